"""The results of decode: of the warps of a block, of the shares that a head's keys were dealt out to, and how they are
put together.

A result is (m, l, O): the largest score of some keys in units of log2, the sum of 2^(score - m), and that of V so
weighted. Milakov and Gimelshein 2018 (arXiv:1805.02867)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.attention_args import AttentionArguments
from mhsa_compile.kernels.cuda.attention.online_softmax import inverse, zero_if_unseen
from mhsa_compile.kernels.cuda.decode.block_shape import DecodeBlockShape
from mhsa_compile.kernels.cuda.decode.split_kv import CudaSplitKv
from mhsa_compile.kernels.cuda.primitives import simt
from mhsa_compile.kernels.cuda.primitives.inputs import elements
from mhsa_compile.kernels.cuda.primitives.simt import exp2, load, materialize, pack, registers, set_register, store
from mhsa_compile.kernels.cuda.primitives.smem_pipeline import Element
from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout

CHUNK = 4  # columns that a thread writes at a time
THREADS = 128  # of a block that puts shares' results together


@dataclass(frozen=True)
class DecodeArrays:
    """The arguments of the kernel. `workspace` is (slots, rows, words of a result), float32."""

    arguments: AttentionArguments
    y: Expr
    workspace: Expr

    @property
    def op(self) -> AttentionOp:
        return self.arguments.op

    def element(self, place: HeadLayout, width: int, b: Expr, head: Expr) -> Element:
        """Elements of one head of an input by row and column."""
        return elements(self.arguments.inputs[place.buffer], place, width, T.cast(b, "int64"), T.cast(head, "int64"))

    def write(self, b: Expr, head: Expr, query: Expr, column: Expr, row_sum: Expr, sums: list[Expr]) -> None:
        """Writes CHUNK columns of a row of Y: O / l, zeros where nothing was visible."""
        op, part = self.op, inverse(row_sum)
        element = elements(self.y, op.output, op.v_head_dim, T.cast(b, "int64"), T.cast(head, "int64"))
        address = T.address_of(element(query, column))
        values = [value * part for value in sums]
        if op.dtype == "float32":
            store(address, values, "global")
            return
        words = registers(2, "uint32")
        for i in range(2):
            pack(words, i, values[2 * i], values[2 * i + 1], op.dtype)
        store(address, [words[0], words[1]], "global")


class Area:
    """The memory in which the warps of a block leave their results to each other, that of their tiles. `address(word)`
    is that of a word; `warp` is whose results are put."""

    def __init__(self, shape: DecodeBlockShape, address: Callable[[Expr], Expr], warp: Expr) -> None:
        self.shape, self.address, self.warp = shape, address, warp

    def _word(self, warp: Expr, row: Expr) -> Expr:
        return (warp * self.shape.rows + row) * self.shape.result_pitch

    def set_sums(self, row: Expr, column: Expr, sums: Sequence[Expr]) -> None:
        store(self.address(self._word(self.warp, row) + column), sums)

    def set_stats(self, row: Expr, row_max: Expr, row_sum: Expr) -> None:
        """Puts a row's maximum and the sum of its probs; several threads may put the same."""
        store(self.address(self._word(self.warp, row) + self.shape.v_head_dim), [row_max, row_sum])

    def merge(self, row: Expr, column: Expr, count: int) -> tuple[Expr, Expr, list[Expr]]:
        """(m, l, `count` columns of O) of a row, of all warps together."""
        results, statistics = JoinedResults(count), registers(2)
        sums = registers(count)
        # In the order of the warps, so that results are the same every time.
        for warp in range(self.shape.warps):
            word = materialize(self._word(T.int32(warp), row))
            load(statistics, 0, 2, self.address(word + self.shape.v_head_dim))
            load(sums, 0, count, self.address(word + column))
            results.add(statistics[0], statistics[1], [sums[i] for i in range(count)])
        return results.row_max, results.row_sum, results.sums


class JoinedResults:
    """Results of one row joined one after another; `count` columns of it."""

    def __init__(self, count: int) -> None:
        self.cells, self.count = registers(count + 2), count
        set_register(self.cells, count, T.float32(-math.inf))
        for i in (*range(count), count + 1):
            set_register(self.cells, i, T.float32(0))

    def add(self, row_max: Expr, row_sum: Expr, sums: Sequence[Expr]) -> None:
        factors, count = registers(2), self.count
        maximum = materialize(T.max(self.cells[count], row_max), "float32")
        origin = zero_if_unseen(maximum)
        exp2(factors, 0, self.cells[count] - origin)
        exp2(factors, 1, row_max - origin)
        set_register(self.cells, count, maximum)
        for i, value in [*enumerate(sums), (count + 1, row_sum)]:
            set_register(self.cells, i, self.cells[i] * factors[0] + value * factors[1])

    @property
    def row_max(self) -> Expr:
        return self.cells[self.count]

    @property
    def row_sum(self) -> Expr:
        return self.cells[self.count + 1]

    @property
    def sums(self) -> list[Expr]:
        return [self.cells[i] for i in range(self.count)]


def combine(
    shape: DecodeBlockShape, thread: Expr, share: Expr, row: Expr, shares: CudaSplitKv, arrays: DecodeArrays
) -> None:
    """The second launch of decode: heads whose keys several shares had, put together in the order of their keys.

    A head is at most one share's that begins it and does not end it. So block (share, row) looks after a row of the
    head that the share begins so, if there is one: its threads are groups that join some of the shares' results each,
    then they join the groups'.
    """
    op = arrays.op
    low, high = shares.begin_of(share), shares.begin_of(share + 1)
    with T.If(low < high), T.Then():
        head, begin = shares.head_of(high - 1)
        b, g = (materialize(f(head, T.int32(op.num_kv_heads))) for f in (T.truncdiv, T.truncmod))
        end = materialize(begin + shares.entry(b).pieces)
        # This share begins the head and another one goes on with it: all others have nothing to do here.
        with T.If(T.And(begin >= low, end > high)), T.Then():
            last = shares.share_of(end - 1)
            ratio = op.num_heads // op.num_kv_heads
            query, number = (f(row, T.int32(ratio)) for f in (T.truncdiv, T.truncmod))
            place = (b, materialize(g * ratio + number), materialize(query))
            _combine_row(shape, thread, share, materialize(last - share + 1), row, arrays, place)


def _combine_row(
    shape: DecodeBlockShape,
    thread: Expr,
    first: Expr,
    count: Expr,
    row: Expr,
    arrays: DecodeArrays,
    place: tuple[Expr, Expr, Expr],
) -> None:
    """Joins row `row` of `count` shares' results, from share `first` on; `place` is its batch entry, head and query."""
    chunks = shape.v_head_dim // CHUNK
    groups = THREADS // chunks
    group, chunk = (materialize(f(thread, T.int32(chunks))) for f in (T.truncdiv, T.truncmod))
    column = chunk * CHUNK
    words = CHUNK + 2
    pool = T.alloc_buffer((groups * chunks * words,), "float32", scope="shared.dyn")
    # A view: TVM would make the buffer itself as small as it thinks to be enough.
    partials = T.decl_buffer((groups, chunks, words), "float32", data=pool.data, scope="shared.dyn")
    results, result, statistics = JoinedResults(CHUNK), registers(words), registers(2)
    with T.If(group < groups), T.Then():
        # 1. Every so manieth result.
        with T.serial(T.truncdiv(count - group + (groups - 1), T.int32(groups))) as turn:
            number = materialize(group + turn * groups)
            slot = 2 * (first + number) + T.Select(number == 0, T.int32(1), T.int32(0))
            at = [materialize(T.cast(slot, "int64"), "int64"), T.cast(row, "int64")]
            load(statistics, 0, 2, T.address_of(arrays.workspace[(*at, T.int64(shape.v_head_dim))]), "global")
            load(result, 0, CHUNK, T.address_of(arrays.workspace[(*at, T.cast(column, "int64"))]), "global")
            results.add(statistics[0], statistics[1], [result[i] for i in range(CHUNK)])
        for i, value in enumerate([results.row_max, results.row_sum, *results.sums]):
            store(T.address_of(partials[group, chunk, T.int32(i)]), [value])
    simt.barrier()
    # 2. All groups'.
    with T.If(group == 0), T.Then():
        # In a fixed order, so that results are the same every time.
        for other in range(1, groups):
            for i in range(words):
                load(result, i, 1, T.address_of(partials[T.int32(other), chunk, T.int32(i)]))
            results.add(result[0], result[1], [result[2 + i] for i in range(CHUNK)])
        arrays.write(*place, column, results.row_sum, results.sums)
