"""What a calling thread says of threads to a module's code: how many a call takes, and whose.

The code keeps it in memory of the thread (`Caller` in openmp.h), whose address it tells. One store before each call
says it anew, since several artifacts with other settings may share the code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any, Literal, get_args

from mhsa_compile.errors import InputError

Pool = Literal["auto", "own", "openmp"]
POOLS = get_args(Pool)
_CHOICES = {"auto": 0, "own": 1, "openmp": 2}
_OPENMP = 2
_RESTED, _TEAM_RESTED = 500_000, 10_000_000
"""Nanoseconds from one call's begin to the next one's after which workers sleep, who look for work for less, and the
members of PyTorch's OpenMP team, who spin for longer."""


@dataclass(frozen=True)
class ThreadSettings:
    """The settings of one loaded artifact. `bounded`: PyTorch's own number of threads bounds `limit`, which nobody
    asked for."""

    limit: int
    pool: Pool
    bounded: bool

    @property
    def word(self) -> int:
        return self.limit | _CHOICES[self.pool] << 32 | self.bounded << 48


def check_pool(pool: object) -> None:
    """Raises InputError for a pool that is not in POOLS."""
    if pool not in POOLS:
        raise InputError("pool", " or ".join(f'"{name}"' for name in POOLS), repr(pool))


class CallThreads:
    """The settings of a calling thread, to be made in it. `tell` is a module's function `mhsa_threads`."""

    def __init__(self, tell: Callable[..., Any], settings: ThreadSettings) -> None:
        address = int(tell(settings.word))
        self._tell, self._last_call = tell, monotonic_ns()
        self._settings = ctypes.c_int64.from_address(address)
        self._ran_on = ctypes.c_int32.from_address(address + ctypes.sizeof(ctypes.c_int64))
        self._word = settings.word

    def say(self) -> None:
        """Tells the code this thread's settings; to be called before each call. After a rest the code itself hears
        them, and wakes the workers."""
        now = monotonic_ns()
        rest = now - self._last_call
        if rest > _RESTED and (rest > _TEAM_RESTED or self._ran_on.value != _OPENMP):
            self._tell(self._word)
        else:
            self._settings.value = self._word
        self._last_call = now

    @property
    def ran_on(self) -> str:
        """The pool in which the last parallel loop of this thread ran: "own" or "openmp"."""
        return "openmp" if self._ran_on.value == _OPENMP else "own"


def openmp_path(find: Callable[..., Any]) -> str | None:
    """The OpenMP runtime that a module's code would run on, if one is loaded. `find` is its function `mhsa_openmp`."""
    address = int(find())
    return ctypes.string_at(address).decode(errors="replace") if address else None
