"""How the keys of all heads are cut into parts, so that every core gets as many: `SplitKv` where the heads have equally
many keys, `SplitKvByLength` where every batch entry has a number of its own.

`tasks` may run in any order; `each_part` says what one consists of, `parts` how many parts there may be at most, and
`each_divided` which heads have several, to be combined.
Sources: splitting the keys, Dao et al., Flash-Decoding, 2023 (pytorch.org/blog/flash-decoding); equal shares of uneven
work, Stream-K, Osama et al. 2023 (arXiv:2301.03598).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.attention_args import AttentionArguments
from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.cpu.decode.work import KeyRange, Span, span_of
from mhsa_compile.kernels.cpu.score_parts import keys_of
from mhsa_compile.kernels.cpu.simd.vectors import let, materialize
from mhsa_compile.kernels.interface.ops import AttentionOp


class SplitKv:
    """batch x key heads, each in `count` parts of `size` keys, the last of the rest."""

    def __init__(
        self, op: AttentionOp, batch: Expr, kv_length: Expr, *, least_keys: int, group: int, cores: int
    ) -> None:
        """Chooses the fewest parts with which all cores get equally many, unless too few keys would be left to each.

        That is cores / gcd(cores, heads), and the gcd is the largest divisor of the cores that divides the heads.
        """
        assert isinstance(op.q_length, int)
        self.kv_length, self.span = kv_length, span_of(op, op.q_length, kv_length)
        self.heads = materialize(batch * op.num_kv_heads)
        shares = T.int64(cores)
        # Divisors ascend, so the largest one that divides the heads has the last word.
        for divisor in (d for d in range(2, cores + 1) if cores % d == 0):
            shares = T.Select(T.truncmod(self.heads, T.int64(divisor)) == 0, T.int64(cores // divisor), shares)
        keys = materialize(T.max(T.int64(0), self.span.stop - self.span.start))
        most = T.max(T.int64(1), T.truncdiv(keys, T.int64(least_keys)))
        self.count = materialize(T.min(materialize(shares), most))
        # Whole groups, so that all parts but the last may take the path without masks.
        self.size = materialize(ceil_div(ceil_div(keys, self.count), group) * group)
        self.tasks = self.heads * self.count
        # The size of a buffer must be an expression of the arguments; what is not used is never touched.
        self.parts = batch * (op.num_kv_heads * cores)

    def each_part(self, task: Expr, body: Callable[[KeyRange], None]) -> None:
        head, split = materialize(T.truncdiv(task, self.count)), materialize(T.truncmod(task, self.count))

        def keys() -> tuple[Expr, Expr]:
            first = materialize(self.span.start + split * self.size)
            return first, materialize(T.min(first + self.size, self.span.stop))

        body(KeyRange(head, task, self.kv_length, self.span, keys, begins=split == 0, whole=self.count == 1))

    def each_divided(self, body: Callable[[Expr, Expr, Expr], None]) -> None:
        """body(head, number of its first part, parts) for each head that has several parts."""
        # A head of one part was written by its task.
        with T.If(self.count > 1), T.Then(), T.serial(self.heads) as head:
            body(head, materialize(head * self.count), self.count)


@dataclass(frozen=True)
class KeyEntry:
    """A batch entry: its keys, what its queries see of them, and the pieces of each of its heads, the first of them
    piece number `begin` of all."""

    b: Expr
    kv_length: Expr
    span: Span
    pieces: Expr
    begin: Expr


class SplitKvByLength:
    """The keys that the heads of all entries see lie end to end, cut into pieces of `piece` keys. Each task is an equal
    share of the pieces, whatever heads they belong to, so the time follows the keys that there are. A share may begin
    and end within a head."""

    def __init__(self, arguments: AttentionArguments, *, least_keys: int, group: int, cores: int) -> None:
        self.arguments, self.op, self.batch = arguments, arguments.op, arguments.batch
        self.piece = T.int64(-(-least_keys // group) * group)
        # All pieces are counted first: a share is a part of that number.
        total = T.alloc_buffer((1,), "int64")
        T.buffer_store(total, T.int64(0), [T.int64(0)])
        self._each_entry(lambda entry: T.buffer_store(total, self._end(entry), [T.int64(0)]))
        self.total = materialize(total[0])
        self.tasks = T.int64(cores)
        # Numbers are head + share, so there are fewer than heads + cores of them.
        self.parts = self.batch * self.op.num_kv_heads + cores

    def each_part(self, share: Expr, body: Callable[[KeyRange], None]) -> None:
        """Share i's part of head j is number i + j: from part to part, one of them goes up by one."""
        low, high = (materialize(T.truncdiv(i * self.total, self.tasks)) for i in (share, share + 1))

        def parts_of(entry: KeyEntry) -> None:
            first, end = T.truncdiv(low - entry.begin, entry.pieces), ceil_div(high - entry.begin, entry.pieces)
            with T.serial(self._group(first), self._group(end)) as g:
                body(self._part(entry, g, share, low, high))

        self._each_entry(parts_of)

    def _group(self, number: Expr) -> Expr:
        return materialize(T.max(T.int64(0), T.min(T.int64(self.op.num_kv_heads), number)))

    def _part(self, entry: KeyEntry, g: Expr, share: Expr, low: Expr, high: Expr) -> KeyRange:
        """What a share, the pieces `low` to before `high`, has of key head g."""
        head, begin = materialize(entry.b * self.op.num_kv_heads + g), materialize(entry.begin + g * entry.pieces)
        begins, ends = let(low <= begin), let(high >= begin + entry.pieces)
        number, span = materialize(head + share), entry.span

        def keys() -> tuple[Expr, Expr]:
            first = materialize(span.start + T.max(T.int64(0), low - begin) * self.piece)
            return first, materialize(T.min(span.stop, span.start + T.min(entry.pieces, high - begin) * self.piece))

        return KeyRange(head, number, entry.kv_length, span, keys, begins=begins, whole=T.And(begins, ends))

    def each_divided(self, body: Callable[[Expr, Expr, Expr], None]) -> None:
        def of(entry: KeyEntry) -> None:
            with T.serial(T.int64(self.op.num_kv_heads)) as g:
                head, begin = (
                    materialize(entry.b * self.op.num_kv_heads + g),
                    materialize(entry.begin + g * entry.pieces),
                )
                first, last = (materialize(self._share_of(piece)) for piece in (begin, begin + entry.pieces - 1))
                with T.If(last > first), T.Then():
                    body(head, materialize(head + first), materialize(last - first + 1))

        self._each_entry(of)

    def _share_of(self, piece: Expr) -> Expr:
        """The last one that begins at the piece or before: the largest i with i * total / tasks < piece + 1."""
        return T.truncdiv((piece + 1) * self.tasks - 1, self.total)

    def _each_entry(self, body: Callable[[KeyEntry], None]) -> None:
        assert isinstance(self.op.q_length, int)
        begin = T.alloc_buffer((1,), "int64")
        T.buffer_store(begin, T.int64(0), [T.int64(0)])
        with T.serial(self.batch) as b:
            kv_length = keys_of(self.arguments, b)
            span = span_of(self.op, self.op.q_length, kv_length)
            # One that sees no key has a piece as well: somebody must write its zeros.
            pieces = materialize(T.max(T.int64(1), ceil_div(span.stop - span.start, self.piece)))
            entry = KeyEntry(b, kv_length, span, pieces, materialize(begin[0]))
            body(entry)
            T.buffer_store(begin, self._end(entry), [T.int64(0)])

    def _end(self, entry: KeyEntry) -> Expr:
        return entry.begin + entry.pieces * self.op.num_kv_heads
