"""One feature of attention scores: what an attention does to its scores beside scaling them, as a class of its own.

An attention has a tuple of steps, in the order of `kernels/scores/order.py`. Whoever needs to know something of its
scores asks the steps, and names none. A step says what it takes, which keys it hides, what it means, and gives each
family of kernels its part of a task; what it does not say is the identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from tvm.ir import Expr

    from mhsa_compile.kernels.interface.ops import AttentionOp, TensorInput
    from mhsa_compile.spec.window import WindowSpec

Part = Any
"""What a step does in a task: a class of its family of kernels, of (step, task); or None."""


Answer = TypeVar("Answer")


def first(answers: Iterable[Answer | None]) -> Answer | None:
    """The first answer that is not None; None where there is none."""
    return next((answer for answer in answers if answer is not None), None)


class ScoreMath(Protocol):
    """Arithmetic on scores, of one family of kernels. `unit` is a score of 1 in the units that scores have there."""

    unit: ClassVar[float]

    def constant(self, value: float) -> Expr: ...

    def tanh(self, x: Expr) -> Expr: ...

    def element(self, buffer: Expr, at: Sequence[Expr]) -> Expr:
        """An element of floats, of any dtype, as a score."""
        ...


@dataclass(frozen=True)
class NodeScores:
    """What a node Attention says, of ONNX or of our domain, as far as it is of its scores.

    dtype      of queries, keys and values
    batch      None where it is not known yet
    heads      of queries
    words      its attributes, by their names
    inputs     (dtype, dims) of what there is for each step's `role`; None where it is not known yet
    beside     the standard's inputs and outputs that it has beside: "past_key", "present_key", "qk_matmul_output"
    pairs      the pairs that are known when it is compiled, bool (1 or H, L, S)
    window     the keys that a query sees by its place
    """

    dtype: str
    batch: int | str | None
    heads: int
    words: Mapping[str, Any]
    inputs: Mapping[str, Sequence[tuple[Any, Any]]]
    beside: tuple[str, ...] = ()
    pairs: np.ndarray | None = None
    window: WindowSpec | None = None

    def mistake_of_heads(self, role: str) -> tuple[str, str] | None:
        """(expected, got) where the input in a role is not one number for each head; None where it is."""
        ((dtype, dims),) = self.inputs.get(role, ((self.dtype, (self.heads,)),))
        if (dtype, dims) == (self.dtype, (self.heads,)):
            return None
        return f"{role} of {self.dtype}, one for each of {self.heads} heads", f"{dtype} of {dims}"


@dataclass(frozen=True)
class SomeRows:
    """Some queries of some batch entries; `distance` (rows, S) is from the place of a query to a key."""

    entries: np.ndarray
    rows: np.ndarray
    distance: np.ndarray


@dataclass(frozen=True)
class RowMeaning:
    """Which of the scores of some rows are visible, and what is added to them: each of (1 or entries, 1 or H, rows, S),
    None where that is nothing; numbers by the names of the formulas that they are of; scores of no key, (H,)."""

    visible: np.ndarray | None = None
    bias: np.ndarray | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    no_key: np.ndarray | None = None


class ScoreStep:
    """A feature of scores; all that is here says: no change.

    attribute    of a node Attention, by which it says the step; "" for none
    role         of the node's inputs that are the step's; "" for none
    read_as      dtypes of these inputs that become others before the step takes them
    foreseeable  whether what it hides is a function of places, which may have its values before any call
    hides        whether it may hide a key from a query
    blind        whether what it hides is known of no pair before it is looked at in the call
    elementwise  whether `score` is all that it does to scores
    bends        whether scores are more than products times the scale, so that their order may be another
    counts_keys  whether batch entries have numbers of keys of their own, as `keys` says
    from_places  whether it counts from the place of a query
    fades        whether scores fall with the distance of a key, by `tilt`
    function     the function of scores that it computes, where it is one
    window       the keys that it leaves a query by its place
    pairs        the pairs that it leaves, (1 or H, L, S), where they are known when the attention is compiled
    not_beside   of families of kernels: what the step is called that cannot stand beside pairs known in advance there
    extra        its word in a report and in a tuner's key, where it has no more to say there
    absent_key   what a tuner's key says where the step is missing

    Its parts of tasks are classes of what each family of kernels has them do; None: nothing but what `score` says.

    cpu_tile     a `TilePart`: many queries, along the lanes
    cpu_rows     a `RowPart`: few queries, against keys that lie along the lanes
    cuda_rows    a `ThreadPart`: the rows of a thread
    plain        a `PlainPart`: single scores in float64, for attention that no kernel takes
    """

    attribute: ClassVar[str] = ""
    role: ClassVar[str] = ""
    read_as: ClassVar[Mapping[str, str]] = {}
    foreseeable: ClassVar[bool] = False
    hides: bool = False
    blind: bool = False
    elementwise: ClassVar[bool] = False
    bends: bool = False
    counts_keys: ClassVar[bool] = False
    from_places: ClassVar[bool] = False
    fades: ClassVar[bool] = False
    not_beside: ClassVar[Mapping[str, str]] = {}
    extra: ClassVar[str] = ""
    absent_key: ClassVar[Mapping[str, Any]] = {}
    cpu_tile: ClassVar[Part] = None
    cpu_rows: ClassVar[Part] = None
    cuda_rows: ClassVar[Part] = None
    plain: ClassVar[Part] = None
    function: Any = None
    window: WindowSpec | None = None

    @property
    def pairs(self) -> np.ndarray[Any, Any] | None:
        return None

    # How a node says it.

    @classmethod
    def captured(cls, word: Any) -> int:
        """How many inputs it takes behind those that have a place of their own, where the node says so much."""
        return 0

    @classmethod
    def mistake(cls, node: NodeScores) -> tuple[str, ...] | None:
        """Where a node says it wrongly: what is expected, what there is, and perhaps a way out."""
        return None

    @classmethod
    def sides(cls, words: Mapping[str, Any]) -> tuple[int, int] | None:
        """How many keys it leaves to the left and to the right of a query, where a node's attributes say so."""
        return None

    @classmethod
    def read(cls, node: NodeScores) -> ScoreStep | None:
        """The step of a node; None: it has none. Of one with a `role` alone, where there is an input."""
        return cls() if cls.role in node.inputs else None

    # What it takes, and whether kernels can do it.

    def arguments(self, op: AttentionOp) -> tuple[tuple[str, TensorInput], ...]:
        """The names and kinds of the inputs that it takes."""
        return ()

    def why_not(self) -> str | None:
        """Why no kernel computes it in float32, or None."""
        return None

    def factor(self, scale: float) -> float | None:
        """What products are multiplied by where the step wants scores in units of its own; None: it does not."""
        return None

    def of_rows(self, rows: tuple[int, ...]) -> tuple[ScoreStep, np.ndarray[Any, Any] | None]:
        """The step where each of these chosen rows is a task of its own, and a constant that it takes then."""
        return self, None

    # Exercises: what a tuner measures kernels with, and their meaning for some rows, in NumPy.

    def random_inputs(self, rng: np.random.Generator, kinds: Sequence[tuple[str, tuple[int, ...]]]) -> list[np.ndarray]:
        """Random inputs of these dtypes and shapes."""
        return [rng.standard_normal(shape).astype(np.dtype(dtype)) for dtype, shape in kinds]

    def meaning(self, own: Sequence[np.ndarray], rows: SomeRows) -> RowMeaning:
        """What it does to the scores of these rows, as `own` says, each with the batch entries in question."""
        return RowMeaning()

    # Words.

    def summary(self) -> str:
        """The step in words, for a report."""
        return self.extra

    def semantics(self) -> dict[str, Any]:
        """Its words in a manifest: fields of `Semantics`, or words of its own, which stand in its `steps`."""
        return {}

    def key(self) -> dict[str, Any]:
        """What a tuner's key says of it, beside its `extra`."""
        return {}

    # What it means, in any arithmetic.

    def keys(self, own: Sequence[Expr], b: Expr, count: Expr) -> Expr:
        """How many of `count` keys batch entry b has; `own` are the step's inputs, here and below."""
        return count

    def score(self, math: ScoreMath, score: Expr) -> Expr:
        """What becomes of a score by itself; one that has a `factor` gets it in units of that."""
        return score

    def tilt(self, math: ScoreMath, own: Sequence[Expr], head: Expr) -> Expr | None:
        """What a head adds to a score for each key further on, where it `fades`."""
        return None

    def cuda_registers(self, row_tiles: int, keys: int, stages: int) -> dict[str, int]:
        """Registers that it takes of a thread of tensor cores, by what they are for; what serves several steps counts
        once."""
        return {}
