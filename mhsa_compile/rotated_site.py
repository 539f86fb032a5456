"""A rotary embedding that a graph spells out, as exporters leave that of Llama and its kin, or of GPT-J and its:

    x * cos + concat(-x[..., R/2:], x[..., :R/2]) * sin
    x * cos + stack(-x[..., 1::2], x[..., ::2]) * sin

with x the first R elements of heads (B, H, L, E), or (B, L, H, E) before they are transposed to that; behind it stand
the other elements, if any, as they were. cos and sin are (B or 1, 1, L, R), or (B or 1, L, 1, R), and the two of a
pair need not be equal. It becomes one node, which reads the rows of a projection in place, as RotaryEmbedding does;
only what is certain to be of these shapes is taken.

Notation: B batch, L length, H heads, E head dim, R the elements of a head that turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import onnx

from mhsa_compile.head_views import Operand, keeps_rows, needed_by, split_rows
from mhsa_compile.onnx_graph import Graph, attributes
from mhsa_compile.rotary_site import rotary_node
from mhsa_compile.spec_checks import DTYPES

_Nodes = list[onnx.NodeProto]


class _Terms(NamedTuple):
    """x cos + turned sin, and the nodes that make it: each behind all that read it, but for the sum."""

    x: str
    cos: str
    sin: str
    interleaved: bool
    nodes: _Nodes


class _Whole(NamedTuple):
    """All of the heads: `x` becomes what `end` makes, by `nodes`. `axes` are those of length and heads in x."""

    x: str
    end: onnx.NodeProto
    nodes: _Nodes
    axes: tuple[int, int]


class RotatedSite:
    """A rotary embedding by its last node, with the nodes that nobody else needs."""

    def __init__(self, graph: Graph, terms: _Terms, whole: _Whole) -> None:
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
        return rotary_node(
            self.node,
            self.operand,
            [self.terms.cos, self.terms.sin],
            rotary_dim=turning[-1],
            interleaved=int(self.terms.interleaved),
            whole_angles=1,
            shared_angles=int(shared[0] == 1 != turning[0]),
            output_layout="heads",
        )


_HEADS, _ROWS = (2, 1), (1, 2)  # the axes of length and heads


def rotations(graph: Graph) -> Iterator[RotatedSite]:
    """Every rotary embedding that the graph spells out."""
    for node in graph.nodes:
        if node.op_type == "Add" and node.domain in ("", "ai.onnx"):
            terms = next(filter(None, (_terms(graph, *order) for order in (node.input, node.input[::-1]))), None)
            whole = None if terms is None else _whole(graph, node, terms)
            if terms is not None and whole is not None:
                yield RotatedSite(graph, terms, whole)


def _whole(graph: Graph, add: onnx.NodeProto, terms: _Terms) -> _Whole | None:
    """The heads of which an Add ends the turning, from where they are read; None where they are none."""
    axes = _axes(graph, terms)
    if axes is None:
        return None
    x, end, nodes = _with_rest(graph, add, terms) or (terms.x, add, terms.nodes)
    if axes == _HEADS:
        return _Whole(x, end, nodes, axes)
    swap, view = graph.only_consumer(end.output[0], "Transpose"), graph.producer(x, "Reshape")
    if swap is None or view is None or attributes(swap).get("perm") != [0, 2, 1, 3] or not keeps_rows(graph, view):
        return None
    before, after = (graph.shape(name) or () for name in (view.input[0], x))
    joined = len(before) == 3 and before[2] == int(after[2] or 0) * int(after[3] or 0)
    return _Whole(x, swap, [end, *nodes], axes) if joined else None


def _with_rest(graph: Graph, add: onnx.NodeProto, terms: _Terms) -> tuple[str, onnx.NodeProto, _Nodes] | None:
    """(x, the Concat, nodes) where the elements of a head that do not turn stand behind those that do, as they were."""
    concat, part = graph.only_consumer(add.output[0], "Concat"), graph.producer(terms.x)
    if concat is None or part is None or len(concat.input) != 2 or concat.input[0] != add.output[0]:
        return None
    x, turning = part.input[0], (graph.shape(terms.x) or (0,))[-1]
    shape = graph.shape(x) or (None,)
    if attributes(concat).get("axis") not in (-1, 3) or not isinstance(size := shape[-1], int) or len(shape) != 4:
        return None
    found = [_part(graph, x, size, name) for name in (terms.x, concat.input[1])]
    if [place and place[:2] for place in found] != [(0, turning), (turning, size)]:
        return None
    makers = {id(place[2]): place[2] for place in found if place is not None}
    return x, concat, [add, *terms.nodes, *makers.values()]


def _axes(graph: Graph, terms: _Terms) -> tuple[int, int] | None:
    """Those of length and heads in x, where dtypes and shapes are seen to be those of a rotary embedding."""
    dtypes = {graph.dtype(name) for name in terms[:3]}
    x, *tables = (graph.shape(name) or () for name in terms[:3])
    if len(dtypes) > 1 or not dtypes <= set(DTYPES) or len(x) != 4 or None in x or tables[0] != tables[1]:
        return None
    for axes, places in ((_HEADS, (1, x[2])), (_ROWS, (x[1], 1))):
        if isinstance(x[axes[1]], int) and tables[0] in {(entries, *places, x[3]) for entries in (1, x[0])}:
            return axes
    return None


def _terms(graph: Graph, straight: str, turned: str) -> _Terms | None:
    products = [graph.producer(name, "Mul") for name in (straight, turned)]
    if products[0] is None or products[1] is None:
        return None
    for (x, cos), (across, sin) in product(*((p.input, p.input[::-1]) for p in products if p is not None)):
        for interleaved, makers in ((False, _turned_halves(graph, x, across)), (True, _turned_pairs(graph, x, across))):
            if makers is not None:
                return _Terms(x, cos, sin, interleaved, [products[0], products[1], *makers])
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


def _turned_pairs(graph: Graph, x: str, name: str) -> _Nodes | None:
    """The nodes of `name` = stack(-x[..., 1::2], x[..., ::2]) with its last two axes as one, the last one first."""
    flat, shape = graph.producer(name, "Reshape"), graph.shape(x) or ()
    stack = None if flat is None else graph.producer(flat.input[0], "Concat")
    if flat is None or stack is None or len(stack.input) != 2 or len(shape) != 4 or not isinstance(shape[3], int):
        return None
    if shape[3] % 2 or graph.shape(name) != shape or graph.shape(stack.output[0]) != (*shape[:3], shape[3] // 2, 2):
        return None
    ones = [graph.producer(value, "Unsqueeze") for value in stack.input]
    negated = None if ones[0] is None else graph.producer(ones[0].input[0], "Neg")
    if negated is None or ones[0] is None or ones[1] is None or attributes(stack).get("axis") not in (-1, 4):
        return None
    parts = [_every_other(graph, x, value) for value in (negated.input[0], ones[1].input[0])]
    if [part and part[0] for part in parts] != [1, 0]:
        return None
    return [flat, stack, *ones, negated, *(part[1] for part in parts if part is not None)]


def _every_other(graph: Graph, x: str, name: str) -> tuple[int, onnx.NodeProto] | None:
    """(first, node) of a value that is x[..., first::2], for an even last axis."""
    node = graph.producer(name, "Slice")
    bounds = [] if node is None or node.input[0] != x else [graph.constant(argument) for argument in node.input[1:]]
    if node is None or len(bounds) != 4 or any(bound is None or bound.size != 1 for bound in bounds):
        return None
    first, end, axis, step = (int(bound.item()) for bound in bounds if bound is not None)
    size = (graph.shape(x) or (0,))[-1]
    whole = isinstance(size, int) and first in (0, 1) and len(range(size)[first:end:2]) == size // 2
    return (first, node) if whole and axis in (-1, 3) and step == 2 else None


def _part(graph: Graph, x: str, size: int, name: str) -> tuple[int, int, onnx.NodeProto] | None:
    """(begin, end, node) of a value that is x[..., begin:end]."""
    node = graph.producer(name)
    if node is None or node.op_type not in ("Slice", "Split") or node.input[0] != x:
        return None
    if node.op_type == "Split":
        sizes = graph.constant(node.input[1]) if len(node.input) > 1 and node.input[1] else None
        if attributes(node).get("axis", 0) not in (-1, 3) or len(node.output) != 2 or (sizes is None and size % 2):
            return None
        cut = size // 2 if sizes is None else int(sizes[0])
        return (0, cut, node) if name == node.output[0] else (cut, size, node)
    bounds = [graph.constant(argument) for argument in node.input[1:]]
    if len(bounds) < 3 or any(bound is None or bound.size != 1 for bound in bounds):
        return None
    begin, end, axis, *step = (int(bound.item()) for bound in bounds if bound is not None)
    if axis not in (-1, 3) or step not in ([], [1]):
        return None
    return *slice(begin, end).indices(size)[:2], node
