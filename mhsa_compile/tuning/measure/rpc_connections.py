"""Connections of TVM's RPC: to a server that is started here, and to one that a tracker names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, Protocol

from mhsa_compile.errors import DeviceError
from mhsa_compile.runtime import tvm_runtime
from mhsa_compile.tuning.measure import rpc_server


class Way(Protocol):
    """How a device is reached."""

    @property
    def wait(self) -> float:
        """Seconds that `connect` may have to wait for its turn."""
        ...

    def connect(self, patience: float) -> Any:
        """A `tvm.rpc.RPCSession` that the device ends after `patience` seconds. Raises DeviceError."""
        ...

    def stop(self) -> None:
        """Gives up what does not answer: the next connection is to another one, if there is another."""
        ...


class Child:
    """The server on this machine; started at the first connection, and again when it has died."""

    wait = 60.0  # a slow machine imports TVM for that long

    def __init__(self, threads: int, folder: Path) -> None:
        self._code = f"from mhsa_compile.tuning.measure.rpc_server import child; child({threads})"
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._port = 0

    def connect(self, patience: float) -> Any:
        client = rpc()
        for _ in range(2):
            if self._process is None or self._process.poll() is not None:
                self.stop()
                self._start()
            process = self._process
            try:
                return client.connect(rpc_server.LOOPBACK, self._port, session_timeout=patience)
            except RuntimeError:
                if self._process is not process:
                    break  # it was stopped: nobody waits for this connection any more
                self.stop()
        raise self._dead()

    def _start(self) -> None:
        # A process group of its own: an interrupt at the keyboard is for the client, and ends the child through it.
        with (self._folder / "log").open("a") as log:
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", self._code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(self._folder)},
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            self.stop()
            raise self._dead()
        self._port = int(line)

    def _dead(self) -> DeviceError:
        words = (self._folder / "log").read_text(errors="replace").strip().splitlines()
        got = words[-1] if words else "nothing"
        return DeviceError("the measuring process", "one that starts and answers", got, "`mhsa doctor` may say why.")

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@dataclass(frozen=True)
class Tracker:
    """Whichever device that a tracker knows under a key is free first, within `wait` seconds."""

    address: str
    port: int
    key: str
    wait: float

    def connect(self, patience: float) -> Any:
        client = rpc()
        rpc_server.require_tracker((self.address, self.port))
        end = perf_counter() + self.wait
        while True:
            tracker = client.connect_tracker(self.address, self.port)
            tracker._sock.settimeout(max(0.1, end - perf_counter()))  # an answer comes when a device is free
            try:
                return tracker.request(self.key, session_timeout=patience, max_retry=1)
            except RuntimeError:
                rpc_server.require_tracker((self.address, self.port))
                if perf_counter() > end:
                    raise self._no_device() from None
                sleep(0.1)  # the device that it named is gone; it will know in a moment
            finally:
                tracker.close()

    def stop(self) -> None:
        """Does nothing: the tracker notices by itself who is gone."""

    def _no_device(self) -> DeviceError:
        devices = [entry["key"].partition(":")[2] for entry in self._summary()["server_info"]]
        if self.key in devices:
            got = f"{devices.count(self.key)}, all of them busy"
            return DeviceError(
                f"device {self.key!r}", f"a free one within {self.wait:g} s", got, "Wait longer, or add devices."
            )
        keys = f"devices of {', '.join(map(repr, sorted(set(devices))))}" if devices else "no device"
        hint = f"Start one: mhsa serve --tracker {self.address}:{self.port} --key {self.key}"
        return DeviceError(f"device {self.key!r}", "one that the tracker knows", keys, hint)

    def _summary(self) -> dict[str, Any]:
        tracker = rpc().connect_tracker(self.address, self.port)
        try:
            summary: dict[str, Any] = tracker.summary()
            return summary
        finally:
            tracker.close()


def rpc() -> Any:
    """`tvm.rpc`, over whichever library of TVM's this process has chosen. PyTorch is not imported along."""
    tvm_runtime.start()
    from tvm import rpc

    return rpc
