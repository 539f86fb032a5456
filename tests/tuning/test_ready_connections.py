"""Whoever connects to a measuring device and says nothing keeps nobody waiting, and is cut."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from time import monotonic

import pytest
from support import measured
from support.rpc_processes import TRACKER, process

from mhsa_compile.tuning.measure import rpc_connections, rpc_server, sessions
from mhsa_compile.tuning.measure.job import Timing
from mhsa_compile.tuning.measure.ready_connections import Nobody, ReadyConnections

MAGIC = 0xFF271  # of TVM's RPC
WORDS = {
    "nothing": b"",
    "half a number": b"\x71\xf2",
    "no name": struct.pack("<ii", MAGIC, 11),
    "half a name": struct.pack("<ii", MAGIC, 11) + b"clie",
}
NO_CLIENTS = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: board\r\n\r\n",
    "a name without end": struct.pack("<ii", MAGIC, 2**31 - 1),
    "a name of less than nothing": struct.pack("<ii", MAGIC, -1),
}


Accepting = Callable[[float], tuple[ReadyConnections, int]]


@pytest.fixture
def accepting() -> Iterator[Accepting]:
    """Makes connections that are accepted, with their port, by the seconds that they may be silent."""
    with rpc_server.bind() as listening, ExitStack() as stack:
        yield lambda silence: (stack.enter_context(ReadyConnections(listening, silence)), listening.getsockname()[1])


def connected(port: int, words: bytes) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port), timeout=20)
    found.sendall(words)
    return found


def test_who_speaks_is_let_in_past_who_does_not(accepting: Accepting) -> None:
    spoken, port = accepting(600)
    silent = [connected(port, words) for words in WORDS.values()]
    assert isinstance(spoken.accept()[0], Nobody)
    last = silent.pop()
    threading.Timer(0.3, last.sendall, [b"nt:boar"]).start()
    begin = monotonic()
    connection, address = spoken.accept()
    assert monotonic() - begin < 0.9
    assert address == last.getsockname()
    assert connection.getblocking()
    assert connection.recv(100) == struct.pack("<ii", MAGIC, 11) + b"client:boar"
    for one in (*silent, last, connection):
        one.close()


def test_the_silent_are_cut(accepting: Accepting) -> None:
    spoken, port = accepting(0.2)
    silent = [connected(port, words) for words in WORDS.values()]
    begin = monotonic()
    assert isinstance(spoken.accept()[0], Nobody)
    assert monotonic() - begin < 5
    for one in silent:
        assert one.recv(1) == b""
        one.close()


def test_who_is_no_client_is_cut_at_once_and_who_leaves_is_forgotten(accepting: Accepting) -> None:
    spoken, port = accepting(600)
    strangers = [connected(port, words) for words in NO_CLIENTS.values()]
    for words in WORDS.values():
        connected(port, words).close()
    assert isinstance(spoken.accept()[0], Nobody)
    for one in strangers:
        with suppress(ConnectionResetError):  # what it had said was not read
            assert one.recv(1) == b""
        one.close()
    assert not spoken._waiting


def test_a_crowd_of_the_silent_has_a_bound(accepting: Accepting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mhsa_compile.tuning.measure.ready_connections._MOST", 3)
    spoken, port = accepting(600)
    crowd = [connected(port, b"") for _ in range(8)]
    assert isinstance(spoken.accept()[0], Nobody)
    assert len(spoken._waiting) == 3
    assert crowd[0].recv(1) == b""
    for one in crowd:
        one.close()


def test_a_measurement_beside_the_silent() -> None:
    """TVM's own server waits for the first of them for ever."""
    with sessions.local(threads=1) as session:
        port = session._way._port
        strangers = [connected(port, words) for words in (*WORDS.values(), *NO_CLIENTS.values())]
        begin = monotonic()
        (outcome,) = session.measure(measured.job(), [measured.kernel()], 0.01)
        assert isinstance(outcome, Timing), outcome
        assert monotonic() - begin < 10
        for one in strangers:
            one.close()


@pytest.mark.thorough
def test_a_device_of_a_tracker_beside_the_silent() -> None:
    """It tells the tracker that it lives all the while, and is found under its key."""
    with process("-P", "-c", TRACKER) as child:
        tracker = int(child.stdout.readline())
        place = ["--port", "0", "--tracker", f"127.0.0.1:{tracker}", "--key", "board"]
        with process("-m", "mhsa_compile", "serve", "--json", "--threads", "1", *place) as served:
            text = ""
            while not text.endswith("\n}\n"):
                text += served.stdout.readline()
            strangers = [connected(json.loads(text)["port"], words) for words in WORDS.values()]
            begin = monotonic()
            with sessions.tracker("127.0.0.1", tracker, "board", wait=20) as session:
                assert session.device == rpc_server.this_device()
            assert monotonic() - begin < 15
            summary = rpc_connections.Tracker("127.0.0.1", tracker, "board", 1)._summary()
            assert [entry["key"] for entry in summary["server_info"]] == ["server:board"]
            for one in strangers:
                one.close()
