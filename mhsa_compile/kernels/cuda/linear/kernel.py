"""y = x W^T + b on an NVIDIA GPU from sm_80 on, for one or more W that share x: the projections of an attention layer.

The weights are packed once, at load: those of all projections side by side (`pack`). A block computes a part of y
(`block`), by tensor cores (`block_mma`) or, of float32, by CUDA cores (`block_fp32`). Where there are few rows, as in
decoding, time goes to reading the weights: then blocks are narrow, so that all multiprocessors have one, and their
warps share the terms of the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import gcd, prod

from tvm import tirx
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CudaProfile
from mhsa_compile.kernels.common.buffers import SizeVars, argument, ceil_div, prim_func
from mhsa_compile.kernels.common.op_args import packed_arguments, weight_arguments
from mhsa_compile.kernels.cuda.linear.block import LinearBlock, LinearOperands, dealt
from mhsa_compile.kernels.cuda.linear.block_fp32 import ThreadBlock, padded
from mhsa_compile.kernels.cuda.linear.block_mma import TensorBlock
from mhsa_compile.kernels.cuda.linear.block_shape import CHUNK, KNOBS, LinearBlockShape, TensorShape, ThreadShape
from mhsa_compile.kernels.cuda.primitives.inputs import wide
from mhsa_compile.kernels.cuda.primitives.simt import ThreadIndex, launch, materialize
from mhsa_compile.kernels.interface.kernel import Config, Emitted, unknown_knobs
from mhsa_compile.kernels.interface.ops import LinearOp

FEW_ROWS = 16
"""The most rows that have a kernel of their own, the default for them, where it is a call that says how many rows there
are: they are a step of decoding."""
LENGTHS, BATCHES = (128, 512, 2048, 8192), (32, 64, 128)
"""Rows that a default is chosen for where the length is symbolic, and batches where only they are, as in decoding."""
THREADS = 256  # of a block that packs
WIDEST = 256
"""Columns of the widest block: by so many zeros the bias is longer than y is wide, so that blocks read it without
looking."""
Packed = tuple[tuple[tuple[int, ...], str], ...]


def packed_shapes(op: LinearOp, width: int | None) -> Packed:
    """Shapes and dtypes of weight and bias: (out, in), or (in, `width`) where they are to be turned."""
    weight = (op.out_features, op.in_features) if width is None else (op.in_features, width)
    return (weight, op.dtype), ((op.out_features + WIDEST,), "float32")


def pack(op: LinearOp, width: int | None) -> Expr:
    """The PrimFunc (weights..., biases...) -> `packed`. What is beyond the last feature is zeros."""
    ((size, inner), _), ((padding,), _) = shapes = packed_shapes(op, width)
    with prim_func("pack_linear") as builder:
        weights, biases = weight_arguments(op)
        weight, bias = packed_arguments(shapes)
        count = max(size * inner, padding)
        with launch(T.int64(-(-count // THREADS)), THREADS) as (block, thread):
            number = materialize(T.cast(block, "int64") * T.int64(THREADS) + T.cast(thread, "int64"), "int64")
            row, column = (materialize(f(number, T.int64(inner)), "int64") for f in (T.truncdiv, T.truncmod))
            feature, term = (row, column) if width is None else (column, row)

            def copy(i: int, own: Expr) -> None:
                index = [term, own] if op.transposed[i] else [own, term]
                T.buffer_store(weight, weights[i][tuple(index)], [row, column])

            def copy_bias(i: int, own: Expr) -> None:
                source = biases[i]
                T.buffer_store(bias, T.float32(0) if source is None else wide(source[own]), [number])

            with T.If(number < T.int64(size * inner)), T.Then():
                _of_feature(op, feature, copy)
                with T.If(feature >= T.int64(op.out_features)), T.Then():
                    T.buffer_store(weight, T.cast(T.float32(0), op.dtype), [row, column])
            with T.If(number < T.int64(padding)), T.Then():
                _of_feature(op, number, copy_bias)
                with T.If(number >= T.int64(op.out_features)), T.Then():
                    T.buffer_store(bias, T.float32(0), [number])
    return builder.get()


def _of_feature(op: LinearOp, feature: Expr, body: Callable[[int, Expr], None]) -> None:
    """body(i, own) for the projection that a feature belongs to, and its number there."""
    begin = 0
    for i, width in enumerate(op.widths):
        with T.If(T.And(feature >= T.int64(begin), feature < T.int64(begin + width))), T.Then():
            body(i, materialize(feature - T.int64(begin), "int64"))
        begin += width


class _LinearOnGpu:
    """What both have in common: knobs, and the choice of a default among a few shapes by `LinearBlockShape.clocks`."""

    name: str
    op_type = LinearOp
    dtypes: tuple[str, ...]
    shape: type[LinearBlockShape]
    block: type[LinearBlock]
    defaults: tuple[tuple[int, ...], ...]
    """The sizes of the configs to choose a default from, in the order of KNOBS; the last one fits everywhere."""

    def why_not(self, op: LinearOp, profile: CudaProfile) -> str | None:
        if op.int8_weights:
            return "weights of the inputs' dtype, not of eight bits"
        if op.dtype not in self.dtypes:
            return f"of {' or '.join(self.dtypes)}, not {op.dtype}"
        if op.epilogue is not None:
            return "a result that is written as it is"
        return self.why_not_operation(op)

    def why_not_operation(self, op: LinearOp) -> str | None:
        return None

    def search_space(self, op: LinearOp, profile: CudaProfile) -> dict[str, tuple[int, ...]]:
        rows = tuple(n for n in (4, 8, 16, 32, 64, 128, 256) if n >= self.shape.least_rows)
        most = next((n for n in rows if n >= max(likely_rows(op))), rows[-1])
        return {
            "rows": tuple(n for n in rows if n <= most),
            "columns": tuple(n for n in (16, 32, 64, 128, 256) if n >= self.shape.least_columns),
            "depth": (16, 32, 64, 128, 256),
            "stages": (2, 3, 4, 5),
            "warp_rows": tuple(n for n in rows if n <= min(most, 64)),
            "warp_columns": tuple(n for n in (16, 32, 64) if n >= self.shape.least_columns),
            "slices": (1, 2, 4, 8),
        }

    def default_config(self, op: LinearOp, profile: CudaProfile) -> dict[str, int]:
        """The fastest of the `defaults` that fit, by the estimate; in the geometric mean over the rows that there may
        be."""
        configs = [dict(zip(KNOBS, sizes, strict=True)) for sizes in self.defaults]
        fitting = [config for config in configs if self.why_not_config(op, profile, config) is None] or configs[-1:]
        return min(fitting, key=lambda config: likely_clocks(self.shape(**config).clocks, op, profile))

    def why_not_config(self, op: LinearOp, profile: CudaProfile, config: Config) -> str | None:
        if reason := unknown_knobs(config, KNOBS):
            return reason
        shape = self.shape(**config)
        if shape.columns > WIDEST:
            return f"blocks of up to {WIDEST} columns, not {shape.columns}"
        pieces = shape.depth // gcd(CHUNK // shape.element, op.in_features)
        copies = f"{shape.threads} threads copy rows of {pieces} pieces" if shape.threads % pieces else None
        return shape.why_not(profile) or copies

    def emit(self, op: LinearOp, profile: CudaProfile, config: Config) -> Emitted:
        return self.emit_by_rows(op, profile, FEW_ROWS, partial(self._launch, op, profile, config))

    def packed_width(self, op: LinearOp) -> int | None:
        """The width of weights that are turned when they are packed."""
        return None

    def emit_by_rows(
        self, op: LinearOp, profile: CudaProfile, most: int, many: Callable[[LinearOperands], None]
    ) -> Emitted:
        """A linear that `many` launches; of up to `most` rows, where it is a call that says how many there are, the
        default config for them."""
        width, dim = self.packed_width(op), SizeVars()
        packing, leading = packed_shapes(op, width), [dim(d) for d in op.rows]
        with prim_func("linear") as builder:
            x = argument("x", [*leading, T.int64(op.in_features)], op.dtype)
            weight, bias = packed_arguments(packing)
            y = argument("y", [*leading, T.int64(op.pitch)], op.dtype)
            operands = LinearOperands(x, weight, bias, y, prod(leading[1:], start=leading[0]))
            if isinstance(operands.rows, tirx.IntImm):
                many(operands)
            else:
                with T.If(operands.rows <= T.int64(most)):
                    with T.Then():
                        few = self.default_config(replace(op, rows=(most,)), profile)
                        self._launch(op, profile, few, operands)
                    with T.Else():
                        many(operands)
        return Emitted(builder.get(), pack(op, width), packing)

    def _launch(self, op: LinearOp, profile: CudaProfile, config: Config, operands: LinearOperands) -> None:
        shape = self.shape(**config)
        lines = ceil_div(operands.rows, shape.rows)
        blocks = lines * T.int64(-(-op.out_features // shape.columns))
        with launch(blocks, shape.threads, shape.together(profile)) as (block, thread):
            rows = materialize(T.cast(operands.rows, "int32"))
            first = dealt(T.cast(block, "int32"), rows, op.out_features, (shape.rows, shape.columns))
            x, weight, bias, y = map(_flat, operands[:4])
            flat = LinearOperands(x, weight, bias, y, rows)
            self.block(op, shape, ThreadIndex(thread), flat, first).emit()


class MmaLinearKernel(_LinearOnGpu):
    """A linear of 16-bit types, on tensor cores, with float32 sums."""

    name = "cuda.linear"
    dtypes = ("bfloat16", "float16")
    shape, block = TensorShape, TensorBlock
    defaults = (
        (128, 256, 64, 3, 64, 64, 1),
        (128, 256, 32, 4, 64, 64, 1),
        (128, 128, 64, 3, 64, 64, 1),
        (128, 128, 32, 3, 64, 64, 1),
        (64, 128, 64, 3, 32, 64, 1),
        (128, 64, 64, 3, 64, 32, 1),
        (64, 64, 64, 3, 32, 32, 1),
        (32, 64, 128, 4, 16, 32, 2),
        (16, 64, 128, 4, 16, 16, 2),
        (16, 32, 256, 4, 16, 16, 4),
        (16, 16, 256, 4, 16, 16, 8),
        (64, 64, 32, 3, 32, 32, 1),
    )

    def why_not_operation(self, op: LinearOp) -> str | None:
        chunk = CHUNK // TensorShape.element
        if op.in_features % chunk:
            return f"rows of whole chunks of {CHUNK} bytes: {chunk} features, not {op.in_features}"
        return None


class Float32LinearKernel(_LinearOnGpu):
    """A linear of float32, on CUDA cores."""

    name = "cuda.linear_float32"
    dtypes = ("float32",)
    shape, block = ThreadShape, ThreadBlock
    defaults = (
        (128, 128, 32, 3, 32, 64, 1),
        (128, 128, 16, 3, 32, 64, 1),
        (64, 128, 32, 3, 32, 64, 1),
        (64, 64, 32, 3, 16, 64, 1),
        (32, 64, 32, 4, 16, 64, 2),
        (16, 64, 64, 4, 16, 64, 4),
        (8, 64, 128, 3, 8, 64, 8),
        (4, 64, 128, 3, 4, 64, 8),
        (8, 32, 128, 4, 8, 32, 8),
        (4, 32, 128, 4, 4, 32, 8),
        (64, 64, 16, 3, 32, 32, 1),
    )

    def packed_width(self, op: LinearOp) -> int | None:
        return padded(op.out_features)


def likely_rows(op: LinearOp) -> tuple[int, ...]:
    """How many rows of x there are, or may be."""
    *_, length = op.rows
    if not isinstance(length, int):
        return LENGTHS
    fixed = prod(dim for dim in op.rows if isinstance(dim, int))
    return (fixed,) if all(isinstance(dim, int) for dim in op.rows) else tuple(fixed * batch for batch in BATCHES)


def likely_clocks(clocks: Callable[[CudaProfile, int, int, int], float], op: LinearOp, profile: CudaProfile) -> float:
    """What shapes are compared by: the product of `clocks`, a shape's, over the rows that there may be."""
    return prod(clocks(profile, rows, op.out_features, op.in_features) for rows in likely_rows(op))


def _flat(tensor: Expr) -> Expr:
    return T.decl_buffer((prod(tensor.shape[1:], start=tensor.shape[0]),), tensor.dtype, data=tensor.data)
