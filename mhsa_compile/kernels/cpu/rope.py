"""Rotary position embedding on a vector CPU: each row is read where it lies, turned, and written once.

A task is one row of one batch entry, all heads of it: they share the angles, which stay in the first cache. Positions
are looked at before any row is: one beyond the tables ends the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.assertions import refuse_unless, spelled
from mhsa_compile.kernels.common.buffers import SizeVars, argument, prim_func
from mhsa_compile.kernels.common.head_layout import HeadView, head_view, placed_shape
from mhsa_compile.kernels.common.op_args import angle_arguments
from mhsa_compile.kernels.cpu.formats.choice import load_wide, store_narrow
from mhsa_compile.kernels.cpu.simd.vectors import each_task, each_vector, let, load, materialize, store
from mhsa_compile.kernels.interface.kernel import Config, Emitted, Fixed
from mhsa_compile.kernels.interface.ops import RotaryOp


class CpuRotaryKernel(Fixed):
    """RotaryEmbedding for any vector CPU."""

    name = "cpu.rope"
    op_type = RotaryOp

    def emit(self, op: RotaryOp, profile: CpuProfile, config: Config) -> Emitted:
        return Emitted(_rope(op, profile.vector_lanes("float32")))


@dataclass(frozen=True)
class _CpuAngles:
    """cos and sin of the angles of each place, by their index in the place's row."""

    op: RotaryOp
    cos: Expr
    sin: Expr
    positions: Expr | None

    def check(self) -> None:
        """Ends the call where a position is beyond the tables."""
        if self.positions is None:
            return
        entries, length = self.positions.shape
        # Before the parallel loop: no row is written where the call is refused.
        wrong = T.alloc_buffer((1,), "int32")
        store(wrong, [T.int64(0)], T.int32(0), 1)
        with T.serial(entries) as b, T.serial(length) as i:
            position = let(self.positions[b, i])
            beyond = T.cast(T.Or(position < 0, position >= self.cos.shape[0]), "int32")
            store(wrong, [T.int64(0)], wrong[0] | beyond, 1)
        assert self.op.max_positions is not None
        expected = f"positions below {spelled(self.op.max_positions)}, and from 0 on"
        refuse_unless(wrong[0] == 0, self.op.positions_name, expected)

    def row(self, b: Expr, i: Expr) -> list[Expr]:
        """The index of the angles of place i, without its last axis."""
        entry = T.int64(0) if self.op.shared_angles else b
        return [entry, i] if self.positions is None else [materialize(self.positions[entry, i])]

    def read(self, row: list[Expr], first: Expr, n: int) -> tuple[tuple[Expr, Expr], tuple[Expr, Expr]]:
        """(cos, sin) of n pairs, for the one element of each and for the other."""

        if self.op.whole_angles and self.op.interleaved:
            (cos1, cos2), (sin1, sin2) = (
                _apart(lambda column, m, table=table: load_wide(table, [*row, column], m), first, n)  # type: ignore[misc]
                for table in (self.cos, self.sin)
            )
            return (cos1, sin1), (cos2, sin2)

        def pair(column: Expr) -> tuple[Expr, Expr]:
            cos, sin = (let(load_wide(table, [*row, column], n)) for table in (self.cos, self.sin))
            return cos, sin

        one = pair(first)
        return one, pair(first + self.op.rotary_dim // 2) if self.op.whole_angles else one


def _rope(op: RotaryOp, lanes: int) -> Expr:
    dim = SizeVars()
    batch, length, heads = dim(op.batch), dim(op.length), op.num_heads
    with prim_func("rope") as builder:
        x = argument("x", placed_shape(op.x, batch, length, heads, op.head_dim), op.dtype)
        angles = _CpuAngles(op, *angle_arguments(op, dim))
        y = argument("y", placed_shape(op.output, batch, length, heads, op.head_dim), op.dtype)
        angles.check()

        def row(task: Expr) -> None:
            b, i = materialize(T.truncdiv(task, length)), materialize(T.truncmod(task, length))
            place = angles.row(b, i)
            with T.serial(T.int64(heads)) as h:
                views = (head_view(x, op.x, op.head_dim, b, h), head_view(y, op.output, op.head_dim, b, h))
                _turn(angles, place, i, *views, lanes)

        each_task(materialize(batch * length), heads * op.head_dim, row)
    return builder.get()


def _turn(angles: _CpuAngles, place: list[Expr], i: Expr, x: HeadView, y: HeadView, lanes: int) -> None:
    """Turns one head of one row."""
    op = angles.op
    half = op.rotary_dim // 2
    pairs = _Interleaved(x, y, i) if op.interleaved else _Halves(x, y, i, half)

    def turn(first: Expr, n: int) -> None:
        (cos1, sin1), (cos2, sin2) = angles.read(place, first, n)
        x1, x2 = pairs.read(first, n)
        pairs.write(first, let(cos1 * x1 - sin1 * x2), let(sin2 * x1 + cos2 * x2), n)

    def copy(first: Expr, n: int) -> None:
        column = op.rotary_dim + first
        # As they are, without widening: NaN keeps its bits.
        store(y.buffer, y.at(i, column), load(x.buffer, x.at(i, column), n), n)

    each_vector(half, lanes, turn)
    each_vector(op.head_dim - op.rotary_dim, lanes, copy)


@dataclass(frozen=True)
class _Halves:
    """Pairs (x[i], x[i + R/2]) of row `row`."""

    x: HeadView
    y: HeadView
    row: Expr
    half: int

    def read(self, first: Expr, n: int) -> tuple[Expr, Expr]:
        one, two = (let(load_wide(self.x.buffer, self.x.at(self.row, c), n)) for c in (first, first + self.half))
        return one, two

    def write(self, first: Expr, one: Expr, two: Expr, n: int) -> None:
        for column, value in ((first, one), (first + self.half, two)):
            store_narrow(self.y.buffer, self.y.at(self.row, column), value, n)


@dataclass(frozen=True)
class _Interleaved:
    """Pairs (x[2 i], x[2 i + 1]) of row `row`."""

    x: HeadView
    y: HeadView
    row: Expr

    def read(self, first: Expr, n: int) -> tuple[Expr, Expr]:
        return _apart(lambda column, m: load_wide(self.x.buffer, self.x.at(self.row, column), m), first, n)

    def write(self, first: Expr, one: Expr, two: Expr, n: int) -> None:
        if n == 1:
            for j, value in enumerate((one, two)):
                store_narrow(self.y.buffer, self.y.at(self.row, first * 2 + j), value, 1)
            return
        order = [T.int32(i // 2 + n * (i % 2)) for i in range(2 * n)]
        store_narrow(self.y.buffer, self.y.at(self.row, first * 2), T.Shuffle([one, two], order), 2 * n)


def _apart(read: Callable[[Expr, int], Expr], first: Expr, n: int) -> tuple[Expr, Expr]:
    """Elements 2 i, and elements 2 i + 1, for n pairs from `first` on, of what `read` has side by side."""
    if n == 1:
        one, two = (let(read(first * 2 + j, 1)) for j in (0, 1))
        return one, two
    both = let(read(first * 2, 2 * n))
    one, two = (let(T.Shuffle([both], [T.int32(2 * i + j) for i in range(n)])) for j in (0, 1))
    return one, two
