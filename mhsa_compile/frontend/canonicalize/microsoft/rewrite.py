"""Microsoft's operators (domain com.microsoft), as ONNX Runtime's optimizer writes them, in the standard's words.

`OPERATORS` is the list of what is known. Everything else of that domain is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx

from mhsa_compile.frontend.canonicalize.definitions import Definitions
from mhsa_compile.frontend.canonicalize.microsoft import (
    attention,
    block_quantised,
    group_query_attention,
    layers,
    quantised,
)
from mhsa_compile.frontend.canonicalize.microsoft.node import MicrosoftNode, NotYet
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.canonicalize.rewriting.shape_propagation import propagate_shapes
from mhsa_compile.frontend.detach_weights import Tensors
from mhsa_compile.frontend.onnx_graph import all_nodes, attributes
from mhsa_compile.frontend.reading.microsoft import DOMAIN
from mhsa_compile.runtime.artifact.manifest import AttentionCoverage

_ATTENTIONS: dict[str, Callable[[MicrosoftNode], None]] = {
    "Attention": attention.attention,
    "MultiHeadAttention": attention.multi_head_attention,
    "GroupQueryAttention": group_query_attention.group_query_attention,
    "QAttention": quantised.qattention,
}
OPERATORS: dict[str, Callable[[MicrosoftNode], None]] = {
    **_ATTENTIONS,
    "BiasGelu": layers.gelu,
    "DequantizeLinear": quantised.pair,
    "DynamicQuantizeLSTM": quantised.dynamic_quantize_lstm,
    "DynamicQuantizeMatMul": quantised.dynamic_quantize_matmul,
    "EmbedLayerNormalization": layers.embed_layer_normalization,
    "FastGelu": layers.gelu,
    "FusedConv": layers.activated("Conv"),
    "FusedGemm": layers.activated("Gemm", "activation_alpha", "activation_beta", "activation_gamma"),
    "FusedMatMul": layers.fused_matmul,
    "GatherBlockQuantized": block_quantised.gather_block_quantized,
    "Gelu": layers.gelu,
    "LayerNormalization": layers.skip_layer_normalization,
    "MatMulIntegerToFloat": quantised.matmul_integer_to_float,
    "MatMulBnb4": block_quantised.matmul_bnb4,
    "MatMulNBits": block_quantised.matmul_nbits,
    "QEmbedLayerNormalization": quantised.qembed_layer_normalization,
    "QGemm": quantised.gemm,
    "QLinearAdd": quantised.elementwise("Add"),
    "QLinearAveragePool": quantised.pooling("AveragePool"),
    "QLinearConcat": quantised.elementwise("Concat", "axis"),
    "QLinearConv": quantised.convolution,
    "QLinearGlobalAveragePool": quantised.pooling("GlobalAveragePool"),
    "QLinearLeakyRelu": quantised.elementwise("LeakyRelu", "alpha"),
    "QLinearMul": quantised.elementwise("Mul"),
    "QLinearReduceMean": quantised.mean,
    "QLinearSigmoid": quantised.elementwise("Sigmoid"),
    "QLinearSoftmax": quantised.softmax,
    "QLinearWhere": quantised.where,
    "QuantizeLinear": quantised.pair,
    "QuickGelu": layers.quick_gelu,
    "RotaryEmbedding": group_query_attention.rotary_embedding,
    "SimplifiedLayerNormalization": layers.skip_layer_normalization,
    "SkipLayerNormalization": layers.skip_layer_normalization,
    "SkipSimplifiedLayerNormalization": layers.skip_layer_normalization,
}


def least_opset(model: onnx.ModelProto) -> int:
    """The first opset with words for what a model's operators of Microsoft's say."""
    needed = 0
    for node in all_nodes(model.graph):
        if node.domain == DOMAIN and node.op_type == "GroupQueryAttention":  # lengths of a cache; windows
            needed = max(needed, 25 if attributes(node).get("local_window_size", -1) > 0 else 24)
    return needed


def rewrite(
    model: onnx.ModelProto, tensors: Tensors, limits: dict[str, int]
) -> tuple[onnx.ModelProto, list[AttentionCoverage]]:
    """The model without operators of Microsoft's, and one entry for each that is an attention. Raises ModelError.

    Nobody infers shapes through an operator of theirs, so some of them have to wait until those before are rewritten.
    """
    blocks: list[AttentionCoverage] = []
    while theirs := [node for node in model.graph.node if node.domain == DOMAIN]:
        rewriter, waiting, shared = Rewriter(model), [], dict[str, list[str]]()
        definitions = Definitions(rewriter.graph)
        for node in theirs:
            microsoft_node = MicrosoftNode(rewriter, node, tensors, shared, definitions)
            if node.op_type not in OPERATORS:
                raise microsoft_node.refused(f"an operator among {', '.join(OPERATORS)}", node.op_type)
            try:
                OPERATORS[node.op_type](microsoft_node)
            except NotYet as reason:
                rewriter.drop()
                waiting.append(microsoft_node.refused("shapes and dtypes that are known", str(reason)))
                continue
            rewriter.place(node, attention=microsoft_node.name)
            if node.op_type in _ATTENTIONS:
                form = f"{DOMAIN}.{node.op_type}"
                blocks.append(AttentionCoverage(microsoft_node.name, form, True, microsoft_node.note))
        if len(waiting) == len(theirs):
            raise waiting[0]
        model = rewriter.finished()
        definitions.put_into(model)
        model = propagate_shapes(model, limits)
    return model, blocks
