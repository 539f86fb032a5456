"""The launch of an attention: which rows of which head a block has, what they see, and where each operand lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.arguments import ceil_div
from mhsa_compile.kernels.attention_arguments import attention_arguments
from mhsa_compile.kernels.cuda.attention_mask import Rows, Visibility
from mhsa_compile.kernels.cuda.attention_plan import Plan, plan_arguments, visits_of
from mhsa_compile.kernels.cuda.attention_scores import Scores
from mhsa_compile.kernels.cuda.cells import Cells
from mhsa_compile.kernels.cuda.mask_reader import MaskReader
from mhsa_compile.kernels.cuda.operands import Extras, elements
from mhsa_compile.kernels.cuda.ring import Element
from mhsa_compile.kernels.cuda.warp import WARP, Expr, Place, at_once, settle
from mhsa_compile.kernels.operations import AttentionOp

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


class Block(Protocol):
    """One block of queries of one head: its `operands` are elements of Q, K, V and Y."""

    def __init__(
        self,
        op: AttentionOp,
        shape: Any,
        place: Place,
        operands: tuple[Element, Element, Element, Element],
        visibility: Visibility,
        scores: Scores,
    ) -> None: ...

    @staticmethod
    def layout(shape: Any, place: Place, first: Expr) -> tuple[Rows, Cells]:
        """Which of the rows from `first` on a thread has, and which of a tile's keys."""
        ...

    def emit(self) -> None: ...


def attention(
    op: AttentionOp, shape: TileShape, planned: Plan | None, block_type: type[Block], together: int | None
) -> Expr:
    """The kernel: a block for each `shape.queries` rows of each head; `together` is what `at_once` is told."""
    with IRBuilder() as builder:
        with T.prim_func():
            T.func_name("attention")
            T.func_attr({"tirx.noalias": True})
            given = attention_arguments(op, Extras)
            views = None if planned is None else plan_arguments(planned)
            y, inputs, extras = given.output(), given.inputs, given.extras
            tiles = ceil_div(given.q_length, shape.queries)
            blocks = given.batch * T.int64(op.num_heads) * tiles
            with (
                T.launch_thread("blockIdx.x", blocks) as block,
                T.launch_thread("threadIdx.x", shape.threads) as thread,
                at_once(together),
            ):
                # 1. Which rows of which head: a block's neighbours share its K and V.
                turn, head = (settle(f(T.cast(block, "int64"), tiles), "int64") for f in (T.truncmod, T.truncdiv))
                b, h = (settle(f(head, T.int64(op.num_heads)), "int64") for f in (T.truncdiv, T.truncmod))
                g = settle(T.truncdiv(h, T.int64(op.num_heads // op.num_kv_heads)), "int64")
                visits = None
                if views is not None:
                    turn, visits = visits_of(views, turn, tiles, h)
                elif op.band is not None:
                    turn = settle(tiles - 1 - turn, "int64")  # long rows of a causal head first
                place = Place(thread)
                rows, cells = block_type.layout(shape, place, settle(T.cast(turn * shape.queries, "int32")))
                # 2. What they see, and what their scores are.
                visibility = Visibility(
                    op,
                    cells,
                    rows,
                    q_length=settle(T.cast(given.q_length, "int32")),
                    kv_length=extras.keys(b, given.kv_length),
                    mask=None if given.mask is None else MaskReader(given.mask, b, h),
                    visits=visits,
                )
                scores = Scores(op, visibility, extras.sink(h), extras.slope(h))
                # 3. The block.
                operands = (
                    elements(inputs[op.query.buffer], op.query, op.head_dim, b, h),
                    elements(inputs[op.key.buffer], op.key, op.head_dim, b, g),
                    elements(inputs[op.value.buffer], op.value, op.v_head_dim, b, g),
                    elements(y, op.output, op.v_head_dim, b, h),
                )
                block_type(op, shape, place, operands, visibility, scores).emit()
    return builder.get()
