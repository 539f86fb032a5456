"""Candidates of a benchmark, each in a process of its own, unpinned and asleep while another is timed.

The process that asks has `started` them and takes `rounds`; a candidate's process spends its life in `answer_turns`.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from mhsa_compile.runtime.array_memory import to_list

WARM_UP, LEAST_CALLS = 3, 5
Opened = TypeVar("Opened")


class Turn(msgspec.Struct):
    """What a candidate is asked for: calls for so many seconds."""

    situation: str
    seconds: float
    callers: int = 1


class Times(msgspec.Struct):
    """A candidate's answer to a turn: the seconds of each call after the first few, and the calls a second of all."""

    calls: list[float]
    rate: float


# The process of one candidate


def answer_turns(opened: AbstractContextManager[Opened], take: Callable[[Turn, Opened], Times]) -> None:
    """Answers turns, a line each, until its input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print
    with opened as calls:
        answers.write("\n")
        for line in sys.stdin:
            turn = msgspec.json.decode(line, type=Turn)
            answers.write(msgspec.json.encode(take(turn, calls)).decode() + "\n")


def in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """The calls one after the other, for ever: each call makes one of them."""
    endless = itertools.cycle(calls)
    return lambda: to_list(next(endless)())


def timed_calls(seconds: float, call: Callable[[], Any], between: Callable[[], Any] = lambda: None) -> list[float]:
    """The seconds of each call, but for the first few; `between` comes before each and is not timed."""
    times: list[float] = []
    begin = end = time.perf_counter()
    for i in itertools.count():
        between()
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        if i >= WARM_UP:
            times.append(end - start)
        if end - begin > seconds and len(times) >= LEAST_CALLS:
            return times
    raise AssertionError


def one_caller(seconds: float, calls: Sequence[Callable[[], Any]], between: Callable[[], Any] = lambda: None) -> Times:
    """A turn of one caller, who makes the calls in turn."""
    begin = time.perf_counter()
    times = timed_calls(seconds, in_turn(calls), between)
    return Times(times, (len(times) + WARM_UP) / (time.perf_counter() - begin))


def check_result(result: Any, expected: Path, most: float) -> None:
    """Raises ValueError where a result is farther from the one in a file than a share of the largest value."""
    reference = np.load(expected)
    off = float(np.abs(np.asarray(result) - reference).max() / np.abs(reference).max())
    if not off <= most:
        raise ValueError(f"its result is off by {off:.2g} of the largest value")


# The process that asks


class Candidate:
    """A process, asleep but for its turns."""

    def __init__(self, name: str, words: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def is_ready(self) -> str | None:
        """None, or the last words of a process that ended, or the signal that ended it."""
        assert self._process.stdout is not None
        if self._process.stdout.readline():
            return None
        printed = self._process.communicate()[1]
        if (code := self._process.returncode) < 0:
            return f"ended by {signal.Signals(-code).name}"
        return _last_line(printed)

    def take(self, turn: Turn) -> Times:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(turn).decode() + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self.name} ended: {self._process.communicate()[1][-300:]}")
        return msgspec.json.decode(line, type=Times)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def started(stack: ExitStack, words: Mapping[str, Sequence[str]]) -> tuple[list[Candidate], dict[str, str]]:
    """(the candidates that are ready, the last words of the others), by what Python runs for each."""
    ready, missing = [], {}
    for name, command in words.items():
        candidate = Candidate(name, command)
        stack.callback(candidate.stop)
        if (reason := candidate.is_ready()) is None:
            ready.append(candidate)
        else:
            missing[name] = reason
    return ready, missing


def why_unprepared(words: Sequence[str]) -> str | None:
    """Runs Python to its end: None, or the last words of a program that failed."""
    program = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    return _last_line(program.stderr) if program.returncode else None


def _last_line(printed: str) -> str:
    return (printed.strip().splitlines() or ["no words"])[-1][:300]


def rounds(candidates: Sequence[Candidate], turn: Turn, count: int) -> Iterator[tuple[str, Times]]:
    """Turns of all candidates, back and forth: (whose it was, what was measured)."""
    order = list(candidates)
    for _ in range(count):
        for candidate in order:
            yield candidate.name, candidate.take(turn)
        order.reverse()
