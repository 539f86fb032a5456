"""Rows of a softmax themselves, on a vector CPU: all of them, or chosen heads and queries.

A task is one tile of query rows of one head, or a single chosen row, and goes over its keys twice: for the sums, then
for the weights, which `WeightsWriter` writes out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import argument, ceil_div, prim_func
from mhsa_compile.kernels.common.head_layout import HeadView
from mhsa_compile.kernels.common.pair_plan import constant_arguments, plan_arguments, plan_constants
from mhsa_compile.kernels.cpu.attention.block_sparsity import CpuBlockSparsity
from mhsa_compile.kernels.cpu.attention.kernel import split_pairs
from mhsa_compile.kernels.cpu.attention.key_loop import Runs
from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.attention.matmuls import Products
from mhsa_compile.kernels.cpu.formats.choice import store_narrow
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import RegisterTile, constant, let, load, materialize, scratch, store
from mhsa_compile.kernels.cpu.softmax_outputs import score_loop
from mhsa_compile.kernels.cpu.softmax_outputs.row_stats import TileRowStats
from mhsa_compile.kernels.cpu.softmax_outputs.score_loop import SoftmaxCall, Sweep, Taker, call_arguments
from mhsa_compile.kernels.interface.kernel import Config, Emitted
from mhsa_compile.kernels.interface.ops import AttentionProbsOp
from mhsa_compile.kernels.interface.score_step import ScoreStep


class WeightsWriter(Taker):
    """Writes w = 2^(s - m) / Z of the task's first `rows` queries; `output` is of (row of the task, key).

    The weights of a block wait in scratch until they can be turned: scores come with queries along the lanes, and in
    memory keys lie side by side.
    """

    def __init__(self, sums: TileRowStats, output: HeadView, rows: Expr, keys: int) -> None:
        self.sums, self.output, self.rows = sums, output, rows
        queries, lanes = sums.visibility.queries, sums.visibility.lanes
        self.lanes = lanes
        # A vector of keys more: the last square of the block is turned whole.
        self.block = scratch((keys + lanes, queries))
        self.turned = scratch((queries, keys + lanes))

    def clear(self, first: Expr, end: Expr) -> None:
        """Writes zeros from `first` to `end`: what is not visited."""
        with T.serial(self.rows) as i, T.serial(first, end) as key:
            store_narrow(self.output.buffer, self.output.at(i, key), T.float32(0), 1)

    def take(self, scores: RegisterTile, base: Expr, first_key: Expr) -> None:
        """Keeps the weights of a group; what is hidden is 0, also where the row sees a NaN."""
        for c, (first, lanes) in enumerate(self.sums.columns):
            zero, nothing = constant(0.0, lanes), constant(-math.inf, lanes)
            for r in range(scores.rows):
                score = materialize(scores.get(r, c), "float32", lanes)
                weight = T.Select(score == nothing, zero, self.sums.prob((first, lanes), score))
                store(self.block, [base + r, T.int64(first)], weight, lanes)

    def end_block(self, first_key: Expr, count: Expr) -> None:
        self._turn(count)
        vectors_of_keys = materialize(T.truncdiv(count, T.int64(self.lanes)))
        with T.serial(self.rows) as i:
            with T.serial(vectors_of_keys) as j:
                base = materialize(j * self.lanes)
                self._write(i, base, first_key, self.lanes)
            with T.serial(materialize(vectors_of_keys * self.lanes), count) as j:
                self._write(i, j, first_key, 1)

    def _turn(self, count: Expr) -> None:
        """turned[i, j] = block[j, i], a square at a time; the last one reaches beyond the block."""
        # Squares of a column of queries each.
        for first, lanes in self.sums.columns:
            with T.serial(materialize(ceil_div(count, lanes))) as square:
                base = materialize(square * lanes)
                rows = [let(load(self.block, [base + j, T.int64(first)], lanes)) for j in range(lanes)]
                for i, row in enumerate(vectors.transpose(rows)):
                    store(self.turned, [T.int64(first + i), base], row, lanes)

    def _write(self, i: Expr, base: Expr, first_key: Expr, lanes: int) -> None:
        weights = load(self.turned, [i, base], lanes)
        store_narrow(self.output.buffer, self.output.at(i, first_key + base), weights, lanes)


class CpuAttentionProbsKernel(score_loop.SoftmaxOutputKernel):
    """Rows of weights, all or chosen ones."""

    name = "cpu.weights"
    op_type = AttentionProbsOp

    def default_config(self, op: AttentionProbsOp, profile: CpuProfile) -> dict[str, int]:
        # A chosen row is a task of its own, with one query in one lane: its neighbours are not wanted.
        return super().default_config(op, profile) | ({} if op.rows is None else {"queries": 1})

    def emit(self, op: AttentionProbsOp, profile: CpuProfile, config: Config) -> Emitted:
        heads = np.array(range(op.attention.num_heads) if op.heads is None else op.heads, np.int32)
        if op.rows is None:
            attention, sparsity = split_pairs(op.attention, profile, config)
            run = _weights(replace(op, attention=attention), profile, config, sparsity)
            return Emitted(run, constants=(*plan_constants(sparsity), heads))
        of_rows = [step.of_rows(op.rows) for step in op.attention.scores]
        constants = [array for _, array in of_rows if array is not None]
        run = _weights_of_rows(op, of_rows, profile, config)
        return Emitted(run, constants=(heads, np.array(op.rows, np.int32), *constants))


def _weights(op: AttentionProbsOp, profile: CpuProfile, config: Config, sparsity: CpuBlockSparsity | None) -> Expr:
    """The PrimFunc for all rows of the chosen heads."""

    with prim_func("weights") as builder:
        attention = op.attention
        call = call_arguments(attention, profile, config)
        views = plan_arguments(sparsity)
        count = attention.num_heads if op.heads is None else len(op.heads)
        heads, numbers = T.int64(count), argument("heads", [T.int64(count)], "int32")
        y = argument("weights", [call.batch, heads, call.q_length, call.kv_length], attention.dtype)

        def tile(b: Expr, place: Expr, h: Expr, first_query: Expr, runs: Runs | None) -> None:
            products, visibility = call.task(b, h, first_query)
            rows = materialize(T.min(T.int64(config["queries"]), call.q_length - first_query))
            view = HeadView(y, lambda row, key: [b, place, first_query + row, key])
            _write_weights(call, products, visibility, runs, view, rows)

        call.each_tile(heads, lambda place: materialize(T.cast(numbers[place], "int64")), views, tile)
    return builder.get()


def _weights_of_rows(
    op: AttentionProbsOp,
    of_rows: Sequence[tuple[ScoreStep, np.ndarray[Any, Any] | None]],
    profile: CpuProfile,
    config: Config,
) -> Expr:
    """The PrimFunc for chosen rows: one task each. `of_rows` are the steps of scores for these rows, each with its
    constant."""
    attention = replace(op.attention, scores=tuple(step for step, _ in of_rows))

    with prim_func("chosen_weights") as builder:
        call = call_arguments(attention, profile, config)
        count = attention.num_heads if op.heads is None else len(op.heads)
        heads, numbers = T.int64(count), argument("heads", [T.int64(count)], "int32")
        rows, chosen_rows = T.int64(len(op.rows or ())), argument("rows", [T.int64(len(op.rows or ()))], "int32")
        arrays = [array for _, array in of_rows if array is not None]
        constants = iter(constant_arguments({f"constant{i}": array for i, array in enumerate(arrays)}))
        own = zip(of_rows, call.of_steps, strict=True)
        call = replace(
            call,
            of_steps=tuple(
                (*arguments, *([] if array is None else [next(constants)])) for (_, array), arguments in own
            ),
        )
        y = argument("weights", [call.batch, heads, rows, call.kv_length], attention.dtype)
        with T.parallel(materialize(call.batch * heads * rows)) as index:
            head_index, place = materialize(T.truncdiv(index, rows)), materialize(T.truncmod(index, rows))
            b, head = materialize(T.truncdiv(head_index, heads)), materialize(T.truncmod(head_index, heads))
            h, row = (materialize(T.cast(number, "int64")) for number in (numbers[head], chosen_rows[place]))
            row = materialize(T.Select(row < 0, row + call.q_length, row))
            view = HeadView(y, lambda _, key: [b, head, place, key])
            products, visibility = call.task(b, h, row, place)
            with T.If(T.And(row >= 0, row < call.q_length)):
                with T.Then():
                    _write_weights(call, products, visibility, None, view, T.int64(1))
                with T.Else():
                    with T.serial(call.kv_length) as key:
                        store(y, view.at(T.int64(0), key), T.cast(T.float32(0), attention.dtype), 1)
    return builder.get()


def _write_weights(
    call: SoftmaxCall, products: Products, visibility: TileMask, runs: Runs | None, output: HeadView, rows: Expr
) -> None:
    """Two passes over the keys of one task: sums, then weights."""
    sweep = Sweep(products, visibility, call.config, runs)
    sums = TileRowStats(visibility, with_moments=False)
    writer = WeightsWriter(sums, output, rows, call.config["keys"])
    sweep.prepare()
    sums.clear()
    sweep.over([sums])
    # Of a static mask's runs nobody knows here where they end: then all keys get zeros first.
    first, end = sweep.ends()
    writer.clear(T.int64(0), first)
    writer.clear(end, call.kv_length)
    sweep.over([writer])
