"""What stands around attention in a file of ONNX Runtime's optimizer: normalizations, GELUs, embeddings, products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mhsa_compile.frontend.canonicalize.microsoft.node import MicrosoftNode


def gelu(node: MicrosoftNode) -> None:
    """Gelu(x), BiasGelu(x, bias), FastGelu(x, bias): of the sum; the fast one by tanh."""
    x, bias = node.inputs[:2]
    if bias:
        x = node.write("Add", x, bias)
    fast = node.node.op_type == "FastGelu"
    node.write("Gelu", x, output=node.outputs[0], **({"approximate": "tanh"} if fast else {}))


def quick_gelu(node: MicrosoftNode) -> None:
    """x * sigmoid(alpha x)"""
    x = node.inputs[0]
    alpha = node.constant(node.attrs.get("alpha", 1.702), node.dtype(x))
    gate = node.write("Sigmoid", node.write("Mul", x, alpha))
    node.write("Mul", x, gate, output=node.outputs[0])


def activated(operator: str, *scales: str) -> Callable[[MicrosoftNode], None]:
    """The rewriting of FusedConv and FusedGemm: Conv or Gemm, the fourth input added to it, if any, and an activation,
    whose numbers have attributes of these names, or are `activation_params`."""

    def rewrite(node: MicrosoftNode) -> None:
        kind = node.attrs.get("activation", "")
        if kind not in _ACTIVATIONS:
            raise node.refused(f"activation among {', '.join(_ACTIVATIONS)}", repr(kind))
        words = {word: value for word, value in node.attrs.items() if not word.startswith("activation")}
        y = node.write(operator, *node.inputs[:3], **words)
        if node.inputs[3]:
            y = node.write("Add", y, node.inputs[3])
        numbers = [node.attrs[word] for word in scales if word in node.attrs] or node.attrs.get("activation_params", [])
        if kind == "Clip":
            bounds = (node.constant(number, node.dtype(node.inputs[0])) for number in numbers)
            node.write(kind, y, *bounds, output=node.outputs[0])
        else:
            own = dict(zip(_ACTIVATIONS[kind], numbers, strict=False))
            node.write(kind, y, output=node.outputs[0], **own)

    return rewrite


_ACTIVATIONS = {"Clip": ("min", "max"), "HardSigmoid": ("alpha", "beta"), "LeakyRelu": ("alpha",), "Relu": (),
                "Sigmoid": (), "Tanh": ()}  # fmt: skip
"""What ONNX Runtime fuses with a Conv, and the numbers that each has, in their order."""


def fused_matmul(node: MicrosoftNode) -> None:
    """alpha * A B, each transposed in its last two axes if asked for, after its first one was put behind those of the
    batch, if that is asked for."""
    operands = []
    for name, side in zip(node.inputs[:2], "AB", strict=True):
        turned, moved = (node.attrs.get(word + side, 0) for word in ("trans", "transBatch"))
        if turned or moved:
            rank = len(node.dims(name))
            order = [*range(1, rank - 1), 0, rank - 1] if moved else list(range(rank))
            if turned:
                order[-2:] = order[:-3:-1]
            name = node.write("Transpose", name, perm=order)
        operands.append(name)
    alpha = node.attrs.get("alpha", 1.0)
    if alpha == 1:
        node.write("MatMul", *operands, output=node.outputs[0])
        return
    factor = node.constant(alpha, node.dtype(*node.inputs[:2]))
    node.write("Mul", node.write("MatMul", *operands), factor, output=node.outputs[0])


def skip_layer_normalization(node: MicrosoftNode) -> None:
    """(Skip)LayerNormalization and (Skip)SimplifiedLayerNormalization: of input + skip + bias; the sum is output 3.

    The simplified ones are RMSNormalization. Their other outputs are for training.
    """
    simplified, skips = "Simplified" in node.node.op_type, node.node.op_type.startswith("Skip")
    if any(node.outputs[1:3]) or (node.outputs[1] and not skips):
        raise node.refused("the normalized values and their sum as outputs", "mean or deviation")
    x, *rest = node.inputs
    skip = rest.pop(0) if skips else ""
    gamma, beta, bias = [rest[0], "", rest[1]] if simplified else rest[:3]
    addends = [name for name in (skip, bias if skips else "") if name]
    for i, name in enumerate(addends):
        x = node.write("Add", x, name, output=node.outputs[3] if i == len(addends) - 1 else "")
    epsilon = node.attrs.get("epsilon", 1e-12 if skips else 1e-5)
    operator = "RMSNormalization" if simplified else "LayerNormalization"
    node.write(operator, x, gamma, beta, output=node.outputs[0], axis=node.attrs.get("axis", -1), epsilon=epsilon)


def embed_layer_normalization(node: MicrosoftNode) -> None:
    """LayerNormalization of word + position + segment embeddings; outputs 1 and 2 are the lengths and the sum."""
    ids, segments, words, positions, segment_table, gamma, beta, mask, position_ids = node.inputs[:9]
    tables = Embeddings(ids, segments, words, positions, segment_table, position_ids)
    of_embeddings(node, tables, lambda table, places: rows_of(node, table, places, ids), gamma, beta, mask)


def rows_of(node: MicrosoftNode, table: str, places: str, ids: str) -> str:
    """Rows of a table; where no places are named, as many of the first as there are ids in a row."""
    if places:
        return node.write("Gather", table, places, axis=0)
    return node.write("Slice", table, node.ints(0), node.write("Shape", ids, start=1, end=2), node.ints(0))


@dataclass(frozen=True)
class Embeddings:
    """Ids of words and of segments, the tables that they point into, and positions where they are none in order."""

    ids: str
    segments: str
    words: str
    positions: str
    segment_table: str
    position_ids: str = ""


def of_embeddings(
    node: MicrosoftNode, of: Embeddings, rows: Callable[[str, str], str], gamma: str, beta: str, mask: str
) -> None:
    """LayerNormalization of a sum of embeddings; `rows(table, places)` are rows of a table as floats, the first of them
    where no places are named."""
    total = rows(of.words, of.ids)
    total = node.write("Add", total, rows(of.positions, of.position_ids), output="" if of.segments else node.outputs[2])
    if of.segments:
        total = node.write("Add", total, rows(of.segment_table, of.segments), output=node.outputs[2])
    epsilon = node.attrs.get("epsilon", 1e-12)
    node.write("LayerNormalization", total, gamma, beta, output=node.outputs[0], axis=-1, epsilon=epsilon)
    if node.outputs[1] and mask:
        node.write("ReduceSum", mask, node.ints(1), output=node.outputs[1], keepdims=0)
    elif node.outputs[1]:
        batch = node.write("Shape", of.ids, start=0, end=1)
        node.write("Expand", node.constant([0], "int32"), batch, output=node.outputs[1])
