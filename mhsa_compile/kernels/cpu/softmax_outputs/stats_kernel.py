"""What the rows of a softmax are like, on a vector CPU: log-sum-exp, entropy, the largest weights.

A task is one tile of query rows of one head, and no more than its scratch is held of the scores. `score_loop`
goes over the keys as attention does, once, and `row_stats` gathers what goes by; this file deals the tasks out
and says where everything lies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import argument, prim_func
from mhsa_compile.kernels.common.pair_plan import plan_arguments, plan_constants
from mhsa_compile.kernels.cpu.attention.block_sparsity import CpuBlockSparsity
from mhsa_compile.kernels.cpu.attention.kernel import split_pairs
from mhsa_compile.kernels.cpu.attention.key_loop import Runs
from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.attention.matmuls import Products
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import load, materialize, scratch, store
from mhsa_compile.kernels.cpu.softmax_outputs.row_stats import Candidates, TileRowStats
from mhsa_compile.kernels.cpu.softmax_outputs.score_loop import SoftmaxCall, SoftmaxOutputKernel, Sweep, call_arguments
from mhsa_compile.kernels.interface.kernel import Config, Emitted
from mhsa_compile.kernels.interface.ops import SoftmaxStatsOp


class CpuSoftmaxStatsKernel(SoftmaxOutputKernel):
    """Log-sum-exp, entropy and the largest weights of every row."""

    name = "cpu.statistics"
    op_type = SoftmaxStatsOp

    def emit(self, op: SoftmaxStatsOp, profile: CpuProfile, config: Config) -> Emitted:
        attention, sparsity = split_pairs(op.attention, profile, config)
        run = _statistics(replace(op, attention=attention), profile, config, sparsity)
        return Emitted(run, constants=plan_constants(sparsity))


def _statistics(op: SoftmaxStatsOp, profile: CpuProfile, config: Config, sparsity: CpuBlockSparsity | None) -> Expr:
    with prim_func("statistics") as builder:
        attention = op.attention
        call = call_arguments(attention, profile, config)
        views = plan_arguments(sparsity)
        rows = [call.batch, T.int64(attention.num_heads), call.q_length]
        lse = argument("lse", rows, "float32") if op.lse else None
        entropy = argument("entropy", rows, "float32") if op.entropy else None
        top = [T.int64(op.top_k)]
        weights = argument("top_k_weights", rows + top, "float32") if op.top_k else None
        keys = argument("top_k_keys", rows + top, "int64") if op.top_k else None

        def tile(b: Expr, _: Expr, h: Expr, first_query: Expr, runs: Runs | None) -> None:
            products, visibility = call.task(b, h, first_query)
            gathered = _Gathered(op, products, visibility, call, runs)
            gathered.gather()
            for buffer, value in ((lse, gathered.sums.lse), (entropy, gathered.sums.entropy)):
                if buffer is not None:
                    gathered.write_rows(buffer, [b, h], value)
            if weights is not None:
                gathered.write_largest(weights, keys, [b, h])

        call.each_tile(T.int64(attention.num_heads), lambda place: place, views, tile)
    return builder.get()


class _Gathered:
    """One task of a SoftmaxStatsOp."""

    def __init__(
        self, op: SoftmaxStatsOp, products: Products, visibility: TileMask, call: SoftmaxCall, runs: Runs | None
    ) -> None:
        self.queries, self.columns, self.first_query = visibility.queries, visibility.columns, visibility.first_query
        self.rows = materialize(T.min(T.int64(self.queries), call.q_length - self.first_query))
        self.sweep = Sweep(products, visibility, call.config, runs)
        self.largest = Candidates(op.top_k, visibility) if op.top_k else None
        # Where origins move, the candidates' scores move with them.
        lower = self.largest.lower if self.largest is not None else None
        self.sums = TileRowStats(visibility, with_moments=op.entropy, lower=lower)

    def gather(self) -> None:
        self.sweep.prepare()
        self.sums.clear()
        if self.largest is not None:
            self.largest.clear()
        self.sweep.over([self.sums, *([self.largest] if self.largest is not None else [])])

    def write_rows(self, buffer: Expr, at: list[Expr], value: Callable[[vectors.Chunk], Expr]) -> None:
        """Writes one number for each row."""
        # Whole vectors here; of the last tile only the rows that there are go out.
        ready = scratch((self.queries,))
        for first, lanes in self.columns:
            store(ready, [T.int64(first)], value((first, lanes)), lanes)
        with T.serial(self.rows) as i:
            store(buffer, [*at, self.first_query + i], ready[i], 1)

    def write_largest(self, weights: Expr, keys: Expr, at: list[Expr]) -> None:
        """Writes the candidates as weights, and their keys."""
        largest = self.largest
        assert largest is not None
        with T.serial(T.int64(largest.k)) as n:
            for first, lanes in self.columns:
                score = materialize(load(largest.scores, [n, T.int64(first)], lanes), "float32", lanes)
                store(largest.weights, [n, T.int64(first)], self.sums.prob((first, lanes), score), lanes)
            with T.serial(self.rows) as i:
                place = [*at, self.first_query + i, n]
                key = T.Select(largest.is_empty(n, i), T.int64(-1), T.cast(largest.keys[n, i], "int64"))
                store(weights, place, largest.weights[n, i], 1)
                store(keys, place, key, 1)
