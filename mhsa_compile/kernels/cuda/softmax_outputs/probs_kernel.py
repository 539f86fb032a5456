"""Rows of a softmax themselves, on NVIDIA GPUs: all of them, or chosen heads and queries.

A warp has a few rows of one head and goes over its keys twice: for the sums, then for the weights, which its lanes
write side by side.
"""

from __future__ import annotations

import math

import numpy as np
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import TargetProfile
from mhsa_compile.kernels.common.buffers import argument, ceil_div, prim_func
from mhsa_compile.kernels.common.score_scale import why_not_scores
from mhsa_compile.kernels.cuda.primitives.vector_copy import coordinates, narrow
from mhsa_compile.kernels.cuda.primitives.warp import WARP, ThreadIndex, launch, materialize
from mhsa_compile.kernels.cuda.softmax_outputs.row_scores import ROWS, WARPS, RowCall, RowScores, packed_bits
from mhsa_compile.kernels.cuda.softmax_outputs.row_stats import WarpRowStats
from mhsa_compile.kernels.interface.kernel import Config, Emitted, Fixed
from mhsa_compile.kernels.interface.ops import AttentionProbsOp

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
            written = [materialize(first + r < rows, "bool") for r in range(count)]
            with T.If(written[0]), T.Then():
                places = [materialize(T.min(first + r, rows - 1), "int64") for r in range(count)]
                h = (
                    place_of_head
                    if of_heads is None
                    else materialize(T.cast(of_heads[place_of_head], "int64"), "int64")
                )
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
                _write(y, scores, sums, at, written, exists)
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
    y: Expr, scores: RowScores, sums: WarpRowStats, at: list[list[Expr]], written: list[Expr], exists: list[Expr]
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
            with T.If(T.And(written[r], key < count)), T.Then():
                T.buffer_store(y, narrow(weight, str(y.dtype)), [*at[r], T.cast(key, "int64")])
