"""What the tests of the apps share: a small model, compiled once."""

from __future__ import annotations

import fcntl
import importlib.util
import os
from pathlib import Path

import pytest

NEEDED = ("tokenizers", "transformers")


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `small_bert`, as `minilm.compile_model` writes it."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    base = tmp_path_factory.getbasetemp()
    of_the_run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # one of its processes compiles
    folder = of_the_run / "apps"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        from minilm.encoder import TOKENIZER

        if not (folder / "model" / TOKENIZER).exists():
            from minilm.compile_model import save
            from support import this_cpu
            from support.small_encoder import small_bert, write_tokenizer

            with this_cpu.native_of(Path(__file__), request.config):
                save(small_bert(), write_tokenizer(folder / "source.json"), folder / "model")
    return folder / "model"
