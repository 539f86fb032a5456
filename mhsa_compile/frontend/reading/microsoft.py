"""What is understood of the operators of ONNX Runtime (com.microsoft), as `canonicalize.microsoft` rewrites them.

No schema of theirs is at hand: an attribute that stands in no row is refused, whatever its value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import onnx

from mhsa_compile.frontend.onnx_graph import GraphView, attributes
from mhsa_compile.frontend.reading.row import MANY, Mismatch, Row, row
from mhsa_compile.frontend.reading.standard import CONVOLUTION, positive_scales

DOMAIN = "com.microsoft"


def _grouped_words(graph: GraphView, node: onnx.NodeProto, words: dict[str, Any]) -> Mismatch:
    """GroupQueryAttention: what it gives of its scores, and caches that hold a window alone."""
    inputs, outputs = [*node.input, *[""] * 16], [*node.output, *[""] * 4]
    if norms := [name for name in inputs[14:16] if name]:
        return "no q_norm_weight and k_norm_weight, which ONNX Runtime has on GPUs alone", repr(norms[0])
    scores, window = words.get("qk_output", 0), words.get("local_window_size", -1)
    if bool(outputs[3]) != bool(scores):
        return "a fourth output where qk_output is 1 or 2, and none where it is 0", str(scores)
    if scores and not words.get("causal", 1):
        return "qk_output=0 beside causal=0", str(scores)
    if not words.get("sliding_window_cache", 0):
        return None
    capacity = [*graph.dims(inputs[3]), *[None] * 4][2]
    if window <= 0 or scores or not inputs[3] or (isinstance(capacity, int) and capacity < window):
        got = f"local_window_size={window}, past_key of {capacity}, qk_output={scores}"
        return "a local_window_size, a past of as many keys and qk_output=0 beside sliding_window_cache", got
    return None


def _grouped(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """GroupQueryAttention: a window of some keys, or none; a cache of floats, or of eight or four bits with its
    scales."""
    words = attributes(node)
    window, bits = words.get("local_window_size", -1), words.get("kv_cache_bit_width", 0)
    if window != -1 and window <= 0:
        return "local_window_size of 1 or more, or -1 for none", str(window)
    if window > 0 and not words.get("causal", 1):
        return "local_window_size=-1 beside causal=0", str(window)
    inputs, kinds = [*node.input, *[""] * 16], [words.get(f"{part}_quant_type", "NONE") for part in "kv"]
    if (mismatch := _grouped_words(graph, node, words)) is not None:
        return mismatch
    scales = [name for name in inputs[12:14] if name]
    if not bits:
        return ("no k_scale, no v_scale and quant_type NONE", f"{kinds}") if scales or {*kinds} != {"NONE"} else None
    if "NONE" in kinds or len(scales) < 2 or not inputs[3]:
        return "k_quant_type and v_quant_type, k_scale and v_scale, and a past, beside a bit width", f"{kinds}"
    rows, heads = graph.shape(inputs[1] or inputs[0]), words["kv_num_heads"]
    heads += 0 if inputs[1] else heads + words["num_heads"]
    width = rows[-1] // heads if rows and isinstance(rows[-1], int) else None
    for name, kind, past in zip(scales, kinds, inputs[3:5], strict=True):
        dims, dtype = graph.dims(past), "int8" if bits == 8 else "uint8"
        head_dim = dims[3] * (8 // bits) if len(dims) == 4 and isinstance(dims[3], int) else 0
        count = 1 if kind == "PER_TENSOR" else words["kv_num_heads"] * head_dim
        shape = graph.shape(name)
        if shape is None or None in shape or math.prod(int(size or 0) for size in shape) != count:
            return f"{name!r} of {count} numbers, as {kind} has them", str(shape)
        if graph.dtype(name) not in (None, "float32") or graph.dtype(past) not in (None, dtype):
            return f"{name!r} of float32 and {past!r} of {dtype}", f"{graph.dtype(name)} and {graph.dtype(past)}"
        if width not in (None, head_dim):
            return f"{past!r} of {width * bits / 8:g} bytes a key, heads of a multiple of {8 // bits}", str(dims)
        if (mismatch := positive_scales(graph, name)) is not None:
            return mismatch
    return None


def _table(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """GatherBlockQuantized: rows of numbers of few bits packed into bytes; or a table of the file of INT4 or UINT4,
    with zero points of that same dtype, by blocks along any of its axes."""
    table, scales, points = node.input[0], *[*node.input[2:], "", ""][:2]
    dtype, dims, words = graph.dtype(table), graph.shape(table), attributes(node)
    axes = words.get("gather_axis", 0), words.get("quantize_axis", 1)
    if dtype not in ("int4", "uint4"):
        if axes not in ((0, 1), (0, -1)):
            return "gather_axis=0 and quantize_axis=1 of numbers in bytes", "gather_axis={}, quantize_axis={}".format(
                *axes
            )
        return _not_bytes(graph, table)
    stored = [name for name in (table, scales, points) if name and name not in graph.initializers]
    if stored or dims is None:
        return f"{table!r}, its scales and its zero points in the file", f"{stored or dims}"
    if not all(-len(dims) <= axis < len(dims) for axis in axes):
        return f"axes of {table!r} {dims}", "gather_axis={}, quantize_axis={}".format(*axes)
    if points and graph.dtype(points) != dtype:
        return f"the zero points {points!r} of {dtype}, as {table!r}", str(graph.dtype(points))
    shape = list(dims)
    shape[axes[1]] = -(-int(dims[axes[1]] or 0) // words.get("block_size", 128))
    wrong = next((name for name in (scales, points) if name and graph.shape(name) != tuple(shape)), None)
    return None if wrong is None else (f"{wrong!r} of {tuple(shape)}", str(graph.shape(wrong)))


def is_gather(node: onnx.NodeProto) -> bool:
    """Whether a node takes rows of a table of few bits."""
    return bool(node.domain == DOMAIN and node.op_type == "GatherBlockQuantized")


def _not_bytes(graph: GraphView, name: str) -> Mismatch:
    dtype = graph.dtype(name)
    return None if dtype in (None, "uint8") else (f"{name!r} of uint8", str(dtype))


def _blocks(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """MatMulNBits: numbers in bytes, by whole blocks, with as many scales and zeros, and scales that are finite."""
    words = attributes(node)
    missing = [word for word in ("K", "N", "block_size") if word not in words]
    if missing or len(node.input) < 3:
        return "attributes K, N and block_size, and three inputs", f"none of {missing}" if missing else "fewer inputs"
    N, K, block, bits = words["N"], words["K"], words["block_size"], words.get("bits", 4)
    if block < 16 or block & (block - 1):
        return "block_size a power of two from 16 on", str(block)
    n = -(-K // block)
    packed, scales, zeros = [*node.input, ""][1:4]
    points = N * (-(-n * bits // 8) if graph.dtype(zeros) == "uint8" else n)
    for name, count in ((packed, N * n * block * bits // 8), (scales, N * n), (zeros, points)):
        shape = (graph.shape(name) or ()) if name else ()
        sizes = [size for size in shape if isinstance(size, int)]
        if shape and len(sizes) == len(shape) and math.prod(sizes) != count:
            return f"{name!r} of {count} elements, for {N} rows of {n} blocks of {block}", f"{sizes}"
    if len(node.input) > 4 and node.input[4] and (mismatch := _groups(graph, node, n)) is not None:
        return mismatch
    if zeros and graph.dtype(zeros) not in (None, "uint8", graph.dtype(scales)):
        return f"{zeros!r} of uint8, or of the scales' {graph.dtype(scales)}", str(graph.dtype(zeros))
    values = graph.constant(scales)
    if values is not None and not np.isfinite(values.astype(np.float32)).all():
        return f"{scales!r} of finite numbers", "NaN or infinity"
    return _not_bytes(graph, packed)


def _table_blocks(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """MatMulBnb4: two numbers to a byte, and a scale for each block of all numbers in a row."""
    words = attributes(node)
    missing = [word for word in ("K", "N", "block_size", "quant_type") if word not in words]
    if missing or len(node.input) < 3:
        expected = "attributes K, N, block_size and quant_type, and three inputs"
        return expected, f"none of {missing}" if missing else "fewer inputs"
    count, block = words["K"] * words["N"], words["block_size"]
    if block < 16 or block & (block - 1):
        return "block_size a power of two from 16 on", str(block)
    for name, size in zip(node.input[1:3], (-(-count // 2), -(-count // block)), strict=True):
        shape = graph.dims(name)
        sizes = [dim for dim in shape if isinstance(dim, int)]
        if shape and len(sizes) == len(shape) and math.prod(sizes) != size:
            return f"{name!r} of {size} elements, for {words['N']} rows of {words['K']}", str(shape)
    return _not_bytes(graph, node.input[1])


def groups_of(graph: GraphView, node: onnx.NodeProto) -> np.ndarray:
    """The block of each column of a MatMulNBits with g_idx."""
    groups = graph.constant(node.input[4])
    assert groups is not None
    return groups.reshape(-1)


def _groups(graph: GraphView, node: onnx.NodeProto, n: int) -> Mismatch:
    """g_idx: of four bits, in the file, with as many columns for each block as there are without it. ONNX Runtime reads
    zero points of bytes beside it as 8, and does not read two or eight bits."""
    words, zeros = attributes(node), node.input[3]
    K, block = words["K"], words["block_size"]
    if words.get("bits", 4) != 4:
        return "bits=4 beside g_idx", f"bits={words['bits']}"
    if zeros and graph.dtype(zeros) in (None, "uint8"):
        return "zero points of floats, or none, beside g_idx", f"{zeros!r} of {graph.dtype(zeros)}"
    stored = [name for name in (node.input[1], node.input[4]) if name not in graph.initializers]
    if stored:
        return "the numbers and g_idx in the file", f"{stored[0]!r}, which a call computes"
    groups = groups_of(graph, node)
    counts = np.bincount(groups, minlength=n) if groups.size and groups.min() >= 0 else np.zeros(0)
    if len(groups) != K or len(counts) != n or (counts != np.bincount(np.arange(K) // block, minlength=n)).any():
        return f"g_idx of {K} columns, {block} for each of {n} blocks", f"{len(groups)}, or blocks of other sizes"
    return None


class Quantised(NamedTuple):
    """Names of bytes, of their scale and of their zero point; empty ones of what there is none."""

    value: str
    scale: str
    zero: str


_RESULT = -1
_QUANTISED: dict[str, tuple[tuple[int, int, int], ...]] = {
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), ((0, 1, 2), (3, 4, 5), (_RESULT, 6, 7))),
    **dict.fromkeys(
        (
            "QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearReduceMean",
            "QLinearSigmoid", "QLinearSoftmax",
        ),
        ((0, 1, 2), (_RESULT, 3, 4)),
    ),
    "DequantizeLinear": ((0, 1, 2),),
    "DynamicQuantizeLSTM": ((1, 8, 9), (2, 10, 11)),
    "DynamicQuantizeMatMul": ((1, 2, 3),),
    "MatMulIntegerToFloat": ((0, 2, 4), (1, 3, 5)),
    "QAttention": ((0, 3, 6), (1, 4, 7)),
    "QEmbedLayerNormalization": ((2, 8, 13), (3, 9, 14), (4, 10, 15), (5, 11, 16), (6, 12, 17)),
    "QGemm": ((0, 1, 2), (3, 4, 5), (_RESULT, 7, 8)),
    "QLinearConv": ((0, 1, 2), (3, 4, 5), (_RESULT, 6, 7)),
    "QLinearWhere": ((1, 2, 3), (4, 5, 6), (_RESULT, 7, 8)),
    "QuantizeLinear": ((_RESULT, 1, 2),),
}  # fmt: skip
"""Operator -> the places among its inputs of each value, of its scale and of its zero point; the result is last."""


_BYTES = ("int8", "uint8")
_PAIRED = (*_BYTES, "int16", "uint16", "int32", "int4", "uint4")
"""The dtypes of QuantizeLinear and DequantizeLinear, which the quantiser writes where the standard's has fewer."""


def quantised_values(node: onnx.NodeProto) -> list[Quantised]:
    """The values of a node that are quantised, its result behind them."""
    if node.op_type == "QLinearConcat":
        scale, zero, *names = node.input
        values = [Quantised(*names[i : i + 3]) for i in range(0, len(names), 3)]
        return [*values, Quantised(node.output[0], scale, zero)]
    names = [*node.input, *[""] * 18, node.output[0]]
    return [Quantised(*(names[place] for place in places)) for places in _QUANTISED[node.op_type]]


def _of_bytes(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """Operators of quantised numbers: scales that are finite and above 0, zero points of the dtype of their values."""
    if node.op_type == "QLinearConcat" and (len(node.input) < 5 or len(node.input) % 3 != 2):
        return "a scale and a zero point, then each value with its own", f"{len(node.input)} inputs"
    for value, scale, zero in quantised_values(node):
        if not scale:  # a result of floats, or none of these
            continue
        if (mismatch := positive_scales(graph, scale)) is not None:
            return mismatch
        if graph.dtype(scale) not in (None, "float32"):
            return f"{scale!r} of float32", str(graph.dtype(scale))
        kinds = [graph.dtype(name) if name else None for name in (value, zero)]
        if None not in kinds and kinds[0] != kinds[1]:
            return f"the zero point {zero!r} of {kinds[0]}, as {value!r}", str(kinds[1])
        dtypes = _PAIRED if node.op_type in ("DequantizeLinear", "QuantizeLinear") else _BYTES
        wrong = next((kind for kind in kinds if kind not in (None, *dtypes)), None)
        if wrong is not None:
            return f"{value!r} of {' or '.join(dtypes)}", wrong
    return None


STAYING = ("MatMulNBits",)
"""What may be left in a graph that is imported: fusion reads it as it is."""
BYTES_LEVEL = 4
"""The accuracy level of MatMulNBits at which activations may have eight bits."""


def stored_products(nodes: Iterable[onnx.NodeProto], weights: Iterable[str]) -> list[onnx.NodeProto]:
    """The MatMulNBits all of whose inputs but x are among these weights."""
    stored = {"", *weights}
    products = (node for node in nodes if node.domain == DOMAIN and node.op_type in STAYING)
    return [node for node in products if stored.issuperset(node.input[1:])]


_SCALES = ("NONE", "PER_CHANNEL", "PER_TENSOR")
MICROSOFT: dict[str, Row] = {
    "Attention": row(
        "mask_filter_value", "num_heads", "qkv_hidden_sizes", "scale",
        unidirectional=(0, 1), do_rotary=(0,), past_present_share_buffer=(0,), rotary_embedding_dim=(0,),
        inputs=6, outputs=2,
    ),
    "BiasGelu": row(inputs=2),
    "DequantizeLinear": row("axis", inputs=3, condition=_of_bytes),
    "DynamicQuantizeLSTM": row(
        "activation_alpha", "activation_beta", "activations", "clip", "direction", "hidden_size", "input_forget",
        inputs=12, outputs=3, condition=_of_bytes,
    ),
    "DynamicQuantizeMatMul": row(inputs=5, condition=_of_bytes),
    "EmbedLayerNormalization": row("epsilon", mask_index_type=(0,), inputs=9, outputs=3),
    "FastGelu": row(inputs=2),
    "FusedConv": row(*CONVOLUTION, "activation", "activation_params", inputs=4),
    "FusedGemm": row(
        "activation", "activation_alpha", "activation_beta", "activation_gamma", "alpha", "beta", "transA", "transB",
        inputs=3,
    ),
    "FusedMatMul": row("alpha", transA=(0, 1), transB=(0, 1), transBatchA=(0, 1), transBatchB=(0, 1), inputs=2),
    "GatherBlockQuantized": row(
        "block_size", "gather_axis", "quantize_axis", bits=(4, 8), inputs=4, condition=_table,
    ),
    "Gelu": row(),
    "GroupQueryAttention": row(
        "kv_num_heads", "local_window_size", "num_heads", "qk_norm_epsilon", "scale", "softcap",
        causal=(0, 1), do_rotary=(0, 1), k_quant_type=_SCALES, kv_cache_bit_width=(0, 4, 8), qk_output=(0, 1, 2),
        rotary_interleaved=(0, 1), sliding_window_cache=(0, 1), smooth_softmax=(-1, 0, 1), v_quant_type=_SCALES,
        inputs=16, outputs=4,
        condition=_grouped,
    ),
    "LayerNormalization": row("axis", "epsilon", stash_type=(1,), inputs=3),
    "MatMulIntegerToFloat": row(inputs=7, condition=_of_bytes),
    "MatMulBnb4": row(
        "K", "N", "block_size", quant_type=(0, 1), training_mode=(0, 1), transB=(1,), inputs=3, condition=_table_blocks,
    ),
    "MatMulNBits": row(
        "K", "N", "accuracy_level", "block_size", bits=(2, 4, 8), weight_prepacked=(0,), inputs=6, condition=_blocks,
    ),
    "MultiHeadAttention": row(
        "mask_filter_value", "num_heads", "scale", unidirectional=(0, 1), inputs=8, outputs=3,
        unread={8: "past_sequence_length", 9: "cache_indirection"},
    ),
    "QAttention": row(
        "mask_filter_value", "num_heads", "scale",
        unidirectional=(0, 1), do_rotary=(0,), past_present_share_buffer=(0,), inputs=9, outputs=2, condition=_of_bytes,
    ),
    "QEmbedLayerNormalization": row("epsilon", inputs=18, outputs=2, condition=_of_bytes),
    "QGemm": row("alpha", transA=(0, 1), transB=(0, 1), inputs=9, condition=_of_bytes),
    "QLinearAdd": row(inputs=8, condition=_of_bytes),
    "QLinearAveragePool": row(
        "auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides",
        channels_last=(0, 1), inputs=5, condition=_of_bytes,
    ),
    "QLinearConcat": row("axis", inputs=MANY, condition=_of_bytes),
    "QLinearConv": row(*CONVOLUTION, channels_last=(0, 1), inputs=9, condition=_of_bytes),
    "QLinearGlobalAveragePool": row(channels_last=(0, 1), inputs=5, condition=_of_bytes),
    "QLinearLeakyRelu": row("alpha", inputs=5, condition=_of_bytes),
    "QLinearMul": row(inputs=8, condition=_of_bytes),
    "QLinearReduceMean": row("axes", "keepdims", inputs=5, condition=_of_bytes),
    "QLinearSigmoid": row(inputs=5, condition=_of_bytes),
    "QLinearSoftmax": row("axis", "opset", inputs=5, condition=_of_bytes),
    "QLinearWhere": row(inputs=9, condition=_of_bytes),
    "QuantizeLinear": row("axis", inputs=3, condition=_of_bytes),
    "QuickGelu": row("alpha"),
    "RotaryEmbedding": row(
        "num_heads", "rotary_embedding_dim", interleaved=(0, 1), is_packed_batching=(0,), scale=(1.0,), inputs=4
    ),
    "SimplifiedLayerNormalization": row("axis", "epsilon", stash_type=(1,), inputs=2),
    "SkipLayerNormalization": row("epsilon", inputs=5, outputs=4),
    "SkipSimplifiedLayerNormalization": row("epsilon", inputs=4, outputs=4),
}  # fmt: skip
