"""Writes the page and what it fetches, and serves it: `make search-page`, or `python -m search_page` in examples/.

The folder is all there is: any server of files will do, and after loading it nobody hears of the page again. Browsers
let pages compute in workers, and check hashes, on https: and localhost.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from minilm.trained import load_reference, model_folder

from search_page.server import server

FOLDER = Path("build/search-page")
PAGE = Path(__file__).with_name("page")
VOCABULARY = "vocab.txt"


def write_page(folder: Path) -> None:
    """Writes the page, the model's bundle and its vocabulary; a folder that is there is kept as it is."""
    from minilm.compile_model import compile_sentences

    from mhsa_compile.runtime.standalone.bundle import bundle

    if not (folder / "model").exists():
        folder.mkdir(parents=True, exist_ok=True)
        print("Compiling all-MiniLM-L6-v2 for WebAssembly; half a minute", flush=True)
        bundle(compile_sentences(load_reference(model_folder()), "wasm32"), folder / "model")
    shutil.copytree(PAGE, folder, dirs_exist_ok=True)
    shutil.copyfile(model_folder() / VOCABULARY, folder / VOCABULARY)


def serve(
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8001,
    folder: Annotated[Path, typer.Option(help="Where the page is; made where it is not there.")] = FOLDER,
) -> None:
    """Search your own text by meaning, in the browser alone."""
    write_page(folder)
    with server(folder, port) as running, suppress(KeyboardInterrupt):
        print(f"Search page: http://localhost:{running.server_address[1]}   (Ctrl+C ends it)", flush=True)
        running.serve_forever()


if __name__ == "__main__":
    typer.run(serve)
