"""MetaSchedule for what no kernel claims: tasks, a small search, its record used, and records that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import tvm
from support.records_made import made
from tvm import relax, te

from mhsa_compile.compiler.codegen.build import pass_context
from mhsa_compile.compiler.fallback import cpu_schedule, traces
from mhsa_compile.hardware.profile import TargetProfile, load_profile
from mhsa_compile.records.record import Record, RecordSet, isa_of
from mhsa_compile.runtime.artifact.manifest import OpReport
from mhsa_compile.tuning import fallback_jobs, metaschedule
from mhsa_compile.tuning.measure import sessions
from mhsa_compile.tuning.measure.job import WRONG


@pytest.fixture(scope="module")
def profile() -> TargetProfile:
    return load_profile("native")


def norms(*rows: Any, width: int = 37, name: str = "x") -> Any:
    """A module whose `main` normalises x (rows, width), with a scale and an offset."""
    builder = relax.BlockBuilder()
    shapes = {name: (*rows, width), "scale": (width,), "offset": (width,)}
    given = [relax.Var(word, relax.TensorType(shape, "float32")) for word, shape in shapes.items()]
    with builder.function("main", given):
        with builder.dataflow():
            output = builder.emit_output(builder.emit(relax.op.nn.layer_norm(*given, [-1])))
        builder.emit_func_output(output)
    return builder.get()


@pytest.fixture(scope="module")
def session() -> Iterator[sessions.Session]:
    with sessions.local(threads=1) as session:
        yield session


@pytest.fixture(scope="module")
def result(profile: TargetProfile, session: sessions.Session) -> metaschedule.ScheduleResult:
    """A search of two trials, to which whatever is right is an improvement."""
    (task,) = fallback_jobs.fallback_tasks(norms(53), profile)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metaschedule, "noise_of", lambda first, last: -1e9)
        return metaschedule.tune_function(task, profile, session, seconds=30, trials=2)


def run(module: Any, *inputs: np.ndarray) -> np.ndarray:
    with pass_context():
        built = relax.build(module, tvm.target.Target("llvm"))
    return relax.VirtualMachine(built, tvm.cpu())["main"](*map(tvm.runtime.tensor, inputs)).numpy()


def test_a_search_makes_a_record_that_compiles(result: metaschedule.ScheduleResult, profile: TargetProfile) -> None:
    assert result.trials == 2
    record = result.record
    assert record is not None
    assert 0 < record.error_share <= 1
    assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record
    lowered = cpu_schedule.lower(norms(53, name="called_otherwise"), profile, RecordSet([record], profile))
    (row,) = lowered.reports
    assert (row.source, row.kernel, row.op) == ("record", "tvm", "tvm")
    assert "times as fast as the default" in row.tuning
    assert msgspec.json.decode(msgspec.json.encode(row), type=OpReport) == row
    job = fallback_jobs.job_of(result.task, seed=7)
    assert job.error_share(run(lowered.module, *job.inputs)) <= 1


@pytest.mark.thorough
def test_what_is_wrong_makes_no_record(
    profile: TargetProfile, session: sessions.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedules that leave out the last column."""
    (task,) = fallback_jobs.fallback_tasks(norms(53), profile)
    whole, short = (f"T.grid(T.int64(53), T.int64({width}))" for width in (37, 36))
    assert whole in task.function.script()
    missing = tvm.script.from_source(task.function.script().replace(whole, short))
    monkeypatch.setattr(traces, "apply", lambda function, trace: missing)
    monkeypatch.setattr(metaschedule, "noise_of", lambda first, last: -1e9)
    found = metaschedule.tune_function(task, profile, session, seconds=30, trials=2)
    assert found.failures == {WRONG: 2}
    assert found.record is None
    assert found.best_us == found.default_us


@pytest.mark.thorough_only("changes1-does not apply: its trace does not fit")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"trace": '[[["GetSBlock", [], ["b9", "main"], ["b0"]]], []]'}, "does not apply: its trace does not fit"),
        ({"trace": "not JSON"}, "does not apply: its trace does not fit"),
        ({"isa": isa_of(load_profile("neoverse-v1"))}, "made for aarch64"),
    ],
)
def test_a_record_that_does_not_fit_is_a_reason(
    result: metaschedule.ScheduleResult, profile: TargetProfile, changes: dict[str, Any], reason: str
) -> None:
    foreign = msgspec.structs.replace(result.record, **changes)
    (row,) = cpu_schedule.lower(norms(53), profile, RecordSet([foreign], profile)).reports
    assert row.source == "fallback"
    assert reason in row.tuning


def test_other_functions_have_no_row(result: metaschedule.ScheduleResult, profile: TargetProfile) -> None:
    assert result.record is not None
    for module in (norms(59), norms(53, width=41), norms(te.var("n", "int64"))):
        assert cpu_schedule.lower(module, profile, RecordSet([result.record, made()], profile)).reports == []


@pytest.mark.thorough
def test_what_cannot_be_tuned_says_why(profile: TargetProfile) -> None:
    (task,) = fallback_jobs.fallback_tasks(norms(te.var("n", "int64")), profile)
    assert "lengths are symbols" in task.reason
