"""Two ways of computing the same, timed in turns on the caller's own inputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

_TURNS, _TURN = 5, 0.02  # of each, and the seconds of one


def in_turns(one: Callable[[], Any], other: Callable[[], Any]) -> tuple[float, float]:
    """The seconds of a call of each: medians of turns that alternate, back and forth."""
    times: tuple[list[float], list[float]] = ([], [])
    order = list(zip((one, other), times, strict=True))
    with torch.no_grad():
        for _ in range(_TURNS):
            for call, seconds in order:
                seconds.append(_seconds(call))
            order.reverse()
    return median(times[0]), median(times[1])


def _seconds(call: Callable[[], Any]) -> float:
    call()
    begin, calls = time.perf_counter(), 0
    while True:
        call()
        calls += 1
        if (elapsed := time.perf_counter() - begin) > _TURN:
            return elapsed / calls
