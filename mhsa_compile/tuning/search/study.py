"""One Optuna study for each operation: what was drawn, what became of it, and what to draw next.

    with Study(open_storage(url), identity, space) as study:
        drawn = study.ask()                              # None once everything was measured
        study.tell(drawn, outcome, incumbent)

Several processes may ask and tell at once, over any database that Optuna takes. No config is measured twice: a trial
comes into the database with its config, and gives way where one before it has the same. What a dead process had drawn
is drawn again. A score is the time of a candidate by that of the default in the same rounds, so that drift cancels.

The database holds what was measured, or is being measured. The sampler works on a copy in memory, which also holds
what it drew in vain.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec

from mhsa_compile.errors import InputError
from mhsa_compile.tuning.measure.job import LOST, Failure, Outcome, Timing
from mhsa_compile.tuning.search.sampler import CONFIG, Sampler, Trial, TrialResult, plain, point_of, results_of
from mhsa_compile.tuning.search.space import Point, Space
from mhsa_compile.tuning.search.study_storage import Heart, begin_beats, named, quiet

_FOUND, _FAILED = "found", "failed"  # a trial's attributes, beside its config
_ABOUT, _SOURCE = "about", "source"  # a study's


@dataclass(frozen=True)
class OpenTrial:
    """A trial that waits for its outcome."""

    number: int
    point: Point


@dataclass(frozen=True)
class StudyIdentity:
    """What a study is about.

    name    None: one that follows from the rest, so that whoever asks the same continues the same study
    about   the operation, its sizes, the target, the threads, the device: JSON
    source  digest of what it was made for: a study that was given a name serves no other source
    """

    name: str | None
    about: Mapping[str, Any]
    source: str


def digest(value: Any) -> str:
    """The digest of a value as JSON, whatever the order of its keys."""
    return sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()


class Study:
    """The trials of one operation; see the module. Every method raises OutputError where the database is gone."""

    def __init__(self, storage: Any, identity: StudyIdentity, space: Space, *, seed: int = 0) -> None:
        import optuna

        self.space = space
        self._backend = storage
        self._url = str(storage.url)
        self._random = random.Random(seed)
        self._open: dict[int, int] = {}  # of draws that were not told: number -> id
        about = _as_json({**identity.about, "space": space.described()})  # as the storage gives it back
        self.name = identity.name or f"mhsa-{digest(about)[:20]}"
        with named(self._url):
            self._storage = optuna.storages.get_storage(storage)  # which need not read twice what is done
            random_ = optuna.samplers.RandomSampler(seed)  # is asked for nothing
            self._study = optuna.create_study(
                storage=self._storage, study_name=self.name, sampler=random_, load_if_exists=True
            )
            self._check(about, identity)
            self._id = self._storage.get_study_id_from_name(self.name)
        self._sampler = Sampler(space, seed)
        self._heart = Heart(storage)

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *_: object) -> None:
        """Frees what was drawn and not told."""
        self._heart.stop()
        with named(self._url):
            for number in self._open:
                self._finish(number)

    def _check(self, about: dict[str, Any], identity: StudyIdentity) -> None:
        """Raises InputError for a study of this name that is about something else."""
        attributes, values = self._study.user_attrs, {_ABOUT: about, _SOURCE: identity.source}
        for name, value in values.items():
            if name not in attributes:
                self._study.set_user_attr(name, value)
        if identity.name is None:
            return
        what = f"study {self.name!r}"
        hint = "Choose another name, or leave --study out: the name then follows from what is tuned."
        if (source := attributes.get(_SOURCE, identity.source)) != identity.source:
            expected = f"one of this source ({identity.source[:12]})"
            raise InputError(what, expected, f"one made for another ({source[:12]})", hint)
        differing = [key for key, value in about.items() if attributes.get(_ABOUT, about).get(key) != value]
        if differing:
            raise InputError(what, "one of this operation", f"one with another {', '.join(differing)}", hint)

    def guess(self, points: Iterable[Point]) -> None:
        """Draws these points before all others, but for those that are known."""
        with named(self._url):
            points_on_record = _points_of(self._all())
            for point in dict.fromkeys(points):
                if point not in points_on_record:
                    self._enqueue(point)

    def ask(self) -> OpenTrial | None:
        """What to measure next; None where everything was measured, or somebody is at it."""
        with named(self._url), quiet():
            self._take_from_the_dead()
            while True:
                trials = self._all()
                waits = any(trial.state.name == "WAITING" for trial in trials)
                point = None if waits else self._proposal(_trials_of(trials), _points_of(trials))
                if not waits and point is None:
                    return None
                if (proposal := self._dequeue() if point is None else self._claim(point)) is not None:
                    return proposal

    def proposals(self, count: int) -> list[Point]:
        """Points to be measured elsewhere: nothing is written down, and so nobody waits for the outcomes."""
        with named(self._url):
            trials = self._all()
        points: dict[Point, None] = {}
        complete, points_before = _trials_of(trials), _points_of(trials)
        while len(points) < count and (point := self._proposal(complete, points_before | points.keys())) is not None:
            points[point] = None
        return list(points)

    def _take_from_the_dead(self) -> None:
        """Makes what dead processes were measuring wait again."""
        from optuna.storages import fail_stale_trials

        begin_beats(self._backend, self._id)
        fail_stale_trials(self._study)

    def is_settled(self) -> bool:
        """Whether nothing waits or runs, here or elsewhere."""
        with named(self._url):
            return all(trial.state.is_finished() for trial in self._all())

    def running_elsewhere(self) -> int:
        """How many trials other living processes are at."""
        with named(self._url), quiet():
            self._take_from_the_dead()
            running = {trial.number for trial in self._all() if trial.state.name == "RUNNING"}
        return len(running - self._open.keys())

    def left(self) -> list[Point]:
        """What was not drawn yet, in the space's order."""
        with named(self._url):
            return _rest(self.space, _points_of(self._all()))

    def tell(self, trial: OpenTrial, outcome: Outcome, incumbent: Timing) -> None:
        """Writes down what became of a draw. `incumbent` is the default, timed in the same rounds. What was lost is
        drawn again."""
        from optuna.exceptions import UpdateFinishedTrialError

        result = TrialResult.of(outcome, incumbent) if isinstance(outcome, Timing) else None
        with named(self._url):
            try:
                self._storage.set_trial_user_attr(self._open[trial.number], *_attribute(outcome, result))
                self._finish(trial.number, None if result is None else result.score)
            except UpdateFinishedTrialError:
                return  # it was taken from this process, which was thought to be dead
            finally:
                self._heart.remove(self._open.pop(trial.number))
            if isinstance(outcome, Failure) and outcome.reason == LOST:
                self._enqueue(trial.point)

    def add(self, point: Point, outcome: Outcome, incumbent: Timing) -> None:
        """Writes down what was measured elsewhere, without a draw; nothing where it is known, or was lost."""
        with named(self._url):
            if point in _points_of(self._all()) or (isinstance(outcome, Failure) and outcome.reason == LOST):
                return
            result = TrialResult.of(outcome, incumbent) if isinstance(outcome, Timing) else None
            score, (name, value) = None if result is None else result.score, _attribute(outcome, result)
            self._study.add_trial(self._sampler.trial(point, score, {name: value}, done=True))

    def trials(self) -> list[Trial]:
        """All trials that are done, but for those that were lost, in the order in which they were drawn."""
        with named(self._url):
            return _trials_of(self._all())

    def _all(self) -> list[Any]:
        return list(self._study.get_trials(deepcopy=False))

    def _enqueue(self, point: Point) -> None:
        self._study.enqueue_trial(self._sampler.params(point), {CONFIG: plain(point)})

    def _proposal(self, trials: list[Trial], points: set[Point]) -> Point | None:
        """The sampler's next, or what is left nearest to the best: by how many steps of knobs, and then as chance has
        it. None where nothing is left."""
        self._sampler.learn(trials)
        if (point := self._sampler.draw(points)) is not None:
            return point
        rest = _rest(self.space, points)
        self._random.shuffle(rest)
        pairs = results_of(trials)
        return min(rest, key=lambda p: self.space.steps(p, pairs[0][1]) if pairs else 0.0, default=None)

    def _claim(self, point: Point) -> OpenTrial | None:
        """A trial for a point; None where another process was faster."""
        trial_id = self._storage.create_new_trial(self._id, self._sampler.trial(point, None, {}, done=False))
        return self._begin(trial_id, point)

    def _dequeue(self) -> OpenTrial | None:
        """A trial that waited; None where another process was faster, or has drawn the same."""
        trial = self._study.ask()
        if CONFIG not in trial.user_attrs:  # nothing waits any more: this one is new
            self._finish(trial.number)
            return None
        point = point_of(trial.user_attrs[CONFIG])
        self._sampler.suggestion(trial)
        return self._begin(trial._trial_id, point)

    def _begin(self, trial_id: int, point: Point) -> OpenTrial | None:
        self._heart.add(trial_id)
        number = self._storage.get_trial_number_from_id(trial_id)
        if point in _points_of(trial for trial in self._all() if trial.number < number):
            self._heart.remove(trial_id)
            self._finish(number)
            return None
        self._open[number] = trial_id
        return OpenTrial(number, point)

    def _finish(self, number: int, score: float | None = None) -> None:
        """Ends a trial, as failed if it has no score. Does nothing where it was taken from this process, which was
        thought to be dead."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        state = TrialState.FAIL if score is None else None
        with suppress(UpdateFinishedTrialError):
            self._study.tell(number, score, state=state, skip_if_finished=True)


def _attribute(outcome: Outcome, result: TrialResult | None) -> tuple[str, Any]:
    """The attribute, its name and its value, that says what became of a trial."""
    return (_FAILED, msgspec.to_builtins(outcome)) if result is None else (_FOUND, msgspec.to_builtins(result))


def _points_of(trials: Iterable[Any]) -> set[Point]:
    """The points that were measured, failed, wait or run: they need not be drawn."""
    return {point_of(t.user_attrs[CONFIG]) for t in trials if CONFIG in t.user_attrs and _counts(t)}


def _rest(space: Space, others: set[Point]) -> list[Point]:
    return [point for point in space.points if point not in others]


def _trials_of(trials: Iterable[Any]) -> list[Trial]:
    results = ((trial, _result(trial)) for trial in trials)
    return [Trial(t.number, point_of(t.user_attrs[CONFIG]), result) for t, result in results if result is not None]


def _counts(trial: Any) -> bool:
    """Whether a trial's config need not be measured: it was, or somebody is at it, or will be."""
    return trial.state.name in ("RUNNING", "WAITING") or _result(trial) is not None


def _result(trial: Any) -> TrialResult | Failure | None:
    """What a trial found, or how it failed; None for one that is not done, was lost with its device or its process, or
    gave way."""
    if trial.state.name == "COMPLETE":
        return msgspec.convert(trial.user_attrs[_FOUND], TrialResult)
    attribute = trial.user_attrs.get(_FAILED) if trial.state.name == "FAIL" else None
    failure = None if attribute is None else msgspec.convert(attribute, Failure)
    return None if failure is None or failure.reason == LOST else failure


def _as_json(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))
