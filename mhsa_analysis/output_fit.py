"""W_O of the heads that are kept, fitted anew on some sequences and measured on others.

Notation: D embed, H heads, F value head dim; K the columns of the heads' outputs that are kept, P those that are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mhsa_analysis.layer_weights import LayerWeights
from mhsa_analysis.moments import LEAST_VARIANCE, HeadMoments, Moments, joined
from mhsa_compile.errors import InputError

PARTS = 4
"""Sequences are dealt to so many parts in turn. The last is never fitted on; the others choose the ridge, each held out
once, and together are what the fit is of."""
NEXT_STEP = "Add more sequences, or longer ones, or remove more heads."
_RIDGES = np.append(2.0 ** np.arange(np.floor(np.log2(LEAST_VARIANCE)), 7), np.inf)
"""By the largest variance of a direction: from less than any that counts up to where the fit is gone, in doublings."""
_CARRIES_OVER = 3**0.5
"""How much larger the unseen error may be. Least squares of n tokens by p columns misses sigma^2 (1 - p/n) of what it
was fitted on and about sigma^2 (1 + p/n) of other tokens: with two tokens a column the errors' ratio is sqrt(3)."""


@dataclass(frozen=True, eq=False)
class SplitMoments:
    """The moments of the parts that are fitted on, apart and together, and of the one that is not; None without one."""

    parts: tuple[HeadMoments, ...]
    fitted: HeadMoments
    unseen: HeadMoments | None

    @classmethod
    def of(cls, layer: LayerWeights, parts: Sequence[Moments]) -> SplitMoments:
        fitted = tuple(HeadMoments.of(layer, part) for part in parts[:-1] if part.count)
        unseen = HeadMoments.of(layer, parts[-1]) if parts[-1].count else None
        return cls(fitted, joined(fitted), unseen)

    def unseen_or_refuse(self, argument: str) -> HeadMoments:
        """The moments that nothing is fitted on. Raises InputError."""
        if self.unseen is None:
            expected = f"statistics of at least {PARTS} sequences: each {PARTS}th is measured on and not fitted on"
            raise InputError(argument, expected, f"{len(self.parts)}", "Add more sequences.")
        return self.unseen

    def why_not_fit(self, heads: Sequence[int]) -> tuple[str, str] | None:
        """(expected, got) where tokens do not determine a fit of the heads that are kept: p columns and a bias pass
        through any p + 1 tokens, so that what is missed is 0 whatever y is."""
        columns = len(self.fitted.columns(heads))
        if self.fitted.tokens >= columns + 2:
            return None
        expected = (
            f"at least {columns + 2} tokens to fit {columns} columns of W_O and a bias on, which pass through any "
            f"{columns + 1} whatever y is"
        )
        return expected, f"{self.fitted.tokens}, without every {PARTS}th sequence"


@dataclass(frozen=True, eq=False)
class OutputFit:
    """out               W_O of what is kept, (len(K), D): the layer's own and what makes up for the heads that are gone
    freedom           sum of s / (s + ridge) over the variances s of the kept columns: as many columns are free; 0 where
                      no fit did better than W_O as it was on sequences held out
    training_error    |y' - y| / |y| over the tokens of the fit, of which there are `tokens`
    unseen_error      the same over `unseen_tokens` others
    """

    out: np.ndarray
    freedom: float
    tokens: int
    training_error: float
    unseen_tokens: int
    unseen_error: float

    @property
    def carries_over(self) -> bool:
        """Whether the unseen error is near the training error: as near as with two tokens a column, or nearer."""
        return self.unseen_error <= _CARRIES_OVER * self.training_error or self.freedom == 0


def relative(moments: HeadMoments, missed: float) -> float:
    """|y' - y| / |y|, from the mean square of what is missed."""
    return float(np.sqrt(max(missed, 0.0) / moments.size)) if moments.size > 0 else 0.0


def fitted(split: SplitMoments, heads: Sequence[int]) -> OutputFit:
    """Ridge regression of what the removed heads added on the kept columns, around their means.

    W_O[K] + (C_KK + ridge)^-1 C_KP W_O[P], C the covariance: without a ridge it is least squares, with an infinite one
    W_O as it was. The ridge is the one that misses least where each part in turn is held out (Hoerl and Kennard, "Ridge
    regression", 1970; Stone, "Cross-validatory choice", 1974). Raises InputError: too few tokens or sequences.
    """
    own = split.fitted
    columns = own.columns(heads)
    unseen = split.unseen_or_refuse("refit")
    if (reason := split.why_not_fit(heads)) is not None:
        raise InputError("refit", *reason, NEXT_STEP)
    whole = _Directions(own, columns)
    ridges = _RIDGES * whole.variances[-1]
    ridge = ridges[_held_out(split.parts, columns, ridges).argmin()]
    gain = whole.gain(ridge)
    out = own.out[columns] + whole.vectors @ (gain[:, None] * whole.target)
    lost = own.out.copy()
    lost[columns] -= out
    return OutputFit(
        out=out,
        freedom=float((whole.variances * gain).sum()),
        tokens=own.tokens,
        training_error=relative(own, own.missed(lost, own.mean)),
        unseen_tokens=unseen.tokens,
        unseen_error=relative(unseen, unseen.missed(lost, own.mean)),
    )


class _Directions:
    """The principal directions of the kept columns that vary, and what each says of the heads that are gone."""

    def __init__(self, moments: HeadMoments, columns: np.ndarray) -> None:
        self.rest = np.setdiff1d(np.arange(len(moments.mean)), columns)
        values, vectors = np.linalg.eigh(moments.covariance[np.ix_(columns, columns)])
        varying = values > LEAST_VARIANCE * max(values[-1], np.finfo(float).tiny)
        if not varying.any():
            varying[-1] = True  # nothing varies, and nothing is to be made up for
        self.variances = np.maximum(values[varying], np.finfo(float).tiny)
        self.vectors = vectors[:, varying]
        self.target = self.vectors.T @ moments.covariance[np.ix_(columns, self.rest)] @ moments.out[self.rest]

    def gain(self, ridge: float) -> np.ndarray:
        """1 / (s + ridge) of each direction."""
        gain: np.ndarray = 1.0 / (self.variances + ridge)
        return gain


def _held_out(parts: Sequence[HeadMoments], columns: np.ndarray, ridges: np.ndarray) -> np.ndarray:
    """The sum of squares of what each ridge misses, less a constant, of parts that are each held out once.

    With rows r around the mean of the fit, z their directions and p what the lost heads add, |p - z gain target|^2 is
    summed from second moments alone: |p|^2, which no ridge changes, -2 gain . (z p target), and gain Q gain.
    """
    missed = np.zeros(len(ridges))
    for fold in range(len(parts)):
        others = joined([part for number, part in enumerate(parts) if number != fold])
        fit, part = _Directions(others, columns), parts[fold]
        off = part.mean - others.mean
        second = part.covariance + np.outer(off, off)
        rows = second[np.ix_(columns, columns)]
        lost = fit.vectors.T @ second[np.ix_(columns, fit.rest)] @ part.out[fit.rest]
        with_lost = (lost * fit.target).sum(axis=1)
        among = (fit.vectors.T @ rows @ fit.vectors) * (fit.target @ fit.target.T)
        for number, ridge in enumerate(ridges):
            gain = fit.gain(ridge)
            missed[number] += part.tokens * float(gain @ among @ gain - 2 * gain @ with_lost)
    return missed
