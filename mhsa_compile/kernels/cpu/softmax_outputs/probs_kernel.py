"""Rows of a softmax themselves, on a vector CPU: all of them, or chosen heads and queries.

A task is one tile of query rows of one head, or a single chosen row, and goes over its keys twice: for the sums, then
for the weights, which `probs_writer` writes out.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import argument, ceil_div
from mhsa_compile.kernels.common.head_layout import HeadView
from mhsa_compile.kernels.cpu.attention.block_sparsity import CpuBlockSparsity
from mhsa_compile.kernels.cpu.attention.kernel import (
    CpuAttentionKernel,
    plan_arguments,
    planned_apart,
    tile_and_runs,
)
from mhsa_compile.kernels.cpu.attention.key_loop import Runs
from mhsa_compile.kernels.cpu.attention.masking import MaskReader, TileMask
from mhsa_compile.kernels.cpu.attention.matmuls import Products
from mhsa_compile.kernels.cpu.attention.matmuls_bf16_dot import imported
from mhsa_compile.kernels.cpu.simd.vectors import Expr, materialize, store
from mhsa_compile.kernels.cpu.softmax_outputs.call import (
    Call,
    call_arguments,
    default_config,
    function,
)
from mhsa_compile.kernels.cpu.softmax_outputs.probs_writer import WeightsWriter
from mhsa_compile.kernels.cpu.softmax_outputs.row_stats import TileRowStats
from mhsa_compile.kernels.cpu.softmax_outputs.score_loop import Sweep
from mhsa_compile.kernels.interface.kernel import Config, Emitted
from mhsa_compile.kernels.interface.ops import AttentionProbsOp, MaskInput
from mhsa_compile.target.profile import CpuProfile


class CpuAttentionProbsKernel:
    """Rows of weights, all or chosen ones."""

    name = "cpu.weights"
    op_type = AttentionProbsOp

    def why_not(self, op: AttentionProbsOp, profile: CpuProfile) -> str | None:
        return CpuAttentionKernel().why_not(op.attention, profile)

    def search_space(self, op: AttentionProbsOp, profile: CpuProfile) -> dict[str, tuple[int, ...]]:
        return CpuAttentionKernel().search_space(op.attention, profile)

    def why_not_config(self, op: AttentionProbsOp, profile: CpuProfile, config: Config) -> str | None:
        return CpuAttentionKernel().why_not_config(op.attention, profile, config)

    def default_config(self, op: AttentionProbsOp, profile: CpuProfile) -> dict[str, int]:
        # A chosen row is a task of its own, with one query in one lane: its neighbours are not wanted.
        return default_config(profile) | ({} if op.rows is None else {"queries": 1})

    def emit(self, op: AttentionProbsOp, profile: CpuProfile, config: Config) -> Emitted:
        heads = np.array(range(op.attention.num_heads) if op.heads is None else op.heads, np.int32)
        if op.rows is None:
            attention, planned = planned_apart(op.attention, profile, config)
            arrays = (*(planned.arrays if planned else ()), heads)
            return Emitted(_weights(replace(op, attention=attention), profile, config, planned), constants=arrays)
        constants: list[np.ndarray[Any, Any]] = [heads, np.array(op.rows, np.int32)]
        if op.attention.static_mask is not None:
            constants.append(_rows_of(op.attention.static_mask.visible, op.rows))
        return Emitted(_chosen_weights(op, profile, config), constants=tuple(constants))


def _rows_of(visible: np.ndarray[Any, Any], rows: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """(1 or H, rows, S): the chosen rows of a static mask, nothing for one that is not there."""
    L = visible.shape[1]
    chosen = np.zeros((len(visible), len(rows), visible.shape[2]), np.bool_)
    for i, row in enumerate(rows):
        if -L <= row < L:
            chosen[:, i] = visible[:, row]
    return chosen


def _weights(op: AttentionProbsOp, profile: CpuProfile, config: Config, planned: CpuBlockSparsity | None) -> Expr:
    """The PrimFunc for all rows of the chosen heads."""

    def body() -> None:
        attention = op.attention
        call = call_arguments(attention, profile, config)
        views = None if planned is None else plan_arguments(planned)
        count = attention.num_heads if op.heads is None else len(op.heads)
        heads, chosen = T.int64(count), argument("heads", [T.int64(count)], "int32")
        y = argument("weights", [call.batch, heads, call.q_length, call.kv_length], attention.dtype)
        queries = config["queries"]
        tiles = materialize(ceil_div(call.q_length, queries))
        total = materialize(call.batch * heads * tiles)
        with imported(call.dot) if call.dot else nullcontext(), T.parallel(total) as index:
            head_index = materialize(T.truncdiv(index, tiles))
            b, place = materialize(T.truncdiv(head_index, heads)), materialize(T.truncmod(head_index, heads))
            h = materialize(T.cast(chosen[place], "int64"))
            tile, runs = tile_and_runs(attention, materialize(T.truncmod(index, tiles)), tiles, h, views)
            first_query = materialize(tile * queries)
            products, visibility = call.task(b, h, first_query, call.reader(b, h))
            rows = materialize(T.min(T.int64(queries), call.q_length - first_query))
            view = HeadView(y, lambda row, key: [b, place, first_query + row, key])
            _write_weights(call, products, visibility, runs, view, rows)

    return function("weights", body)


def _chosen_weights(op: AttentionProbsOp, profile: CpuProfile, config: Config) -> Expr:
    """The PrimFunc for chosen rows: one task each."""
    assert op.rows is not None
    attention, visible = op.attention, op.attention.static_mask
    hidden_rows = None if visible is None else (len(visible.visible), len(op.rows), visible.visible.shape[2])
    if hidden_rows is not None:  # one row of it is as a mask that is the same for all queries
        mask = MaskInput("bool", (1, hidden_rows[0], 1, hidden_rows[2]))
        attention = replace(attention, static_mask=None, mask=mask)

    def body() -> None:
        call = call_arguments(replace(attention, mask=op.attention.mask), profile, config)
        # The arguments were the call's own; from here on the static mask's row stands for its mask.
        call = replace(call, op=attention)
        count = attention.num_heads if op.heads is None else len(op.heads)
        heads, chosen = T.int64(count), argument("heads", [T.int64(count)], "int32")
        rows, chosen_rows = T.int64(len(op.rows or ())), argument("rows", [T.int64(len(op.rows or ()))], "int32")
        bits = None if hidden_rows is None else argument("visible", list(map(T.int64, hidden_rows)), "bool")
        y = argument("weights", [call.batch, heads, rows, call.kv_length], attention.dtype)
        with T.parallel(materialize(call.batch * heads * rows)) as index:
            head_index, place = materialize(T.truncdiv(index, rows)), materialize(T.truncmod(index, rows))
            b, head = materialize(T.truncdiv(head_index, heads)), materialize(T.truncmod(head_index, heads))
            h, row = (materialize(T.cast(number, "int64")) for number in (chosen[head], chosen_rows[place]))
            row = materialize(T.Select(row < 0, row + call.q_length, row))
            view = HeadView(y, lambda _, key: [b, head, place, key])
            products, visibility = call.task(b, h, row, _row_reader(bits, h, place) or call.reader(b, h))
            with T.If(T.And(row >= 0, row < call.q_length)):
                with T.Then():
                    _write_weights(call, products, visibility, None, view, T.int64(1))
                with T.Else():
                    with T.serial(call.kv_length) as key:
                        store(y, view.at(T.int64(0), key), T.cast(T.float32(0), attention.dtype), 1)

    return function("chosen_weights", body)


def _row_reader(bits: Expr | None, h: Expr, place: Expr) -> MaskReader | None:
    """Reads the chosen row of a static mask, whichever query asks."""
    if bits is None:
        return None
    head = T.int64(0) if int(bits.shape[0]) == 1 else h
    return lambda _, key: bits[head, place, key]


def _write_weights(
    call: Call, products: Products, visibility: TileMask, runs: Runs | None, output: HeadView, rows: Expr
) -> None:
    """Two passes over the keys of one task: sums, then weights."""
    config, lanes = call.config, call.profile.vector_lanes("float32")
    sweep = Sweep(products, visibility, config, lanes=lanes, runs=runs)
    sums = TileRowStats(sweep.scores, config["queries"], config["key_tile"], lanes, with_moments=False)
    writer = WeightsWriter(sums, output, rows, queries=config["queries"], keys=config["keys"], lanes=lanes)
    sweep.prepare()
    sums.clear()
    sweep.over([sums])
    # Of a static mask's runs nobody knows here where they end: then all keys get zeros first.
    first, end = sweep.ends()
    writer.clear(T.int64(0), first)
    writer.clear(end, call.kv_length)
    sweep.over([writer])
