"""Starts the search app: `make search-app`, or `python -m search_app` in examples/."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import uvicorn
from minilm.encoder import compiled_folder

from search_app.server import Search, create_app

MODEL = Path("build/minilm")


def serve(
    host: Annotated[str, typer.Option(help="Who may come: by default nobody from outside.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    model: Annotated[Path, typer.Option(help="The compiled model; made where it is not there.")] = MODEL,
    threads: Annotated[int | None, typer.Option(min=1, help="Of a batch; by default every CPU there is.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Queries that may share a batch.")] = 32,
) -> None:
    """Semantic search over text files, in the browser."""
    app = create_app(Search.of(compiled_folder(model), threads, batch))
    print(f"Search app: http://{host}:{port}   (Ctrl+C ends it)", flush=True)
    uvicorn.run(app, host=host, port=port, log_level="warning")


if __name__ == "__main__":
    typer.run(serve)
