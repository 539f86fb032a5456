"""Starts the search app: `make search-app`, or `python -m search_app` in examples/."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
import uvicorn
from minilm.encoder import compiled_folder

from search_app.server import Search, create_app

MODEL = Path("build/minilm")
LOOPBACK = ("127.0.0.1", "localhost")


def serve(
    host: Annotated[str, typer.Option(help="Who may come: by default nobody from outside.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    model: Annotated[Path, typer.Option(help="The compiled model; made where it is not there.")] = MODEL,
    threads: Annotated[int | None, typer.Option(min=1, help="Of a batch; by default every CPU there is.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Queries that may share a batch.")] = 8,
) -> None:
    """Semantic search over text files, in the browser."""
    names = LOOPBACK if host in LOOPBACK else ("*",)
    with bound(host, port) as listening:  # a port that is taken is said before the work
        app = create_app(Search.of(compiled_folder(model), threads, batch), names)
        print(f"Search app: http://{host}:{listening.getsockname()[1]}   (Ctrl+C ends it)", flush=True)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens; 0 is any free port."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        sys.exit(f"{host}:{port} cannot be had: {error.strerror}. Take another: make search-app PORT=8080")


if __name__ == "__main__":
    typer.run(serve)
