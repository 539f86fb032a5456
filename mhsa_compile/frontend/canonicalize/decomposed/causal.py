"""Causality, as graphs spell it: key j is seen by query i iff j <= i, over the last two axes of a bool value."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx

from mhsa_compile.frontend.canonicalize.rewriting.constant_values import KnownGraph
from mhsa_compile.frontend.onnx_graph import GraphView, attributes

_OPPOSITE = {"Less": "GreaterOrEqual", "LessOrEqual": "Greater", "Greater": "LessOrEqual", "GreaterOrEqual": "Less"}
_VIEWS = ("Cast", "Identity", "Unsqueeze", "Reshape", "Expand")


class Flags(NamedTuple):
    """A bool value, or the opposite of one."""

    name: str
    positive: bool = True


class _Index(NamedTuple):
    """A value that counts offset, offset + 1, ... along one axis, counted from the end, and is 1 wide in all others."""

    axis: int
    offset: int


def conjuncts(graph: GraphView, flags: Flags) -> list[Flags]:
    """What must all hold for `flags` to hold."""
    name = without_expansion(graph, flags.name)
    negation = graph.producer(name, "Not")
    if negation is not None:
        return conjuncts(graph, Flags(negation.input[0], not flags.positive))
    junction = graph.producer(name, "And" if flags.positive else "Or")
    if junction is not None:
        return [part for operand in junction.input for part in conjuncts(graph, Flags(operand, flags.positive))]
    return [Flags(name, flags.positive)]


def without_expansion(graph: GraphView, name: str) -> str:
    """A mask before it was expanded to the size of the scores: it broadcasts to them anyway, but for its last axis."""
    while (node := graph.producer(name)) is not None and node.op_type in ("Identity", "Expand", "Cast"):
        before, after = graph.shape(node.input[0]), graph.shape(name)
        if node.op_type == "Cast" and graph.dtype(node.input[0]) != graph.dtype(name):
            break
        if node.op_type == "Expand" and not (before and after and before[-1] not in (1, None)):
            break
        name = node.input[0]
    return name


def is_triangle(graph: KnownGraph, flags: Flags) -> bool:
    """Whether it holds exactly where j <= i, for every size of its last two axes."""
    name, positive = flags
    node = graph.producer(name)
    if node is None:
        return False
    if node.op_type == "Slice":
        return _is_corner(graph, node, positive)
    if node.op_type == "Trilu":
        upper = bool(attributes(node).get("upper", 1))
        fits = upper is not positive and _diagonal(graph, node) == (1 if upper else 0)
        return fits and is_constant(graph, node.input[0], 1)
    if node.op_type == "Not":
        return is_triangle(graph, Flags(node.input[0], not positive))
    if node.op_type in ("Cast", "Identity"):
        return is_triangle(graph, Flags(node.input[0], positive))
    if node.op_type == "Equal" and graph.scalar(node.input[1]) in (0, 1):  # of a triangle of zeros and ones
        return is_triangle(graph, Flags(node.input[0], (graph.scalar(node.input[1]) == 1) == positive))
    if node.op_type in _OPPOSITE:
        left, right = (_index(graph, operand) for operand in node.input)
        if left is not None and right is not None:
            return _is_causal(node.op_type if positive else _OPPOSITE[node.op_type], left, right)
    return False


def _is_causal(comparison: str, left: _Index, right: _Index) -> bool:
    key, query = (left, right) if comparison.startswith("Less") else (right, left)
    ahead = 0 if comparison.endswith("OrEqual") else 1
    return key.axis == -1 and query.axis == -2 and query.offset - key.offset == ahead


def always(graph: KnownGraph, flags: Flags) -> bool:
    """Whether it holds everywhere, whatever the sizes."""
    node = graph.producer(flags.name)
    if node is not None and node.op_type in _OPPOSITE:
        left, right = _index(graph, node.input[0]), graph.scalar(node.input[1])
        comparison = node.op_type if flags.positive else _OPPOSITE[node.op_type]
        least = None if right is None else right + (comparison == "Greater")
        return comparison.startswith("Greater") and left is not None and least is not None and left.offset >= least
    return is_constant(graph, flags.name, int(flags.positive))


def is_constant(graph: KnownGraph, name: str, value: float) -> bool:
    """Whether every element is `value`, whatever the sizes."""
    array = graph.array(name)
    if array is not None:
        return bool((array == value).all())
    node = graph.producer(name)
    if node is None:
        return False
    if node.op_type == "ConstantOfShape":
        fill = attributes(node).get("value")
        return bool((onnx.numpy_helper.to_array(fill) == value).all()) if fill is not None else value == 0
    return node.op_type in _VIEWS and is_constant(graph, node.input[0], value)


def _index(graph: KnownGraph, name: str) -> _Index | None:
    """What a value counts, if it is made of a Range from a constant on, by steps of one."""
    node, shape = graph.producer(name), graph.shape(name)
    if node is None:
        return None
    if node.op_type == "Range":
        start, step = graph.scalar(node.input[0]), graph.scalar(node.input[2])
        return _Index(-1, int(start)) if start is not None and step == 1 else None
    if node.op_type in ("Cast", "Identity"):
        return _index(graph, node.input[0])
    if node.op_type in ("Add", "Sub"):
        return _index_of_sum(graph, node)
    if node.op_type in ("Unsqueeze", "Reshape"):
        inner = _index(graph, node.input[0])
        if inner is None or shape is None:
            return None
        places = [axis for axis in range(-len(shape), 0) if shape[axis] != 1]
        return _Index(places[0], inner.offset) if len(places) == 1 else None
    return None


def _index_of_sum(graph: KnownGraph, node: onnx.NodeProto) -> _Index | None:
    inner, by = _index(graph, node.input[0]), graph.scalar(node.input[1])
    if inner is None and node.op_type == "Add":
        inner, by = _index(graph, node.input[1]), graph.scalar(node.input[0])
    if inner is None or by is None:
        return None
    return _Index(inner.axis, inner.offset + int(by if node.op_type == "Add" else -by))


def _diagonal(graph: KnownGraph, node: onnx.NodeProto) -> int | None:
    if len(node.input) < 2 or not node.input[1]:
        return 0
    value = graph.scalar(node.input[1])
    return None if value is None else int(value)


def _is_corner(graph: KnownGraph, node: onnx.NodeProto, positive: bool) -> bool:
    """Whether a Slice begins with the first row and column of a constant triangle."""
    whole = _corner_of(graph, node)
    if whole is None or whole.ndim < 2:
        return False
    return bool((whole.astype(bool) == (np.tril(np.ones(whole.shape[-2:], dtype=bool)) == positive)).all())


def _corner_of(graph: KnownGraph, node: onnx.NodeProto) -> np.ndarray | None:
    starts = graph.partial(node.input[1])
    steps = graph.partial(node.input[4]) if len(node.input) > 4 and node.input[4] else np.array([1], dtype=object)
    if starts is None or steps is None or any(s != 0 for s in starts) or any(s != 1 for s in steps):
        return None
    inner = graph.producer(node.input[0], "Slice")
    return _corner_of(graph, inner) if inner is not None else graph.array(node.input[0])
