"""What a decode task works on: the keys that each query sees, the operands of a key/value head, a part of its keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.head_layout import HeadView
from mhsa_compile.kernels.cpu.simd.vectors import materialize
from mhsa_compile.kernels.interface.ops import AttentionOp


@dataclass(frozen=True)
class Span:
    """The keys that each query sees by its place: query i those from low[i] to before high[i]."""

    low: tuple[Expr, ...]
    high: tuple[Expr, ...]

    @property
    def start(self) -> Expr:
        """The first key that any query sees."""
        return self.low[0]

    @property
    def stop(self) -> Expr:
        return self.high[-1]

    @property
    def visible_to_all(self) -> tuple[Expr, Expr]:
        return self.low[-1], self.high[0]


def span_of(op: AttentionOp, q_length: int, kv_length: Expr) -> Span:
    """The window and the end of the keys, as one interval a query; both ends grow from query to query."""
    zero = T.int64(0)
    if op.window is None:
        return Span((zero,), (kv_length,))
    offset = kv_length - q_length if op.from_end else zero
    left, right = op.window.left, op.window.right
    places = [materialize(offset + i) for i in range(q_length)]
    low = [zero if left is None else materialize(T.max(zero, p - left)) for p in places]
    high = [kv_length if right is None else materialize(T.max(zero, T.min(kv_length, p + (right + 1)))) for p in places]
    # A window without ends hides nothing: one interval for all queries.
    if left is None and right is None:
        return Span((zero,), (kv_length,))
    return Span(tuple(low), tuple(high))


@dataclass(frozen=True)
class Heads:
    """The operands of one key/value head and its query heads, read in place. A row is (query, query head)."""

    query: Callable[[Expr], HeadView]  # query head within the group -> its view
    key: HeadView
    value: HeadView
    entry: Expr
    first_head: Expr


@dataclass(frozen=True)
class KeyRange:
    """Some keys of key head `head` of all entries: `keys()` computes (first, end) where it is called.

    `begins` says whether they are the head's first ones, `whole` whether they are all. `number` is where the result of
    a part waits for the others'; those of one head have successive ones.
    """

    head: Expr
    number: Expr
    kv_length: Expr
    span: Span
    keys: Callable[[], tuple[Expr, Expr]]
    begins: Expr
    whole: Expr
