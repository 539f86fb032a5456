"""How candidates are timed: in turns, settled, warm, with every pool's workers on CPUs of their own.

Candidates take turns in bursts. A thread pool's workers spin for a while after a call (TVM's, OpenMP's and ONNX
Runtime's, up to a millisecond), at the cost of whoever comes next; so each turn begins with calls that do not count,
until the others' workers sleep and its own are awake, and a burst of calls follows, whose median is one sample. The
order is reversed from round to round, so that no candidate always follows the same one. The calling thread keeps one
CPU, and the workers of every pool the others.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from statistics import median
from time import perf_counter
from typing import Any

from mhsa_compile.files import system
from mhsa_compile.files.proc import thread_numbers

Call = Callable[[], Any]
"""A call without arguments: what is timed."""

SETTLE = 0.005
"""Seconds of calls that open a turn and do not count: every pool here was seen to spin for less than 1 ms."""
LONG = 0.2
"""A call that takes longer than this many seconds needs none: what spins at its beginning is lost in it."""
BURST = 0.02
"""Seconds of calls that make one sample."""
LEAST_ROUNDS = 5
TRIAL = 0.1
"""Seconds in which one form of a peer shows how fast it is."""
INPUT_SETS = 4
"""Calls go through so many sets of inputs, so that none finds its own in the cache."""


def interleave(
    candidates: Sequence[Sequence[Call]], seconds: float, clock: Callable[[], float] = perf_counter
) -> list[list[float]]:
    """Seconds a call, as [candidate][round]; a candidate is a list of calls, taken in turn.

    Rounds go on for `seconds` per candidate, at least five; the first is a warm-up and is left out.
    """
    turns = [_Turns(calls, clock) for calls in candidates]
    samples: list[list[float]] = [[] for _ in candidates]
    order = list(range(len(candidates)))
    with _no_garbage_collection():
        for index in order:
            turns[index].take()
        end = clock() + seconds * len(candidates)
        while len(samples[0]) < LEAST_ROUNDS or clock() < end:
            for index in order:
                samples[index].append(turns[index].take())
            order.reverse()
    return samples


class _Turns:
    """The turns of one candidate: its calls in an endless circle."""

    def __init__(self, calls: Sequence[Call], clock: Callable[[], float]) -> None:
        self.calls = cycle(calls)
        self.clock = clock
        self.last = 0.0

    def take(self) -> float:
        """The median seconds of the calls after the turn has settled."""
        if self.last < LONG:
            ready = self.clock() + SETTLE
            next(self.calls)()
            while self.clock() < ready:
                next(self.calls)()
        times: list[float] = []
        end = self.clock() + BURST
        while not times or self.clock() < end:
            times.append(self._timed(next(self.calls)))
        self.last = median(times)
        return self.last

    def _timed(self, call: Call) -> float:
        start = self.clock()
        call()
        return self.clock() - start


def quickest(call: Call) -> float:
    """Seconds of the fastest of a few calls: enough to choose between forms, no more. It should have been called."""
    best, end = float("inf"), perf_counter() + TRIAL
    while True:
        start = perf_counter()
        call()
        best = min(best, perf_counter() - start)
        if perf_counter() > end:
            return best


def tasks() -> set[int]:
    """The threads of this process, those of native pools among them. Raises InstallationError."""
    return set(thread_numbers())


@contextmanager
def workers_apart(sole_workers: Collection[int] = ()) -> Iterator[None]:
    """Keeps this thread on one CPU and every pool's workers on the others.

    `sole_workers` are those of pools whose caller only waits: they have all the CPUs, one each.

    Some kernels of virtual machines pack threads that wake up often onto one CPU to save another; a pool whose worker
    lands behind its caller then waits out whole time slices, up to a thousand times longer than the call takes.
    """
    cpus, own = system.cpus(), threading.get_native_id()
    before = {task: os.sched_getaffinity(task) for task in tasks()}
    if len(cpus) > 1:
        for task in before.keys() - set(sole_workers):
            os.sched_setaffinity(task, {cpus[0]} if task == own else cpus[1:])
        for task, cpu in zip(sorted(sole_workers), cycle(cpus), strict=False):
            os.sched_setaffinity(task, {cpu})
    try:
        yield
    finally:
        for task in before.keys() & tasks():
            os.sched_setaffinity(task, before[task])


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
