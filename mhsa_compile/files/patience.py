"""A word on the terminal of whoever waits: what takes longer than two seconds says what it is doing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SECONDS = 2.0
"""What may pass in silence."""
_SHOWN = threading.Lock()  # a terminal has one such line


@contextmanager
def shown_stages(what: str) -> Iterator[Callable[[str], None]]:
    """A function to call at the start of each stage of `what`: from `SECONDS` on a terminal has a line with it, which
    is gone in the end. Where there is no terminal, or another thread has its line there, nothing is."""
    if sys.stderr is None or not sys.stderr.isatty() or not _SHOWN.acquire(blocking=False):
        yield lambda stage: None
        return
    line = _Line(what)
    timer = threading.Timer(SECONDS, line.begin)
    timer.daemon = True
    timer.start()
    try:
        yield line.tell
    finally:
        timer.cancel()
        line.end()
        _SHOWN.release()


class _Line:
    """The line, which is there between `begin`, unless that comes after `end`, and `end`."""

    def __init__(self, what: str) -> None:
        self._what, self._stage, self._ended = what, "", False
        self._status: Any = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        from rich.console import Console

        with self._lock:
            if not self._ended:
                self._status = Console(stderr=True).status(self._text())
                self._status.start()

    def tell(self, stage: str) -> None:
        with self._lock:
            self._stage = stage
            if self._status is not None:
                self._status.update(self._text())

    def end(self) -> None:
        with self._lock:
            self._ended = True
            if self._status is not None:
                self._status.stop()

    def _text(self) -> Any:
        from rich.text import Text

        return Text(f"{self._what}: {self._stage}" if self._stage else self._what)
