"""Attention on matrix tiles, of 16 bits or of float32 that is multiplied as bfloat16, on a CPU that has them.

First V^T of all heads goes into tiles, which all queries of a head share; then the tasks, as the vector kernel has
them, but in strips: a task's last probs come among the first scores of the one after it (`softmax`), its last values
among the scores behind these (`output`).
"""

from __future__ import annotations

from functools import partial

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.attention_args import attention_arguments
from mhsa_compile.kernels.common.buffers import ceil_div, prim_func
from mhsa_compile.kernels.common.pair_plan import plan_arguments, plan_constants
from mhsa_compile.kernels.cpu import strips
from mhsa_compile.kernels.cpu.attention.block_sparsity import CpuBlockSparsity
from mhsa_compile.kernels.cpu.attention.kernel import CpuAttentionKernel, by_width, split_pairs, task_at
from mhsa_compile.kernels.cpu.attention.key_loop import KeyLoop, Route, Runs
from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.attention.matmuls import TaskOperands
from mhsa_compile.kernels.cpu.score_parts import tile_parts
from mhsa_compile.kernels.cpu.simd.vectors import materialize
from mhsa_compile.kernels.cpu.strips import strip, strip_count
from mhsa_compile.kernels.cpu.tile_attention import powers, terms
from mhsa_compile.kernels.cpu.tile_attention.output import TileOutput
from mhsa_compile.kernels.cpu.tile_attention.powers import LANES
from mhsa_compile.kernels.cpu.tile_attention.softmax import TileSoftmax
from mhsa_compile.kernels.cpu.tile_attention.task import TaskScratch, TileAttentionTask
from mhsa_compile.kernels.cpu.tile_attention.values import FEATURES, KEYS, KeyValueTiles
from mhsa_compile.kernels.cpu.units import tiles
from mhsa_compile.kernels.interface.kernel import Config, Emitted, unknown_knobs
from mhsa_compile.kernels.interface.ops import AttentionOp
from mhsa_compile.spec.float32_products import TERM_PRODUCTS, Float32Products

WORTH_SPLITTING = 256
"""Queries and keys from which on attention by six products, all of it seen, takes less time than float32's."""
WIDTHS = (64, 128)
"""Elements of a head of which that is so, and no class of inputs is known to exceed float32's error budget."""


class CpuTileAttentionKernel(CpuAttentionKernel):
    """Tiled attention with an online softmax, its products on matrix tiles."""

    name = "cpu.attention_on_tiles"

    def why_not(self, op: AttentionOp, profile: CpuProfile) -> str | None:
        if op.dtype == "float32" and op.float32_products not in TERM_PRODUCTS:
            return "numbers of 16 bits, or float32 by bfloat16 terms, not IEEE's products"
        if op.kv_dtype is not None:
            return f"keys and values of {op.dtype}, not stored in {op.kv_dtype}"
        if not (unit := tiles.unit_of(op.dtype)).is_on(profile):
            return f"a CPU with {unit.feature}"
        if op.head_dim % KEYS or op.v_head_dim % FEATURES:
            return f"heads of a multiple of {KEYS} elements, not {op.head_dim} and {op.v_head_dim}"
        if op.any_step("fades"):
            return "no bias that is counted from an origin of each row"
        return super().why_not(op, profile)

    def float32_products(self, op: AttentionOp, profile: CpuProfile) -> tuple[Float32Products, ...]:
        return tuple(TERM_PRODUCTS)

    def exact_products(self, op: AttentionOp, profile: CpuProfile) -> tuple[Float32Products, ...]:
        long = all(isinstance(length, int) and length >= WORTH_SPLITTING for length in (op.q_length, op.kv_length))
        plain = op.window is None and not op.scores
        return ("bf16x6",) if long and plain and {op.head_dim, op.v_head_dim} <= set(WIDTHS) else ()

    def search_space(self, op: AttentionOp, profile: CpuProfile) -> dict[str, tuple[int, ...]]:
        return {"queries": (16, 32), "keys": (64, 128, 192, 256, 512)}

    def why_not_config(self, op: AttentionOp, profile: CpuProfile, config: Config) -> str | None:
        if reason := unknown_knobs(config, ("queries", "keys")):
            return reason
        if config["queries"] not in (16, 32) or config["keys"] % KEYS:
            return f"queries 16 or 32, and keys a multiple of {KEYS}"
        return None

    def default_config(self, op: AttentionOp, profile: CpuProfile) -> dict[str, int]:
        # As many chunks of keys in a block as tiles of features: each chunk adds one of them for the block before.
        # Fewer where a prob is several terms, which take the more room.
        queries = LANES if isinstance(op.q_length, int) and op.q_length <= LANES else 2 * LANES
        most = 8 if terms.term_count(op) == 1 else 4
        return {"queries": queries, "keys": KEYS * min(most, max(2, op.v_head_dim // tiles.ROWS))}

    def emit(self, op: AttentionOp, profile: CpuProfile, config: Config) -> Emitted:
        config = {**config, "key_tile": KEYS}
        op, sparsity = split_pairs(op, profile, config)
        return Emitted(_attention(op, config, sparsity), constants=plan_constants(sparsity))


def _attention(op: AttentionOp, config: Config, sparsity: CpuBlockSparsity | None) -> Expr:
    queries, unit = config["queries"], tiles.unit_of(op.dtype)
    with prim_func("attention") as builder:
        arguments = attention_arguments(op)
        views = plan_arguments(sparsity)
        y = arguments.output()
        with unit.imported(), T.attr(0, "pragma_import_llvm", powers.TEXT + strips.TEXT):
            values = KeyValueTiles.of(arguments)
            batch, q_length = arguments.batch, arguments.q_length
            count = materialize(ceil_div(q_length, queries))
            total = materialize(batch * T.int64(op.num_heads) * count)

            def softmax_of(width: int) -> TileSoftmax:
                output = TileOutput(op, values, width, config["keys"], y, q_length)
                softmax = TileSoftmax(output, is_alone=width != queries)
                output.start()
                softmax.start()
                return softmax

            pieces = strip_count(total)
            with T.parallel(pieces) as piece:
                tiles.configure()
                softmax, memory = softmax_of(queries), TaskScratch(op, queries)
                with T.serial(*strip(total, piece, pieces)) as index:
                    place = partial(task_at, op, batch, count, queries, views)
                    b, h, first_query, runs = place(index)
                    g = materialize(T.truncdiv(h, T.int64(op.num_heads // op.num_kv_heads)))
                    following = place(materialize(T.min(index + 1, total - 1)))
                    operands = TaskOperands.of(arguments, b, h, first_query, following[:3])
                    parts = tile_parts(arguments, b, h)

                    def task(softmax: TileSoftmax, memory: TaskScratch) -> TileAttentionTask:
                        visibility = AlignedMask(operands, softmax.output.queries, config["keys"], parts, LANES)
                        first_row = values.first_row(arguments, b, g)
                        return TileAttentionTask(memory, softmax, operands, visibility, (b, h, first_query), first_row)

                    def tile(width: int) -> None:
                        if width == queries:
                            return _visit_keys(task(softmax, memory), config, runs)
                        narrow = softmax_of(width)
                        _visit_keys(task(narrow, TaskScratch(op, width)), config, runs)
                        narrow.output.write(waits=True)

                    by_width(op, LANES, queries, q_length - first_query, tile)
                softmax.flush()
                softmax.output.write(waits=True)
                tiles.release()
    return builder.get()


def _visit_keys(task: TileAttentionTask, config: Config, runs: Runs | None) -> None:
    """The whole task: all keys that its queries see."""
    task.begin()
    route = Route(equal_blocks=True, begins_early=True)
    KeyLoop(task, task.visibility, {**config, "queries": task.queries}, route, runs).emit()
    task.end()


class AlignedMask(TileMask):
    """Chunks of keys begin at whole numbers of chunks, as those of the values do."""

    def visible_to_any(self) -> tuple[Expr, Expr]:
        first, end = super().visible_to_any()
        return materialize(T.truncdiv(first, T.int64(KEYS)) * KEYS), end
