"""The search for one operation's fastest config: draw, build, measure, until there is nothing more to gain.

The default is part of every measurement, and what counts is the time of a candidate by its own in the same rounds.

Noise. At the beginning and at the end the default is measured against itself. The noise is how far the median of those
ratios is from 1, plus three standard errors of a median of ratios; a smaller difference is none.

When it ends. At its time; at a number of trials; when nothing is left; or when the gain that may still be expected is
under the noise: PATIENCE trials in a row, guesses and random ones apart, lowered the best score by less than that.

At the end the best few are measured against the default once more, for longer, since the best of many short
measurements is one of the lucky ones. Where none of them gains more than the noise, and more than three standard errors
of its own, the default is the best. What is to serve every length has to be no slower at other lengths, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median, quantiles
from time import monotonic, sleep

from mhsa_compile.errors import BuildError, DeviceError
from mhsa_compile.tuning.measure.job import BUILD, LOST, Candidate, Failure, MeasureJob, Outcome, Timing
from mhsa_compile.tuning.measure.sessions import Session
from mhsa_compile.tuning.search.sampler import STARTUP, Trial, TrialResult, ratios, results_of
from mhsa_compile.tuning.search.space import Point, Space
from mhsa_compile.tuning.search.study import OpenTrial, Study

BATCH = 4
"""Candidates that are measured together, beside the default: connecting and sending arrays costs as much as one."""
SECONDS = 0.08
"""Seconds of timing for each candidate of a batch."""
FIRST, LAST = 0.2, 0.4
"""Seconds of timing for each candidate of the first measurement, of the noise, and of the last, of the best."""
FINALISTS = 4
PATIENCE = 40
ELSEWHERE = 0.5
"""Seconds until others are looked after again, who measure the last that is left."""
MOST_LOST = 3
"""Measurements in a row that a device may lose."""

Build = Callable[[Point], Candidate]
"""A function that builds the candidate of a point. Raises BuildError."""


@dataclass(frozen=True)
class Progress:
    """How far the search of an operation is. Times are those of this operation; `best` is a score until it is
    confirmed."""

    default_us: float
    best: float
    trials: int
    failures: dict[str, int]
    noise: float


@dataclass(frozen=True)
class SearchResult:
    """What the search of an operation came to.

    point      the default where nothing was faster by more than the noise
    best       what it measured against the default in the last measurement
    stopped    why the search ended
    swept      with a sweep: what the search alone had found, in the same measurement as `best`
    """

    point: Point
    best: TrialResult
    noise: float
    trials: tuple[Trial, ...]
    stopped: str
    swept: TrialResult | None = None

    @property
    def failures(self) -> dict[str, int]:
        return failures_of(self.trials)


@dataclass
class Search:
    """One operation on one device. `elsewhere` gives the same operation at other lengths, where those are symbolic."""

    space: Space
    job: MeasureJob
    study: Study
    session: Session
    build: Build
    tell: Callable[[Progress], None] = lambda progress: None
    elsewhere: Callable[[], Sequence[MeasureJob]] = tuple
    clock: Callable[[], float] = monotonic
    noise: float = 0.0
    default_us: float = 0.0

    def begin(self) -> None:
        """Measures the default against itself. Raises DeviceError where it cannot be measured, and BuildError."""
        first, second = map(_require_timing, self._outcomes([self.default, self.default], FIRST))
        self.default_us = median(first.samples_us)
        self.noise = noise_of(first, second)

    @cached_property
    def default(self) -> Candidate:
        return self.build(self.space.default)

    def run(self, end: float, trials: int | None = None) -> str:
        """Draws and measures until `end` on the clock, a batch at least. Returns why it stopped."""
        losses = 0
        while True:
            trials_before = self.study.trials()
            self._report(trials_before)
            if self.clock() >= end and len(trials_before) >= BATCH:
                return "time"
            if trials is not None and len(trials_before) >= trials:
                return "trials"
            if self._is_exhausted(trials_before):
                return "no gain beyond the noise"
            others = 0 if trials is None else self.study.running_elsewhere()
            count = BATCH if trials is None else min(BATCH, trials - len(trials_before) - others)
            batch = self._draw(count)
            if not batch and count > 0 and self.study.is_settled():
                return "nothing left"
            if not batch:
                sleep(ELSEWHERE)  # others are at the last ones, or died over them
                continue
            losses = losses + 1 if self._measure(batch) else 0
            if losses >= MOST_LOST:
                _require_timing(Failure(LOST, f"{losses} times in a row"))

    def sweep(self, end: float = float("inf")) -> str:
        """Measures everything that is left, also what other processes are at and do not come through with."""
        while (rest := self.study.left()) or not self.study.is_settled():
            if self.clock() >= end:
                return "time"
            self.study.guess(rest[:BATCH])
            if batch := self._draw(BATCH):
                self._measure(batch)
            else:
                sleep(ELSEWHERE)
            self._report(self.study.trials())
        return "swept"

    def confirm(self, reason: str, before: Sequence[Trial] | None = None) -> SearchResult:
        """Measures the best against the default, longer. With `before`, the trials before a sweep, also the best of
        those."""
        trials = self.study.trials()
        own = [point for _, point in results_of(before or ())][:1]
        finalists = list(dict.fromkeys([*own, *self._finalists(trials)]))
        candidates = {point: self.build(point) for point in finalists}
        everyone = [self.default, *candidates.values(), self.default]
        outcomes = self._outcomes(everyone, LAST)
        first, again = map(_require_timing, (outcomes[0], outcomes[-1]))
        self.noise = noise_of(first, again)
        timings = dict(zip(candidates, outcomes[1:-1], strict=True))
        right = {point: timing for point, timing in timings.items() if isinstance(timing, Timing)}
        point, results = choose(self.space.default, first, right, self.noise)
        while point != self.space.default and not self._holds_elsewhere(candidates[point]):
            del right[point]
            point, _ = choose(self.space.default, first, right, self.noise)
        of_sweep = None if before is None else results.get(own[0] if own else self.space.default)
        return SearchResult(point, results[point], self.noise, tuple(trials), reason, of_sweep)

    def _holds_elsewhere(self, candidate: Candidate) -> bool:
        """Whether a candidate is right, and no slower than the default, at the other lengths."""
        company = [self.default, candidate, self.default]
        return all(no_slower(*self.session.measure(job, company, LAST)) for job in self.elsewhere())

    def _finalists(self, trials: Sequence[Trial]) -> list[Point]:
        """The best few, of those that may be faster than the default."""
        return [point for result, point in results_of(trials) if result.score < 1 and point != self.space.default][
            :FINALISTS
        ]

    def _is_exhausted(self, trials: Sequence[Trial]) -> bool:
        """Whether PATIENCE trials after the first STARTUP gained less than the noise."""
        if len(trials) < STARTUP + PATIENCE:
            return False
        before, all_ = (
            min((f.score for f, _ in results_of(some)), default=1.0) for some in (trials[:-PATIENCE], trials)
        )
        return before - all_ < self.noise * before

    def _draw(self, count: int) -> list[OpenTrial]:
        batch: list[OpenTrial] = []
        while len(batch) < count and (one := self.study.ask()) is not None:
            batch.append(one)
        return batch

    def _measure(self, batch: Sequence[OpenTrial]) -> bool:
        """Builds and measures these, and tells the study. Returns whether the device was lost."""
        candidates: dict[OpenTrial, Candidate] = {}
        incumbent = Timing((self.default_us,), 0.0)
        for one in batch:
            try:
                candidates[one] = self.default if one.point == self.space.default else self.build(one.point)
            except BuildError as error:
                self.study.tell(one, Failure(BUILD, str(error)), incumbent)
        if not candidates:
            return False
        first, *outcomes = self._outcomes([self.default, *candidates.values()], SECONDS)
        if isinstance(first, Failure) and first.reason == LOST:
            outcomes = [first] * len(outcomes)
        else:
            incumbent = _require_timing(first)
        for one, outcome in zip(candidates, outcomes, strict=True):
            self.study.tell(one, outcome, incumbent)
        return any(isinstance(outcome, Failure) and outcome.reason == LOST for outcome in outcomes)

    def _outcomes(self, candidates: Sequence[Candidate], seconds: float) -> list[Outcome]:
        return self.session.measure(self.job, candidates, seconds)

    def _report(self, trials: Sequence[Trial]) -> None:
        best = min((result.score for result, _ in results_of(trials)), default=1.0)
        self.tell(Progress(self.default_us, min(best, 1.0), len(trials), failures_of(trials), self.noise))


def choose(
    default: Point, incumbent: Timing, timings: Mapping[Point, Timing], noise: float
) -> tuple[Point, dict[Point, TrialResult]]:
    """(the fastest of those that gain more than the noise and the error of their own, else the default; what each
    found). All were timed in the same rounds."""
    results = {default: TrialResult.of(incumbent, incumbent)}
    clear = [default]
    for point, timing in timings.items():
        results[point] = TrialResult.of(timing, incumbent)
        if 1 - results[point].score > max(noise, _error(ratios(timing, incumbent))):
            clear.append(point)
    return min(clear, key=lambda point: results[point].score), results


def no_slower(first: Outcome, outcome: Outcome, again: Outcome) -> bool:
    """Whether a candidate takes no longer than the default, which was measured before and after it, by more than their
    noise. Raises DeviceError where the device went away."""
    for one in (first, outcome, again):
        if isinstance(one, Failure):
            if one.reason == LOST:
                _require_timing(one)
            return False
    assert isinstance(first, Timing) and isinstance(outcome, Timing) and isinstance(again, Timing)
    return TrialResult.of(outcome, first).score <= 1 + noise_of(first, again)


def noise_of(first: Timing, second: Timing) -> float:
    """The least difference that means something, as a share: from two measurements of one candidate in turns."""
    samples = ratios(first, second)
    return abs(median(samples) - 1) + _error(samples)


def _error(samples: Sequence[float]) -> float:
    """Three standard errors of the median of these ratios."""
    if len(samples) < 2:
        return 0.0
    lower, _, upper = quantiles(samples, n=4, method="inclusive")
    # 1.25 standard deviations by the root of their number is a median's; the interquartile range is 1.35 of them.
    return float(3 * 1.25 * (upper - lower) / 1.35 / len(samples) ** 0.5)


def failures_of(trials: Sequence[Trial]) -> dict[str, int]:
    """The number of failures for each reason."""
    return dict(Counter(trial.result.reason for trial in trials if isinstance(trial.result, Failure)))


class Unmeasurable(DeviceError):
    """The default config did not come through: there is nothing to compare with."""


def _require_timing(outcome: Outcome) -> Timing:
    """The timing of a default. Raises Unmeasurable, and DeviceError where it was the device that went away."""
    if isinstance(outcome, Timing):
        return outcome
    got = f"{outcome.reason} {outcome.detail}".strip()
    if outcome.reason == LOST:
        hint = "Start it again when the device is back: what was measured is kept."
        raise DeviceError("device", "one that stays", got, hint)
    hint = "`mhsa verify` holds the compiled artifact against float64; `mhsa doctor` looks at this machine."
    raise Unmeasurable("the default config", "one that can be measured", got, hint)
