"""Ways to a device that measures: a child process on this machine, or whatever a tracker of TVM's knows under a key.

    with sessions.local(threads=2) as session:
        sessions.require(session.device, records.isa_of(profile))
        outcomes = session.measure(job, [incumbent, candidate], seconds=0.2)

Every way ends in a connection of TVM's RPC, and everything behind that is the same. The other side is `serve`, or a
plain `python -m tvm.exec.rpc_server`, which can say less of itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, Protocol

import msgspec

from mhsa_compile import host, measuring, serve, tvm_runtime
from mhsa_compile.errors import DeviceError, OutputError
from mhsa_compile.jobs import LOST, TIMEOUT, Candidate, Device, Failure, Job, Outcome, Timing
from mhsa_compile.measuring import Fault
from mhsa_compile.records import Isa

PATIENCE = 30.0
"""Seconds beyond those of the timing that a connection may take, before what runs there counts as hanging."""
WAIT = 60.0
"""Seconds to wait for a free device of a tracker's."""
UNKNOWN = "unknown"
"""The architecture of a device that does not say: what it loads is its architecture."""
_ROOM = 16 * 2**20  # bytes; a library has 0.1 MiB
_MACHINES = {62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le", 258: "loongarch64"}  # e_machine of ELF

Connect = Callable[[float], Any]
"""Seconds until the other side ends it -> a `tvm.rpc.RPCSession`. Raises DeviceError."""


class Session(Protocol):
    """What can measure."""

    @property
    def device(self) -> Device:
        """What measured last, or will: a tracker may have several under one key."""
        ...

    @property
    def threads(self) -> int:
        """That a call uses there."""
        ...

    def measure(self, job: Job, candidates: Sequence[Candidate], seconds: float) -> list[Outcome]:
        """What became of each candidate, in their order; they are timed together, for `seconds` a candidate.

        The first is the incumbent. Raises DeviceError for libraries of another architecture than the device's; a
        device that was lost is a Failure(LOST) of those without an outcome.
        """
        ...


@contextmanager
def local(threads: int | None = None, *, patience: float = PATIENCE) -> Iterator[Session]:
    """This machine, in a child process that ends with the block; by default with the CPUs that this process may use."""
    with tempfile.TemporaryDirectory(prefix="mhsa-device-") as folder:
        if (free := shutil.disk_usage(folder).free) < _ROOM:
            hint = "Free some space, or choose another place with TMPDIR."
            raise OutputError(repr(tempfile.gettempdir()), "room for libraries", f"{free // 2**20} MiB free", hint)
        child = _Child(threads or host.allowed_cpus(), Path(folder))
        try:
            yield RpcSession(child.connect, patience)
        finally:
            child.stop()


def require(device: Device, isa: Isa) -> None:
    """Raises DeviceError unless the device can run code made for an ISA, as far as it says."""
    if device.architecture == UNKNOWN:
        return
    if device.architecture != isa.architecture:
        hint = "Choose a target of the device's architecture, or another device."
        raise DeviceError(f"device {device.cpu!r}", f"one of {isa.architecture}", device.architecture, hint)
    if missing := sorted(set(isa.features) - set(device.features)):
        expected = f"one with {' '.join(sorted(isa.features))}"
        hint = "Choose a target without them, or another device."
        raise DeviceError(f"device {device.cpu!r}", expected, f"one without {' '.join(missing)}", hint)


class RpcSession:
    """A Session over connections that somebody makes."""

    def __init__(self, connect: Connect, patience: float) -> None:
        self._connect = connect
        self._patience = patience
        self._look(connect(patience))

    def _look(self, remote: Any) -> Any:
        self.device, self.threads = _described(remote), int(remote.get_function("runtime.NumThreads")())
        return remote

    def measure(self, job: Job, candidates: Sequence[Candidate], seconds: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        company = list(range(len(candidates)))
        try:
            while company:
                result = self._attempt(job, [candidates[i] for i in company], seconds)
                if not isinstance(result, Fault):
                    outcomes |= zip(company, result, strict=True)
                    break
                suspect = company[result.position]
                again = self._confirmed(job, candidates[suspect], result, seconds)
                if isinstance(again, Failure):
                    outcomes[suspect] = again
                    company.remove(suspect)
                    continue
                # It is well alone, so another one of the company harmed it. Nobody is timed beside that.
                for i in company:
                    outcomes[i] = again if i == suspect else self._alone(job, candidates[i], seconds)
                break
        except _Lost as error:
            lost = Failure(LOST, str(error))
            return [outcomes.get(i, lost) for i in range(len(candidates))]
        return [outcomes[i] for i in range(len(candidates))]

    def _alone(self, job: Job, candidate: Candidate, seconds: float) -> Outcome:
        result = self._attempt(job, [candidate], seconds)
        if not isinstance(result, Fault):
            return result[0]
        return self._confirmed(job, candidate, result, seconds)

    def _confirmed(self, job: Job, candidate: Candidate, fault: Fault, seconds: float) -> Outcome:
        """A fault is believed when it happens again, alone: it may have been the device's, or another candidate's. Time
        that ran out is not spent twice."""
        if fault.failure.reason == TIMEOUT:
            return fault.failure
        again = self._attempt(job, [candidate], seconds)
        return again.failure if isinstance(again, Fault) else again[0]

    def _attempt(self, job: Job, candidates: Sequence[Candidate], seconds: float) -> list[Timing] | Fault:
        """One connection's result. Raises _Lost where the device cannot be reached, or goes while it is prepared."""
        patience = self._patience + seconds * len(candidates)
        try:
            remote = self._look(self._connect(patience))
        except (DeviceError, RuntimeError) as error:
            raise _Lost(measuring.last_words(error)) from None
        for candidate in candidates:
            _check_architecture(self.device, candidate.library)
        try:
            return measuring.timings(remote, job, candidates, seconds, patience)
        except Fault as fault:
            # Not itself: the other side serves nobody while this connection is open, and its frames hold on to that.
            return Fault(fault.position, fault.failure)
        except RuntimeError as error:
            raise _Lost(measuring.last_words(error)) from None


class _Lost(Exception):
    """The device is gone, or nobody was free."""


def _described(remote: Any) -> Device:
    try:
        said = remote.get_function(serve.DEVICE)
    except AttributeError:  # TVM's own server
        return Device(cpu=UNKNOWN, cores=int(remote.get_function("runtime.NumThreads")()), architecture=UNKNOWN)
    return msgspec.json.decode(said().encode(), type=Device)


def _check_architecture(device: Device, library: bytes) -> None:
    """Raises DeviceError for a library that is an ELF file of another architecture than the device's."""
    machine = _MACHINES.get(int.from_bytes(library[18:20], "little")) if library[:4] == b"\x7fELF" else None
    if machine is not None and device.architecture not in (UNKNOWN, machine):
        hint = "Choose a target of the device's architecture, or another device."
        raise DeviceError(f"device {device.cpu!r}", f"one that runs code for {machine}", device.architecture, hint)


class _Child:
    """The server on this machine; started at the first connection, and again when it has died."""

    def __init__(self, threads: int, folder: Path) -> None:
        self._code = f"from mhsa_compile.serve import child; child({threads})"
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._port = 0

    def connect(self, patience: float) -> Any:
        rpc = _rpc()
        for _ in range(2):
            if self._process is None or self._process.poll() is not None:
                self.stop()
                self._start()
            try:
                return rpc.connect(serve.LOOPBACK, self._port, session_timeout=patience)
            except RuntimeError:
                self.stop()
        raise self._dead()

    def _start(self) -> None:
        # A process group of its own: an interrupt at the keyboard is for the client, and ends the child through it.
        with (self._folder / "log").open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", self._code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(self._folder)},
            )
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if not said:
            self.stop()
            raise self._dead()
        self._port = int(said)

    def _dead(self) -> DeviceError:
        words = (self._folder / "log").read_text(errors="replace").strip().splitlines()
        got = words[-1] if words else "nothing"
        return DeviceError("the measuring process", "one that starts and answers", got, "`mhsa doctor` may say why.")

    def stop(self) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._process = None


@contextmanager
def tracker(address: str, port: int, key: str, *, wait: float = WAIT, patience: float = PATIENCE) -> Iterator[Session]:
    """A device that TVM's tracker at address:port knows under `key`; each measurement takes whichever is free first.

    Raises DeviceError where the tracker does not answer, or has no free device within `wait` seconds.
    """
    yield RpcSession(_Tracker(address, port, key, wait).connect, patience)


@dataclass(frozen=True)
class _Tracker:
    address: str
    port: int
    key: str
    wait: float

    def connect(self, patience: float) -> Any:
        rpc = _rpc()
        serve.require_tracker((self.address, self.port))
        end = perf_counter() + self.wait
        while True:
            asked = rpc.connect_tracker(self.address, self.port)
            asked._sock.settimeout(max(0.1, end - perf_counter()))  # an answer comes when a device is free
            try:
                return asked.request(self.key, session_timeout=patience, max_retry=1)
            except RuntimeError:
                serve.require_tracker((self.address, self.port))
                if perf_counter() > end:
                    raise self._no_device() from None
                sleep(0.1)  # the device that it named is gone; it will know in a moment
            finally:
                asked.close()

    def _no_device(self) -> DeviceError:
        found = [entry["key"].partition(":")[2] for entry in self._summary()["server_info"]]
        if self.key in found:
            got = f"{found.count(self.key)}, all of them busy"
            return DeviceError(
                f"device {self.key!r}", f"a free one within {self.wait:g} s", got, "Wait longer, or add devices."
            )
        keys = f"devices of {', '.join(map(repr, sorted(set(found))))}" if found else "no device"
        hint = f"Start one: mhsa serve --tracker {self.address}:{self.port} --key {self.key}"
        return DeviceError(f"device {self.key!r}", "one that the tracker knows", keys, hint)

    def _summary(self) -> dict[str, Any]:
        asked = _rpc().connect_tracker(self.address, self.port)
        try:
            found: dict[str, Any] = asked.summary()
            return found
        finally:
            asked.close()


def _rpc() -> Any:
    """`tvm.rpc`, over whichever library of TVM's this process has chosen. PyTorch is not imported along."""
    tvm_runtime.start()
    from tvm import rpc

    return rpc
