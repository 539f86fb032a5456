"""Files that are hashed as they are read: beside the reading where there is another CPU, and of the very bytes."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mhsa_compile.files.opened_once import HashedFile

DATA = bytes(range(251)) * 12_000  # three blocks of a megabyte


class SlowSha256:
    """As hashlib's, but it looks at the bytes late, and notes the threads that it ran in."""

    def __init__(self) -> None:
        self._sha256, self.threads = hashlib.sha256(), set[int]()

    def update(self, data: memoryview) -> None:
        self.threads.add(threading.get_ident())
        time.sleep(0.01)
        self._sha256.update(data)

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    return path


def read_all(path: Path, size: int, buffer: Callable[[int], bytearray]) -> tuple[bytes, str, set[int]]:
    """What buffers of one size held, the digest, and the threads that hashed."""
    with path.open("rb") as file:
        source = HashedFile(file)
        source._sha256 = slow = SlowSha256()  # type: ignore[assignment]
        parts, number = [], 0
        while count := source.readinto(memoryview(block := buffer(number))[:size]):
            parts.append(bytes(block[:count]))
            number += 1
        return b"".join(parts), source.digest(), slow.threads


@pytest.mark.parametrize("size", [1000, 2**18, 2**20, len(DATA) + 1])
@pytest.mark.parametrize("buffers", [1, 2, 1000])
def test_the_digest_is_of_what_was_read(path: Path, size: int, buffers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if size == 1000:
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    blocks = [bytearray(size) for _ in range(min(buffers, 20))]
    data, digest, threads = read_all(path, size, lambda number: blocks[number % len(blocks)])
    assert data == DATA and digest == hashlib.sha256(DATA).hexdigest()
    assert (threads == {threading.get_ident()}) == (size == 1000)


def test_one_cpu_hashes_as_it_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    _, digest, threads = read_all(path, 2**20, lambda number: bytearray(2**20))
    assert digest == hashlib.sha256(DATA).hexdigest() and threads == {threading.get_ident()}


def test_where_there_are_no_more_threads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(threading.Thread, "start", refused)
    _, digest, threads = read_all(path, 2**20, lambda number: bytearray(2**20))
    assert digest == hashlib.sha256(DATA).hexdigest() and threads == {threading.get_ident()}


def test_the_rest_and_nothing(path: Path, tmp_path: Path) -> None:
    with path.open("rb") as file:
        source = HashedFile(file)
        source.readinto(memoryview(bytearray(2**20)))
        assert source.read() == DATA[2**20 :] and source.digest() == hashlib.sha256(DATA).hexdigest()
    (tmp_path / "empty").touch()
    with (tmp_path / "empty").open("rb") as file:
        assert HashedFile(file).digest() == hashlib.sha256().hexdigest()
