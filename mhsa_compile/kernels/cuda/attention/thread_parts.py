"""What kernels for GPUs ask the steps of scores: their parts of what a thread computes, which are the identity where a
step does not say otherwise. Scores are in units of log2, so that 2^x makes probs of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.attention_args import AttentionArguments
from mhsa_compile.kernels.common.score_scale import LOG2_E
from mhsa_compile.kernels.cuda.primitives.inputs import wide
from mhsa_compile.kernels.cuda.primitives.warp import OfRows, materialize
from mhsa_compile.kernels.interface.ops import AttentionOp
from mhsa_compile.kernels.interface.score_step import ScoreStep

if TYPE_CHECKING:
    from mhsa_compile.kernels.cuda.attention.thread_scores import ThreadScores

CellScore = Callable[[Expr, int], Expr]
"""(score, offset of its key from the thread's first one) -> what becomes of it."""


class CudaMath:
    """Arithmetic on single scores."""

    unit: ClassVar[float] = LOG2_E

    def constant(self, value: float) -> Expr:
        return T.float32(value)

    def tanh(self, x: Expr) -> Expr:
        return T.tanh(x)

    def element(self, buffer: Expr, at: Sequence[Expr]) -> Expr:
        return materialize(wide(buffer[tuple(at)]) * T.float32(self.unit), "float32")


@dataclass(frozen=True)
class ThreadTask:
    """The rows of a thread: of batch entry `b`, and of one head, or each of its own."""

    op: AttentionOp
    own: Sequence[Expr]
    b: Expr
    heads: OfRows[Expr]


class ThreadPart:
    """What a step does to the scores of a thread."""

    masks = False
    """Whether it hides pairs that only the call knows, by `add` and `masked`."""

    def __init__(self, step: ScoreStep, task: ThreadTask) -> None:
        self.step, self.task = step, task

    def of_heads(self, read: Callable[[Expr], Any]) -> OfRows[Any]:
        """What is read of the thread's head, or of that of each of its rows."""
        heads = self.task.heads
        return tuple(map(read, heads)) if isinstance(heads, tuple) else read(heads)

    def read(self) -> None:
        """Reads what the step needs of its heads."""

    def begin(self, mask: ThreadScores) -> None:
        """Computes what depends on the rows alone."""

    def of_product(self, product: Expr) -> Expr | None:
        """The score of a product, where the step wants it in units of its own."""
        return self.exact(product)

    def exact(self, product: Expr) -> Expr | None:
        """`of_product` to the last bits: without the quick instructions that tiles of 16-bit types can afford."""
        factor = self.step.factor(self.task.op.scale)
        return None if factor is None else self.step.score(CudaMath(), product * T.float32(factor))

    def element(self, score: Expr) -> Expr:
        """What becomes of a score by itself, after `exact`."""
        changes = self.step.elementwise and self.step.factor(self.task.op.scale) is None
        return self.step.score(CudaMath(), score) if changes else score

    def of_row(self, row: int, first_key: Expr) -> CellScore | None:
        """What becomes of the scores of a row and the keys of a tile; None: they stay."""
        return (lambda score, _: self.element(score)) if self.step.elementwise else None

    def add(self, scores: Expr, tiles: int, first_key: Expr, mask: ThreadScores) -> None:
        """Hides scores, and changes them, whose keys come in pairs."""

    def masked(self, score: Expr, row: int, query: Expr, key: Expr) -> Expr:
        """`add` of a single score, of a query and a key that there are."""
        return score

    def sink(self, row: int) -> Expr | None:
        """A score of no key, counted from the row's place; None where there is none."""
        return None

    def lack(self, row: int) -> Expr | None:
        """What the scores of a row lack, since they are not counted from its place."""
        return None

    def tilt(self) -> Expr | None:
        """What the head adds to a score for each key further on, where rows are of one head and may ask for it."""
        return None


def thread_parts(arguments: AttentionArguments, b: Expr, heads: OfRows[Expr]) -> list[ThreadPart]:
    """The parts of all steps, in their order."""
    tasks = [(step, ThreadTask(arguments.op, own, b, heads)) for step, own in arguments.steps()]
    return [(step.cuda_rows or ThreadPart)(step, task) for step, task in tasks]
