"""The launch of an attention: which rows of which head a block has, what they see, and where each operand lies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.attention_args import attention_arguments
from mhsa_compile.kernels.common.buffers import ceil_div, prim_func
from mhsa_compile.kernels.common.pair_plan import plan_arguments
from mhsa_compile.kernels.cuda.attention.block_sparsity import CudaBlockSparsity, block_of_turn, visits_of
from mhsa_compile.kernels.cuda.attention.key_range import BlockKeyRange, KeyTiles, hides_values
from mhsa_compile.kernels.cuda.attention.thread_scores import ThreadScores, thread_parts
from mhsa_compile.kernels.cuda.primitives import smem_pipeline
from mhsa_compile.kernels.cuda.primitives.inputs import elements, keys_of
from mhsa_compile.kernels.cuda.primitives.simt import WARP, Fragment, ThreadIndex, launch, materialize
from mhsa_compile.kernels.cuda.primitives.smem_pipeline import Element, SharedTiles
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

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory."""
        raise NotImplementedError


Shape = TypeVar("Shape", bound=TileShape)


class AttentionBlock(ABC, Generic[Shape]):
    """One block of queries of one head: its `operands` are elements of Q, K, V and Y. How tiles come
    into its ring is the same for all; what becomes of them is each one's own."""

    order: KeyTiles
    queries: SharedTiles
    keys: SharedTiles
    values: SharedTiles

    def __init__(self, shape: Shape, place: ThreadIndex, operands: Sequence[Element], scores: ThreadScores) -> None:
        self.op, self.shape, self.place, self.operands, self.scores = scores.op, shape, place, operands, scores
        self.hides_values = hides_values(self.op, copied_to_length=True)
        self.allocate()

    @staticmethod
    @abstractmethod
    def layout(shape: Shape, place: ThreadIndex, first: Expr) -> tuple[tuple[Expr, ...], Fragment]:
        """The numbers of the rows that a thread has, of those from `first` on, and which of a tile's keys."""

    @abstractmethod
    def allocate(self) -> None:
        """Declares shared memory and registers."""

    @abstractmethod
    def begin(self) -> None:
        """Begins with rows that have seen nothing."""

    @abstractmethod
    def visit(self, turn: Expr) -> None:
        """All that becomes of a tile of keys."""

    @abstractmethod
    def write(self) -> None:
        """Writes O / l."""

    def emit(self) -> None:
        """All that the block computes."""
        # 1. Q.
        rows = self.scores.key_range
        self._copy(self.queries, T.int32(0), self.operands[0], rows.first_row, rows.q_length)
        # 2. One tile after the other.
        self.sweep()
        # 3. O / l.
        self.write()

    def sweep(self) -> None:
        # 1. The ring full but for the last V.
        for turn in range(self.shape.stages):
            self.copy_keys(T.int32(turn))
            if turn + 1 < self.shape.stages:
                self.copy_values(T.int32(turn))
        self.begin()
        # 2. One tile of keys after the other.
        with T.serial(self.order.count) as turn:
            self.visit(turn)
        smem_pipeline.wait(0)

    def copy_keys(self, turn: Expr) -> None:
        """Begins to copy the keys of the tile whose turn it will be, if there is one."""
        self._copy_tile(self.keys, self.operands[1], turn)

    def copy_values(self, turn: Expr) -> None:
        self._copy_tile(self.values, self.operands[2], turn)

    def _copy(self, tiles: SharedTiles, slot: Expr, source: Element, first: Expr, end: Expr) -> None:
        tiles.copy(slot, source, first, end, self.place.thread, self.shape.threads)

    def _copy_tile(self, tiles: SharedTiles, source: Element, turn: Expr) -> None:
        with T.If(turn < self.order.count), T.Then():
            slot = T.truncmod(turn, T.int32(self.shape.stages))
            self._copy(tiles, slot, source, self.order.first_key(turn), self.scores.key_range.kv_length)
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
    with prim_func("attention") as builder:
        arguments = attention_arguments(op)
        views = plan_arguments(plan)
        y, inputs = arguments.output(), arguments.inputs
        tiles = ceil_div(arguments.q_length, shape.queries)
        blocks = arguments.batch * T.int64(op.num_heads) * tiles
        with launch(blocks, shape.threads, together) as (block, thread):
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
            key_range = BlockKeyRange(op, first_row, shape.queries, q_length, kv_length, visits)
            scores = ThreadScores(key_range, cells, numbers, parts)
            # 3. The block.
            operands = (
                elements(inputs[op.query.buffer], op.query, op.head_dim, b, h),
                elements(inputs[op.key.buffer], op.key, op.head_dim, b, g),
                elements(inputs[op.value.buffer], op.value, op.v_head_dim, b, g),
                elements(y, op.output, op.v_head_dim, b, h),
            )
            block_type(shape, place, operands, scores).emit()
    return builder.get()
