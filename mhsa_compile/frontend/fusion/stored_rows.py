"""Keys and values that a cache stores in another dtype than queries have: the nodes that bring rows into it and make
floats of it again, which attention and the cache look through.

    TensorScatter(cache, Cast(rows)) -> Cast -> Attention
    TensorScatter(cache, QuantizeRows(rows)), TensorScatter(scales, ...) -> DequantizeRows -> Attention

A cache of bytes whose steps others apply, to queries and to what comes out, is made floats by a Cast, too; one of four
bits, two numbers to a byte, by the nodes that `canonicalize.microsoft` writes:

    Reshape(Concat(cache & 15, cache >> 4)) -> Cast -> Sub 8 -> Attention
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from mhsa_compile.frontend.fusion.fused_nodes import FusedQuantiseRows
from mhsa_compile.frontend.fusion.head_layout import NodePattern, Operand
from mhsa_compile.frontend.onnx_graph import GraphView, attributes
from mhsa_compile.kernels.interface.ops import INT4_ZERO
from mhsa_compile.nn.row_operators import DEQUANTIZE
from mhsa_compile.spec.attention_spec import DOMAIN
from mhsa_compile.spec.checks import DTYPES


@dataclass(frozen=True)
class StoredRows:
    """What rows are made of: a cache, and the scales of its rows; "" where they have none. An element of the cache
    holds `numbers`."""

    name: str
    scales: str = ""
    numbers: int = 1


def stored_rows(graph: GraphView, name: str) -> StoredRows | None:
    """The cache that keys or values of four axes are made of, where it is of another dtype."""
    node = graph.producer(name)
    if node is None or not node.input or len(graph.dims(name)) != 4:
        return None
    if node.op_type == "Sub":
        return _pairs(graph, node)
    if graph.producer(node.input[0], "TensorScatter") is None:
        return None
    if node.domain == DOMAIN and node.op_type == DEQUANTIZE:
        return StoredRows(*node.input)
    is_cast = node.op_type == "Cast" and node.domain in ("", "ai.onnx")
    return StoredRows(node.input[0]) if is_cast and graph.dtype(node.input[0]) in (*DTYPES, "int8") else None


def _pairs(graph: GraphView, node: onnx.NodeProto) -> StoredRows | None:
    """The cache of bytes whose halves, less 8, are the numbers."""

    def through(name: str, op_type: str, *constants: int) -> str:
        """The first input of the operator that gives a value, beside constants; "" where it is another."""
        maker = graph.producer(name, op_type) if name else None
        if maker is None:
            return ""
        values = [graph.constant(other) for other in maker.input[1 : 1 + len(constants)]]
        pairs = zip(values, constants, strict=True)
        same = all(value is not None and value.shape in ((), (1,)) and (value == own).all() for value, own in pairs)
        return maker.input[0] if same else ""

    halves = through(node.output[0], "Sub", INT4_ZERO)
    joined = through(halves, "Cast")
    both = graph.producer(through(joined, "Reshape"), "Concat")
    if both is None or len(both.input) != 2 or attributes(both).get("axis") not in (4, -1):
        return None
    lower, upper = (through(name, "Unsqueeze", 4) for name in both.input)
    caches = {through(lower, "BitwiseAnd", 15), through(upper, "BitShift", 4)}
    shift = graph.producer(upper, "BitShift")
    cache = caches.pop()
    is_right = shift is not None and attributes(shift)["direction"] == "RIGHT" and not caches
    if (
        not is_right
        or not _joins_halves(graph, graph.producer(joined, "Reshape"), cache)
        or graph.producer(cache, "TensorScatter") is None
        or graph.dtype(cache) != "uint8"
    ):
        return None
    return StoredRows(cache, numbers=2)


def _joins_halves(graph: GraphView, node: onnx.NodeProto | None, cache: str) -> bool:
    """Whether a Reshape of (B, G, C, E / 2, 2) gives (B, G, C, E), and no other arrangement of these numbers."""
    target = None if node is None else graph.constant(node.input[1])
    dims = graph.dims(cache)
    if node is None or target is None or target.shape != (4,) or len(dims) != 4 or attributes(node).get("allowzero"):
        return False
    *places, last = (int(size) for size in target)
    same = all(size in (0, own) for size, own in zip(places, dims, strict=False))
    return same and (last == -1 or (isinstance(dims[3], int) and last == 2 * dims[3]))


class QuantizeRowsPattern(NodePattern):
    """One mhsa.QuantizeRows of heads, with the views before it."""

    def __init__(self, graph: GraphView, node: onnx.NodeProto) -> None:
        super().__init__(graph, node)
        shape = self.ranked(node.input[0], "x", 4)
        heads, size = shape[1], shape[3]
        if not isinstance(heads, int) or not isinstance(size, int):
            raise self.refusal("x (B, heads, L, size) with fixed heads and sizes", shape)
        self.operand = self.split_rows(node.input[0]) or Operand(node.input[0], "heads", heads, size)
        self.operands = [self.operand]

    def fused_node(self) -> onnx.NodeProto:
        x = self.operand
        fused = FusedQuantiseRows(x=x.as_input(0), num_heads=x.heads, head_dim=x.head_dim)
        return fused.to_node(self.node, [x.source], self.node.output)
