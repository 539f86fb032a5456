"""Tuning for NVIDIA GPUs without one: candidates, records, bundles, refusals. On one: test_on_gpu_tuning.py."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from support.cuda.cuda_compiler import needs_compiler
from support.gpu_tuning import OP
from support.made_session import DEVICE, MadeSession, built

from mhsa_compile.compiler.codegen import cuda_compiler
from mhsa_compile.compiler.selection.select_kernel import kernels_for
from mhsa_compile.errors import DeviceError, InstallationError
from mhsa_compile.hardware.profile import TargetProfile, load_profile
from mhsa_compile.kernels.registry import KERNELS
from mhsa_compile.records import record_files
from mhsa_compile.records.device import GpuDevice
from mhsa_compile.records.record import RecordSet, isa_of, why_not_on
from mhsa_compile.runtime import cuda_devices
from mhsa_compile.tuning import offline_tuner, op_jobs
from mhsa_compile.tuning.measure import rpc_server, sessions, work_results
from mhsa_compile.tuning.measure.work_bundle import WorkBundle
from mhsa_compile.tuning.search.space import Point, Space
from mhsa_compile.tuning.search.warm_start import first_guesses
from mhsa_compile.tuning.tasks import Request
from mhsa_compile.tuning.tuner import tune

HOPPER, AMPERE, CPU = (load_profile(name) for name in ("cuda-sm90a", "cuda-sm80", "x86-64-v3"))
H200 = GpuDevice(name="NVIDIA H200", capability=(9, 0), multiprocessors=132)
BOARD = msgspec.structs.replace(DEVICE, gpu=H200)


def time(point: Point) -> float:
    """Fewer keys are faster: 1 us each."""
    return 100.0 + point.config.get("keys", 1000)


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    return Request({}, tmp_path / "records.jsonl", f"sqlite:///{tmp_path}/studies.db", seconds=None, trials=6)


def test_a_search_writes_records_that_compiling_for_that_gpu_uses(request_: Request):
    (op,) = tune({"a": OP}, HOPPER, MadeSession(time, device=BOARD, threads=1), request_, build=built).ops
    (record,) = record_files.read(request_.records).records
    assert record.isa == isa_of(HOPPER) and (record.isa.gpu, record.isa.vector_bits) == ("sm_90a", 0)
    assert record.device == msgspec.structs.replace(BOARD, features=()) and record.device.name == "NVIDIA H200"
    assert op.speedup > 1 and record.config == op.config
    found = RecordSet([record], HOPPER).candidates(record.op, record.key)
    assert found == ([record], "")
    assert op.kernel in {kernel.name for kernel in KERNELS["cuda"]}


@pytest.mark.thorough_but("made_for0-used_on0")
@pytest.mark.parametrize(("made_for", "used_on"), [(HOPPER, AMPERE), (AMPERE, HOPPER), (HOPPER, CPU), (CPU, HOPPER)])
def test_a_record_of_another_gpu_or_of_a_cpu_is_never_used(
    request_: Request, made_for: TargetProfile, used_on: TargetProfile
):
    """This holds where the code itself would run, too: what is fast on one GPU says little of another."""
    record = recorded(request_, made_for)
    assert why_not_on(record, made_for) is None
    assert why_not_on(record, used_on) is not None and "made for" in str(why_not_on(record, used_on))
    assert RecordSet([record], used_on).candidates(record.op, record.key)[0] == []


def recorded(request: Request, profile: TargetProfile):
    gpu = None if profile is CPU else msgspec.structs.replace(H200, capability=profile.tvm.capability)
    op = OP if profile is not CPU else replace(OP, dtype="float32")
    device = msgspec.structs.replace(DEVICE, gpu=gpu, features=tuple({*DEVICE.features, *isa_of(profile).features}))
    tune({"a": op}, profile, MadeSession(time, device=device), request, build=built)
    return record_files.read(request.records).records[-1]


@pytest.mark.thorough
def test_records_of_one_gpu_are_first_guesses_for_another(request_: Request):
    record = recorded(request_, AMPERE)
    space = Space.of(OP, HOPPER)
    expected = space.nearest(record.kernel, record.config)
    assert expected in first_guesses(space, [record])
    cpu = recorded(request_, CPU)
    assert first_guesses(space, [cpu]) == [space.default]


def test_a_device_is_held_against_the_target(request_: Request):
    sessions.require(BOARD, isa_of(HOPPER))
    sessions.require(
        msgspec.structs.replace(BOARD, gpu=msgspec.structs.replace(H200, capability=(8, 6))), isa_of(AMPERE)
    )
    with pytest.raises(DeviceError, match=r"compute capability 9\.0, for sm_90a, got none"):
        sessions.require(DEVICE, isa_of(HOPPER))
    with pytest.raises(DeviceError, match=r"capability 8\.0 to 8\.9, for sm_80, got NVIDIA H200, of 9\.0"):
        tune({"a": OP}, AMPERE, MadeSession(time, device=BOARD), request_, build=built)


def test_a_device_says_which_gpu_it_has(monkeypatch: pytest.MonkeyPatch):
    assert rpc_server.this_device().gpu is None  # nobody asked: a process that forks must not start the driver
    found = cuda_devices.Gpu(0, "NVIDIA H200", (9, 0), 132, 227)
    monkeypatch.setattr(cuda_devices, "first", lambda: found)
    assert rpc_server.this_device(gpu=True).gpu == H200

    def broken() -> None:
        raise InstallationError("NVIDIA driver", "one that starts", "none")

    monkeypatch.setattr(rpc_server.tvm_runtime, "start_cuda", broken)  # a driver, but nothing that launches
    assert json.loads(rpc_server._description(False))["gpu"] is None


@pytest.mark.thorough
@needs_compiler
def test_a_candidate_is_a_library_with_machine_code(tmp_path: Path):
    (kernel, *_), _ = kernels_for(OP, AMPERE)
    candidate = op_jobs.candidate_of(OP, kernel, kernel.default_config(OP, AMPERE), AMPERE)
    assert candidate.memory == "cuda"
    start = candidate.library.index(b"\x7fELF", 4)
    assert cuda_compiler.architecture(candidate.library[start:]) == "sm_80"
    assert b"__global__" not in candidate.library


@pytest.mark.thorough
@needs_compiler
def test_a_bundle_for_a_gpu_is_refused_where_there_is_none(request_: Request, tmp_path: Path):
    work = tmp_path / "work.zip"
    assert offline_tuner.pack({"a": OP}, AMPERE, 1, "cuda-sm80", replace(request_, trials=2), work) == 2
    with WorkBundle.opened(work) as opened:
        assert opened.order.isa.gpu == "sm_80" and opened.candidate(0, 1).memory == "cuda"
    if cuda_devices.first() is None:
        with pytest.raises(DeviceError, match=r"one with a GPU of compute capability 8\.0 to 8\.9"):
            work_results.measure(work, tmp_path / "results.json")
        assert not (tmp_path / "results.json").exists()


@pytest.mark.thorough
@pytest.mark.skipif(cuda_devices.first() is not None, reason="there is a GPU here")
def test_tuning_for_a_gpu_without_one_says_so(tmp_path: Path):
    words = ["tune", "--workload", "tiny", "--dtype", "bfloat16", "--target", "cuda-sm90a", "--seconds", "1"]
    words += ["--records", str(tmp_path / "r.jsonl")]
    done = subprocess.run([sys.executable, "-P", "-m", "mhsa_compile", *words], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "sm_90a" in done.stderr and "--on bundle" in done.stderr
    assert not (tmp_path / "r.jsonl").exists()
