"""What the rows of a softmax are like, on NVIDIA GPUs: log-sum-exp, entropy, the largest weights.

A warp has a few rows of one head, and goes over the keys that they see once: `row_scores` makes the scores, `row_stats`
gathers what goes by.
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import TargetProfile
from mhsa_compile.kernels.common.buffers import argument, ceil_div, prim_func
from mhsa_compile.kernels.common.score_scale import why_not_scores
from mhsa_compile.kernels.cuda.primitives.vector_copy import coordinates
from mhsa_compile.kernels.cuda.primitives.warp import WARP, ThreadIndex, launch, materialize
from mhsa_compile.kernels.cuda.softmax_outputs.row_scores import ROWS, WARPS, RowCall, RowScores, packed_bits
from mhsa_compile.kernels.cuda.softmax_outputs.row_stats import Largest, WarpRowStats
from mhsa_compile.kernels.interface.kernel import Config, Emitted, Fixed
from mhsa_compile.kernels.interface.ops import SoftmaxStatsOp

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
                largest = None
                if weights is not None:
                    largest = Largest(sums, weights, keys, at, there, op.top_k)
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
