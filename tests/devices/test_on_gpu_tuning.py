"""Tuning on an NVIDIA GPU, measured over RPC and through a bundle: `make test-gpu`. Else skipped, with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.cuda import gpu_machine
from support.gpu_tuning import OP

from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.interface.ops import AttentionOp, LinearOp
from mhsa_compile.records import record_files
from mhsa_compile.records.record import why_not_on
from mhsa_compile.tuning import offline_tuner, op_jobs
from mhsa_compile.tuning.measure import sessions, work_results
from mhsa_compile.tuning.measure.job import WRONG, Failure
from mhsa_compile.tuning.search.space import Space
from mhsa_compile.tuning.tasks import Request
from mhsa_compile.tuning.tuner import built, tune

pytestmark = gpu_machine.marks

LINEAR = LinearOp((1, 197), 256, (256, 64), (True, True), (False, False), "bfloat16")
DECODE = replace(OP, q_length=1, kv_length=1023)


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    return Request({}, tmp_path / "records.jsonl", f"sqlite:///{tmp_path}/studies.db", seconds=60.0, trials=12)


@pytest.mark.parametrize("op", [OP, DECODE, LINEAR], ids=["attention", "decode", "linear"])
def test_a_gpu_is_tuned(request_: Request, op: AttentionOp | LinearOp):
    profile = load_profile(gpu_machine.target())
    with sessions.local(1) as session:
        assert session.device.gpu is not None
        (tuned,) = tune({"a": op}, profile, session, request_).ops
    assert tuned.trials >= 2 and tuned.failures == {} and tuned.error_share is not None and tuned.error_share <= 1
    assert 1 < tuned.best_us <= tuned.default_us < 1e4
    (record,) = record_files.read(request_.records).records
    assert why_not_on(record, profile) is None and record.device.gpu == session.device.gpu


def test_what_is_wrong_on_a_gpu_is_refused(request_: Request):
    """The library of another operation, with the same arrays."""
    profile = load_profile(gpu_machine.target())
    wrong = replace(OP, scale=1.0)
    candidate = built(Space.of(wrong, profile), Space.of(wrong, profile).default)
    with sessions.local(1) as session:
        (outcome,) = session.measure(op_jobs.job_of(OP, {}), [candidate], 0.01)
    assert isinstance(outcome, Failure) and outcome.reason == WRONG


def test_a_bundle_is_measured_on_a_gpu(request_: Request, tmp_path: Path):
    profile, work, out = load_profile(gpu_machine.target()), tmp_path / "work.zip", tmp_path / "results.json"
    count = offline_tuner.pack({"a": OP}, profile, 1, "this GPU", replace(request_, trials=4), work)
    found = work_results.measure(work, out)
    assert len(found.measured) == count and not any(one.failures for one in work_results.summary(found))
    (op,) = offline_tuner.unpack({"a": OP}, profile, request_, out).ops
    assert op.best_us <= op.default_us
