"""Native calls side by side, each in a thread of its own: how limits and peers without a pool of their own use several
CPUs.

The threads are Python's: TVM's pool belongs to the candidate and keeps its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


@contextmanager
def together(calls: Sequence[Callable[[], Any]]) -> Iterator[Callable[[], None]]:
    """A call that makes all of them, the first in the caller's thread; they must not hold Python's lock."""
    with ThreadPoolExecutor(max(1, len(calls) - 1), thread_name_prefix="together") as pool:

        def run() -> None:
            others = [pool.submit(call) for call in calls[1:]]
            calls[0]()
            for other in others:
                other.result()

        yield run
