"""A server of files, on loopback: all that the page needs."""

from __future__ import annotations

import http.server
from functools import partial
from pathlib import Path


def server(folder: Path, port: int) -> http.server.ThreadingHTTPServer:
    """A server of a folder's files, on loopback; port 0 is any free one."""
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, directory=str(folder)))


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Says nothing of each file."""
