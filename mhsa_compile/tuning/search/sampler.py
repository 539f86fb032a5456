"""Optuna's sampler over a space: what was found goes in, the next point comes out. All of it is in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec

from mhsa_compile.runtime.profile.call_profile import spread
from mhsa_compile.tuning.measure.job import Failure, Timing
from mhsa_compile.tuning.search.space import Point, Space
from mhsa_compile.tuning.search.study_storage import quiet

STARTUP = 16
"""Random draws before the sampler uses what it saw."""
TRIES = 2
"""Draws in a row that cannot be emitted, or are known: the sampler then circles around its best, whose neighbours come
instead. On tables of measured times, of attention and of a linear layer, that found more than eight draws."""
CONFIG = "config"
"""The attribute of a trial that holds its point."""
_KERNEL = "kernel"


def ratios(one: Timing, other: Timing) -> list[float]:
    """The ratios of the times of two candidates, round by round; of the medians, where a company broke up and they
    shared no rounds."""
    if len(one.samples_us) != len(other.samples_us):
        return [median(one.samples_us) / median(other.samples_us)]
    return [a / b for a, b in zip(one.samples_us, other.samples_us, strict=True)]


class TrialResult(msgspec.Struct, frozen=True):
    """What a trial measured: `score` is the median over the rounds of its time by the default's; the rest as in a
    record."""

    score: float
    us: float
    default_us: float
    spread: float
    error_share: float

    @classmethod
    def of(cls, timing: Timing, incumbent: Timing) -> TrialResult:
        return cls(
            score=median(ratios(timing, incumbent)),
            us=median(timing.samples_us),
            default_us=median(incumbent.samples_us),
            spread=spread(timing.samples_us),
            error_share=timing.error_share,
        )


@dataclass(frozen=True)
class Trial:
    """A trial that is done: what it found, or why it found nothing."""

    number: int
    point: Point
    result: TrialResult | Failure


def results_of(trials: Iterable[Trial]) -> list[tuple[TrialResult, Point]]:
    """(what it found, its point) of each trial that found something, the best first."""
    pairs = [(trial.result, trial.point) for trial in trials if isinstance(trial.result, TrialResult)]
    return sorted(pairs, key=lambda pair: pair[0].score)


class Sampler:
    """TPE over the kernel and the knobs of that kernel, together."""

    def __init__(self, space: Space, seed: int) -> None:
        import optuna

        self.space = space
        self._points: set[Point] = set()
        self._drawn: dict[Point, Any] = {}
        with quiet():
            tpe = optuna.samplers.TPESampler(
                seed=seed, multivariate=True, group=True, constant_liar=True, n_startup_trials=STARTUP
            )
            self._study = optuna.create_study(sampler=tpe)

    def learn(self, trials: Iterable[Trial]) -> None:
        """Tells the sampler what was found, here and by others; what failed is not drawn again, and teaches nothing."""
        from optuna.trial import TrialState

        for trial in trials:
            if trial.point in self._points:
                continue
            self._points.add(trial.point)
            score = trial.result.score if isinstance(trial.result, TrialResult) else None
            if (own := self._drawn.pop(trial.point, None)) is not None:
                self._study.tell(own, score, state=TrialState.FAIL if score is None else None)
            elif score is not None:
                self._study.add_trial(self.trial(trial.point, score, {}, done=True))

    def draw(self, points: set[Point]) -> Point | None:
        """A point that can be emitted and is not known; None where TRIES draws in a row give none."""
        from optuna.trial import TrialState

        with quiet():
            for _ in range(TRIES):
                trial = self._study.ask()
                point = self.suggestion(trial)
                if self.space.why_not(point) is not None:
                    self._study.tell(trial, state=TrialState.PRUNED)  # which it learns from
                elif point in points:
                    self._study.tell(trial, state=TrialState.FAIL)  # which it does not
                else:
                    self._drawn[point] = trial  # as long as it runs, its like is not drawn
                    return point
        return None

    def suggestion(self, trial: Any) -> Point:
        """The point that an Optuna trial comes to."""
        names = list(self.space.kernels)
        kernel = trial.suggest_categorical(_KERNEL, names) if len(names) > 1 else names[0]
        knobs = []
        for knob, choices in self.space.values[kernel].items():
            # The place in the order: the sampler takes neighbours to be alike, and steps between values are uneven.
            place = trial.suggest_int(f"{kernel}.{knob}", 0, len(choices) - 1) if len(choices) > 1 else 0
            knobs.append((knob, choices[place]))
        return Point(kernel, tuple(knobs))

    def params(self, point: Point) -> dict[str, Any]:
        """What `suggestion` asks for, so that it comes to this point."""
        choices = self.space.values[point.kernel]
        places = {knob: choices[knob].index(value) for knob, value in point.knobs if len(choices[knob]) > 1}
        kernel = {_KERNEL: point.kernel} if len(self.space.kernels) > 1 else {}
        return kernel | {f"{point.kernel}.{knob}": place for knob, place in places.items()}

    def trial(self, point: Point, score: float | None, attributes: Mapping[str, Any], *, done: bool) -> Any:
        """An Optuna trial of a point: one that runs, or one that is done, and failed without a score."""
        from optuna.trial import TrialState, create_trial

        params = self.params(point)
        state = TrialState.RUNNING if not done else TrialState.FAIL if score is None else TrialState.COMPLETE
        distributions = {name: self._distribution(name) for name in params}
        user_attributes = {CONFIG: plain(point), **attributes}
        return create_trial(
            state=state, value=score, params=params, distributions=distributions, user_attrs=user_attributes
        )

    def _distribution(self, name: str) -> Any:
        from optuna.distributions import CategoricalDistribution, IntDistribution

        if name == _KERNEL:
            return CategoricalDistribution(list(self.space.kernels))
        kernel, _, knob = name.rpartition(".")
        return IntDistribution(0, len(self.space.values[kernel][knob]) - 1)


def plain(point: Point) -> dict[str, Any]:
    """A point as JSON gives it back."""
    return {"kernel": point.kernel, "knobs": [list(knob) for knob in point.knobs]}


def point_of(words: Mapping[str, Any]) -> Point:
    return Point(words["kernel"], tuple((knob, value) for knob, value in words["knobs"]))
