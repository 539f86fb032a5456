"""The two elements of each pair of a head, as a graph takes them apart and puts them together again.

Pairs are halves of the last axis, x[..., :R/2] and x[..., R/2:], or neighbours, x[..., ::2] and x[..., 1::2]. Nodes are
given so that each stands behind all that read it.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx

from mhsa_compile.frontend.onnx_graph import GraphView, attributes

NodeList = list[onnx.NodeProto]


class JoinedHalves(NamedTuple):
    """concat(one, other), or stack(one, other) behind the last axis with both axes as one: `interleaved`."""

    one: str
    other: str
    interleaved: bool
    nodes: NodeList


def joined(graph: GraphView, name: str) -> JoinedHalves | None:
    """What a value of four axes is put together of, in equal parts; None where it is not."""
    node, shape = graph.producer(name), graph.shape(name) or ()
    if node is None or len(shape) != 4 or None in shape or not isinstance(shape[3], int) or shape[3] % 2:
        return None
    if node.op_type == "Concat" and len(node.input) == 2 and attributes(node).get("axis") in (-1, 3):
        parts = [graph.shape(part) for part in node.input]
        halves = parts == [(*shape[:3], shape[3] // 2)] * 2
        return JoinedHalves(node.input[0], node.input[1], False, [node]) if halves else None
    stack = graph.producer(node.input[0], "Concat") if node.op_type == "Reshape" else None
    if stack is None or len(stack.input) != 2 or attributes(stack).get("axis") not in (-1, 4):
        return None
    ones = [unsqueeze for part in stack.input if (unsqueeze := graph.producer(part, "Unsqueeze")) is not None]
    if len(ones) < 2 or graph.shape(stack.output[0]) != (*shape[:3], shape[3] // 2, 2):
        return None
    if any(graph.shape(unsqueeze.output[0]) != (*shape[:3], shape[3] // 2, 1) for unsqueeze in ones):
        return None
    return JoinedHalves(ones[0].input[0], ones[1].input[0], True, [node, stack, *ones])


def source(graph: GraphView, name: str, interleaved: bool) -> str:
    """The value that `name` is a part of, if it is one of anything."""
    node = graph.producer(name)
    if interleaved and node is not None and node.op_type == "Squeeze":
        inner = graph.producer(node.input[0])
        node = None if inner is None else graph.producer(inner.input[0], "Reshape")
    return node.input[0] if node is not None and node.input else ""


def element(graph: GraphView, x: str, name: str, interleaved: bool) -> tuple[int, NodeList] | None:
    """(0 or 1, nodes) of a value that is the one element of each pair of x, or the other; None of another value."""
    shape = graph.shape(x) or ()
    if len(shape) != 4 or not isinstance(size := shape[3], int) or size % 2:
        return None
    if interleaved:
        return _every_other(graph, x, size, name) or _unbound(graph, x, size, name)
    half = part(graph, x, size, name)
    halves = {(0, size // 2): 0, (size // 2, size): 1}
    return None if half is None or half[:2] not in halves else (halves[half[:2]], [half[2]])


def part(graph: GraphView, x: str, size: int, name: str, last: int = 3) -> tuple[int, int, onnx.NodeProto] | None:
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
    squeeze, shape = graph.producer(name, "Squeeze"), graph.shape(x) or ()
    slice_node = None if squeeze is None else graph.producer(squeeze.input[0])
    view = None if slice_node is None or not slice_node.input else graph.producer(slice_node.input[0], "Reshape")
    if squeeze is None or view is None or view.input[0] != x or None in shape:
        return None
    if graph.shape(view.output[0]) != (*shape[:3], size // 2, 2) or graph.shape(name) != (*shape[:3], size // 2):
        return None
    place = part(graph, view.output[0], 2, squeeze.input[0], last=4)
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
