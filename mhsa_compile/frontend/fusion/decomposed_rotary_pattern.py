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
from mhsa_compile.frontend.fusion.head_layout import NodePattern, Operand, keeps_rows, needed_by, split_rows
from mhsa_compile.frontend.onnx_graph import GraphView, attributes
from mhsa_compile.spec.checks import DTYPES

NodeList = list[onnx.NodeProto]  # each behind all that read it


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


class DecomposedRotaryPattern(NodePattern):
    """A rotary embedding by its last node, with the nodes that nobody else needs."""

    def __init__(self, graph: GraphView, terms: _Terms, whole: _Whole) -> None:
        super().__init__(graph, whole.end)
        self.terms = terms
        self.absorbed = needed_by(graph, whole.nodes, [whole.end])
        shape, readers = graph.dims(whole.x), [whole.end, *self.absorbed]
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
        self.operands = [self.operand]

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
    before, after = (graph.dims(name) for name in (view.input[0], x))
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
    places = [_part(graph, x, size, name) for name in (terms.x, concat.input[1])]
    if [place and place[:2] for place in places] != [(0, turning), (turning, size)]:
        return None
    makers = {id(place[2]): place[2] for place in places if place is not None}
    return x, concat, [last, *terms.nodes, *makers.values()]


def _axes(graph: GraphView, terms: _Terms) -> tuple[int, int] | None:
    """The axes of length and heads in x; None unless dtypes and shapes are seen to be those of a rotary embedding."""
    dtypes = {graph.dtype(name) for name in terms[:3]}
    x, *tables = (graph.dims(name) for name in terms[:3])
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
            pairs = _joined(graph, across)
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
    pairs = _joined(graph, last.output[0])
    if pairs is None:
        return None
    less, more = graph.producer(pairs.one, "Sub"), graph.producer(pairs.other, "Add")
    if less is None or more is None:
        return None
    products = [p for name in (*less.input, *more.input) if (p := graph.producer(name, "Mul")) is not None]
    if len(products) < 4:
        return None
    for (one, cos), (two, sin) in product(*((p.input, p.input[::-1]) for p in products[:2])):
        x = _source(graph, one, pairs.interleaved)
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
    places = [_element(graph, x, name, interleaved) for name in names]
    if [place and place[0] for place in places] != list(numbers):
        return None
    makers = [node for place in places if place is not None for node in place[1]]
    return list({id(node): node for node in reversed(makers)}.values())[::-1]


# The two elements of each pair, as a graph takes them apart and puts them together again. Pairs are halves of the last
# axis, x[..., :R/2] and x[..., R/2:], or neighbours, x[..., ::2] and x[..., 1::2].


class _JoinedHalves(NamedTuple):
    """concat(one, other), or stack(one, other) behind the last axis with both axes as one: `interleaved`."""

    one: str
    other: str
    interleaved: bool
    nodes: NodeList


def _joined(graph: GraphView, name: str) -> _JoinedHalves | None:
    """What a value of four axes is put together of, in equal parts; None where it is not."""
    node, shape = graph.producer(name), graph.dims(name)
    if node is None or len(shape) != 4 or None in shape or not isinstance(shape[3], int) or shape[3] % 2:
        return None
    if node.op_type == "Concat" and len(node.input) == 2 and attributes(node).get("axis") in (-1, 3):
        parts = [graph.shape(part) for part in node.input]
        halves = parts == [(*shape[:3], shape[3] // 2)] * 2
        return _JoinedHalves(node.input[0], node.input[1], False, [node]) if halves else None
    stack = graph.producer(node.input[0], "Concat") if node.op_type == "Reshape" else None
    if stack is None or len(stack.input) != 2 or attributes(stack).get("axis") not in (-1, 4):
        return None
    ones = [unsqueeze for part in stack.input if (unsqueeze := graph.producer(part, "Unsqueeze")) is not None]
    if len(ones) < 2 or graph.shape(stack.output[0]) != (*shape[:3], shape[3] // 2, 2):
        return None
    if any(graph.shape(unsqueeze.output[0]) != (*shape[:3], shape[3] // 2, 1) for unsqueeze in ones):
        return None
    return _JoinedHalves(ones[0].input[0], ones[1].input[0], True, [node, stack, *ones])


def _source(graph: GraphView, name: str, interleaved: bool) -> str:
    """The value that `name` is a part of, if it is one of anything."""
    node = graph.producer(name)
    if interleaved and node is not None and node.op_type == "Squeeze":
        inner = graph.producer(node.input[0])
        node = None if inner is None else graph.producer(inner.input[0], "Reshape")
    return node.input[0] if node is not None and node.input else ""


def _element(graph: GraphView, x: str, name: str, interleaved: bool) -> tuple[int, NodeList] | None:
    """(0 or 1, nodes) of a value that is the one element of each pair of x, or the other; None of another value."""
    shape = graph.dims(x)
    if len(shape) != 4 or not isinstance(size := shape[3], int) or size % 2:
        return None
    if interleaved:
        return _every_other(graph, x, size, name) or _unbound(graph, x, size, name)
    half = _part(graph, x, size, name)
    halves = {(0, size // 2): 0, (size // 2, size): 1}
    return None if half is None or half[:2] not in halves else (halves[half[:2]], [half[2]])


def _part(graph: GraphView, x: str, size: int, name: str, last: int = 3) -> tuple[int, int, onnx.NodeProto] | None:
    """(begin, end, node) of a value that is x[..., begin:end] along the axis `last`, of `size`."""
    node = graph.producer(name)
    if node is None or node.op_type not in ("Slice", "Split") or node.input[0] != x:
        return None
    if node.op_type == "Split":
        sizes = graph.constant(node.input[1]) if len(node.input) > 1 and node.input[1] else None
        if attributes(node).get("axis", 0) not in (-1, last) or len(node.output) != 2 or (sizes is None and size % 2):
            return None
        cut = size // 2 if sizes is None else int(sizes[0])
        return (0, cut, node) if name == node.output[0] else (cut, size, node)
    begin, end, axis, step = _bounds(graph, node)
    return (*slice(begin, end).indices(size)[:2], node) if axis in (-1, last) and step == 1 else None


def _every_other(graph: GraphView, x: str, size: int, name: str) -> tuple[int, NodeList] | None:
    """x[..., first::2]"""
    node = graph.producer(name, "Slice")
    if node is None or node.input[0] != x:
        return None
    first, end, axis, step = _bounds(graph, node)
    whole = first in (0, 1) and len(range(size)[first:end:2]) == size // 2
    return (first, [node]) if whole and axis in (-1, 3) and step == 2 else None


def _unbound(graph: GraphView, x: str, size: int, name: str) -> tuple[int, NodeList] | None:
    """x viewed as (..., R/2, 2), and one element of its last axis."""
    squeeze, shape = graph.producer(name, "Squeeze"), graph.dims(x)
    slice_node = None if squeeze is None else graph.producer(squeeze.input[0])
    view = None if slice_node is None or not slice_node.input else graph.producer(slice_node.input[0], "Reshape")
    if squeeze is None or view is None or view.input[0] != x or None in shape:
        return None
    if graph.shape(view.output[0]) != (*shape[:3], size // 2, 2) or graph.shape(name) != (*shape[:3], size // 2):
        return None
    place = _part(graph, view.output[0], 2, squeeze.input[0], last=4)
    if place is None or place[1] - place[0] != 1:
        return None
    return place[0], [squeeze, place[2], view]


def _bounds(graph: GraphView, node: onnx.NodeProto) -> tuple[int, int, int, int]:
    """(begin, end, axis, step) of a Slice along one axis; the step is 0 where they are not constant."""
    bounds = [graph.constant(argument) for argument in node.input[1:]]
    numbers = [int(bound.item()) for bound in bounds if bound is not None and bound.size == 1]
    if len(numbers) < len(bounds) or len(numbers) not in (3, 4):
        return 0, 0, 0, 0
    return numbers[0], numbers[1], numbers[2], (*numbers[3:], 1)[0]
