"""Connections to a server that have said who they are.

TVM's server takes one connection after another and waits for its first words, for ever: whoever connects and says
nothing (a scan of ports, a browser, a program that hangs) keeps the device from all others. Here connections wait for
their own words beside each other, and those that stay silent are cut.
"""

from __future__ import annotations

import select
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

SILENCE = 10.0
"""Seconds after which a connection is cut that has not said who it is: the first thing that a client of TVM's sends."""
_HEAD = struct.Struct("<ii")  # a magic number, and how many bytes the client's name has
_LONGEST_NAME = 4096
_MOST = 128  # that wait at once; beyond it the one that has waited for longest is cut
_TURN = 1.0  # seconds after which `accept` lets TVM's server tell its tracker that it lives


@dataclass
class _Waiting:
    connection: socket.socket
    address: Any
    until: float


class ReadyConnections:
    """A listening socket, as far as TVM's server uses one: to be selected, and to be accepted from. A context manager
    that cuts whoever waits still."""

    def __init__(self, listening: socket.socket, silence: float = SILENCE) -> None:
        listening.setblocking(False)
        self._listening, self._silence = listening, silence
        self._waiting: dict[int, _Waiting] = {}
        self._events = select.epoll()
        self._events.register(listening, select.EPOLLIN)

    def __enter__(self) -> ReadyConnections:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in list(self._waiting):
            self._cut(handle)
        self._events.close()

    def fileno(self) -> int:
        """What is readable when somebody connects, or says something."""
        return self._events.fileno()

    def accept(self) -> tuple[Any, Any]:
        """A connection whose first words are there, with its address; `Nobody` where none comes for a while."""
        end = monotonic() + _TURN
        while (seconds := end - monotonic()) > 0:
            for handle, events in self._events.poll(seconds):
                if handle == self._listening.fileno():
                    self._welcome()
                elif has_spoken := _has_spoken(self._waiting[handle].connection):
                    waiting = self._forget(handle)
                    waiting.connection.setblocking(True)
                    return waiting.connection, waiting.address
                elif has_spoken is None or events & select.EPOLLRDHUP:
                    self._cut(handle)
            for handle in [handle for handle, waiting in self._waiting.items() if waiting.until < monotonic()]:
                self._cut(handle)
        return Nobody(), None

    def _welcome(self) -> None:
        try:
            connection, address = self._listening.accept()
        except OSError:  # it is gone again
            return
        if len(self._waiting) >= _MOST:
            self._cut(next(iter(self._waiting)))
        connection.setblocking(False)
        self._waiting[connection.fileno()] = _Waiting(connection, address, monotonic() + self._silence)
        # Told of once for whatever it says: half a name would be news for ever.
        self._events.register(connection, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)

    def _forget(self, handle: int) -> _Waiting:
        self._events.unregister(handle)
        return self._waiting.pop(handle)

    def _cut(self, handle: int) -> None:
        connection = self._forget(handle).connection
        with suppress(OSError):  # it may be gone already
            connection.shutdown(socket.SHUT_RDWR)  # a fork that serves another may have it open, too
        connection.close()


def _has_spoken(connection: socket.socket) -> bool | None:
    """Whether a server can read on without waiting; None for what is no client, or gone."""
    try:
        words = connection.recv(_HEAD.size + _LONGEST_NAME, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return None
    if len(words) < _HEAD.size:
        return False if words else None
    size = _HEAD.unpack_from(words)[1]
    return len(words) >= _HEAD.size + size if 0 <= size <= _LONGEST_NAME else None


class Nobody:
    """A connection whose first words are nobody's: the server closes it, tells its tracker that it lives, and waits."""

    def recv(self, size: int) -> bytes:
        """As many zeros as are asked for, which are no first words of a client of TVM's."""
        return bytes(size)

    def close(self) -> None:
        """Does nothing."""
