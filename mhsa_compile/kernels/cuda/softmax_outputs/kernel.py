"""What the rows of a softmax are like, on NVIDIA GPUs: log-sum-exp, entropy, the largest weights. And rows of a softmax
themselves: all of them, or chosen heads and queries.

A warp has a few rows of one head: `row_scores` makes their scores, `row_stats` gathers what goes by. It goes over the
keys that they see once; for weights twice, for the sums, then for the weights, which its lanes write side by side.
"""

from __future__ import annotations

import math

import numpy as np
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import TargetProfile
from mhsa_compile.kernels.common.buffers import argument, ceil_div, prim_func
from mhsa_compile.kernels.common.score_scale import why_not_scores
from mhsa_compile.kernels.cuda.primitives.simt import WARP, ThreadIndex, launch, materialize
from mhsa_compile.kernels.cuda.primitives.vector_copy import coordinates, narrow
from mhsa_compile.kernels.cuda.softmax_outputs.row_scores import ROWS, WARPS, RowCall, RowScores, packed_bits
from mhsa_compile.kernels.cuda.softmax_outputs.row_stats import Largest, WarpRowStats
from mhsa_compile.kernels.interface.kernel import Config, Emitted, Fixed
from mhsa_compile.kernels.interface.ops import AttentionProbsOp, SoftmaxStatsOp

ROWS_WITH_LISTS = 2  # of a warp: with more, all that a mask may be and the lists would not stay in registers


class CudaSoftmaxStatsKernel(Fixed):
    """Log-sum-exp, entropy and the largest weights of every row, of any dtype."""

    name = "cuda.statistics"
    op_type = SoftmaxStatsOp

    def why_not(self, op: SoftmaxStatsOp, profile: TargetProfile) -> str | None:
        return why_not_scores(op.attention)

    def emit(self, op: SoftmaxStatsOp, profile: TargetProfile, config: Config) -> Emitted:
        pairs = op.attention.pairs
        return Emitted(_statistics(op), constants=() if pairs is None else (packed_bits(pairs),))


def _statistics(op: SoftmaxStatsOp) -> Expr:
    attention, count = op.attention, ROWS_WITH_LISTS if op.top_k else ROWS
    with prim_func("statistics") as builder:
        call = RowCall.arguments(attention)
        shape = [call.batch, T.int64(attention.num_heads), call.q_length]
        lse = argument("lse", shape, "float32") if op.lse else None
        entropy = argument("entropy", shape, "float32") if op.entropy else None
        top = [*shape, T.int64(op.top_k)]
        weights = argument("top_k_weights", top, "float32") if op.top_k else None
        keys = argument("top_k_keys", top, "int64") if op.top_k else None
        tiles = ceil_div(call.q_length, WARPS * count)
        blocks = call.batch * T.int64(attention.num_heads) * tiles
        with launch(blocks, WARPS * WARP) as (block, thread):
            # 1. Which rows a warp has.
            b, h, tile = coordinates(materialize(T.cast(block, "int64"), "int64"), shape[1], tiles)
            place = ThreadIndex(thread)
            first = materialize(T.cast(tile * (WARPS * count), "int32") + place.warp * count)
            numbers = [first + r for r in range(count)]
            there = [T.cast(number, "int64") < call.q_length for number in numbers]
            with T.If(there[0]), T.Then():
                # 2. What goes by of them.
                scores = RowScores(call, b, h, numbers, place.lane)
                at = [[b, h, T.cast(number, "int64")] for number in scores.rows]
                sums = WarpRowStats(scores)
                largest = None if weights is None else Largest(sums, weights, keys, at, there, op.top_k)
                _gather(scores, sums, largest)
                # 3. What it comes to.
                with T.If(place.lane == 0), T.Then():
                    for buffer, value in ((lse, sums.lse), (entropy, sums.entropy)):
                        if buffer is not None:
                            for r in range(count):
                                with T.If(there[r]), T.Then():
                                    T.buffer_store(buffer, value(r), at[r])
    return builder.get()


def _gather(scores: RowScores, sums: WarpRowStats, largest: Largest | None) -> None:
    """Goes over the keys once, and gathers the sums and, where they are asked for, the largest."""
    sums.clear()
    if largest is not None:
        largest.clear()

    def take(first_key: Expr) -> None:
        sums.take(first_key)
        if largest is not None:
            largest.take(first_key)

    scores.over(take)
    sums.join()
    if largest is not None:
        largest.write()


ROWS_WITH_BITS = 2  # of a warp, where a static mask has a word for each: with more, ptxas spilt one of them on sm_86


class CudaAttentionProbsKernel(Fixed):
    """Rows of weights, all or chosen ones, of any dtype."""

    name = "cuda.weights"
    op_type = AttentionProbsOp

    def why_not(self, op: AttentionProbsOp, profile: TargetProfile) -> str | None:
        return why_not_scores(op.attention)

    def emit(self, op: AttentionProbsOp, profile: TargetProfile, config: Config) -> Emitted:
        pairs, axes = op.attention.pairs, (op.heads, op.rows)
        numbers = [np.array(of_axis, np.int32) for of_axis in axes if of_axis is not None]
        return Emitted(_weights(op), constants=(*([] if pairs is None else [packed_bits(pairs)]), *numbers))


def _weights(op: AttentionProbsOp) -> Expr:
    attention = op.attention
    count = ROWS if attention.pairs is None else ROWS_WITH_BITS
    with prim_func("weights") as builder:
        call = RowCall.arguments(attention)
        of_heads = _numbers_argument("heads", op.heads)
        of_rows = _numbers_argument("rows", op.rows)
        heads = T.int64(attention.num_heads if op.heads is None else len(op.heads))
        rows = call.q_length if op.rows is None else T.int64(len(op.rows))
        y = argument("weights", [call.batch, heads, rows, call.kv_length], attention.dtype)
        tiles = ceil_div(rows, WARPS * count)
        blocks = call.batch * heads * tiles
        with launch(blocks, WARPS * WARP) as (block, thread):
            # 1. Which rows of the result, and of which head and queries they are.
            b, place_of_head, tile = coordinates(materialize(T.cast(block, "int64"), "int64"), heads, tiles)
            place = ThreadIndex(thread)
            first = materialize(tile * (WARPS * count) + T.cast(place.warp * count, "int64"), "int64")
            there = [materialize(first + r < rows, "bool") for r in range(count)]
            with T.If(there[0]), T.Then():
                places = [materialize(T.min(first + r, rows - 1), "int64") for r in range(count)]
                h = place_of_head
                if of_heads is not None:
                    h = materialize(T.cast(of_heads[place_of_head], "int64"), "int64")
                queries = materialize(T.cast(call.q_length, "int32"))
                numbers = [_number(of_rows, at, queries) for at in places]
                # 2. Their sums, then their weights.
                scores = RowScores(call, b, h, numbers, place.lane)
                sums = WarpRowStats(scores)
                sums.clear()
                scores.over(sums.take)
                sums.join()
                exists = [materialize(T.And(number >= 0, number < queries), "bool") for number in numbers]
                at = [[b, place_of_head, row] for row in places]
                _write(y, scores, sums, at, there, exists)
    return builder.get()


def _numbers_argument(name: str, numbers: tuple[int, ...] | None) -> Expr | None:
    return None if numbers is None else argument(name, [T.int64(len(numbers))], "int32")


def _number(of_rows: Expr | None, place: Expr, queries: Expr) -> Expr:
    """The query whose weights come to a row of the result, int32; none where it is negative or too large."""
    if of_rows is None:
        return materialize(T.cast(place, "int32"))
    number = materialize(of_rows[place])
    return materialize(T.Select(number < 0, number + queries, number))


def _write(
    y: Expr, scores: RowScores, sums: WarpRowStats, at: list[list[Expr]], there: list[Expr], exists: list[Expr]
) -> None:
    """Writes the weights of all keys, of which those that no row sees take zeros, as do rows of queries that there are
    not."""
    count, ends = materialize(T.cast(y.shape[3], "int32")), scores.groups()
    with T.serial(materialize(T.truncdiv(count + (WARP - 1), T.int32(WARP)))) as group:
        scores.at(group, ends)
        key = materialize(group * WARP + scores.lane)
        for r in range(len(at)):
            base = materialize(scores.bases[r], "float32")
            hidden = T.Or(T.Not(exists[r]), base == T.float32(-math.inf))  # also where the row sees a NaN
            weight = materialize(T.Select(hidden, T.float32(0), sums.prob(r, base, key)), "float32")
            with T.If(T.And(there[r], key < count)), T.Then():
                T.buffer_store(y, narrow(weight, str(y.dtype)), [*at[r], T.cast(key, "int64")])
