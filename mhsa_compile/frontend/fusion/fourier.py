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
from mhsa_compile.frontend.onnx_graph import add_import, attributes, is_standard, node_error
from mhsa_compile.spec.attention_spec import DOMAIN

MOST = 1 << 23
"""Elements of a matrix."""
_TRANSFORMS = ("DFT", "STFT")


def as_products(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without DFT and STFT. Raises ModelError where one's matrix is not known, or too large."""
    if not any(is_standard(node, *_TRANSFORMS) for node in model.graph.node):
        return model
    rewriter = Rewriter(model)
    for node in rewriter.graph.nodes:
        if is_standard(node, *_TRANSFORMS):
            transform = _Transform(rewriter, node)
            y = transform.dft() if node.op_type == "DFT" else transform.stft()
            rewriter.node("Cast" if transform.narrow else "Identity", y, output=node.output[0], **transform.narrow)
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


class _Transform:
    """One DFT or STFT, written by its rewriter. `narrow`: what a Cast back to halves is told; empty of wider floats."""

    def __init__(self, rewriter: Rewriter, node: onnx.NodeProto) -> None:
        self.rewriter, self.graph, self.node, self.attrs = rewriter, rewriter.graph, node, attributes(node)
        self.write, kind = rewriter.node, rewriter.graph.dtype(node.input[0])
        is_narrow = kind in ("float16", "bfloat16")
        self.narrow = {"to": onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))} if is_narrow else {}
        self.kind = "float32" if is_narrow else kind

    def dft(self) -> str:
        x, length_name, axis_name = [*self.node.input, "", ""][:3]
        dims = self.graph.shape(x)
        inverse, onesided = bool(self.attrs.get("inverse")), bool(self.attrs.get("onesided"))
        if dims is None or len(dims) < 2 or dims[-1] not in (1, 2):
            raise self._unknown("a signal of a known rank, whose last axis is 1 or 2")
        if onesided and (dims[-1] == 2) == (not inverse):
            expected = "a spectrum of complex numbers" if inverse else "real numbers"
            raise node_error(self.node, f"{expected}, for onesided=1", f"a last axis of {dims[-1]}")
        length = self._number(length_name)
        axes = self._axes(axis_name, len(dims), every=not (onesided or length_name))
        sizes = [dims[axis] for axis in axes]
        if not all(isinstance(size, int) and size > 0 for size in sizes) or (length_name and (length or 0) < 1):
            raise self._unknown("an axis and a size along it that are known, and a dft_length of 1 or more")
        wide = self._widened(x)
        *results, y = [self._along(wide, axis, dims, length) for axis in axes]
        for axis, result in zip(axes, results, strict=False):  # one that comes by the call
            kind = self.graph.dtype(axis_name)
            places = (self.rewriter.constant(place, kind) for place in (axis, axis - len(dims)))
            meant = self.write("Or", *(self.write("Equal", axis_name, place) for place in places))
            y = self.write("Where", meant, result, y)
        return y

    def _axes(self, name: str, rank: int, *, every: bool) -> list[int]:
        """The axis of a transform; all that it may be, where a call brings it and the result is as large along
        `every`."""
        axis = self._number(name) if name else -2
        if axis is None:
            if not every:
                raise self._unknown("an axis and a size along it that are known")
            return list(range(rank - 1))
        if not -rank <= axis < rank or axis % rank == rank - 1:
            raise node_error(self.node, f"an axis before the last of {rank}", str(axis))
        return [axis % rank]

    def _along(self, x: str, axis: int, dims: Sequence[Any], length: int | None) -> str:
        """The transform along one axis, of `length` points or as many as there are."""
        size, complex_in = dims[axis], dims[-1] == 2
        inverse, onesided = bool(self.attrs.get("inverse")), bool(self.attrs.get("onesided"))
        complex_out = not (inverse and onesided)
        length = length or (size if complex_out else 2 * (size - 1))
        if length < 1:
            raise node_error(self.node, "a transform of 1 point or more", f"one of {length}")
        rows = min(size, length // 2 + 1 if not complex_out else length)
        columns = length // 2 + 1 if onesided and not inverse else length
        if rows < size:
            x = self.write("Slice", x, *(self._ints(number) for number in (0, rows, axis)))
        others = [i for i in range(len(dims) - 1) if i != axis]
        order = [*others, axis, len(dims) - 1]
        y = self._transposed(x, order)
        if complex_in and complex_out and rows == columns == length and length % 2 == 0:
            y = self._halved(y, len(others), length, inverse)
        else:
            values = matrix(length, rows, columns, complex_in=complex_in, complex_out=complex_out, inverse=inverse)
            y = self._product(y, len(others), values / length if inverse else values)
            y = self.write("Reshape", y, self._ints(*[0] * len(others), columns, 2 if complex_out else 1))
        return self._transposed(y, [order.index(i) for i in range(len(dims))])

    def stft(self) -> str:
        x, step_name, window, length_name = [*self.node.input, "", ""][:4]
        dims, step = self.graph.shape(x), self._number(step_name)
        length: Any = self._number(length_name)
        window_dims = self.graph.shape(window) if window else None
        if not length_name:
            length = window_dims[0] if window_dims else dims[1] if dims and not window else None
        if dims is None or len(dims) != 3 or dims[2] not in (1, 2) or step is None or not isinstance(length, int):
            raise self._unknown("a frame_step and a frame_length that are known, of a signal (batch, length, 1 or 2)")
        if window and window_dims != (length,):
            expected = f"a window of {length}, as frame_length has it"
            raise node_error(self.node, expected, f"one of {window_dims}")
        onesided = bool(self.attrs.get("onesided", 1))
        if step < 1 or length < 1 or (onesided and dims[2] == 2):
            expected = "a frame_step and a frame_length of 1 or more, and of complex numbers onesided=0"
            raise node_error(self.node, expected, f"{step}, {length}, onesided={int(onesided)}")
        columns, parts = length // 2 + 1 if onesided else length, int(dims[2])
        values = matrix(length, length, columns, complex_in=parts == 2, complex_out=True, inverse=False)
        patches = FusedPatches((length,), (step,), (1,), before=(0,), behind=(0,), channels_last=True)
        frames = self.rewriter.fresh(f"{self.node.output[0]}/frames")
        self.rewriter.append(patches.to_node(self.node, [self._widened(x)], [frames]))
        self.rewriter.hint(frames, [dims[0], None, length * parts], self.kind)
        if window:
            wide = self._widened(window)
            if parts == 2:
                column = self.write("Unsqueeze", wide, self._ints(1))
                wide = self.write("Reshape", self.write("Concat", column, column, axis=1), self._ints(-1))
            frames = self.write("Mul", frames, wide)
        y = self.write("MatMul", frames, self._matrix(values))
        return self.write("Reshape", y, self._ints(0, 0, columns, 2))

    def _halved(self, x: str, before: int, length: int, inverse: bool) -> str:
        """A transform of complex numbers (..., N, 2), behind `before` axes, by two of half the length: of the sums of
        both halves, which gives the even numbers, and of their differences, turned, which gives the odd ones."""
        half, rewriter = length // 2, self.rewriter
        halves = rewriter.nodes("Split", (x,), [rewriter.fresh("half") for _ in range(2)], axis=-2, num_outputs=2)
        sums, differences = (self.write(operator, *halves) for operator in ("Add", "Sub"))
        angles = (2 if inverse else -2) * np.pi / length * np.arange(half)
        turned = np.stack([-np.sin(angles), np.sin(angles)], -1)
        swapped = self.write("Gather", differences, self._ints(1, 0), axis=-1)
        differences = self.write(
            "Add",
            self.write("Mul", differences, self._matrix(np.cos(angles)[:, None])),
            self.write("Mul", swapped, self._matrix(turned)),
        )
        place = self._ints(before)
        both = [self.write("Unsqueeze", value, place) for value in (sums, differences)]
        values = matrix(half, half, half, complex_in=True, complex_out=True, inverse=inverse)
        y = self._product(self.write("Concat", *both, axis=before), before + 1, values)
        y = self.write("Reshape", y, self._ints(*[0] * (before + 1), half, 2))
        y = self.write("Transpose", y, perm=[*range(before), before + 1, before, before + 2])
        y = self.write("Reshape", y, self._ints(*[0] * before, length, 2))
        return self.write("Mul", y, self._matrix(np.array(1 / length))) if inverse else y

    def _product(self, x: str, before: int, values: np.ndarray) -> str:
        """The numbers of the axes behind the first ones as rows, times a matrix."""
        rows = self.write("Reshape", x, self._ints(*[0] * before, len(values)))
        return self.write("MatMul", rows, self._matrix(values))

    def _number(self, name: str) -> int | None:
        value = self.graph.constant(name)
        return None if value is None or value.size != 1 else int(value.item())

    def _ints(self, *values: int) -> str:
        return self.rewriter.constant(list(values), "int64")

    def _matrix(self, values: np.ndarray) -> str:
        """A matrix as a constant of the program: it is no weight of the file."""
        if values.size > MOST:
            expected = f"a transform of at most {MOST} angles"
            raise node_error(self.node, expected, f"one of {values.size}", "Cut it into shorter ones.")
        array = values.astype(np.float64 if self.kind == "float64" else np.float32)
        return self.write("Constant", value=numpy_helper.from_array(array))

    def _widened(self, x: str) -> str:
        return self.write("Cast", x, to=onnx.TensorProto.FLOAT) if self.narrow else x

    def _transposed(self, x: str, order: Sequence[int]) -> str:
        return x if list(order) == sorted(order) else self.write("Transpose", x, perm=list(order))

    def _unknown(self, expected: str) -> ModelError:
        hint = "Fix sizes with dims, lengths in the file."
        return node_error(self.node, expected, "one that only a call tells", hint)
