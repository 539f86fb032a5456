"""One feature of attention scores: what an attention does to its scores beside scaling them, as a class of its own.

An attention has a tuple of steps, in the order of `kernels/scores/order.py`. Whoever needs to know something of its
scores asks the steps, and names none. A step says what it takes, which keys it hides, what it means, and gives each
family of kernels its part of a task; what it does not say is the identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

if TYPE_CHECKING:
    from mhsa_compile.kernels.interface.ops import AttentionOp, TensorInput, WindowSpec

Expr = Any  # TVM has no type stubs
Part = Any
"""A step's part of a task: of a class of its family of kernels."""


class ScoreMath(Protocol):
    """Arithmetic on scores, of one family of kernels. `unit` is a score of 1 in the units that scores have there."""

    unit: ClassVar[float]

    def constant(self, value: float) -> Expr: ...

    def tanh(self, x: Expr) -> Expr: ...

    def element(self, buffer: Expr, at: Sequence[Expr]) -> Expr:
        """An element of floats, of any dtype, as a score."""
        ...


Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SomeRows:
    """Some queries of some batch entries; `distance` (rows, S) is from the place of a query to a key."""

    entries: Array
    rows: Array
    distance: Array


@dataclass(frozen=True)
class RowMeaning:
    """Which of the scores of some rows are visible, and what is added to them: each of (1 or entries, 1 or H, rows, S),
    None where that is nothing; the softcap, 0 for none; scores of no key, (H,)."""

    visible: Array | None = None
    bias: Array | None = None
    softcap: float = 0.0
    sinks: Array | None = None


class ScoreStep:
    """A feature of scores; all that is here says: no change.

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
    extra        its word in a tuner's key, where it has no more to say there
    absent_key   what a tuner's key says where the step is missing
    """

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
    function: Any = None
    window: WindowSpec | None = None

    @property
    def pairs(self) -> np.ndarray[Any, Any] | None:
        return None

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

    def drawn(self, rng: np.random.Generator, kinds: Sequence[tuple[str, tuple[int, ...]]]) -> list[Array]:
        """Random inputs of these dtypes and shapes."""
        return [rng.standard_normal(shape).astype(np.dtype(dtype)) for dtype, shape in kinds]

    def meaning(self, own: Sequence[Array], rows: SomeRows) -> RowMeaning:
        """What it does to the scores of these rows, as `own` says, each with the batch entries in question."""
        return RowMeaning()

    # Words.

    def summary(self) -> str:
        """Its words in a report."""
        return ""

    def semantics(self) -> dict[str, Any]:
        """Its words in a manifest: fields of `Semantics`."""
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

    # Its parts of tasks; None: nothing but what `score` says.

    def cpu_tile(self, task: Any) -> Part | None:
        """A `TilePart`: many queries, along the lanes."""
        return None

    def cpu_rows(self, task: Any) -> Part | None:
        """A `RowPart`: few queries, against keys that lie along the lanes."""
        return None

    def cuda_rows(self, task: Any) -> Part | None:
        """A `ThreadPart`: the rows of a thread."""
        return None

    def plain(self, task: Any) -> Part | None:
        """A `PlainPart`: single scores in float64, for attention that no kernel takes."""
        return None
