"""Of several processes that compile the same thing, one does and the rest wait; one that dies lets the next go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mhsa_compile.compiler.cache import artifact_store
from mhsa_compile.compiler.cache.artifact_store import Turn

KEY = "0" * 64
HOLDER = """
import sys, time
from pathlib import Path
from mhsa_compile.compiler.cache.artifact_store import Turn
turn = Turn(Path(sys.argv[1]), sys.argv[2])
turn.take()
print("taken", flush=True)
time.sleep(600)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", HOLDER, folder, KEY], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "taken\n"
    return child


def test_the_next_one_goes_on_when_a_holder_is_killed(tmp_path: Path) -> None:
    with holder(tmp_path) as child:
        turn = Turn(tmp_path, KEY)
        waiter = threading.Thread(target=turn.take)
        waiter.start()
        waiter.join(0.3)
        assert waiter.is_alive()  # the control: a living holder is waited for
        os.kill(child.pid, signal.SIGKILL)
        waiter.join(5)
        assert not waiter.is_alive()
    assert not turn._try_lock()  # it is its own by now, and so nobody else's
    turn.over()
    assert list(tmp_path.iterdir()) == []


def test_one_that_hangs_is_waited_for_no_longer_than_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact_store, "WAIT_SECONDS", 0.2)
    with holder(tmp_path) as child:
        begin = time.monotonic()
        turn = Turn(tmp_path, KEY)
        turn.take()
        turn.over()
        assert time.monotonic() - begin < 5 and (tmp_path / f".{KEY}.lock").exists()
        child.kill()


def test_turns_do_not_overlap(tmp_path: Path) -> None:
    inside, most = 0, 0

    def work(_: int) -> None:
        nonlocal inside, most
        for _ in range(5):
            turn = Turn(tmp_path, KEY)
            turn.take()
            inside += 1
            most = max(most, inside)
            time.sleep(0.001)
            inside -= 1
            turn.over()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert most == 1


def test_where_nothing_can_be_written_nobody_waits(tmp_path: Path) -> None:
    turn = Turn(tmp_path / "nowhere", KEY)
    turn.take()
    turn.over()
