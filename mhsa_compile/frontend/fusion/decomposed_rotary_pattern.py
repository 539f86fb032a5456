"""A rotary embedding that a graph spells out, as exporters leave that of Llama and its kin, or of GPT-J and its:

    x * cos + concat(-x[..., R/2:], x[..., :R/2]) * sin
    x * cos + stack(-x[..., 1::2], x[..., ::2]) * sin
    concat(x1 * cos - x2 * sin, x2 * cos + x1 * sin), or their stack

with x the first R elements of heads (B, H, L, E), or (B, L, H, E) before they are transposed to that; behind it stand
the other elements, if any, as they were. cos and sin are (B or 1, 1, L, R), or (B or 1, L, 1, R), and the two of a
pair need not be equal; in the third form they are R/2 wide. It becomes one node, which reads the rows of a projection
in place, as RotaryEmbedding does; only what is certain to be of these shapes is taken.

Notation: B batch, L length, H heads, E head dim, R the elements of a head that turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import onnx

from mhsa_compile.frontend.fusion.fused_nodes import FusedRotary
from mhsa_compile.frontend.fusion.head_layout import Operand, keeps_rows, needed_by, split_rows
from mhsa_compile.frontend.fusion.rotary_halves import NodeList, element, joined, part, source
from mhsa_compile.frontend.onnx_graph import GraphView, attributes
from mhsa_compile.spec.checks import DTYPES


class _Terms(NamedTuple):
    """What is turned by which angles, and the nodes that do it: each behind all that read it, but for the last one.

    `whole`: the tables hold an angle for each element, not for each pair.
    """

    x: str
    cos: str
    sin: str
    interleaved: bool
    whole: bool
    nodes: NodeList


class _Whole(NamedTuple):
    """All of the heads: `x` becomes what `end` makes, by `nodes`. `axes` are those of length and heads in x."""

    x: str
    end: onnx.NodeProto
    nodes: NodeList
    axes: tuple[int, int]


class DecomposedRotaryPattern:
    """A rotary embedding by its last node, with the nodes that nobody else needs."""

    def __init__(self, graph: GraphView, terms: _Terms, whole: _Whole) -> None:
        self.graph, self.terms, self.node = graph, terms, whole.end
        self.absorbed = needed_by(graph, whole.nodes, [whole.end])
        shape, readers = graph.shape(whole.x) or (), [whole.end, *self.absorbed]
        heads, head_dim = int(shape[whole.axes[1]] or 0), int(shape[3] or 0)
        if whole.axes == _ROWS:
            view = graph.producer(whole.x, "Reshape")
            assert view is not None
            self.operand = Operand(view.input[0], "rows", heads, head_dim, width=heads * head_dim)
            self.absorbed += needed_by(graph, [view], readers)
        elif (split := split_rows(graph, whole.x, readers)) is not None:
            self.operand = split[0]
            self.absorbed += split[1]
        else:
            self.operand = Operand(whole.x, "heads", heads, head_dim)

    @property
    def operands(self) -> list[Operand]:
        return [self.operand]

    def fused_node(self) -> onnx.NodeProto:
        turning, shared = (self.graph.shape(name) or (None,) for name in (self.terms.x, self.terms.cos))
        fused = FusedRotary(
            x=self.operand.as_input(0),
            output_layout="heads",
            num_heads=self.operand.heads,
            head_dim=self.operand.head_dim,
            rotary_dim=int(turning[-1] or 0),
            interleaved=self.terms.interleaved,
            shared_angles=shared[0] == 1 != turning[0],
            whole_angles=self.terms.whole,
        )
        return fused.to_node(self.node, [self.operand.source, self.terms.cos, self.terms.sin], [self.node.output[0]])


_HEADS, _ROWS = (2, 1), (1, 2)  # the axes of length and heads
_ENDS = ("Add", "Concat", "Reshape")


def rotations(graph: GraphView) -> Iterator[DecomposedRotaryPattern]:
    """Every rotary embedding that the graph spells out."""
    for node in graph.nodes:
        if node.op_type not in _ENDS or node.domain not in ("", "ai.onnx"):
            continue
        terms = _sum(graph, node) if node.op_type == "Add" else _pairs(graph, node)
        whole = None if terms is None else _whole(graph, node, terms)
        if terms is not None and whole is not None:
            yield DecomposedRotaryPattern(graph, terms, whole)


def _whole(graph: GraphView, last: onnx.NodeProto, terms: _Terms) -> _Whole | None:
    """The heads of which a node ends the turning, from where they are read; None where they are none."""
    axes = _axes(graph, terms)
    if axes is None:
        return None
    x, end, nodes = _with_rest(graph, last, terms) or (terms.x, last, terms.nodes)
    if axes == _HEADS:
        return _Whole(x, end, nodes, axes)
    swap, view = graph.only_consumer(end.output[0], "Transpose"), graph.producer(x, "Reshape")
    if swap is None or view is None or attributes(swap).get("perm") != [0, 2, 1, 3] or not keeps_rows(graph, view):
        return None
    before, after = (graph.shape(name) or () for name in (view.input[0], x))
    joined = len(before) == 3 and before[2] == int(after[2] or 0) * int(after[3] or 0)
    return _Whole(x, swap, [end, *nodes], axes) if joined else None


def _with_rest(graph: GraphView, last: onnx.NodeProto, terms: _Terms) -> tuple[str, onnx.NodeProto, NodeList] | None:
    """(x, the Concat, nodes) where the elements of a head that do not turn stand behind those that do, as they were."""
    concat, maker = graph.only_consumer(last.output[0], "Concat"), graph.producer(terms.x)
    if concat is None or maker is None or len(concat.input) != 2 or concat.input[0] != last.output[0]:
        return None
    x, turning = maker.input[0], (graph.shape(terms.x) or (0,))[-1]
    shape = graph.shape(x) or (None,)
    if attributes(concat).get("axis") not in (-1, 3) or not isinstance(size := shape[-1], int) or len(shape) != 4:
        return None
    places = [part(graph, x, size, name) for name in (terms.x, concat.input[1])]
    if [place and place[:2] for place in places] != [(0, turning), (turning, size)]:
        return None
    makers = {id(place[2]): place[2] for place in places if place is not None}
    return x, concat, [last, *terms.nodes, *makers.values()]


def _axes(graph: GraphView, terms: _Terms) -> tuple[int, int] | None:
    """The axes of length and heads in x; None unless dtypes and shapes are seen to be those of a rotary embedding."""
    dtypes = {graph.dtype(name) for name in terms[:3]}
    x, *tables = (graph.shape(name) or () for name in terms[:3])
    if len(dtypes) > 1 or not dtypes <= set(DTYPES) or len(x) != 4 or None in x or tables[0] != tables[1]:
        return None
    columns = x[3] if terms.whole or not isinstance(x[3], int) else x[3] // 2
    for axes, places in ((_HEADS, (1, x[2])), (_ROWS, (x[1], 1))):
        if isinstance(x[axes[1]], int) and tables[0] in {(entries, *places, columns) for entries in (1, x[0])}:
            return axes
    return None


def _sum(graph: GraphView, add: onnx.NodeProto) -> _Terms | None:
    """x cos + (-x2, x1) sin"""
    products = [graph.producer(name, "Mul") for name in add.input]
    for one, two in (products, products[::-1]):
        if one is None or two is None:
            return None
        for (x, cos), (across, sin) in product(*((p.input, p.input[::-1]) for p in (one, two))):
            pairs = joined(graph, across)
            negated = None if pairs is None else graph.producer(pairs.one, "Neg")
            if pairs is None or negated is None or graph.shape(across) != graph.shape(x):
                continue
            names = (negated.input[0], pairs.other)
            parts = _elements(graph, x, names, pairs.interleaved, (1, 0))
            if parts is not None:
                return _Terms(x, cos, sin, pairs.interleaved, True, [one, two, *pairs.nodes, negated, *parts])
    return None


def _pairs(graph: GraphView, last: onnx.NodeProto) -> _Terms | None:
    """(x1 cos - x2 sin, x2 cos + x1 sin)"""
    pairs = joined(graph, last.output[0])
    if pairs is None:
        return None
    less, more = graph.producer(pairs.one, "Sub"), graph.producer(pairs.other, "Add")
    if less is None or more is None:
        return None
    products = [p for name in (*less.input, *more.input) if (p := graph.producer(name, "Mul")) is not None]
    if len(products) < 4:
        return None
    for (one, cos), (two, sin) in product(*((p.input, p.input[::-1]) for p in products[:2])):
        x = source(graph, one, pairs.interleaved)
        parts = _elements(graph, x, (one, two), pairs.interleaved, (0, 1))
        crossed = [sorted(p.input) for p in products[2:]]
        if parts is not None and crossed in (
            [sorted((two, cos)), sorted((one, sin))],
            [sorted((one, sin)), sorted((two, cos))],
        ):
            return _Terms(x, cos, sin, pairs.interleaved, False, [*pairs.nodes[1:], less, more, *products, *parts])
    return None


def _elements(
    graph: GraphView, x: str, names: tuple[str, str], interleaved: bool, numbers: tuple[int, int]
) -> NodeList | None:
    """The nodes of two values that are these elements of the pairs of x, each node once; None of others."""
    places = [element(graph, x, name, interleaved) for name in names]
    if [place and place[0] for place in places] != list(numbers):
        return None
    makers = [node for place in places if place is not None for node in place[1]]
    return list({id(node): node for node in reversed(makers)}.values())[::-1]
