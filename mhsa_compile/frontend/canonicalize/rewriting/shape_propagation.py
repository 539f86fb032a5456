"""What is known of shapes, put into the graph as constants.

Exporters write the shapes that they reshape to as arithmetic over Shape. Here that is done once, and what it comes to
stands in the graph: [0, 0, 12, 64] instead of nine nodes. What is left is the network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from mhsa_compile.frontend.canonicalize.rewriting.constant_values import KnownGraph, ShapeEntry, multiplied, product
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.onnx_graph import attributes

_MOST_ROUNDS = 500  # each lets the shapes of a few nodes more be inferred; a model of 100 layers needs a fraction of it
_MADE_UP = "unk__"  # how onnx begins the names of the symbols that it makes up, anew each time


def propagate_shapes(model: onnx.ModelProto, limits: dict[str, int]) -> onnx.ModelProto:
    """The model with all that is known of it as constants, the targets of Reshape and Expand among that.

    `limits` is told symbols and the largest size they may have: that of a table of which a part is taken. Shapes are
    inferred again after every step, as each may let more be known.
    """
    hinted: set[str] = set()
    for _ in range(_MOST_ROUNDS):
        settled = _settled_once(model, limits, hinted)
        if settled is model:
            break
        model = settled
    return model


def _settled_once(model: onnx.ModelProto, limits: dict[str, int], hinted: set[str]) -> onnx.ModelProto:
    rewriter = Rewriter(model)
    graph = rewriter.graph
    for node in graph.nodes:
        if node.op_type == "Constant" or node.domain not in ("", "ai.onnx"):
            continue
        name = node.output[0]
        array = graph.array(name)
        dims = None if array is not None else _dims_of(graph, node, limits)
        if dims is not None and name not in hinted and not _agree(dims, graph.shape(name)):
            hinted.add(name)
            rewriter.hint(name, dims)
        if array is not None:
            rewriter.node("Constant", output=name, value=numpy_helper.from_array(array))
            rewriter.place(node)
        elif node.op_type in ("Reshape", "Expand") and graph.array(node.input[1]) is None:
            find = _reshape_target if node.op_type == "Reshape" else _expand_target
            target = find(graph.shape(node.input[0]), graph.partial(node.input[1]), attributes(node))
            if target is not None:
                inferred = graph.shape(name)
                if inferred is not None and all(map(_is_certain, inferred)):  # a target with -1 says less
                    rewriter.hint(name, inferred)
                rewriter.node(node.op_type, node.input[0], rewriter.constant(target, "int64"), output=name)
                rewriter.place(node)
    return rewriter.finished()


def _agree(dims: Sequence[ShapeEntry], inferred: Sequence[ShapeEntry] | None) -> bool:
    """Whether the inferred dims say as much as `dims`."""
    return inferred is not None and all(d is None or d == i for d, i in zip(dims, inferred, strict=True))


def _dims_of(graph: KnownGraph, node: onnx.NodeProto, limits: dict[str, int]) -> list[ShapeEntry] | None:
    """Dims that follow from computed sizes: what onnx's inference does not look into. All of them, or None."""
    finders: dict[str, Callable[[KnownGraph, onnx.NodeProto], list[ShapeEntry] | None]] = {
        "Range": _counted, "Reshape": _reshaped, "Expand": _expanded, "ConstantOfShape": _filled, "Tile": _tiled,
        "Slice": partial(_sliced, limits),
    }  # fmt: skip
    dims = finders[node.op_type](graph, node) if node.op_type in finders else None
    return dims if dims is not None and all(map(_is_certain, dims)) else None


def _is_certain(entry: ShapeEntry) -> bool:
    return isinstance(entry, int) or (isinstance(entry, str) and not entry.startswith(_MADE_UP))


def _counted(graph: KnownGraph, node: onnx.NodeProto) -> list[ShapeEntry] | None:
    start, end, step = (graph.partial(name) for name in node.input)
    if start is None or end is None or step is None or (start.item(), step.item()) != (0, 1):
        return None
    return [end.item()]


def _reshaped(graph: KnownGraph, node: onnx.NodeProto) -> list[ShapeEntry] | None:
    target, source = graph.partial(node.input[1]), graph.shape(node.input[0])
    if target is None or target.ndim != 1 or (attributes(node).get("allowzero") and 0 in target):
        return None
    if source is None:  # of which a 0 is a size, and of which a -1 is what is left
        return None if 0 in target or -1 in target else list(target)
    dims = [source[i] if size == 0 else size for i, size in enumerate(target)]
    if -1 in dims:
        place = dims.index(-1)
        dims[place] = _left_over(source, dims[:place] + dims[place + 1 :])
    return dims


def _expanded(graph: KnownGraph, node: onnx.NodeProto) -> list[ShapeEntry] | None:
    target, source = graph.partial(node.input[1]), graph.shape(node.input[0])
    if target is None or source is None or len(target) < len(source):
        return None
    aligned = [1] * (len(target) - len(source)) + list(source)
    return [own if size == 1 else size for own, size in zip(aligned, target, strict=True)]


def _tiled(graph: KnownGraph, node: onnx.NodeProto) -> list[ShapeEntry] | None:
    repeats, source = graph.partial(node.input[1]), graph.shape(node.input[0])
    if repeats is None or source is None or len(repeats) != len(source):
        return None
    return [multiplied(size, times) for size, times in zip(source, repeats, strict=True)]


def _filled(graph: KnownGraph, node: onnx.NodeProto) -> list[ShapeEntry] | None:
    target = graph.partial(node.input[0])
    return None if target is None else list(target)


def _sliced(limits: dict[str, int], graph: KnownGraph, node: onnx.NodeProto) -> list[ShapeEntry] | None:
    """Dims of a Slice by steps of one. An end that is a symbol is taken to lie within the axis: that is its limit."""
    dims = graph.shape(node.input[0])
    starts, ends = (graph.partial(name) for name in node.input[1:3])
    axes = graph.partial(node.input[3]) if len(node.input) > 3 and node.input[3] else None
    steps = graph.partial(node.input[4]) if len(node.input) > 4 and node.input[4] else None
    if dims is None or starts is None or ends is None or (steps is not None and any(step != 1 for step in steps)):
        return None
    result: list[ShapeEntry] = list(dims)
    for axis, start, end in zip(range(len(starts)) if axes is None else axes, starts, ends, strict=True):
        size = result[axis]
        if start == 0 and (end == size or (isinstance(end, int) and end > 1 << 30)):
            continue
        if start == 0 and isinstance(end, str) and isinstance(size, int) and not end.startswith(_MADE_UP):
            limits[end] = min(size, limits.get(end, size))
            result[axis] = end
        elif isinstance(start, int) and isinstance(end, int) and isinstance(size, int):
            result[axis] = len(range(size)[start:end])
        else:
            return None
    return result


def _reshape_target(
    source: Sequence[ShapeEntry] | None, entries: np.ndarray | None, attrs: dict[str, Any]
) -> list[int] | None:
    """The constant that stands for a computed target: 0 for an axis that stays, -1 for at most one other."""
    if source is None or entries is None or entries.ndim != 1 or (attrs.get("allowzero") and 0 in entries):
        return None
    target: list[int] = []
    for i, entry in enumerate(entries):
        if isinstance(entry, str) and i < len(source) and source[i] == entry:
            target.append(0)
        elif isinstance(entry, int):
            target.append(entry)
        else:
            target.append(-1)
    if target.count(-1) > 1:
        return None
    if -1 in target:
        target[target.index(-1)] = _remaining(source, entries, target.index(-1))
    return target


def _remaining(source: Sequence[ShapeEntry], entries: np.ndarray, place: int) -> int:
    """The size that is left for one axis of a target, or -1 where that is not a number."""
    others = [source[i] if entry == 0 and i < len(source) else entry for i, entry in enumerate(entries) if i != place]
    size = _left_over(source, others)
    return size if isinstance(size, int) else -1


def _left_over(source: Sequence[ShapeEntry], others: Sequence[ShapeEntry]) -> ShapeEntry:
    """The size of the one axis that a target has beside `others`, where it is a number or a symbol."""
    if None in source or None in others:
        return None
    left, more = _symbols(source), _symbols(others)
    whole, part = product(source), product(others)
    if more - left or not part or whole % part:
        return None
    symbols = list((left - more).elements())
    if not symbols:
        return whole // part
    return symbols[0] if len(symbols) == 1 and whole == part else None


def _symbols(entries: Sequence[ShapeEntry]) -> Counter[str]:
    return Counter(entry for entry in entries if isinstance(entry, str))


def _expand_target(
    source: Sequence[ShapeEntry] | None, entries: np.ndarray | None, _: dict[str, Any]
) -> list[int] | None:
    """The target of an Expand as constants: an axis that keeps its size is 1 in the target."""
    if source is None or entries is None or entries.ndim != 1:
        return None
    aligned = [None] * (len(entries) - len(source)) + list(source)[-len(entries) :]
    target = [1 if entry is not None and entry == size else entry for entry, size in zip(entries, aligned, strict=True)]
    sizes = [entry for entry in target if isinstance(entry, int)]
    return sizes if len(sizes) == len(target) else None
