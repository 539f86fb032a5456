"""Ways of computing the same, timed in turns on the caller's own inputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

_TURN = 0.02
"""The seconds of one turn."""
_LEAST_TURNS, _MOST_TURNS = 5, 15
"""Of each way: the second where turns contradict each other, unless `_MOST_SECONDS` are over."""
_MOST_SECONDS = 2.0
_CLEAR = 0.8
"""The part of the turns that have to agree on the faster way."""


def in_turns(*calls: Callable[[], Any]) -> tuple[float, ...]:
    """The seconds of a call of each: medians of turns that alternate, back and forth. Where the turns of the two
    fastest disagree on which is faster, as on a busy machine, there are more of them."""
    times: list[list[float]] = [[] for _ in calls]
    order = list(zip(calls, times, strict=True))
    begin = time.perf_counter()
    with torch.no_grad():
        while len(times[0]) < _LEAST_TURNS or (len(times[0]) < _MOST_TURNS and not _is_clear(times)):
            for call, seconds in order:
                seconds.append(_seconds(call))
            order.reverse()
            if time.perf_counter() - begin > _MOST_SECONDS and len(times[0]) > 1:
                break
    return tuple(median(seconds) for seconds in times)


def _is_clear(times: list[list[float]]) -> bool:
    """Whether most turns of the fastest way took less than those of the second beside them."""
    if len(times) < 2:
        return True
    first, second, *_ = sorted(times, key=median)
    return sum(one < other for one, other in zip(first, second, strict=True)) >= _CLEAR * len(first)


def _seconds(call: Callable[[], Any]) -> float:
    call()
    begin, calls = time.perf_counter(), 0
    while True:
        call()
        calls += 1
        if (elapsed := time.perf_counter() - begin) > _TURN:
            return elapsed / calls
