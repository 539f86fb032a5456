"""docs/recipes.md: the programs are copied out under the names that they have, and used as the page says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.page_blocks import blocks, run_python

pytest.importorskip("transformers", reason="not installed: transformers (extra `examples`)")
pytest.importorskip("fastapi", reason="not installed: fastapi (extra `apps`)")

from fastapi.testclient import TestClient

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
PROGRAMS = {re.match(r"# (\w+\.py)\n", block.code)[1]: block for block in blocks(PAGE)}
TEXTS = [[5, 17, 42, 8], [99], [3, 1, 4, 1, 5, 9, 2, 6], *([7, token] for token in range(40))]

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("recipes")
    for name, block in PROGRAMS.items():
        (place / name).write_text(block.code, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        yield place


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Any:
    return run_python([PROGRAMS["make_model.py"]], {})["encoder"]


@pytest.fixture(scope="module")
def expected(encoder: Any) -> np.ndarray:
    """The module's own embeddings, a text at a time, without padding."""
    with torch.inference_mode():
        each = [encoder(torch.tensor([text]), torch.ones(1, len(text), dtype=torch.long)) for text in TEXTS]
    return torch.cat(each).numpy()


def test_the_page_has_these_programs() -> None:
    assert list(PROGRAMS) == ["make_model.py", "endpoint.py", "batch_job.py"]


def test_the_endpoint_answers_and_refuses(expected: np.ndarray) -> None:
    client = TestClient(run_python([PROGRAMS["endpoint.py"]], {})["app"])

    def embedded(texts: list[list[int]]) -> np.ndarray:
        answer = client.post("/embed", json={"tokens": texts})
        assert answer.status_code == 200, answer.text
        return np.array(answer.json())

    assert np.abs(embedded(TEXTS[:3]) - expected[:3]).max() < 1e-5
    assert np.abs(expected[0] - expected[1]).max() > 1e-2  # another text, another embedding
    with ThreadPoolExecutor(4) as threads:
        each = list(threads.map(embedded, ([text] for text in TEXTS)))
    assert np.abs(np.concatenate(each) - expected).max() < 1e-5
    for wrong, message in {"[[]]": "1 to 512", "[[101]]": "0 to 100", "[[-1]]": "0 to 100"}.items():
        refused = client.post("/embed", json={"tokens": json.loads(wrong)})
        assert refused.status_code == 422 and message in refused.json()["detail"]
    assert client.post("/embed", json={"tokens": []}).status_code == 422


def test_the_endpoint_imports_neither_pytorch_nor_a_compiler(folder: Path, encoder: Any) -> None:
    names = "('torch', 'onnx', 'tvm.relax', 'mhsa_compile.compiler')"
    program = f"import endpoint, sys; print([name for name in {names} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_the_batch_job_keeps_the_order_of_the_file(folder: Path, expected: np.ndarray) -> None:
    (folder / "texts.jsonl").write_text("".join(f"{json.dumps(text)}\n" for text in TEXTS))
    subprocess.run([sys.executable, "batch_job.py", "texts.jsonl", "embeddings.npy"], cwd=folder, check=True)
    embeddings = np.load(folder / "embeddings.npy")
    assert embeddings.dtype == np.float32 and np.abs(embeddings - expected).max() < 1e-5
