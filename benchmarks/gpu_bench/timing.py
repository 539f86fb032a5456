"""Candidates on a GPU in turns: A B C, C B A, and so on, each turn a burst of calls between two events.

The GPU's own clock counts, from before the first call of a burst to behind the last: what the host does meanwhile does
not, as long as it is ahead. A turn begins with a call that does not count, since whoever was there before has left its
own data in the caches, and the GPU's clock where its own power allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any, Protocol

Call = Callable[[], Any]
BURST = 0.02
"""Seconds of calls that make one sample."""
LEAST_ROUNDS = 7
MOST_CALLS = 1000
"""The most calls in one burst: a queue of launches has an end."""


class Stopwatch(Protocol):
    """Whoever knows how long a GPU takes."""

    def seconds(self, calls: Sequence[Call]) -> float:
        """The seconds that the GPU takes for all these calls, one after another."""
        ...


class Events:
    """CUDA's events, on PyTorch's current stream."""

    def seconds(self, calls: Sequence[Call]) -> float:
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def interleave(
    candidates: Sequence[Sequence[Call]], seconds: float, stopwatch: Stopwatch | None = None
) -> list[list[float]]:
    """Seconds a call, as [candidate][round]; a candidate is a list of calls, taken in turn.

    Rounds go on until the GPU has spent `seconds` per candidate on what counts, and for LEAST_ROUNDS at least. A round
    before them finds out how many calls make a burst of each.
    """
    watch = stopwatch or Events()
    turns = [_GpuTurns(calls, watch) for calls in candidates]
    samples: list[list[float]] = [[] for _ in candidates]
    order, seconds_so_far = list(range(len(candidates))), 0.0
    for index in order:
        turns[index].learn()
    while len(samples[0]) < LEAST_ROUNDS or seconds_so_far < seconds * len(candidates):
        for index in order:
            samples[index].append(turns[index].take())
            seconds_so_far += samples[index][-1] * turns[index].count
        order.reverse()
    return samples


class _GpuTurns:
    """The turns of one candidate: its calls in an endless circle, and how many of them are a burst."""

    def __init__(self, calls: Sequence[Call], watch: Stopwatch) -> None:
        self._calls, self._sets, self._watch = cycle(calls), len(calls), watch
        self.count = 1

    def learn(self) -> None:
        """Finds out how many calls are a burst, after every set has had a call: the first ones load code, and choose
        among kernels."""
        for _ in range(self._sets):
            next(self._calls)()
        call_seconds = self._watch.seconds(self._next(self._sets)) / self._sets
        self.count = min(MOST_CALLS, max(1, round(BURST / call_seconds))) if call_seconds > 0 else MOST_CALLS

    def take(self) -> float:
        """The seconds a call takes in one burst; a call that does not count opens the turn."""
        next(self._calls)()
        return self._watch.seconds(self._next(self.count)) / self.count

    def _next(self, count: int) -> list[Call]:
        return list(islice(self._calls, count))
