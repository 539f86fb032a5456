"""Tuning: what is found, what is a difference, when it ends, and what never gets into the records."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import crossover
import msgspec
import pytest
from support import measured
from support.made_session import DEVICE, MadeSession, built

from mhsa_bench.plots import tuning_plots
from mhsa_compile.errors import BuildError, BundleError, DeviceError
from mhsa_compile.hardware import host
from mhsa_compile.hardware.profile import detect, load_profile
from mhsa_compile.kernels.cpu.linear.kernel import CpuLinearKernel
from mhsa_compile.kernels.interface.ops import LinearOp
from mhsa_compile.records import record_files
from mhsa_compile.records.record import for_record
from mhsa_compile.tuning import offline_tuner
from mhsa_compile.tuning.measure import sessions, work_results
from mhsa_compile.tuning.measure.job import CRASH, LOST, WRONG, Candidate, Failure, MeasureJob, Outcome, Timing
from mhsa_compile.tuning.measure.work_results import Measurement
from mhsa_compile.tuning.search import search
from mhsa_compile.tuning.search.search import BATCH
from mhsa_compile.tuning.search.space import Point, Space
from mhsa_compile.tuning.tasks import Request, TaskResult, TuningReport, tasks_of
from mhsa_compile.tuning.tuner import tune

PROFILE = detect()
OP = measured.OP
OTHER = replace(OP, widths=(11, 3))
DEFAULT = Space.of(OP, PROFILE).default


def far(point: Point) -> float:
    """A hill: 100 at the default, 60 at the bottom, which is where the rows are 2, the block is 8 and the depth 64."""
    c = point.config
    steps = [math.log2(c["rows"] / 2), math.log2(c["block"] / 8), math.log2(c["depth"] / 64), math.log2(c["columns"])]
    return 60 + 12 * sum(map(abs, steps))


def flat(point: Point) -> float:
    return 100.0 if point == DEFAULT else 99.5


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    return Request({}, tmp_path / "records.jsonl", f"sqlite:///{tmp_path}/studies.db", seconds=None, trials=8)


def tuned(request: Request, session: MadeSession, **ops: LinearOp) -> TuningReport:
    return tune(ops or {"a": OP}, PROFILE, session, request, build=built)


@pytest.mark.thorough
def test_the_fastest_is_found_and_recorded(request_: Request):
    """A small part of the space is tried, and the machine's speed changes by half from round to round."""
    session = MadeSession(far, drift=0.5)
    report = tuned(replace(request_, trials=48), session)
    (op,) = report.ops
    space = Space.of(OP, PROFILE)
    assert op.trials == report.trials == 48 < op.space == len(space.points)
    assert far(Point.of(op.kernel, op.config)) <= 1.03 * min(map(far, space.points))  # 97 % of the speed
    assert op.speedup == pytest.approx(far(DEFAULT) / far(Point.of(op.kernel, op.config)))
    (record,) = record_files.read(request_.records).records
    assert (record.kernel, record.config, record.threads) == (op.kernel, op.config, 2)
    assert record.device == for_record(DEVICE, PROFILE)
    assert record.median_us < record.default_us and record.sizes == {"rows": 3}
    assert len(session.measured) - len(set(session.measured)) <= 2 + search.FINALISTS  # beside noise and confirmation


@pytest.mark.thorough
def test_a_difference_within_the_noise_is_none(request_: Request):
    report = tuned(request_, MadeSession(flat, noise=0.02))
    (op,) = report.ops
    assert (op.speedup, Point.of(op.kernel, op.config)) == (1.0, DEFAULT)
    assert op.noise > 0.005
    (record,) = record_files.read(request_.records).records
    assert record.config == DEFAULT.config  # that, too, is known now
    assert record.median_us == record.default_us


@pytest.mark.thorough
def test_half_a_percent_counts_where_nothing_moves(request_: Request):
    (op,) = tuned(request_, MadeSession(flat)).ops
    assert op.speedup == pytest.approx(1 / 0.995)


@pytest.mark.thorough
def test_it_goes_on_where_it_ended_and_measures_nothing_twice(request_: Request):
    first, second = MadeSession(far), MadeSession(far)
    assert tuned(replace(request_, trials=8), first).trials == 8
    report = tuned(replace(request_, trials=20), second)
    assert report.trials == 20
    searched = [set(session.measured[1 : 1 + count]) for session, count in ((first, 8), (second, 12))]
    assert not searched[0] & searched[1]
    assert len(record_files.read(request_.records).records) == 2


@pytest.mark.thorough
def test_it_ends_when_the_gain_is_under_the_noise(request_: Request, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(search, "STARTUP", 2)
    monkeypatch.setattr(search, "PATIENCE", 10)
    (op,) = tuned(replace(request_, trials=None), MadeSession(lambda point: 100.0, noise=0.001)).ops
    assert op.stopped == "no gain beyond the noise"
    assert op.trials == 12


def test_it_ends_with_its_time_but_tries_some(request_: Request):
    (op,) = tuned(replace(request_, trials=None, seconds=0.0), MadeSession(far)).ops
    assert (op.stopped, op.trials) == ("time", BATCH)


@pytest.mark.thorough
def test_a_sweep_says_how_near_the_search_came(request_: Request, monkeypatch: pytest.MonkeyPatch):
    few = {"rows": (2, 4), "columns": (1, 2), "block": (8,), "depth": (16, 64), "group": (8,)}
    monkeypatch.setattr(CpuLinearKernel, "search_space", lambda self, op, profile: few)
    space = Space.of(OP, PROFILE)
    (op,) = tuned(replace(request_, trials=8, exhaustive=True), MadeSession(far)).ops
    assert op.stopped == "swept"
    assert 8 < op.trials == op.space == len(space.points)
    best = min(map(far, space.points))
    assert (op.best_us, op.found_us) == (pytest.approx(best), pytest.approx(min(op.history[:8]) * op.default_us))


def test_a_bundle_is_written_measured_and_read(request_: Request, tmp_path: Path):
    """This machine measures it, as a device without a network would; what it found is known to the next bundle."""
    ops, request = {"a": OP}, replace(request_, trials=3)
    work, found = tmp_path / "work.zip", tmp_path / "results.json"
    assert offline_tuner.pack(ops, PROFILE, 1, "this one", request, work) == 3
    work_results.measure(work, found)
    (op,) = offline_tuner.unpack(ops, PROFILE, request, found).ops
    assert op.trials == 3 and op.error_share is not None and op.error_share < 1
    (record,) = record_files.read(request.records).records
    assert (record.kernel, record.config, record.threads) == (op.kernel, op.config, 1)
    assert record.device.cpu == host.cpu_model()
    (again,) = offline_tuner.unpack(ops, PROFILE, request, found).ops
    assert again.history == op.history  # told once
    with pytest.raises(BundleError, match=r"expected those of this source, .* Give the same source"):
        offline_tuner.unpack({"a": OTHER}, PROFILE, request, found)
    with pytest.raises(BundleError, match="expected those of this source"):
        offline_tuner.unpack(ops, PROFILE, replace(request, study="another"), found)
    other = load_profile("neoverse-n1")
    with pytest.raises(BundleError, match="expected those of this target, got those of this one"):
        offline_tuner.unpack(ops, other, request, found)


SYMBOLIC = replace(OP, rows=("L",))
ANY_DEFAULT = Space.of(SYMBOLIC, PROFILE).default


@dataclass
class _OtherwiseElsewhere(MadeSession):
    """`elsewhere` is the time where the rows are not 12."""

    elsewhere: Callable[[Point], float | Failure] = far
    rows: list[int] = field(default_factory=list)

    def measure(self, job: MeasureJob, candidates: Sequence[Candidate], seconds: float) -> list[Outcome]:
        self.rows.append(job.output[0][0])
        here = MadeSession(self.time if self.rows[-1] == 12 else self.elsewhere)
        return here.measure(job, candidates, seconds)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("elsewhere", "is_kept"),
    [
        (far, True),
        (lambda point: 100.0, True),
        (lambda point: 100.0 if point == ANY_DEFAULT else 101.0, False),
        (lambda point: 100.0 if point == ANY_DEFAULT else Failure(WRONG), False),
        (lambda point: Failure(WRONG), False),  # nothing to compare with
    ],
)
def test_a_record_for_every_length_is_no_slower_at_others(
    request_: Request, elsewhere: Callable[[Point], float | Failure], is_kept: bool
):
    session = _OtherwiseElsewhere(far, elsewhere=elsewhere)
    (op,) = tuned(replace(request_, sizes={"L": 12}, trials=16), session, a=SYMBOLIC).ops
    assert (Point.of(op.kernel, op.config) != ANY_DEFAULT) == (op.speedup > 1) == is_kept
    (record,) = record_files.read(request_.records).records
    assert (record.config != ANY_DEFAULT.config) == is_kept and record.key["rows"] == "any"
    assert (set(session.rows[:-2]) == {12} and session.rows[-2:] == [3, 48]) or not is_kept  # of the best alone


@pytest.mark.thorough
def test_a_bundle_measures_symbolic_lengths_at_others(request_: Request, tmp_path: Path):
    ops, request = {"a": SYMBOLIC}, replace(request_, sizes={"L": 12}, trials=2)
    work, found = tmp_path / "work.zip", tmp_path / "results.json"
    assert offline_tuner.pack(ops, PROFILE, 1, "this one", request, work) == 3 * 2
    came = work_results.measure(work, found)
    tasks = list(dict.fromkeys(one.task for one in came.measured))
    assert [task.split()[1] for task in tasks] == ["rows=12", "rows=3", "rows=48"]

    def told(**times: float) -> str:
        """What is recorded where the candidate takes so long at so many rows, and the default 100."""
        default = came.measured[0].label

        def changed(one: Measurement) -> Measurement:
            us = 100.0 if one.label == default else times[one.task.split()[1].replace("=", "")]
            timings = [Timing((time,) * 5, 0.5) for time in (us, 100.0)]
            return msgspec.structs.replace(one, outcome=timings[0], incumbent=timings[1])

        known = msgspec.structs.replace(came, measured=tuple(map(changed, came.measured)))
        path, file = tmp_path / "told.json", tmp_path / f"{times}.jsonl"
        path.write_bytes(msgspec.json.encode(known))
        offline_tuner.unpack(ops, PROFILE, replace(request, records=file), path)
        (record,) = record_files.read(file).records
        return "the default" if record.config == ANY_DEFAULT.config else "the other"

    assert told(rows12=90, rows3=100, rows48=95) == "the other"
    assert told(rows12=90, rows3=100, rows48=101) == "the default"
    assert told(rows12=101, rows3=90, rows48=90) == "the default"


@pytest.mark.thorough
def test_failures_are_counted_and_never_recorded(request_: Request):
    """What is fastest is wrong, what is next crashes."""

    def time(point: Point) -> float | Failure:
        rows = point.config["rows"]
        return Failure(WRONG) if rows == 1 else Failure(CRASH) if rows == 2 else 100.0 + rows

    (op,) = tuned(replace(request_, trials=16), MadeSession(time)).ops
    assert set(op.failures) <= {WRONG, CRASH} and sum(op.failures.values()) == op.history.count(None) > 0
    assert op.config["rows"] not in (1, 2)


@pytest.mark.thorough
def test_what_does_not_build_is_a_failure(request_: Request):
    def build(space: Space, point: Point) -> Candidate:
        if point.config["group"] != DEFAULT.config["group"]:
            raise BuildError("kernel", "code", "none")
        return built(space, point)

    (op,) = tune({"a": OP}, PROFILE, MadeSession(far), request_, build=build).ops
    assert set(op.failures) == {"did not build"}


@pytest.mark.thorough
def test_what_a_device_lost_is_measured_when_it_is_back(request_: Request):
    away = [False, True, True]  # after the measurement of the noise

    class Absent(MadeSession):
        def measure(self, job, candidates, seconds):
            outcomes = super().measure(job, candidates, seconds)
            return [Failure(LOST)] * len(outcomes) if away and away.pop(0) else outcomes

    session = Absent(far)
    (op,) = tuned(replace(request_, trials=8), session).ops
    assert (op.trials, op.failures) == (8, {})
    assert session.measured[1:5] == session.measured[5:9] == session.measured[9:13]
    away[:] = [False, True, True, True]
    with pytest.raises(DeviceError, match="one that stays"):
        tuned(replace(request_, trials=16), Absent(far))


@pytest.mark.thorough
def test_operations_that_are_equal_are_one_and_each_has_its_record(request_: Request):
    report = tuned(replace(request_, trials=4), MadeSession(far), a=OP, b=OTHER, c=OP)
    assert [op.names for op in report.ops] == [("a", "c"), ("b",)]
    assert report.default_us == pytest.approx(3 * far(DEFAULT))
    assert len(record_files.read(request_.records).records) == 2


def test_a_default_that_fails_is_said_and_the_others_are_tuned(request_: Request):
    bad = Space.of(OTHER, PROFILE)

    class Half(MadeSession):
        def measure(self, job, candidates, seconds):
            wrong = job.output[0][-1] == bad.op.out_features
            return [Failure(WRONG)] * len(candidates) if wrong else super().measure(job, candidates, seconds)

    first, second = tuned(request_, Half(far), a=OP, b=OTHER).ops
    assert first.trials == 8 and not second.history
    assert "the default config: expected one that can be measured, got over the error budget" in second.stopped
    assert len(record_files.read(request_.records).records) == 1


def test_a_device_of_another_architecture_is_refused(request_: Request):
    other = load_profile("neoverse-n1" if PROFILE.tvm.mtriple.startswith("x86_64") else "x86-64-v3")
    with pytest.raises(DeviceError, match="architecture"):
        tune({"a": OP}, other, MadeSession(far), request_, build=built)


def test_pictures_of_a_search_and_of_a_crossover(tmp_path: Path):
    history = (1.0, None, 1.7, 9.0, 0.8)
    op = TaskResult(
        names=("a",),
        op="linear",
        sizes={"rows": 3},
        kernel="k",
        config={},
        default_us=10.0,
        best_us=8.0,
        speedup=1.25,
        noise=0.01,
        failures={CRASH: 1},
        stopped="time",
        space=99,
        study="s",
        history=history,
    )
    tuning_plots.searches({"tiny": TuningReport((op,), 1.0)}, tmp_path / "search.svg")
    drawn = (tmp_path / "search.svg").read_text()
    assert "linear rows=3: 10 to 8 µs, 1 failed (x)" in drawn and "the default" in drawn
    crossover.picture({128: {1: 2.0, 8: 0.5}}, tmp_path / "crossover.svg", ("one", "other"), "few queries")
    drawn = (tmp_path / "crossover.svg").read_text()
    assert all(words in drawn for words in ("one is faster", "other is faster", "S = 128", "few queries"))


def test_the_sizes_of_symbols_are_those_asked_for():
    op = replace(OP, rows=("B", "L"))
    (task,) = tasks_of({"a": op}, {"B": 2, "L": 7})
    assert (task.key["rows"], task.sizes) == ("any", {"rows": 14})


@pytest.mark.thorough
def test_planted_kernels_never_enter_the_records(request_: Request):
    """The kernels run on this machine: one is off by one in a tail, one crashes; both would be the fastest."""

    def build(space: Space, point: Point) -> Candidate:
        if point == space.default:
            return measured.kernel()
        if point.config["rows"] == 1:
            return measured.planted(measured.RIGHT, written=29)
        return measured.planted(measured.CRASHES)

    request = replace(request_, trials=4)
    with sessions.local(threads=1) as session:
        (op,) = tune({"a": OP}, PROFILE, session, request, build=build).ops
    assert set(op.failures) <= {WRONG, CRASH} and sum(op.failures.values()) == 3
    (record,) = record_files.read(request_.records).records
    assert record.config == DEFAULT.config
