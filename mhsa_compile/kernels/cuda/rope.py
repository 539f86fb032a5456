"""Rotary position embedding on a GPU: a thread turns a piece of a head's row, and its neighbour the next.

A position beyond the tables, which the host cannot see before the launch, turns its row into NaN: nothing is read
there, and nothing that looks like a result comes out.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import TargetProfile
from mhsa_compile.kernels.common.buffers import SizeVars, argument, prim_func
from mhsa_compile.kernels.common.head_layout import HeadView, head_view, placed_shape
from mhsa_compile.kernels.common.op_args import angle_arguments
from mhsa_compile.kernels.cuda.primitives import vector_copy
from mhsa_compile.kernels.cuda.primitives.simt import materialize
from mhsa_compile.kernels.cuda.primitives.vector_copy import Piece, copy_piece, each_thread, piece_of, row_steps
from mhsa_compile.kernels.interface.kernel import Config, Emitted, Fixed
from mhsa_compile.kernels.interface.ops import RotaryOp


class CudaRotaryKernel(Fixed):
    """RotaryEmbedding on NVIDIA GPUs from sm_80 on."""

    name = "cuda.rope"
    op_type = RotaryOp

    def emit(self, op: RotaryOp, profile: TargetProfile, config: Config) -> Emitted:
        return Emitted(_rope(op))


@dataclass(frozen=True)
class _Pairs:
    """The pairs that one thread turns: those of one piece, or of one and its counterpart half a turn further on."""

    op: RotaryOp
    piece: int  # elements

    @classmethod
    def of(cls, op: RotaryOp) -> _Pairs:
        parts = (op.rotary_dim if op.interleaved else op.rotary_dim // 2, op.head_dim)
        return cls(op, piece_of(op.dtype, *parts, *row_steps(op.x), *row_steps(op.output)))

    @property
    def side_by_side(self) -> bool:
        """Whether both elements of a pair lie in one piece."""
        return self.op.interleaved and self.piece > 1

    @property
    def count(self) -> int:
        return self.piece // 2 if self.side_by_side else self.piece

    def columns(self, turn: Expr) -> list[Expr]:
        """The columns at which the thread's pieces begin."""
        if self.side_by_side:
            return [turn * self.piece]
        apart = 1 if self.op.interleaved else self.op.rotary_dim // 2
        first = turn * (2 if self.op.interleaved else self.piece)
        return [first, first + apart]

    def place(self, pair: int, which: int) -> tuple[int, int]:
        """(the piece, the element of it) where the one or the other of a pair lies."""
        return (0, 2 * pair + which) if self.side_by_side else (which, pair)


@dataclass(frozen=True)
class _CudaAngles:
    """cos and sin of the angles of each place."""

    op: RotaryOp
    tables: list[Expr]  # of cos, and of sin
    positions: Expr | None

    def read(self, b: Expr, i: Expr, turn: Expr, pairs: _Pairs) -> list[list[Piece]]:
        """The pieces of cos, then those of sin, that a thread needs at place i: laid out as x, or one for its pairs."""
        columns = pairs.columns(turn) if self.op.whole_angles else [turn * pairs.count]
        size = pairs.piece if self.op.whole_angles else pairs.count
        angles = [[Piece(size, self.op.dtype) for _ in columns] for _ in self.tables]
        entry = T.int64(0) if self.op.shared_angles else b
        if self.positions is None:
            self._load(angles, [entry, i], columns)
            return angles
        position = materialize(self.positions[entry, i], "int64")
        with T.If(T.And(position >= 0, position < self.tables[0].shape[0])):
            with T.Then():
                self._load(angles, [position], columns)
            with T.Else():
                for piece in (piece for table in angles for piece in table):
                    piece.fill_with_nan()
        return angles

    def _load(self, angles: list[list[Piece]], row: list[Expr], columns: list[Expr]) -> None:
        for table, pieces in zip(self.tables, angles, strict=True):
            for piece, column in zip(pieces, columns, strict=True):
                piece.load(table, [*row, column])


def _rope(op: RotaryOp) -> Expr:
    dim, pairs = SizeVars(), _Pairs.of(op)
    batch, length, heads = dim(op.batch), dim(op.length), T.int64(op.num_heads)
    turns = op.rotary_dim // 2 // pairs.count
    copies = (op.head_dim - op.rotary_dim) // pairs.piece
    with prim_func("rope") as builder:
        x = argument("x", placed_shape(op.x, batch, length, op.num_heads, op.head_dim), op.dtype)
        *tables, positions = angle_arguments(op, dim)
        angles = _CudaAngles(op, tables, positions)
        y = argument("y", placed_shape(op.output, batch, length, op.num_heads, op.head_dim), op.dtype)

        def piece(number: Expr) -> None:
            b, i, h, part = vector_copy.coordinates(number, length, heads, T.int64(turns + copies))
            views = (head_view(x, op.x, op.head_dim, b, h), head_view(y, op.output, op.head_dim, b, h))
            if not copies:
                _turn(angles, pairs, b, i, part, *views)
                return
            with T.If(part < turns):
                with T.Then():
                    _turn(angles, pairs, b, i, part, *views)
                with T.Else():
                    column = op.rotary_dim + (part - turns) * pairs.piece
                    at = [view.at(i, column) for view in views]
                    copy_piece(y, at[1], x, at[0], pairs.piece)

        each_thread(batch * length * heads * T.int64(turns + copies), piece)
    return builder.get()


def _turn(angles: _CudaAngles, pairs: _Pairs, b: Expr, i: Expr, turn: Expr, x: HeadView, y: HeadView) -> None:
    """Turns the pairs of one thread."""
    op, columns = angles.op, pairs.columns(turn)
    cos, sin = angles.read(b, i, turn, pairs)
    pieces = [Piece(pairs.piece, op.dtype) for _ in columns]
    for piece, column in zip(pieces, columns, strict=True):
        piece.load(x.buffer, x.at(i, column))
    rotation: list[list[Expr]] = [[None] * pairs.piece for _ in columns]
    for pair in range(pairs.count):
        one, two = (pairs.place(pair, which) for which in range(2))
        x1, x2 = (pieces[p][e] for p, e in (one, two))
        places = (one, two) if op.whole_angles else ((0, pair), (0, pair))
        (cos1, sin1), (cos2, sin2) = ((cos[p][e], sin[p][e]) for p, e in places)
        rotation[one[0]][one[1]] = materialize(cos1 * x1 - sin1 * x2, "float32")
        rotation[two[0]][two[1]] = materialize(sin2 * x1 + cos2 * x2, "float32")
    for piece, values, column in zip(pieces, rotation, columns, strict=True):
        piece.set(values)
        piece.store(y.buffer, y.at(i, column))
