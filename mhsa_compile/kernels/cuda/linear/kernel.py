"""y = x W^T + b on an NVIDIA GPU from sm_80 on, for one or more W that share x: the projections of an attention layer.

The weights are packed once, at load: those of all projections side by side (`pack_weights`). A block computes a
part of y (`block`), by tensor cores (`block_mma`) or, of float32, by CUDA cores (`block_fp32`). Where
there are few rows, as in decoding, time goes to reading the weights: then blocks are narrow, so that all
multiprocessors have one, and their warps share the terms of the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import gcd, prod
from typing import NamedTuple

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CudaProfile
from mhsa_compile.kernels.common.buffers import SizeVars, argument
from mhsa_compile.kernels.common.op_args import packed_arguments
from mhsa_compile.kernels.cuda.linear.block import LinearBlock, LinearOperands, dealt
from mhsa_compile.kernels.cuda.linear.block_fp32 import ThreadBlock, padded
from mhsa_compile.kernels.cuda.linear.block_mma import TensorBlock
from mhsa_compile.kernels.cuda.linear.block_shape import (
    CHUNK,
    KNOBS,
    LinearBlockShape,
    TensorShape,
    ThreadShape,
    why_not_knobs,
)
from mhsa_compile.kernels.cuda.linear.pack_weights import WIDEST, Packed, pack, packed_shapes
from mhsa_compile.kernels.cuda.linear.smem_tiles import why_not_copy
from mhsa_compile.kernels.cuda.primitives.warp import ThreadIndex, materialize, min_blocks_per_sm
from mhsa_compile.kernels.interface.kernel import Config, Emitted
from mhsa_compile.kernels.interface.ops import LinearOp

FEW_ROWS = 16
"""The most rows that have a kernel of their own, the default for them, where it is a call that says how many rows there
are: they are a step of decoding."""
LENGTHS, BATCHES = (128, 512, 2048, 8192), (32, 64, 128)
"""Rows that a default is chosen for where the length is symbolic, and batches where only they are, as in decoding."""


class Arguments(NamedTuple):
    """The arguments of a linear, as they are passed; and the number of rows of x, int64."""

    x: Expr
    weight: Expr
    bias: Expr
    y: Expr
    rows: Expr


def linear_function(op: LinearOp, packing: Packed, body: Callable[[Arguments], None]) -> Expr:
    """The PrimFunc `run` of a linear; `body` launches."""
    dim = SizeVars()
    leading = [dim(d) for d in op.rows]
    with IRBuilder() as builder:
        with T.prim_func():
            T.func_name("linear")
            T.func_attr({"tirx.noalias": True})
            x = argument("x", [*leading, T.int64(op.in_features)], op.dtype)
            weight, bias = packed_arguments(packing)
            y = argument("y", [*leading, T.int64(op.pitch)], op.dtype)
            body(Arguments(x, weight, bias, y, prod(leading[1:], start=leading[0])))
    return builder.get()


def launch_by_rows(rows: Expr, most: int, few: Callable[[], None], many: Callable[[], None]) -> None:
    """Emits `few` for up to `most` rows, where it is a call that says how many there are, else `many`."""
    if isinstance(rows, tirx.IntImm):
        many()
        return
    with T.If(rows <= T.int64(most)):
        with T.Then():
            few()
        with T.Else():
            many()


class _LinearOnGpu:
    """What both have in common: knobs, and the choice of a default among a few shapes by `LinearBlockShape.clocks`."""

    name: str
    op_type = LinearOp
    dtypes: tuple[str, ...]
    shape: type[LinearBlockShape]
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

        def clocks(config: dict[str, int]) -> float:
            shape = self.shape(**config)
            return prod(shape.clocks(profile, rows, op.out_features, op.in_features) for rows in likely_rows(op))

        return min(fitting, key=clocks)

    def why_not_config(self, op: LinearOp, profile: CudaProfile, config: Config) -> str | None:
        if reason := why_not_knobs(config):
            return reason
        shape = self.shape(**config)
        if shape.columns > WIDEST:
            return f"blocks of up to {WIDEST} columns, not {shape.columns}"
        return shape.why_not(profile) or self.why_not_copies(op, shape)

    def why_not_copies(self, op: LinearOp, shape: LinearBlockShape) -> str | None:
        unit = gcd(CHUNK // shape.element, op.in_features)
        return why_not_copy(shape.depth, unit, shape.threads)

    def emit(self, op: LinearOp, profile: CudaProfile, config: Config) -> Emitted:
        width = self.packed_width(op)
        return Emitted(self._function(op, profile, self.shape(**config)), pack(op, width), packed_shapes(op, width))

    def packed_width(self, op: LinearOp) -> int | None:
        """The width of weights that are turned when they are packed."""
        return None

    def block(
        self,
        op: LinearOp,
        shape: LinearBlockShape,
        place: ThreadIndex,
        operands: LinearOperands,
        first: tuple[Expr, Expr],
    ) -> LinearBlock:
        raise NotImplementedError

    def _function(self, op: LinearOp, profile: CudaProfile, shape: LinearBlockShape) -> Expr:
        def body(arguments: Arguments) -> None:
            launch_by_rows(
                arguments.rows,
                FEW_ROWS,
                lambda: self.launch_few(op, profile, FEW_ROWS, arguments),
                lambda: self.launch(op, shape, profile, arguments),
            )

        return linear_function(op, packed_shapes(op, self.packed_width(op)), body)

    def launch_few(self, op: LinearOp, profile: CudaProfile, rows: int, arguments: Arguments) -> None:
        """Launches the default config for so many rows."""
        config = self.default_config(replace(op, rows=(rows,)), profile)
        self.launch(op, self.shape(**config), profile, arguments)

    def launch(self, op: LinearOp, shape: LinearBlockShape, profile: CudaProfile, arguments: Arguments) -> None:
        lines = T.truncdiv(arguments.rows + (shape.rows - 1), T.int64(shape.rows))
        blocks = lines * T.int64(-(-op.out_features // shape.columns))
        with (
            T.launch_thread("blockIdx.x", blocks) as block,
            T.launch_thread("threadIdx.x", shape.threads) as thread,
            min_blocks_per_sm(shape.together(profile)),
        ):
            rows = materialize(T.cast(arguments.rows, "int32"))
            first = dealt(T.cast(block, "int32"), rows, op.out_features, (shape.rows, shape.columns))
            x, weight, bias, y = map(_flat, arguments[:4])
            self.block(op, shape, ThreadIndex(thread), LinearOperands(x, weight, bias, y, rows), first).emit()


class MmaLinearKernel(_LinearOnGpu):
    """A linear of 16-bit types, on tensor cores, with float32 sums."""

    name = "cuda.linear"
    dtypes = ("bfloat16", "float16")
    shape = TensorShape
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

    def block(
        self,
        op: LinearOp,
        shape: LinearBlockShape,
        place: ThreadIndex,
        operands: LinearOperands,
        first: tuple[Expr, Expr],
    ) -> LinearBlock:
        assert isinstance(shape, TensorShape)
        return TensorBlock(op, shape, place, operands, first)


class Float32LinearKernel(_LinearOnGpu):
    """A linear of float32, on CUDA cores."""

    name = "cuda.linear_float32"
    dtypes = ("float32",)
    shape = ThreadShape
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

    def block(
        self,
        op: LinearOp,
        shape: LinearBlockShape,
        place: ThreadIndex,
        operands: LinearOperands,
        first: tuple[Expr, Expr],
    ) -> LinearBlock:
        assert isinstance(shape, ThreadShape)
        return ThreadBlock(op, shape, place, operands, first)


def likely_rows(op: LinearOp) -> tuple[int, ...]:
    """How many rows of x there are, or may be."""
    *_, length = op.rows
    if not isinstance(length, int):
        return LENGTHS
    fixed = prod(dim for dim in op.rows if isinstance(dim, int))
    return (fixed,) if all(isinstance(dim, int) for dim in op.rows) else tuple(fixed * batch for batch in BATCHES)


def _flat(tensor: Expr) -> Expr:
    return T.decl_buffer((prod(tensor.shape[1:], start=tensor.shape[0]),), tensor.dtype, data=tensor.data)
