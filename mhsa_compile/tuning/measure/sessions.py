"""Ways to a device that measures: a child process on this machine, or whatever a tracker of TVM's knows under a key.

    with sessions.local(threads=2) as session:
        sessions.require(session.device, records.isa_of(profile))
        outcomes = session.measure(job, [incumbent, candidate], seconds=0.2)

Every way ends in a connection of TVM's RPC, and everything behind that is the same. The other side is `serve`, or a
plain `python -m tvm.exec.rpc_server`, which can say less of itself.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import msgspec

from mhsa_compile.errors import DeviceError, OutputError
from mhsa_compile.files import atomic_write, room
from mhsa_compile.hardware import host
from mhsa_compile.records.device import Device
from mhsa_compile.records.record import Isa
from mhsa_compile.runtime import cuda_devices
from mhsa_compile.tuning.measure import rpc_connections, rpc_server, runner
from mhsa_compile.tuning.measure.job import LOST, TIMEOUT, Candidate, Failure, MeasureJob, Outcome, Timing
from mhsa_compile.tuning.measure.rpc_connections import Child, Tracker, Way
from mhsa_compile.tuning.measure.runner import Fault

PATIENCE = 30.0
"""Seconds beyond those of the timing that a connection may take, before what runs there counts as hanging."""
WAIT = 60.0
"""Seconds to wait for a free device of a tracker's."""
GRACE = 10.0
"""Seconds after which a device that should have ended a connection is lost."""
UNKNOWN = "unknown"
"""The architecture of a device that does not say: what it loads is its architecture."""
_ROOM = 16 * 2**20  # bytes; a library has 0.1 MiB
_MACHINES = {62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le", 258: "loongarch64"}  # e_machine of ELF

Result = TypeVar("Result")


class Session(Protocol):
    """A way to measure candidates on a device."""

    @property
    def device(self) -> Device:
        """What measured last, or will: a tracker may have several under one key."""
        ...

    @property
    def threads(self) -> int:
        """The threads that a call uses on the device."""
        ...

    def measure(self, job: MeasureJob, candidates: Sequence[Candidate], seconds: float) -> list[Outcome]:
        """What became of each candidate, in their order; they are timed together, for `seconds` a candidate.

        The first is the incumbent. Raises DeviceError for libraries of another architecture than the device's; a
        device that was lost is a Failure(LOST) of those without an outcome.
        """
        ...


@contextmanager
def local(threads: int | None = None, *, patience: float = PATIENCE) -> Iterator[Session]:
    """This machine, in a child process that ends with the block; by default with the CPUs that this process may use.

    Raises InputError and OutputError.
    """
    count = host.thread_count(threads)
    with atomic_write.temporary() as folder:
        if (why := room.without_room(folder, _ROOM)) is not None:
            hint = "Free some space, lift the limit on sizes of files, or choose another place with TMPDIR."
            raise OutputError(repr(str(folder.parent)), f"room for {_ROOM // 2**20} MiB of libraries", why, hint)
        child = Child(count, folder)
        try:
            yield RpcSession(child, patience)
        finally:
            child.stop()


def require(device: Device, isa: Isa) -> None:
    """Raises DeviceError unless the device can run code made for an ISA, as far as it says."""
    if isa.gpu:
        _require_gpu(device, isa.gpu)
    if device.architecture == UNKNOWN:
        return
    if device.architecture != isa.architecture:
        hint = "Choose a target of the device's architecture, or another device."
        raise DeviceError(f"device {device.cpu!r}", f"one of {isa.architecture}", device.architecture, hint)
    if missing := sorted(set(isa.features) - set(device.features)):
        expected = f"one with {' '.join(sorted(isa.features))}"
        why = " `mhsa doctor` there says why it has no tiles." if host.tiles(frozenset(missing)) else ""
        hint = f"Choose a target without them, or another device.{why}"
        raise DeviceError(f"device {device.cpu!r}", expected, f"one without {' '.join(missing)}", hint)


def _require_gpu(device: Device, arch: str) -> None:
    what, gpu = f"device {device.cpu!r}", device.gpu
    expected = f"one with a GPU of compute capability {cuda_devices.capabilities(arch)}, for {arch}"
    if gpu is None:
        hint = "Tune where there is one, by --on tracker or --on bundle. `mhsa doctor` shows what the driver says."
        raise DeviceError(what, expected, "none that says so", hint)
    if not cuda_devices.runs(arch, gpu.capability):
        hint = "Choose the target of this GPU: `mhsa targets` lists them."
        raise DeviceError(what, expected, f"{gpu.name}, of {'.'.join(map(str, gpu.capability))}", hint)


class RpcSession:
    """A Session over connections, one for each attempt."""

    def __init__(self, way: Way, patience: float) -> None:
        """Connects to the device once. Raises DeviceError where there is none."""
        self._way = way
        self._patience = patience
        rpc_connections.rpc()  # the import may take a while, which counts for nobody
        try:
            self._within(patience, self._connection)
        except (_Lost, RuntimeError) as error:
            hint = "Look whether it still runs: `mhsa serve` there."
            raise DeviceError("device", "one that answers", runner.last_words(error), hint) from error

    def _connection(self, patience: float | None = None) -> Any:
        remote = self._way.connect(self._patience if patience is None else patience)
        self.device, self.threads = _device_of(remote), int(remote.get_function("runtime.NumThreads")())
        return remote

    def measure(self, job: MeasureJob, candidates: Sequence[Candidate], seconds: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        company = list(range(len(candidates)))
        try:
            while company:
                result = self._attempt(job, [candidates[i] for i in company], seconds)
                if not isinstance(result, Fault):
                    outcomes |= zip(company, result, strict=True)
                    break
                suspect = company[result.position]
                again = self._confirm(job, candidates[suspect], result, seconds)
                if isinstance(again, Failure):
                    outcomes[suspect] = again
                    company.remove(suspect)
                    continue
                # It is well alone, so another one of the company harmed it. Nobody is timed beside that.
                for i in company:
                    outcomes[i] = again if i == suspect else self._alone(job, candidates[i], seconds)
                break
        except _Lost as error:
            failure = Failure(LOST, str(error))
            return [outcomes.get(i, failure) for i in range(len(candidates))]
        return [outcomes[i] for i in range(len(candidates))]

    def _alone(self, job: MeasureJob, candidate: Candidate, seconds: float) -> Outcome:
        result = self._attempt(job, [candidate], seconds)
        if not isinstance(result, Fault):
            return result[0]
        return self._confirm(job, candidate, result, seconds)

    def _confirm(self, job: MeasureJob, candidate: Candidate, fault: Fault, seconds: float) -> Outcome:
        """A fault is believed when it happens again, alone: it may have been the device's, or another candidate's. Time
        that ran out is not spent twice."""
        if fault.failure.reason == TIMEOUT:
            return fault.failure
        again = self._attempt(job, [candidate], seconds)
        return again.failure if isinstance(again, Fault) else again[0]

    def _attempt(self, job: MeasureJob, candidates: Sequence[Candidate], seconds: float) -> list[Timing] | Fault:
        """One connection's result. Raises _Lost where the device cannot be reached, or goes while it is prepared."""
        patience = self._patience + seconds * len(candidates)

        def attempt() -> list[Timing]:
            try:
                remote = self._connection(patience)
            except DeviceError as error:
                raise _Lost(str(error)) from None
            for candidate in candidates:
                _check_architecture(self.device, candidate.library)
            return runner.timings(remote, job, candidates, seconds, patience)

        try:
            return self._within(patience, attempt)
        except Fault as fault:
            _let_go(fault)
            return Fault(fault.position, fault.failure)
        except RuntimeError as error:
            _let_go(error)
            raise _Lost(runner.last_words(error)) from None

    def _within(self, patience: float, action: Callable[[], Result]) -> Result:
        """What `action` returns or raises; _Lost where it does neither in time. TVM's calls wait for ever for a machine
        that was unplugged, so it has a thread of its own, which is then left behind."""
        results: queue.SimpleQueue[Result | Exception] = queue.SimpleQueue()

        def run() -> None:
            try:
                results.put(action())
            except Exception as error:
                results.put(error)

        threading.Thread(target=run, daemon=True).start()
        seconds = self._way.wait + patience + GRACE
        try:
            result = results.get(timeout=seconds)
        except queue.Empty:
            self._way.stop()
            raise _Lost(f"no answer for {seconds:.0f} seconds") from None
        try:
            if isinstance(result, Exception):
                raise result
            return result
        finally:
            del result  # its traceback holds this frame, and frames hold connections open


def _let_go(error: BaseException) -> None:
    """Lets go of what the frames of an error hold: the other side serves nobody while this connection is open. From
    Python 3.12 on it would be open until garbage is collected, or until its time is up."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__context__


class _Lost(Exception):
    """The device is gone, or nobody was free."""


def _device_of(remote: Any) -> Device:
    try:
        describe = remote.get_function(rpc_server.DEVICE)
    except AttributeError:  # TVM's own server
        return Device(cpu=UNKNOWN, cores=int(remote.get_function("runtime.NumThreads")()), architecture=UNKNOWN)
    return msgspec.json.decode(describe().encode(), type=Device)


def _check_architecture(device: Device, library: bytes) -> None:
    """Raises DeviceError for a library that is an ELF file of another architecture than the device's."""
    machine = _MACHINES.get(int.from_bytes(library[18:20], "little")) if library[:4] == b"\x7fELF" else None
    if machine is not None and device.architecture not in (UNKNOWN, machine):
        hint = "Choose a target of the device's architecture, or another device."
        raise DeviceError(f"device {device.cpu!r}", f"one that runs code for {machine}", device.architecture, hint)


@contextmanager
def tracker(address: str, port: int, key: str, *, wait: float = WAIT, patience: float = PATIENCE) -> Iterator[Session]:
    """A device that TVM's tracker at address:port knows under `key`; each measurement takes whichever is free first.

    Raises DeviceError where the tracker does not answer, or has no free device within `wait` seconds.
    """
    yield RpcSession(Tracker(address, port, key, wait), patience)
