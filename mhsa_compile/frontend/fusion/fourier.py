"""Fourier transforms of a known length as products with the matrix of their angles.

    DFT(x (..., N, 2))          ->  x as rows of 2 N, MatMul (2 N, 2 K), then (..., K, 2)
    STFT(x (B, L, 1), window)   ->  frames as patches (B, F, N), times the window, MatMul (N, 2 K), then (B, F, K, 2)

Of halves both are computed in float32. Notation: N numbers go in, K come out, F frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.fusion.fused_nodes import FusedPatches
from mhsa_compile.frontend.onnx_graph import GraphView, add_import, attributes, is_standard, title
from mhsa_compile.spec.attention_spec import DOMAIN

MOST = 1 << 23
"""Elements of a matrix."""
_NARROW = ("float16", "bfloat16")
_TRANSFORMS = ("DFT", "STFT")


def as_products(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without DFT and STFT. Raises ModelError where one's matrix is not known, or too large."""
    if not any(is_standard(node, *_TRANSFORMS) for node in model.graph.node):
        return model
    rewriter = Rewriter(model)
    for node in rewriter.graph.nodes:
        if is_standard(node, *_TRANSFORMS):
            (_dft if node.op_type == "DFT" else _stft)(rewriter, node)
            rewriter.place(node)
    result = rewriter.finished()
    add_import(result, DOMAIN)
    return result


def matrix(length: int, rows: int, columns: int, *, complex_in: bool, complex_out: bool, inverse: bool) -> np.ndarray:
    """(rows * 1 or 2, columns * 1 or 2) of a transform of `length` points: what number `row` adds to number `column`,
    the real and the imaginary part of each side by side where it has both; of an inverse one `length` times that.

    An inverse one of which only real numbers come takes the first half of the spectrum of real numbers, twice.
    """
    turns = np.outer(np.arange(rows), np.arange(columns)) % length
    angles = 2 * np.pi / length * turns
    cos, sin = np.cos(angles), np.sin(angles)
    sin[2 * turns == length] = 0  # of half a turn, where rounding leaves something
    sign = 1 if inverse else -1
    real = np.stack([cos, sign * sin], -1)  # of a real number
    imaginary = np.stack([-sign * sin, cos], -1)
    if not complex_out:
        real, imaginary = real[..., :1], imaginary[..., :1]
        twice = np.full((rows, 1, 1), 2.0)
        twice[0] = 1
        twice[2 * np.arange(rows) == length] = 1
        real, imaginary = real * twice, imaginary * twice
    parts = np.stack([real, imaginary] if complex_in else [real], 1)
    return parts.reshape(rows * parts.shape[1], -1)


def _dft(rewriter: Rewriter, node: onnx.NodeProto) -> None:
    graph, attrs = rewriter.graph, attributes(node)
    x, length_name, axis_name = [*node.input, "", ""][:3]
    dims, inverse, onesided = graph.shape(x), bool(attrs.get("inverse")), bool(attrs.get("onesided"))
    if dims is None or len(dims) < 2 or dims[-1] not in (1, 2):
        raise _unknown(node, "a signal of a known rank, whose last axis is 1 or 2")
    if onesided and (dims[-1] == 2) == (not inverse):
        expected = "a spectrum of complex numbers" if inverse else "real numbers"
        raise ModelError(title(node), f"{expected}, for onesided=1", f"a last axis of {dims[-1]}")
    length = _number(graph, length_name) if length_name else None
    axes = _axes(graph, node, axis_name, len(dims), every=not (onesided or length_name))
    sizes = [dims[axis] for axis in axes]
    if not all(isinstance(size, int) and size > 0 for size in sizes) or (length_name and (length or 0) < 1):
        raise _unknown(node, "an axis and a size along it that are known, and a dft_length of 1 or more")
    kind = graph.dtype(x)
    wide = _widened(rewriter, x, kind)
    results = [_along(rewriter, node, wide, axis, dims, length, kind) for axis in axes]
    y = results.pop()
    for axis, result in zip(axes, results, strict=False):  # one that comes by the call
        places = (rewriter.constant(place, graph.dtype(axis_name)) for place in (axis, axis - len(dims)))
        meant = rewriter.node("Or", *(rewriter.node("Equal", axis_name, place) for place in places))
        y = rewriter.node("Where", meant, result, y)
    _give(rewriter, node, y, kind)


def _axes(graph: GraphView, node: onnx.NodeProto, name: str, rank: int, *, every: bool) -> list[int]:
    """The axis of a transform; all that it may be, where a call brings it and the result is as large along `every`."""
    axis = _number(graph, name) if name else -2
    if axis is None:
        if not every:
            raise _unknown(node, "an axis and a size along it that are known")
        return list(range(rank - 1))
    if not -rank <= axis < rank or axis % rank == rank - 1:
        raise ModelError(title(node), f"an axis before the last of {rank}", str(axis))
    return [axis % rank]


def _along(
    rewriter: Rewriter,
    node: onnx.NodeProto,
    x: str,
    axis: int,
    dims: Sequence[Any],
    length: int | None,
    kind: str | None,
) -> str:
    """The transform along one axis, of `length` points or as many as there are."""
    attrs, size, complex_in = attributes(node), dims[axis], dims[-1] == 2
    inverse, onesided = bool(attrs.get("inverse")), bool(attrs.get("onesided"))
    complex_out = not (inverse and onesided)
    length = length or (size if complex_out else 2 * (size - 1))
    if length < 1:
        raise ModelError(title(node), "a transform of 1 point or more", f"one of {length}")
    rows = min(size, length // 2 + 1 if not complex_out else length)
    columns = length // 2 + 1 if onesided and not inverse else length
    y = x
    if rows < size:
        bounds = (rewriter.constant([number], "int64") for number in (0, rows, axis))
        y = rewriter.node("Slice", y, *bounds)
    others = [i for i in range(len(dims) - 1) if i != axis]
    order = [*others, axis, len(dims) - 1]
    y = _transposed(rewriter, y, order)
    if complex_in and complex_out and rows == columns == length and length % 2 == 0:
        y = _halved(rewriter, node, y, len(others), length, inverse, kind)
    else:
        values = matrix(length, rows, columns, complex_in=complex_in, complex_out=complex_out, inverse=inverse)
        y = _product(rewriter, node, y, len(others), values / length if inverse else values, kind)
        shape = [0] * len(others) + [columns, 2 if complex_out else 1]
        y = rewriter.node("Reshape", y, rewriter.constant(shape, "int64"))
    return _transposed(rewriter, y, [order.index(i) for i in range(len(dims))])


def _stft(rewriter: Rewriter, node: onnx.NodeProto) -> None:
    graph = rewriter.graph
    x, step_name, window, length_name = [*node.input, "", ""][:4]
    dims, step = graph.shape(x), _number(graph, step_name)
    length: Any = _number(graph, length_name) if length_name else None
    window_dims = graph.shape(window) if window else None
    if not length_name:
        length = window_dims[0] if window_dims else dims[1] if dims and not window else None
    if dims is None or len(dims) != 3 or dims[2] not in (1, 2) or step is None or not isinstance(length, int):
        raise _unknown(node, "a frame_step and a frame_length that are known, of a signal (batch, length, 1 or 2)")
    if window and window_dims != (length,):
        raise ModelError(title(node), f"a window of {length}, as frame_length has it", f"one of {window_dims}")
    onesided = bool(attributes(node).get("onesided", 1))
    if step < 1 or length < 1 or (onesided and dims[2] == 2):
        expected = "a frame_step and a frame_length of 1 or more, and of complex numbers onesided=0"
        raise ModelError(title(node), expected, f"{step}, {length}, onesided={int(onesided)}")
    columns, parts = length // 2 + 1 if onesided else length, int(dims[2])
    values = matrix(length, length, columns, complex_in=parts == 2, complex_out=True, inverse=False)

    kind = graph.dtype(x)
    patches = FusedPatches(
        kernel=(length,), strides=(step,), dilations=(1,), before=(0,), behind=(0,), channels_last=True
    )
    frames = rewriter.fresh(f"{node.output[0]}/frames")
    rewriter.append(patches.to_node(node, [_widened(rewriter, x, kind)], [frames]))
    rewriter.hint(frames, [dims[0], None, length * parts], "float32" if kind in _NARROW else kind)
    if window:
        wide = _widened(rewriter, window, kind)
        if parts == 2:
            column = rewriter.node("Unsqueeze", wide, rewriter.constant([1], "int64"))
            both = rewriter.node("Concat", column, column, axis=1)
            wide = rewriter.node("Reshape", both, rewriter.constant([-1], "int64"))
        frames = rewriter.node("Mul", frames, wide)
    y = rewriter.node("MatMul", frames, _matrix(rewriter, node, values, kind))
    y = rewriter.node("Reshape", y, rewriter.constant([0, 0, columns, 2], "int64"))
    _give(rewriter, node, y, kind)


def _halved(
    rewriter: Rewriter, node: onnx.NodeProto, x: str, before: int, length: int, inverse: bool, kind: str | None
) -> str:
    """A transform of complex numbers (..., N, 2), behind `before` axes, by two of half the length: of the sums of both
    halves, which gives the even numbers, and of their differences, turned, which gives the odd ones."""
    half = length // 2
    lower, upper = rewriter.nodes("Split", (x,), [rewriter.fresh("half") for _ in range(2)], axis=-2, num_outputs=2)
    sums, differences = (rewriter.node(operator, lower, upper) for operator in ("Add", "Sub"))
    angles = (2 if inverse else -2) * np.pi / length * np.arange(half)
    turned = np.stack([-np.sin(angles), np.sin(angles)], -1)
    swapped = rewriter.node("Gather", differences, rewriter.constant([1, 0], "int64"), axis=-1)
    differences = rewriter.node(
        "Add",
        rewriter.node("Mul", differences, _matrix(rewriter, node, np.cos(angles)[:, None], kind)),
        rewriter.node("Mul", swapped, _matrix(rewriter, node, turned, kind)),
    )
    place = rewriter.constant([before], "int64")
    both = [rewriter.node("Unsqueeze", value, place) for value in (sums, differences)]
    values = matrix(half, half, half, complex_in=True, complex_out=True, inverse=inverse)
    y = _product(rewriter, node, rewriter.node("Concat", *both, axis=before), before + 1, values, kind)
    y = rewriter.node("Reshape", y, rewriter.constant([0] * (before + 1) + [half, 2], "int64"))
    y = rewriter.node("Transpose", y, perm=[*range(before), before + 1, before, before + 2])
    y = rewriter.node("Reshape", y, rewriter.constant([0] * before + [length, 2], "int64"))
    return rewriter.node("Mul", y, _matrix(rewriter, node, np.array(1 / length), kind)) if inverse else y


def _product(
    rewriter: Rewriter, node: onnx.NodeProto, x: str, before: int, values: np.ndarray, kind: str | None
) -> str:
    """The numbers of the axes behind the first ones as rows, times a matrix."""
    rows = rewriter.node("Reshape", x, rewriter.constant([0] * before + [len(values)], "int64"))
    return rewriter.node("MatMul", rows, _matrix(rewriter, node, values, kind))


def _number(graph: GraphView, name: str) -> int | None:
    value = graph.constant(name)
    return None if value is None or value.size != 1 else int(value.item())


def _matrix(rewriter: Rewriter, node: onnx.NodeProto, values: np.ndarray, kind: str | None) -> str:
    """A matrix as a constant of the program: it is no weight of the file."""
    if values.size > MOST:
        expected = f"a transform of at most {MOST} angles"
        raise ModelError(title(node), expected, f"one of {values.size}", "Cut it into shorter ones.")
    array = values.astype(np.float64 if kind == "float64" else np.float32)
    return rewriter.node("Constant", value=numpy_helper.from_array(array))


def _widened(rewriter: Rewriter, x: str, kind: str | None) -> str:
    return rewriter.node("Cast", x, to=onnx.TensorProto.FLOAT) if kind in _NARROW else x


def _transposed(rewriter: Rewriter, x: str, order: Sequence[int]) -> str:
    return x if list(order) == sorted(order) else rewriter.node("Transpose", x, perm=list(order))


def _give(rewriter: Rewriter, node: onnx.NodeProto, y: str, kind: str | None) -> None:
    if kind in _NARROW:
        code = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        rewriter.node("Cast", y, output=node.output[0], to=code)
    else:
        rewriter.node("Identity", y, output=node.output[0])


def _unknown(node: onnx.NodeProto, expected: str) -> ModelError:
    return ModelError(title(node), expected, "one that only a call tells", "Fix sizes with dims, lengths in the file.")
