"""`mhsa serve`: a device that outlives what it runs, ends with its client, and is found through a tracker."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import msgspec
import pytest
from support import measured
from support.rpc_processes import TRACKER, process
from typer.testing import CliRunner

from mhsa_compile.cli.app import app
from mhsa_compile.errors import DeviceError
from mhsa_compile.records.device import Device
from mhsa_compile.tuning.measure import rpc_server, sessions
from mhsa_compile.tuning.measure.job import CRASH, LOST, Failure, Timing


@pytest.fixture(scope="module")
def tracker() -> Iterator[tuple[subprocess.Popen[str], int]]:
    with process("-P", "-c", TRACKER) as child:
        yield child, int(child.stdout.readline())


@contextmanager
def device(tracker_port: int, key: str) -> Iterator[subprocess.Popen[str]]:
    """`mhsa serve` on a free port."""
    place = ["--port", "0", "--tracker", f"127.0.0.1:{tracker_port}", "--key", key]
    with process("-m", "mhsa_compile", "serve", "--json", "--threads", "1", *place) as child:
        text = ""
        while not text.endswith("\n}\n"):
            text += child.stdout.readline()
        assert msgspec.convert(json.loads(text)["device"], Device) == rpc_server.this_device()
        yield child


def find(port: int, key: str, wait: float) -> None:
    with sessions.tracker("127.0.0.1", port, key, wait=wait):
        pass


def free_port() -> int:
    with rpc_server.bind() as listening:
        return listening.getsockname()[1]


def test_an_absent_tracker_is_named_at_once() -> None:
    with pytest.raises(DeviceError, match=r"tracker 127.0.0.1:\d+: expected one that answers, .*\.rpc_tracker"):
        find(free_port(), "board", wait=600)


def test_something_else_is_no_tracker() -> None:
    with rpc_server.bind() as listening:

        def answer() -> None:
            with listening.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400")

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(DeviceError, match="a tracker of TVM's, got something else"):
            find(listening.getsockname()[1], "board", wait=600)
        answering.join()


@pytest.mark.thorough
def test_a_device_that_is_killed_costs_no_measurement(tracker: tuple[subprocess.Popen[str], int]) -> None:
    """Two devices, one of which is killed while it measures: whatever was there is measured by the other."""
    _, port = tracker
    with (
        device(port, "pair") as one,
        device(port, "pair") as other,
        sessions.tracker("127.0.0.1", port, "pair", wait=20) as session,
        pytest.MonkeyPatch.context() as patch,
    ):
        connect, killed = session._way.connect, []

        def connect_and_kill(_: object, patience: float) -> object:
            remote = connect(patience)
            if not killed:
                killed.append(served_by(one, other))
                threading.Timer(0.2, killed[0].kill).start()
            return remote

        patch.setattr(type(session._way), "connect", connect_and_kill)
        outcomes = session.measure(measured.job(), [measured.kernel(), measured.kernel()], 0.3)
        assert killed[0].wait() == -signal.SIGKILL
        assert all(isinstance(outcome, Timing) for outcome in outcomes), outcomes


def served_by(*servers: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """The server that has a fork, which serves a connection."""
    for server in servers:
        if Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().strip():
            return server
    raise AssertionError("nobody serves a connection")


def test_a_device_through_a_tracker(tracker: tuple[subprocess.Popen[str], int]) -> None:
    process, port = tracker
    with pytest.raises(DeviceError, match=r"got no device\. Start one: mhsa serve --tracker"):
        find(port, "board", wait=0.1)
    with device(port, "board"), sessions.tracker("127.0.0.1", port, "board", wait=20, patience=5) as session:
        assert session.device == rpc_server.this_device()
        right, crash = session.measure(measured.job(), [measured.kernel(), measured.planted(measured.CRASHES)], 0.01)
        assert isinstance(right, Timing) and isinstance(crash, Failure) and crash.reason == CRASH
        with pytest.raises(DeviceError, match="got devices of 'board'"):
            find(port, "bread", wait=0.1)
        held = session._way.connect(5)
        with pytest.raises(DeviceError, match=r"a free one within 0.1 s, got 1, all of them busy"):
            find(port, "board", wait=0.1)
        del held
        process.send_signal(signal.SIGKILL)
        process.wait()
        (lost,) = session.measure(measured.job(), [measured.kernel()], 0.01)
        assert isinstance(lost, Failure) and lost.reason == LOST and "expected one that answers" in lost.detail


CLIENT = """
import os
from mhsa_compile.tuning.measure import sessions
with sessions.local(threads=1) as session:
    held = session._way.connect(600)
    print(session._way._process.pid, flush=True)
    os.read(0, 1)
"""


def test_the_child_ends_when_its_client_is_killed() -> None:
    with process("-P", "-c", CLIENT) as client:
        group = int(client.stdout.readline())
        assert members(group)  # the server and the fork that serves the connection
        client.kill()
        end = monotonic() + 10
        while members(group) and monotonic() < end:
            sleep(0.02)
        assert not members(group)


def members(group: int) -> list[int]:
    """The living processes of a group."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, _, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            found += [int(folder.name)] if int(its_group) == group and state != "Z" else []
    return found


def test_a_port_in_use_and_a_foreign_address_are_named() -> None:
    with rpc_server.bind() as listening, pytest.raises(DeviceError, match="Address already in use"):
        rpc_server.bind(port=listening.getsockname()[1])
    with pytest.raises(DeviceError, match="an address to listen at"):
        rpc_server.bind("192.0.2.1")


@pytest.mark.parametrize("text", ["board", "board:", ":9190", "board:9190x", "board:65536", "board:-1"])
def test_an_address_is_a_host_and_a_port(text: str) -> None:
    with pytest.raises(DeviceError, match="--tracker: expected HOST:PORT"):
        rpc_server.parsed(text, "--tracker")


def test_addresses() -> None:
    assert rpc_server.parsed("[::1]:9190", "--tracker") == ("::1", 9190)
    assert rpc_server.is_loopback("127.0.0.2") and rpc_server.is_loopback("::1")
    assert not rpc_server.is_loopback("0.0.0.0") and not rpc_server.is_loopback("192.0.2.1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tracker", "192.0.2.1:9190", "--key", "k"], "--host: expected an address that others"),
        (["--tracker", "127.0.0.1:9190"], "--tracker and --key: expected both, or neither"),
        (["--key", "k"], "--tracker and --key: expected both, or neither"),
    ],
)
def test_what_serve_refuses(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    assert said in result.output


def test_an_emulator_with_the_hosts_cpuinfo_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not rpc_server.this_device().emulated
    monkeypatch.setattr(rpc_server.host, "architecture", lambda: "aarch64")
    monkeypatch.setattr(rpc_server.host, "cpu_features", lambda root=rpc_server.host.ROOT: frozenset({"sse2", "avx2"}))
    assert rpc_server.this_device().emulated


def test_a_device_is_told_in_json() -> None:
    device = rpc_server.this_device()
    assert msgspec.json.decode(msgspec.json.encode(device), type=type(device)) == device
    assert device.cores >= 1
