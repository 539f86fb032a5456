"""Calls that still run in other threads when the interpreter ends, or when the process forks: it waits for them.

A thread that comes back from compiled code asks for the interpreter's lock. Where the interpreter has begun to end,
Python (before 3.14) ends the thread there, by unwinding its stack; in it stands a destructor of TVM's binding that must
not be unwound, and the process aborts. And a fork has none of the other threads, so what one of them had locked, such
as TVM's memory, would stay so.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Any

Lock = Any  # threading.RLock is a function to type checkers


class CallsAtExit:
    """A lock for each thread, held while it is inside compiled code. As the interpreter ends it takes all of them, each
    once its call is over, and keeps them: no thread goes back in. A fork takes them for its moment."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._registry = threading.RLock()
        self._locks: weakref.WeakSet[Lock] = weakref.WeakSet()
        self._own = threading.local()
        self._held: list[Lock] = []
        atexit.register(self._finish)
        os.register_at_fork(before=self._acquire, after_in_parent=self._release, after_in_child=self._release)

    @property
    def lock(self) -> Lock:
        """The calling thread's lock, to be held around whatever calls TVM."""
        lock = getattr(self._own, "lock", None)
        if lock is None:
            with self._registry:
                lock = self._own.lock = threading.RLock()
                self._locks.add(lock)
        return lock

    def _finish(self) -> None:
        if os.getpid() != self._process:
            return  # a fork: the threads that hold these locks do not exist in it
        self._acquire()

    def _acquire(self) -> None:
        self._registry.acquire()
        self._held = list(self._locks)
        for lock in self._held:
            lock.acquire()

    def _release(self) -> None:
        for lock in self._held:
            lock.release()
        self._registry.release()
