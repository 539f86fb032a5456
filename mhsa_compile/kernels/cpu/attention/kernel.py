"""Attention on a vector CPU: one pass over the keys with an online softmax, nothing transposed in memory.

A task is one tile of query rows of one head, against all the keys that they see:

    for each block of keys, for each group of them:
        S^T = K Q^T;  where some score exceeds its row's reference m by far: m' = the new maximum, and what was summed
                      up so far (l, O, the block's probs) shrinks by 2^(m - m')
        P^T = 2^(S^T - m);  l = l + sum P^T
    O = O + P V
    Y = O / l, and zeros where nothing was visible (l = 0)

The reference need not be the maximum: a prob of 2^RISE is as exact as one of 1. So it hardly ever moves, nothing is
rescaled from block to block, and the probs of one group are computed among the products of the next one's scores,
or, where the registers are too few for both, just before them. `key_loop` says which keys are visited; P V sums for
each few rows only the keys that they see.
Sources: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867); tiling, Dao 2023 (arXiv:2307.08691); rescaling
only when it matters: FlashAttention-4 (github.com/Dao-AILab/flash-attention).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.attention_args import attention_arguments
from mhsa_compile.kernels.common.buffers import ceil_div, prim_func
from mhsa_compile.kernels.common.head_layout import HeadView, head_view
from mhsa_compile.kernels.common.pair_plan import plan_arguments, plan_constants, split_window, why_not_plan
from mhsa_compile.kernels.common.score_scale import why_not_scores
from mhsa_compile.kernels.cpu.attention.block_sparsity import CpuBlockSparsity, plan
from mhsa_compile.kernels.cpu.attention.key_loop import KeyLoop, Route, Runs, VisitedBlock
from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.attention.matmuls import Products, TaskOperands, unit_for
from mhsa_compile.kernels.cpu.attention.online_softmax import OnlineSoftmax
from mhsa_compile.kernels.cpu.attention.output_accumulator import Accumulator
from mhsa_compile.kernels.cpu.score_parts import tile_parts
from mhsa_compile.kernels.cpu.simd.vectors import materialize
from mhsa_compile.kernels.cpu.units.choice import units
from mhsa_compile.kernels.cpu.units.unit import Unit
from mhsa_compile.kernels.interface.kernel import Config, Emitted, unknown_knobs, why_not_tile
from mhsa_compile.kernels.interface.ops import AttentionOp


class AttentionTile:
    """One attention task. Scratch is allocated where the tile is constructed: inside the loop over tasks, so per
    thread."""

    def __init__(self, products: Products, visibility: TileMask, profile: CpuProfile, output: HeadView) -> None:
        registers = profile.hardware.vector_registers
        self.products, self.visibility, self.output = products, visibility, output
        self.sums = Accumulator(products, visibility, registers)
        self.probs = OnlineSoftmax(
            products,
            visibility,
            self.sums.rescale,
            overwrites_summands=profile.overwrites_summands,
            interleaves=registers > 16,
        )
        self.begin_block, self.add_group = self.probs.begin_block, self.probs.add_group

    def emit(self, config: Config, runs: Runs | None) -> None:
        self.products.pack_queries()
        self.products.operands.prefetch_next(self.products.queries)
        self.sums.prefetch(self.output)
        self.probs.clear()
        self.sums.clear()
        # Backwards where scores fall with the distance, so that the reference need not rise.
        backwards = self.visibility.op.any_step("fades")
        route = Route(equal_blocks=True, backwards=backwards, drops_columns=True, begins_early=True)
        KeyLoop(self, self.visibility, config, route, runs).emit()
        self.sums.write(self.output, self.probs.row_sum)

    def end_block(self, block: VisitedBlock) -> None:
        """Adds the block to the output: O = O + P V."""
        self.probs.end_block(block.groups)
        self.products.take_values(block.first_key, block.count)
        if block.hides is None:
            self.sums.add(block.first_key, block.count)
        else:
            self.sums.add_past_hidden(block.first_key, block.count, block.hides)


class CpuAttentionKernel:
    """Tiled attention with an online softmax, for any vector CPU."""

    name = "cpu.attention"
    op_type = AttentionOp

    def why_not(self, op: AttentionOp, profile: CpuProfile) -> str | None:
        return why_not_plan(op, "cpu") or why_not_scores(op, functions=True, formats=True)

    def search_space(self, op: AttentionOp, profile: CpuProfile) -> dict[str, tuple[int, ...]]:
        lanes = profile.vector_lanes("float32")
        return {
            "queries": tuple(lanes * n for n in (1, 2, 3, 4, 6)),
            "key_tile": (1, 2, 3, 4, 6, 8, 12),
            "keys": (24, 48, 60, 64, 72, 96, 120, 128, 192, 256, 384),
        }

    def why_not_config(self, op: AttentionOp, profile: CpuProfile, config: Config) -> str | None:
        if reason := unknown_knobs(config, ("queries", "key_tile", "keys")):
            return reason
        queries, key_tile, keys = config["queries"], config["key_tile"], config["keys"]
        if keys % key_tile:
            return f"a block of {keys} keys is no whole number of tiles of {key_tile}"
        columns = -(-queries // profile.vector_lanes("float32"))
        return why_not_tile(key_tile, columns, profile.hardware.vector_registers)

    def default_config(self, op: AttentionOp, profile: CpuProfile) -> dict[str, int]:
        """The register tile with the fewest loads a product; a block of keys whose P^T and V fill two thirds of L1."""
        # Of 32 registers 4 x 4 accumulators leave room for the exponentials beside them; 4 x 3 take all of 16, and a
        # tile of 24 queries meets the keys fewer times than one of 16.
        columns, key_tile = (4, 4) if profile.hardware.vector_registers >= 32 else (3, 4)
        if _unit(op, profile, key_tile).rows > 1:
            columns = 6  # two keys' rows of K are joined on their way, which costs less the more queries they meet
        queries = columns * profile.vector_lanes("float32")
        # P^T in float32 and V widened: a row of each for every key.
        room = profile.hardware.l1d_kib * 1024 * 2 // 3 // (4 * (queries + op.v_head_dim))
        keys = min(512, max(32, room)) // key_tile * key_tile
        return {"queries": queries, "key_tile": key_tile, "keys": keys}

    def emit(self, op: AttentionOp, profile: CpuProfile, config: Config) -> Emitted:
        op, sparsity = split_pairs(op, profile, config)
        return Emitted(_attention(op, profile, config, sparsity), constants=plan_constants(sparsity))


def split_pairs(op: AttentionOp, profile: CpuProfile, config: Config) -> tuple[AttentionOp, CpuBlockSparsity | None]:
    """(What is left to the kernel, the plan of pairs that are known and of as much of the window as it holds.)"""
    if op.pairs is None:
        return op, None
    tile = {name: config[name] for name in ("queries", "keys", "key_tile")}
    window, rest = split_window(op)
    return rest, plan(op.pairs, window, lanes=profile.vector_lanes("float32"), **tile)


def _attention(op: AttentionOp, profile: CpuProfile, config: Config, sparsity: CpuBlockSparsity | None) -> Expr:
    queries, lanes = config["queries"], profile.vector_lanes("float32")
    unit = _unit(op, profile, config["key_tile"])
    with prim_func("attention") as builder:
        arguments = attention_arguments(op)
        views = plan_arguments(sparsity)
        y = arguments.output()
        batch, q_length = arguments.batch, arguments.q_length
        tiles = materialize(ceil_div(q_length, queries))
        total = materialize(batch * T.int64(op.num_heads) * tiles)
        with unit.imported(), T.parallel(total) as index:
            task = partial(task_at, op, batch, tiles, queries, views)
            b, h, first_query, runs = task(index)
            following = task(materialize(T.min(index + 1, total - 1)))
            operands = TaskOperands.of(arguments, b, h, first_query, following[:3])
            output = head_view(y, op.output, op.v_head_dim, b, h)
            parts = tile_parts(arguments, b, h)

            def tile(width: int) -> None:
                shape = {**config, "queries": width}
                products = Products(operands, unit, shape, lanes)
                visibility = TileMask(operands, width, config["keys"], parts, lanes)
                AttentionTile(products, visibility, profile, output).emit(shape, runs)

            by_width(op, lanes, queries, q_length - first_query, tile)
    return builder.get()


def _unit(op: AttentionOp, profile: CpuProfile, key_tile: int) -> Unit:
    return unit_for(op, units(profile, op.dtype), key_tile, profile.vector_lanes("float32"))


def task_at(
    op: AttentionOp, batch: Expr, tiles: Expr, queries: int, views: list[Expr] | None, index: Expr
) -> tuple[Expr, Expr, Expr, Runs | None]:
    """(batch entry, head, first query, runs) of a task; all tiles of a head come one after another."""
    b, h = _entry_and_head(op, materialize(T.truncdiv(index, tiles)), batch)
    tile, runs = tile_and_runs(op, materialize(T.truncmod(index, tiles)), tiles, h, views)
    return b, h, materialize(tile * queries), runs


def _entry_and_head(op: AttentionOp, index: Expr, batch: Expr) -> tuple[Expr, Expr]:
    """Heads of one entry come together; of entries with lengths of their own, the entries of one head: an equal share
    of the tasks is then nearly equal work."""
    if op.any_step("counts_keys"):
        return materialize(T.truncmod(index, batch)), materialize(T.truncdiv(index, batch))
    heads = T.int64(op.num_heads)
    return materialize(T.truncdiv(index, heads)), materialize(T.truncmod(index, heads))


def tile_and_runs(
    op: AttentionOp, turn: Expr, tiles: Expr, h: Expr, views: list[Expr] | None
) -> tuple[Expr, Runs | None]:
    """The tile of query rows whose turn it is, and with a plan the runs of keys that it visits."""
    if views is None:
        # Short and long causal rows in turn: equal shares of the tasks are then equal work.
        return turn if op.window is None else _in_turn(turn, tiles), None
    order, index, runs, bits = views
    # One plan for all heads, where the mask is the same for all.
    head = T.int64(0) if int(order.shape[0]) == 1 else h
    tile = materialize(T.cast(order[head, turn], "int64"))
    entry = materialize(head * tiles + tile)
    first, end = (materialize(T.cast(index[at], "int64")) for at in (entry, entry + 1))
    return tile, Runs(first, end, runs, bits)


def by_width(op: AttentionOp, lanes: int, queries: int, rows: Expr, tile: Callable[[int], None]) -> None:
    """The tile of `queries` rows, and for a last tile with half as many rows, or a quarter, one of its own."""
    half = queries // 2 // lanes * lanes
    # Where a known length never leaves half a tile or less, the code for it would be dead.
    fits = isinstance(op.q_length, int) and not 0 < op.q_length % queries <= half
    if half < lanes or fits:
        return tile(queries)
    with T.If(rows > half):
        with T.Then():
            tile(queries)
        with T.Else():
            by_width(op, lanes, half, rows, tile)


def _in_turn(turn: Expr, tiles: Expr) -> Expr:
    """0, n - 1, 1, n - 2, ...: the first and the last tiles in turn."""
    half = T.truncdiv(turn, T.int64(2))
    return T.Select(T.truncmod(turn, T.int64(2)) == 0, half, tiles - 1 - half)
