"""The launch of an attention: which rows of which head a block has, what they see, and where each operand lies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.attention_args import attention_arguments
from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.cuda.attention.block_sparsity import (
    CudaBlockSparsity,
    block_of_turn,
    plan_arguments,
    visits_of,
)
from mhsa_compile.kernels.cuda.attention.key_range import BlockKeyRange
from mhsa_compile.kernels.cuda.attention.kv_tiles import KeyTiles, hides_values
from mhsa_compile.kernels.cuda.attention.masking import ScoreMask
from mhsa_compile.kernels.cuda.attention.score_mods import RowScoreMods
from mhsa_compile.kernels.cuda.attention.thread_parts import thread_parts
from mhsa_compile.kernels.cuda.primitives import smem_pipeline
from mhsa_compile.kernels.cuda.primitives.fragments import Fragment
from mhsa_compile.kernels.cuda.primitives.inputs import elements, keys_of
from mhsa_compile.kernels.cuda.primitives.smem_pipeline import Element, SharedTiles
from mhsa_compile.kernels.cuda.primitives.warp import WARP, ThreadIndex, materialize, min_blocks_per_sm
from mhsa_compile.kernels.interface.ops import AttentionOp

WARPS = 4  # of a block


@dataclass(frozen=True)
class TileShape:
    """The sizes of a block: rows of queries, keys of a tile, tiles of the ring."""

    queries: int
    keys: int
    stages: int
    head_dim: int
    v_head_dim: int

    @property
    def threads(self) -> int:
        return WARPS * WARP


Shape = TypeVar("Shape", bound=TileShape)


class AttentionBlock(ABC, Generic[Shape]):
    """One block of queries of one head: its `operands` are elements of Q, K, V and Y. How tiles come
    into its ring is the same for all; what becomes of them is each one's own."""

    order: KeyTiles

    def __init__(
        self,
        op: AttentionOp,
        shape: Shape,
        place: ThreadIndex,
        operands: tuple[Element, Element, Element, Element],
        visibility: ScoreMask,
        scores: RowScoreMods,
    ) -> None:
        self.op, self.shape, self.place, self.operands = op, shape, place, operands
        self.visibility, self.scores = visibility, scores
        self.hides_values = hides_values(op, copied_to_length=True)

    @staticmethod
    @abstractmethod
    def layout(shape: Shape, place: ThreadIndex, first: Expr) -> tuple[tuple[Expr, ...], Fragment]:
        """The numbers of the rows that a thread has, of those from `first` on, and which of a tile's keys."""

    @abstractmethod
    def emit(self) -> None:
        """All that the block computes."""

    def _copy(self, tiles: SharedTiles, slot: Expr, source: Element, first: Expr, end: Expr) -> None:
        tiles.copy(slot, source, first, end, self.place.thread, self.shape.threads)

    def _copy_tile(self, tiles: SharedTiles, source: Element, turn: Expr) -> None:
        """Begins to copy the tile whose turn it will be, if there is one."""
        with T.If(turn < self.order.count), T.Then():
            slot = T.truncmod(turn, T.int32(self.shape.stages))
            first = self.order.first_key(turn)
            self._copy(tiles, slot, source, first, self.visibility.key_range.kv_length)
        # Outside of the branch: an empty group counts too, so `wait` means the same in every turn.
        smem_pipeline.commit()


def attention(
    op: AttentionOp,
    shape: Shape,
    plan: CudaBlockSparsity | None,
    block_type: type[AttentionBlock[Shape]],
    together: int | None,
) -> Expr:
    """The kernel: a block for each `shape.queries` rows of each head; `together` is for `min_blocks_per_sm`."""
    with IRBuilder() as builder:
        with T.prim_func():
            T.func_name("attention")
            T.func_attr({"tirx.noalias": True})
            arguments = attention_arguments(op)
            views = None if plan is None else plan_arguments(plan)
            y, inputs = arguments.output(), arguments.inputs
            tiles = ceil_div(arguments.q_length, shape.queries)
            blocks = arguments.batch * T.int64(op.num_heads) * tiles
            with (
                T.launch_thread("blockIdx.x", blocks) as block,
                T.launch_thread("threadIdx.x", shape.threads) as thread,
                min_blocks_per_sm(together),
            ):
                # 1. Which rows of which head: a block's neighbours share its K and V.
                turn, head = (materialize(f(T.cast(block, "int64"), tiles), "int64") for f in (T.truncmod, T.truncdiv))
                b, h = (materialize(f(head, T.int64(op.num_heads)), "int64") for f in (T.truncdiv, T.truncmod))
                g = materialize(T.truncdiv(h, T.int64(op.num_heads // op.num_kv_heads)), "int64")
                visits = None
                if views is not None:
                    turn = block_of_turn(views, turn, h)
                    visits = visits_of(views, turn, h)
                elif op.window is not None:
                    turn = materialize(tiles - 1 - turn, "int64")  # long rows of a causal head first
                place = ThreadIndex(thread)
                first_row = materialize(T.cast(turn * shape.queries, "int32"))
                numbers, cells = block_type.layout(shape, place, first_row)
                # 2. What they see, and what their scores are.
                q_length, kv_length = materialize(T.cast(arguments.q_length, "int32")), keys_of(arguments, b)
                parts = thread_parts(arguments, b, h)
                key_range = BlockKeyRange(
                    op, first_row, shape.queries, q_length=q_length, kv_length=kv_length, visits=visits
                )
                visibility = ScoreMask(key_range, cells, numbers, parts)
                scores = RowScoreMods(op, visibility)
                # 3. The block.
                operands = (
                    elements(inputs[op.query.buffer], op.query, op.head_dim, b, h),
                    elements(inputs[op.key.buffer], op.key, op.head_dim, b, g),
                    elements(inputs[op.value.buffer], op.value, op.v_head_dim, b, g),
                    elements(y, op.output, op.v_head_dim, b, h),
                )
                block_type(op, shape, place, operands, visibility, scores).emit()
    return builder.get()
