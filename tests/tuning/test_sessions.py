"""Sessions: what is right is timed, and what crashes, hangs, or is wrong costs only itself."""

from __future__ import annotations

import os
import re
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import tvm
from support import measured
from support.attention_ops import attention_of
from support.pretended_cpu import pretend

from mhsa_compile.errors import DeviceError
from mhsa_compile.hardware import host, tile_permission
from mhsa_compile.hardware.profile import detect, load_profile
from mhsa_compile.kernels.cpu.attention.kernel import CpuAttentionKernel
from mhsa_compile.kernels.cpu.linear.kernel import CpuLinearKernel
from mhsa_compile.kernels.interface.ops import HeadLayout
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.records.device import Device
from mhsa_compile.records.record import isa_of
from mhsa_compile.spec.window import WindowSpec
from mhsa_compile.tuning.measure import rpc_server, runner, sessions
from mhsa_compile.tuning.measure.job import BUILD, CRASH, LOST, TIMEOUT, WRONG, Candidate, Failure, MeasureJob, Timing
from mhsa_compile.tuning.measure.runner import Fault
from mhsa_compile.tuning.measure.sessions import RpcSession, Session
from mhsa_compile.tuning.op_jobs import candidate_of, job_of


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with sessions.local(threads=1, patience=2) as session:
        yield session


def test_the_child_says_what_it_is(session: Session) -> None:
    assert (session.threads, session.device.architecture) == (1, host.architecture())
    assert set(session.device.features) == host.usable_features()


def test_right_candidates_are_timed_in_the_same_rounds(session: Session) -> None:
    kernel = measured.kernel()
    one, other = session.measure(measured.job(), [kernel, measured.planted(measured.RIGHT)], 0.02)
    assert isinstance(one, Timing) and isinstance(other, Timing)
    assert len(one.samples_us) == len(other.samples_us) >= 1
    assert 0 < one.error_share < 1 and min(one.samples_us) > 0


def test_sets_of_inputs_take_turns() -> None:
    """What reads its inputs once then reads them from where they lie, not from the caches."""
    seen: list[tuple[int, ...]] = []
    arrays = [tvm.runtime.tensor(np.full(1, i)) for i in range(4)]
    run = {"run": lambda *given: seen.append(tuple(int(array.numpy()[0]) for array in given))}
    seconds = rpc_server.seconds(run, 5, 2, *arrays)
    assert seen == [(0, 1), (2, 3), (0, 1), (2, 3), (0, 1)]
    assert seconds > 0


def test_several_sets_are_sent_and_judged(session: Session) -> None:
    job = replace(measured.job(), sets=3)
    one, wrong = session.measure(job, [measured.kernel(), measured.planted(measured.RIGHT, off_by=1e-3)], 0.02)
    assert isinstance(one, Timing) and one.error_share < 1 and min(one.samples_us) > 0
    assert isinstance(wrong, Failure) and wrong.reason == WRONG


GOES_WRONG = {
    "a crash": (lambda: measured.planted(measured.CRASHES), CRASH),
    "a crash at the second call": (lambda: measured.planted(measured.CRASHES_LATER), CRASH),
    "a hang": (lambda: measured.planted(measured.HANGS), TIMEOUT),
    "a wrong result": (lambda: measured.planted(measured.RIGHT, off_by=1e-3), WRONG),
    "a missing tail": (lambda: measured.planted(measured.RIGHT, written=29), WRONG),
    "no library": (lambda: Candidate(b"nonsense"), BUILD),
}


@pytest.mark.parametrize(("bad", "reason"), GOES_WRONG.values(), ids=GOES_WRONG.keys())
def test_what_goes_wrong_costs_only_itself(
    session: Session, bad: Callable[[], Candidate], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections: list[weakref.ref[Any]] = []
    still_open: list[bool] = []
    connect = session._way.connect

    def observed(patience: float) -> Any:
        still_open.append(any(earlier() is not None for earlier in connections))
        remote = connect(patience)
        connections.append(weakref.ref(remote))
        return remote

    monkeypatch.setattr(session._way, "connect", observed)
    outcomes = session.measure(measured.job(), [measured.kernel(), bad(), measured.kernel()], 0.01)
    assert not any(still_open)  # while one is open, the device serves no other
    assert isinstance(outcomes[0], Timing) and isinstance(outcomes[2], Timing)
    assert isinstance(outcomes[1], Failure) and outcomes[1].reason == reason


@pytest.mark.thorough
def test_every_dtype_crosses(session: Session) -> None:
    """bfloat16 inputs and weights; a boolean mask and 64-bit lengths."""
    linear = replace(measured.OP, dtype="bfloat16")
    placed = [HeadLayout(i, "heads", 2) for i in range(3)]
    mask = CallMask("bool", (2, 1, 3, 5))
    features = {"band": WindowSpec(None, 0), "mask": mask, "lengths": True}
    attention = attention_of(*(2, 3, 5, 3, 1, 2, 2, 0.7), *placed, HeadLayout(0, "rows", 6), **features)
    for op, kernel in ((linear, CpuLinearKernel()), (attention, CpuAttentionKernel())):
        profile = detect()
        candidate = candidate_of(op, kernel, kernel.default_config(op, profile), profile)
        (outcome,) = session.measure(job_of(op, {}), [candidate], 0.0)
        assert isinstance(outcome, Timing), outcome


def test_code_for_another_architecture_is_refused(session: Session) -> None:
    library = bytearray(measured.kernel().library)
    other, machine = ("x86_64", 62) if host.architecture() == "riscv64" else ("riscv64", 243)
    library[18:20] = machine.to_bytes(2, "little")
    said = f"expected one that runs code for {other}, got {host.architecture()}. Choose a target"
    with pytest.raises(DeviceError, match=re.escape(said)):
        session.measure(measured.job(), [replace(measured.kernel(), library=bytes(library))], 0.0)


def test_a_device_must_have_what_the_code_uses() -> None:
    isa = isa_of(detect())
    board = Device(cpu="a board", cores=4, architecture=isa.architecture, features=isa.features)
    sessions.require(board, isa)
    sessions.require(msgspec.structs.replace(board, architecture=sessions.UNKNOWN, features=()), isa)
    with pytest.raises(DeviceError, match=r"device 'a board': expected one of .*, got sparc"):
        sessions.require(msgspec.structs.replace(board, architecture="sparc"), isa)
    with pytest.raises(DeviceError, match=f"got one without {isa.features[0]}"):
        sessions.require(msgspec.structs.replace(board, features=isa.features[1:]), isa)


def test_a_device_that_refuses_tiles_does_not_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "sapphirerapids")
    monkeypatch.setattr(tile_permission, "refusal", lambda: "a sandbox")
    device, needs = rpc_server.this_device(), isa_of(load_profile("sapphirerapids"))
    assert "avx512f" in device.features and "amx_tile" not in device.features
    with pytest.raises(DeviceError, match=r"amx_tile.* `mhsa doctor` there says why it has no tiles"):
        sessions.require(device, needs)


@pytest.mark.thorough
def test_a_device_that_falls_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with sessions.local(threads=1, patience=2) as session:
        monkeypatch.setattr(sessions, "GRACE", -1.9)
        monkeypatch.setattr(type(session._way), "wait", 0.0)
        os.killpg(session._way._process.pid, signal.SIGSTOP)
        (outcome,) = session.measure(measured.job(), [measured.kernel()], 0.0)
        assert isinstance(outcome, Failure) and outcome.reason == LOST
        monkeypatch.undo()
        (outcome,) = session.measure(measured.job(), [measured.kernel()], 0.0)  # by a new process
        assert isinstance(outcome, Timing)


class Nowhere:
    """A way to a device that does nothing: `timings` is somebody else's."""

    wait = 0.0

    def connect(self, patience: float) -> Nowhere:
        return self

    def get_function(self, name: str) -> Callable[[], Any]:
        board = Device(cpu="a board", cores=1, architecture=sessions.UNKNOWN)
        return {"mhsa.device": lambda: msgspec.json.encode(board).decode(), "runtime.NumThreads": lambda: 1}[name]


GOOD, HARMED, BAD = Candidate(b"good"), Candidate(b"harmed"), Candidate(b"bad")


def test_who_harms_the_others_is_not_timed_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One writes where another one's memory is: it is the other that fails, but not by itself."""

    def timings(remote: object, job: MeasureJob, candidates: Sequence[Candidate], *_: float) -> list[Timing]:
        if BAD in candidates and HARMED in candidates:
            raise Fault(candidates.index(HARMED), Failure(CRASH))
        return [Timing((float(len(candidates)),), 0.5)] * len(candidates)

    monkeypatch.setattr(runner, "timings", timings)
    outcomes = RpcSession(Nowhere(), 1.0).measure(measured.job(), [GOOD, HARMED, BAD], 0.0)
    assert outcomes == [Timing((1.0,), 0.5)] * 3


@pytest.mark.thorough
def test_a_crash_that_does_not_happen_again_was_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [Fault(1, Failure(CRASH)), Fault(0, Failure(WRONG, "twice"))]

    def timings(remote: object, job: MeasureJob, candidates: Sequence[Candidate], *_: float) -> list[Timing]:
        if faults:
            raise faults.pop(0)
        return [Timing((1.0,), 0.5)] * len(candidates)

    monkeypatch.setattr(runner, "timings", timings)
    session = RpcSession(Nowhere(), 1.0)
    assert session.measure(measured.job(), [GOOD, BAD], 0.0) == [Timing((1.0,), 0.5), Failure(WRONG, "twice")]
    faults += [Fault(0, Failure(CRASH))]
    assert session.measure(measured.job(), [GOOD], 0.0) == [Timing((1.0,), 0.5)]
