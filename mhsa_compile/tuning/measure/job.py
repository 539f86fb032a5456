"""What is measured on a device, and what comes back. NumPy and msgspec only: a device needs no more.

A job is one operation with everything that a candidate for it is called with, and what must come out. A candidate is a
compiled library whose `run` (and, where weights are packed, `pack`) computes that operation in one particular way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np


@dataclass(frozen=True)
class MeasureJob:
    """One operation at the sizes at which it is measured.

    inputs    of `run`, in its order
    weights   of `pack`, in its order; none where nothing is packed
    output    shape and dtype of what `run` writes
    checked   places in the flattened output that are held against `expected`: all of it, or some rows
    expected  what float64 has there
    budget    the largest error allowed there
    flops     useful operations of one call; 0 where nobody counts them
    sets      of inputs that calls take in turn while they are timed: several for what in use reads its inputs from
              memory, which over the same ones would read them from the caches
    """

    inputs: tuple[np.ndarray, ...]
    weights: tuple[np.ndarray, ...]
    output: tuple[tuple[int, ...], str]
    checked: np.ndarray
    expected: np.ndarray
    budget: float
    flops: int = 0
    sets: int = 1

    def error_share(self, output: np.ndarray) -> float:
        """The largest error of an output as a share of the budget: above 1 is wrong; so are NaN and infinity, where
        none are expected."""
        values = output.reshape(-1)[self.checked].astype(np.float64)
        finite = np.isfinite(self.expected)
        if not np.array_equal(finite, np.isfinite(values)):
            return float("inf")
        error = float(np.abs(values[finite] - self.expected[finite]).max(initial=0.0))
        return error / self.budget if self.budget else (0.0 if error == 0 else float("inf"))


@dataclass(frozen=True)
class Candidate:
    """One way to compute a job.

    library    the bytes of a shared library for the device, with `run` and perhaps `pack`
    packed     shape and dtype of each array that `pack` writes, after its weights; `run` takes them after its inputs
    constants  what `run` takes after those; then comes its output
    workspace  shape of a float32 array behind the output, for `run` to work in; none where it is empty
    memory     where all of these arrays lie: "cpu", or "cuda" for a GPU's
    """

    library: bytes
    packed: tuple[tuple[tuple[int, ...], str], ...] = ()
    constants: tuple[np.ndarray, ...] = ()
    workspace: tuple[int, ...] = ()
    memory: str = "cpu"


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="timing"):
    """A candidate that ran, and was right.

    samples_us   microseconds a call in each round, one entry for each round; rounds are shared by the candidates that
                 were measured together, so ratios are taken round by round
    error_share  its largest error as a share of the budget
    """

    samples_us: Annotated[tuple[Annotated[float, msgspec.Meta(gt=0)], ...], msgspec.Meta(min_length=1)]
    error_share: float


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="failure"):
    """A candidate that is out: `reason` is one of those below, `detail` what is known beside it."""

    reason: str
    detail: str = ""


Outcome = Timing | Failure

BUILD, CRASH, TIMEOUT, WRONG, LOST = "did not build", "crashed", "timed out", "over the error budget", "device lost"
"""Why candidates fail. LOST is no fault of theirs: the device, or the way to it, went away; one may be asked for
again."""
