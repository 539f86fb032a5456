"""A session whose times are a formula: quick, and the same every time. Candidates are configs instead of code."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from mhsa_compile.hardware import host
from mhsa_compile.records.device import Device
from mhsa_compile.tuning.measure.job import Candidate, Failure, MeasureJob, Outcome, Timing
from mhsa_compile.tuning.search.space import Point, Space

ROUNDS = 5
DEVICE = Device(cpu="made up", cores=2, architecture=host.architecture(), features=tuple(sorted(host.cpu_features())))


def built(space: Space, point: Point) -> Candidate:
    return Candidate(msgspec.json.encode([point.kernel, point.knobs]))


def point_of(candidate: Candidate) -> Point:
    kernel, knobs = msgspec.json.decode(candidate.library)
    return Point(kernel, tuple((knob, value) for knob, value in knobs))


@dataclass
class MadeSession:
    """`time` says the microseconds of a point, or its failure. Each round has luck of its own, shared by all that are
    measured in it (`drift`), and each sample some of its own (`noise`), as shares."""

    time: Callable[[Point], float | Failure]
    noise: float = 0.0
    drift: float = 0.0
    device: Device = DEVICE
    threads: int = 2
    measured: list[Point] = field(default_factory=list)
    luck: random.Random = field(default_factory=lambda: random.Random(0))

    def measure(self, job: MeasureJob, candidates: Sequence[Candidate], seconds: float) -> list[Outcome]:
        points = [point_of(candidate) for candidate in candidates]
        self.measured += points[1:]
        common = [1 + self.drift * self.luck.random() for _ in range(ROUNDS)]
        return [self._outcome(point, common) for point in points]

    def _outcome(self, point: Point, common: list[float]) -> Outcome:
        us = self.time(point)
        if isinstance(us, Failure):
            return us
        return Timing(tuple(us * luck * (1 + self.noise * self.luck.gauss(0, 1)) for luck in common), 0.25)
