"""How the keys of all heads are dealt out to blocks: everyone gets as many, whatever heads they belong to.

The keys that the heads of all batch entries see lie end to end, in pieces of `piece` keys; a share is as many pieces as
another, or one more. So the time follows the keys that there are, and one long entry among short ones occupies all
blocks. A share may have the last keys of a head that another share began, whole heads, and the first keys of a head
that others go on with: two partial results at most, at most one of them with a head's first keys.
Sources: splitting the keys, Dao et al., Flash-Decoding, 2023 (pytorch.org/blog/flash-decoding); equal shares of uneven
work, Stream-K, Osama et al. 2023 (arXiv:2301.03598).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.attention_args import AttentionArguments
from mhsa_compile.kernels.cuda.attention.key_range import span
from mhsa_compile.kernels.cuda.primitives import simt
from mhsa_compile.kernels.cuda.primitives.inputs import keys_of
from mhsa_compile.kernels.cuda.primitives.simt import WARP, clear, materialize, over_warp, registers, set_register


@dataclass(frozen=True)
class SplitEntry:
    """A batch entry: its keys, the first and the end of those that any of its queries sees, their pieces."""

    kv_length: Expr
    first_key: Expr
    end_key: Expr
    pieces: Expr


@dataclass(frozen=True)
class SplitPart:
    """What a block takes of key head `g` of batch entry `b`: the pieces from `first` to before `end`. `begins` and
    `ends` say whether the head's first and last piece are among them."""

    b: Expr
    g: Expr
    entry: SplitEntry
    first: Expr
    end: Expr
    begins: Expr
    ends: Expr


class CudaSplitKv:
    """`count` shares. Numbers are int32: there are fewer than 2^31 pieces. All lanes of a warp have to ask together."""

    def __init__(self, arguments: AttentionArguments, lane: Expr, *, piece: int, count: int) -> None:
        op = self.op = arguments.op
        assert isinstance(op.q_length, int)
        self.arguments, self.lane, self.piece = arguments, lane, piece
        self.batch = materialize(T.cast(arguments.batch, "int32"))
        self.heads = op.num_kv_heads
        self.alike = None if op.any_step("counts_keys") else self._entry(T.int64(0))
        total = self._sum() if self.alike is None else self.batch * self.heads * self.alike.pieces
        self.total = materialize(total)
        # The first `more` shares have one piece more than `least`.
        self.least, self.more = (materialize(f(self.total, T.int32(count))) for f in (T.truncdiv, T.truncmod))

    def begin_of(self, share: Expr) -> Expr:
        """The number of a share's first piece."""
        return materialize(share * self.least + T.min(share, self.more))

    def share_of(self, number: Expr) -> Expr:
        """The share that a piece belongs to."""
        long = self.more * (self.least + 1)
        # Where `least` is 0 all pieces lie before `long`; only the division must not fail.
        after = self.more + T.truncdiv(number - long, T.max(T.int32(1), self.least))
        return materialize(T.Select(number < long, T.truncdiv(number, self.least + 1), after))

    def each_part(self, share: Expr, body: Callable[[SplitPart], None]) -> None:
        low, high = self.begin_of(share), self.begin_of(share + 1)
        with T.If(low < high), T.Then():
            state = registers(2, "int32")  # a head, and the number of its first piece
            for i, value in enumerate(self.head_of(low)):
                set_register(state, i, value)
            with T.While(state[1] < high):
                head, begin = (materialize(state[i]) for i in range(2))
                b, g = (materialize(f(head, T.int32(self.heads))) for f in (T.truncdiv, T.truncmod))
                entry = self.entry(b)
                first, end = materialize(T.max(low - begin, T.int32(0))), materialize(T.min(high - begin, entry.pieces))
                begins, ends = materialize(first == 0, "bool"), materialize(end == entry.pieces, "bool")
                body(SplitPart(b, g, entry, first, end, begins, ends))
                set_register(state, 0, head + 1)
                set_register(state, 1, begin + entry.pieces)

    def head_of(self, number: Expr) -> tuple[Expr, Expr]:
        """(the head that a piece belongs to, of all entries' in a row; the number of the head's first piece)."""
        if self.alike is not None:
            head = materialize(T.truncdiv(number, self.alike.pieces))
            return head, materialize(head * self.alike.pieces)
        totals = registers(3, "int32")  # whole entries before it, their pieces; pieces of all entries so far
        clear(totals, 3)
        with T.serial(self._rounds()) as turn:
            pieces, end, below = registers(1, "int32"), registers(1, "int32"), registers(2, "int32")
            set_register(pieces, 0, self._pieces_of(turn * WARP + self.lane))
            set_register(end, 0, pieces[0])
            # A running sum over the lanes: 32 batch entries at a time.
            for apart in (1, 2, 4, 8, 16):
                before = materialize(simt.from_below(end[0], apart))
                set_register(end, 0, T.Select(self.lane >= apart, end[0] + before, end[0]))
            is_below = materialize(T.And(totals[2] + end[0] <= number, turn * WARP + self.lane < self.batch), "bool")
            set_register(below, 0, T.Select(is_below, T.int32(1), T.int32(0)))
            set_register(below, 1, T.Select(is_below, pieces[0], T.int32(0)))
            for i in range(2):
                over_warp(below, i, lambda a, b: a + b)
                set_register(totals, i, totals[i] + below[i])
            set_register(totals, 2, totals[2] + simt.from_lane(end[0], T.int32(WARP - 1)))
        b, begin = materialize(totals[0]), materialize(totals[1])
        pieces_of_head = self.entry(b).pieces
        g = materialize(T.truncdiv(number - begin, pieces_of_head))
        return materialize(b * self.heads + g), materialize(begin + g * pieces_of_head)

    def entry(self, b: Expr) -> SplitEntry:
        return self.alike if self.alike is not None else self._entry(T.cast(b, "int64"))

    def _entry(self, b: Expr) -> SplitEntry:
        assert isinstance(self.op.q_length, int)
        keys, rows = keys_of(self.arguments, b), self.op.q_length
        first, end = span(self.op.window, T.int32(0), rows, T.int32(rows), keys)
        # One that sees no key has a piece as well: somebody must write its zeros.
        pieces = materialize(T.max(T.int32(1), T.truncdiv(end - first + (self.piece - 1), T.int32(self.piece))))
        return SplitEntry(keys, first, end, pieces)

    def _rounds(self) -> Expr:
        return materialize(T.truncdiv(self.batch + (WARP - 1), T.int32(WARP)))

    def _pieces_of(self, b: Expr) -> Expr:
        """How many pieces all heads of an entry have, 0 where there is no such entry."""
        pieces = registers(1, "int32")
        set_register(pieces, 0, T.int32(0))
        with T.If(b < self.batch), T.Then():
            set_register(pieces, 0, self.entry(b).pieces * self.heads)
        return pieces[0]

    def _sum(self) -> Expr:
        total = registers(1, "int32")
        clear(total, 1)
        with T.serial(self._rounds()) as turn:
            set_register(total, 0, total[0] + self._pieces_of(turn * WARP + self.lane))
        over_warp(total, 0, lambda a, b: a + b)
        return total[0]
