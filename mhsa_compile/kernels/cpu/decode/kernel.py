"""Attention of one or few queries on a vector CPU, as a language model's next token asks for it: bound by memory.

A task is one key/value head with all its query heads, against a stretch of the keys; `task` holds its
arithmetic. Where there are fewer heads than threads, or a number that does not divide among them, each head's keys are
split, and the partial results (maximum, sum, accumulator) are combined at the end; `split_kv` says how.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.attention_args import AttentionArguments, attention_arguments
from mhsa_compile.kernels.common.buffers import DTYPE_BYTES, prim_func
from mhsa_compile.kernels.common.decode_limits import MOST_QUERIES, rows_of_key_head, why_not_few_queries
from mhsa_compile.kernels.common.head_layout import HeadView, head_view
from mhsa_compile.kernels.cpu.decode import tile_scores
from mhsa_compile.kernels.cpu.decode.query_key import ScoreLayout
from mhsa_compile.kernels.cpu.decode.split_kv import SplitKv, SplitKvByLength
from mhsa_compile.kernels.cpu.decode.task import DecodeTask, zero_if_unseen
from mhsa_compile.kernels.cpu.decode.work import Heads, KeyRange
from mhsa_compile.kernels.cpu.formats.choice import store_narrow
from mhsa_compile.kernels.cpu.score_parts import CpuMath
from mhsa_compile.kernels.cpu.simd import vector_math, vectors
from mhsa_compile.kernels.cpu.simd.vectors import constant, each_vector, let, load, materialize, splat, store
from mhsa_compile.kernels.cpu.units import tiles
from mhsa_compile.kernels.cpu.units.choice import units
from mhsa_compile.kernels.interface.kernel import Config, Emitted, unknown_knobs, why_not_tile
from mhsa_compile.kernels.interface.ops import AttentionOp, numbers_in_element

MOST_ROWS = 96
MOST_QUERIES_BESIDE_DOT = 8
"""The most queries, instead of MOST_QUERIES, in a dtype whose products of pairs the CPU adds at once. Both numbers are
where `cpu.attention` overtakes this kernel, or is about to, as `benchmarks/crossover.py` shows: earlier in such a
dtype, since tiles of queries are made of those products, and this kernel is not."""
LEAST_PARALLEL = 1 << 16
"""Keys and values (elements) below which waking threads takes longer than the work."""


class CpuDecodeKernel:
    """Few queries against many keys: every key and value is read once, for all the query heads that share it."""

    name = "cpu.decode"
    op_type = AttentionOp

    def why_not(self, op: AttentionOp, profile: CpuProfile) -> str | None:
        is_narrow = len(units(profile, op.dtype)) > 1
        return why_not_few_queries(
            op, MOST_QUERIES_BESIDE_DOT if is_narrow else MOST_QUERIES, MOST_ROWS, functions=True, formats=True
        )

    def search_space(self, op: AttentionOp, profile: CpuProfile) -> dict[str, tuple[int, ...]]:
        return {
            "keys": (32, 64, 128, 256, 512, 1024),
            "value_rows": (1, 2, 3, 4, 6, 8),
            "value_columns": (1, 2, 3, 4, 6, 8),
            "least_keys": (64, 128, 256, 512),
        }

    def why_not_config(self, op: AttentionOp, profile: CpuProfile, config: Config) -> str | None:
        if reason := unknown_knobs(config, ("keys", "value_rows", "value_columns", "least_keys")):
            return reason
        return why_not_tile(config["value_rows"], config["value_columns"], profile.hardware.vector_registers)

    def default_config(self, op: AttentionOp, profile: CpuProfile) -> dict[str, int]:
        """Blocks whose values fill a quarter of L2, from where the second tile of rows reads them again."""
        columns = len(vectors.chunks(op.v_head_dim, profile.vector_lanes("float32")))
        widens = op.stored_dtype != "float32"
        rows, columns = _value_tile(rows_of_key_head(op), columns, profile.hardware.vector_registers, widens=widens)
        row = DTYPE_BYTES[op.stored_dtype] * op.v_head_dim // numbers_in_element(op.stored_dtype)
        keys = profile.hardware.l2_kib * 1024 // 4 // row
        return {"keys": min(512, max(32, keys)), "value_rows": rows, "value_columns": columns, "least_keys": 128}

    def emit(self, op: AttentionOp, profile: CpuProfile, config: Config) -> Emitted:
        return Emitted(run=_decode(op, profile, config))


def _decode(op: AttentionOp, profile: CpuProfile, config: Config) -> Expr:
    assert isinstance(op.q_length, int)
    with prim_func("decode") as builder:
        arguments = attention_arguments(op)
        y = arguments.output()
        layout = _layout(op, profile)
        sizes = {"least_keys": config["least_keys"], "group": layout.group, "cores": profile.hardware.cores}
        deal = (
            SplitKvByLength(arguments, **sizes)
            if op.any_step("counts_keys")
            else SplitKv(op, arguments.batch, arguments.kv_length, **sizes)
        )
        emitter = _Decode(profile, config, arguments, y, deal.parts)
        loop = T.serial if _is_small(op) else T.parallel
        with tiles.SIGNED_BYTES.imported() if layout.tiles else nullcontext(), loop(deal.tasks) as task:
            deal.each_part(task, emitter.attend)
        # In the calling thread: the partial results are less than a hundredth of the keys and values.
        deal.each_divided(emitter.combine)
    return builder.get()


def _layout(op: AttentionOp, profile: CpuProfile) -> ScoreLayout:
    runs = max(1, profile.hardware.pages_in_turn // 2)  # keys are asked for while values are read, and the other way
    registers = profile.hardware.vector_registers
    layout = ScoreLayout(rows_of_key_head(op), profile.vector_lanes("float32"), registers, runs=runs)
    return replace(layout, tiles=tile_scores.GROUP) if tile_scores.takes(op, layout, profile) else layout


def _value_tile(rows: int, columns: int, registers: int, *, widens: bool) -> tuple[int, int]:
    """(rows, columns in vectors) of p V's register tile. Where V is widened, up to four rows, so that it is done once
    for them.

    With 32 registers the widest columns that leave room for two rows: V is then read in the order in which it lies in
    memory, which counts for more than a load saved. With 16, LLVM spills sums of such a tile, and none of a tall one.
    """
    room = vectors.tile_registers(registers) + 1
    if registers < 32:
        tall = max(1, min(rows, (room - 2) // 2 - 1))
        return tall, min(2, columns)
    if widens:
        tall = min(4, rows)
        parts = -(-columns // max(1, room // (tall + 1)))
        return -(-rows // -(-rows // tall)), -(-columns // parts)
    for parts in range(1, columns + 1):
        wide = -(-columns // parts)
        fitting = (room - wide) // wide
        if fitting >= min(2, rows):
            most = min(rows, fitting)
            return -(-rows // -(-rows // most)), wide
    return 1, 1


def _is_small(op: AttentionOp) -> bool:
    """Whether the sizes are known now, and too small to pay for waking threads. (To decide it when called would take a
    second copy of the code, in which LLVM was seen to spill the sums.)"""
    if not isinstance(op.batch, int) or not isinstance(op.kv_length, int):
        return False
    return op.batch * op.num_kv_heads * op.kv_length * (op.head_dim + op.v_head_dim) < LEAST_PARALLEL


class _Decode:
    """The two loops' bodies: `attend` is one task, `combine` puts the parts of one key head together.

    `parts` are the partial results there may be. They lie outside the loops, so they are taken once a call from TVM's
    pool and shared by all threads.
    """

    def __init__(
        self, profile: CpuProfile, config: Config, arguments: AttentionArguments, y: Expr, parts: Expr
    ) -> None:
        op = arguments.op
        self.op, self.config = op, config
        self.arguments, self.inputs, self.y, self.fades = arguments, arguments.inputs, y, op.any_step("fades")
        self.layout = _layout(op, profile)
        self.lanes = self.layout.lanes
        self.ratio = op.num_heads // op.num_kv_heads
        self.rows = rows_of_key_head(op)
        # Rows of all parts; one that no part fills is never touched.
        self.sums = T.alloc_buffer((parts, T.int64(self.rows), T.int64(op.v_head_dim)), "float32")
        # The maximum, the sum and, where scores fade, the origin of each row's distances.
        self.statistics = T.alloc_buffer((parts, T.int64(3 if self.fades else 2), T.int64(self.rows)), "float32")

    def attend(self, part: KeyRange) -> None:
        heads = self._heads(part.head)
        task = DecodeTask(self.arguments, self.config, self.layout, part.kv_length, part.span, heads)
        first, end = part.keys()
        if self.layout.tiles:
            tiles.configure(right=tiles.RIGHTS)
        task.attend(first, end, part.begins)
        if self.layout.tiles:
            tiles.release()
        with T.If(part.whole):
            with T.Then(), T.serial(T.int64(self.rows)) as row:
                self._write(
                    part.head, row, task.row_sum[row], lambda at, n: load(task.values.accumulator, [row, at], n)
                )
            with T.Else(), T.serial(T.int64(self.rows)) as row:
                T.buffer_store(self.statistics, task.row_max[row], [part.number, T.int64(0), row])
                T.buffer_store(self.statistics, task.row_sum[row], [part.number, T.int64(1), row])
                if task.fading is not None:
                    T.buffer_store(self.statistics, task.fading.origin(row), [part.number, T.int64(2), row])
                task.values.each_vector(
                    lambda at, n: store(
                        self.sums, [part.number, row, at], load(task.values.accumulator, [row, at], n), n
                    )
                )

    def _heads(self, head: Expr) -> Heads:
        op, groups = self.op, T.int64(self.op.num_kv_heads)
        b, g = materialize(T.truncdiv(head, groups)), materialize(T.truncmod(head, groups))
        first = materialize(g * self.ratio)
        return Heads(
            query=lambda h: head_view(self.inputs[op.query.buffer], op.query, op.head_dim, b, first + h),
            key=self.arguments.key(b, g),
            value=self.arguments.value(b, g),
            entry=b,
            first_head=first,
        )

    def _write(self, head: Expr, row: Expr, total: Expr, accumulator: Callable[[Expr, int], Expr]) -> None:
        """Writes one row of Y: accumulator / total, zeros where nothing was visible."""
        groups, ratio = T.int64(self.op.num_kv_heads), T.int64(self.ratio)
        b, g = materialize(T.truncdiv(head, groups)), materialize(T.truncmod(head, groups))
        query, h = materialize(T.truncdiv(row, ratio)), materialize(g * self.ratio + T.truncmod(row, ratio))
        out: HeadView = head_view(self.y, self.op.output, self.op.v_head_dim, b, h)
        total = let(total)
        inverse = let(T.Select(total == T.float32(0), T.float32(0), T.float32(1) / total))
        each_vector(
            self.op.v_head_dim,
            self.lanes,
            lambda at, n: store_narrow(out.buffer, out.at(query, at), accumulator(at, n) * splat(inverse, n), n),
        )

    def combine(self, head: Expr, first: Expr, count: Expr) -> None:
        """o = sum of o_s 2^(m_s - m) over the parts s of a head, `count` from number `first` on, l likewise; m is the
        largest m_s."""
        width = self.op.v_head_dim

        def add(split: Expr, row: Expr, factor: Expr, at: Expr, n: int) -> None:
            value = load(self.sums, [split, row, at], n) * splat(factor, n)
            store(whole, [at], load(whole, [at], n) + value, n)

        with T.serial(T.int64(self.rows)) as row:
            total, zero = T.alloc_buffer((1,), "float32"), [T.int64(0)]
            T.buffer_store(total, T.float32(0), zero)
            below_largest = self._below_largest(head, row, first, count)
            whole = T.alloc_buffer((width,), "float32")
            each_vector(width, self.lanes, lambda at, n: store(whole, [at], constant(0.0, n), n))
            with T.serial(count) as s:
                factor = let(vector_math.exp2(below_largest(first + s), 1))
                T.buffer_store(total, total[0] + factor * self.statistics[first + s, T.int64(1), row], zero)
                each_vector(width, self.lanes, lambda at, n: add(first + s, row, factor, at, n))
            self._write(head, row, total[0], lambda at, n: load(whole, [at], n))

    def _below_largest(self, head: Expr, row: Expr, first: Expr, count: Expr) -> Callable[[Expr], Expr]:
        """Number of a part -> how far its maximum is from the largest of the `count` parts from `first` on."""
        zero, largest = [T.int64(0)], T.alloc_buffer((1,), "float32")
        T.buffer_store(largest, T.float32(-math.inf), zero)

        def maximum(part: Expr) -> Expr:
            return self.statistics[part, T.int64(0), row]

        if not self.fades:
            with T.serial(count) as s:
                T.buffer_store(largest, T.max(largest[0], maximum(first + s)), zero)
            # Where no part saw anything all maxima are -inf, and -inf - -inf is not a number.
            top = let(zero_if_unseen(largest[0], 1))
            return lambda part: maximum(part) - top

        def origin(part: Expr) -> Expr:
            return self.statistics[part, T.int64(2), row]

        # Distances from place 0 find the part, since they need not be exact for that; what counts is from its origin.
        h = T.truncmod(head, T.int64(self.op.num_kv_heads)) * self.ratio + T.truncmod(row, T.int64(self.ratio))
        tilt, best = self._tilt(materialize(h)), T.alloc_buffer((1,), "int64")
        T.buffer_store(best, first, zero)
        with T.serial(count) as s:
            reach = materialize(maximum(first + s) + tilt * origin(first + s), "float32")
            with T.If(reach > largest[0]), T.Then():
                T.buffer_store(largest, reach, zero)
                T.buffer_store(best, first + s, zero)
        reference = materialize(best[0])
        top, from_key = (
            materialize(zero_if_unseen(maximum(reference), 1), "float32"),
            materialize(origin(reference), "float32"),
        )
        return lambda part: maximum(part) - top + tilt * (origin(part) - from_key)

    def _tilt(self, head: Expr) -> Expr:
        """What a head adds to a score for each key further on."""
        tilts = (step.tilt(CpuMath(), own, head) for step, own in self.arguments.steps())
        return next(tilt for tilt in tilts if tilt is not None)
