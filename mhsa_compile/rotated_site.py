"""A rotary embedding that a graph spells out, as exporters leave that of Llama and its kin:

    x * cos + concat(-x[..., E/2:], x[..., :E/2]) * sin

with x (B, H, L, E) and cos, sin (B or 1, 1, L, E), whose two halves need not be equal. It becomes one node, which reads
the rows of a projection in place, as RotaryEmbedding does; only what is certain to be of these shapes is taken.

Notation: B batch, L length, H heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import onnx

from mhsa_compile.head_views import Operand, needed_by, split_rows
from mhsa_compile.onnx_graph import Graph, attributes
from mhsa_compile.rotary_site import rotary_node
from mhsa_compile.spec_checks import DTYPES


class _Terms(NamedTuple):
    """x cos + turned sin, and the nodes that make it: each behind all that read it, but for the sum."""

    x: str
    cos: str
    sin: str
    nodes: list[onnx.NodeProto]


class RotatedSite:
    """One Add that ends a rotary embedding, with the nodes that nobody else needs."""

    def __init__(self, graph: Graph, node: onnx.NodeProto, terms: _Terms) -> None:
        self.graph, self.node, self.terms = graph, node, terms
        self.absorbed = needed_by(graph, terms.nodes, [node])
        shape = graph.shape(terms.x) or ()
        split = split_rows(graph, terms.x, [node, *self.absorbed])
        self.operand = Operand(terms.x, "heads", int(shape[1] or 0), int(shape[3] or 0))
        if split is not None:
            self.operand = split[0]
            self.absorbed += split[1]

    @property
    def operands(self) -> list[Operand]:
        return [self.operand]

    def fused_node(self) -> onnx.NodeProto:
        batch, shared = (self.graph.shape(name) or (None,) for name in (self.terms.x, self.terms.cos))
        return rotary_node(
            self.node,
            self.operand,
            [self.terms.cos, self.terms.sin],
            rotary_dim=self.operand.head_dim,
            interleaved=0,
            whole_angles=1,
            shared_angles=int(shared[0] == 1 != batch[0]),
            output_layout="heads",
        )


def rotations(graph: Graph) -> Iterator[RotatedSite]:
    """Every rotary embedding that the graph spells out."""
    for node in graph.nodes:
        if node.op_type == "Add" and node.domain in ("", "ai.onnx"):
            found = next(filter(None, (_terms(graph, *order) for order in (node.input, node.input[::-1]))), None)
            if found is not None and _fits(graph, found):
                yield RotatedSite(graph, node, found)


def _terms(graph: Graph, straight: str, turned: str) -> _Terms | None:
    products = [graph.producer(name, "Mul") for name in (straight, turned)]
    if products[0] is None or products[1] is None:
        return None
    for (x, cos), (concat, sin) in product(*((p.input, p.input[::-1]) for p in products if p is not None)):
        halves = _turned_halves(graph, x, concat)
        if halves is not None:
            return _Terms(x, cos, sin, [products[0], products[1], *halves])
    return None


def _turned_halves(graph: Graph, x: str, name: str) -> list[onnx.NodeProto] | None:
    """The nodes of `name` = concat(-x[..., E/2:], x[..., :E/2]), the last one first; None where it is another value."""
    concat, shape = graph.producer(name, "Concat"), graph.shape(x) or ()
    if concat is None or len(concat.input) != 2 or len(shape) != 4 or not isinstance(shape[3], int) or shape[3] % 2:
        return None
    if attributes(concat).get("axis") not in (-1, 3):
        return None
    negated, half = graph.producer(concat.input[0], "Neg"), shape[3] // 2
    if negated is None:
        return None
    parts = [_part(graph, x, shape[3], source) for source in (negated.input[0], concat.input[1])]
    if [part and part[:2] for part in parts] != [(half, 2 * half), (0, half)]:
        return None
    makers = {id(part[2]): part[2] for part in parts if part is not None}
    return [concat, negated, *makers.values()]


def _part(graph: Graph, x: str, size: int, name: str) -> tuple[int, int, onnx.NodeProto] | None:
    """(begin, end, node) of a value that is x[..., begin:end]."""
    node = graph.producer(name)
    if node is None or node.op_type not in ("Slice", "Split") or node.input[0] != x:
        return None
    if node.op_type == "Split":
        sizes = graph.constant(node.input[1]) if len(node.input) > 1 else None
        equal = attributes(node).get("num_outputs", len(node.output)) == 2 if sizes is None else False
        if attributes(node).get("axis", 0) not in (-1, 3) or len(node.output) != 2:
            return None
        if not equal and (sizes is None or list(sizes) != [size // 2] * 2):
            return None
        return (0, size // 2, node) if name == node.output[0] else (size // 2, size, node)
    bounds = [graph.constant(argument) for argument in node.input[1:]]
    if len(bounds) < 3 or any(bound is None or bound.size != 1 for bound in bounds):
        return None
    begin, end, axis, *step = (int(bound.item()) for bound in bounds if bound is not None)
    if axis not in (-1, 3) or step not in ([], [1]):
        return None
    return *slice(begin, end).indices(size)[:2], node


def _fits(graph: Graph, terms: _Terms) -> bool:
    """Whether dtypes and shapes are those of a rotary embedding, seen now."""
    dtypes = {graph.dtype(name) for name in terms[:3]}
    x, *tables = (graph.shape(name) or () for name in terms[:3])
    if len(dtypes) > 1 or not dtypes <= set(DTYPES) or len(x) != 4 or None in x or not isinstance(x[1], int):
        return False
    return tables[0] == tables[1] and tables[0] in {(entries, 1, x[2], x[3]) for entries in (1, x[0])}
