"""The programs of examples/ run to their end, as `make demo` runs them, and fail when a result is wrong."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.examples import EXAMPLES, loaded, needs_the_model

from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.verification.verify import CaseResult

# Each process of the suite keeps to one CPU: with two threads each, their spinning workers would fight over two CPUs.
PINNED = """\
import os, pathlib, runpy, sys
sys.path.insert(0, str(pathlib.Path(sys.argv[2]).parent))
os.sched_setaffinity(0, {int(sys.argv[1])})
runpy.run_path(sys.argv[2], run_name="__main__")
"""


def run(example: str, folder: Path) -> str:
    """What the program printed; it must end with exit code 0."""
    cpus = sorted(os.sched_getaffinity(0))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    command = [sys.executable, "-c", PINNED, str(cpus[worker % len(cpus)]), EXAMPLES / example]
    child = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    assert child.stderr == ""
    return child.stdout


@pytest.mark.thorough
def test_demo(tmp_path: Path) -> None:
    (tmp_path / "build" / "demo.mhsa").mkdir(parents=True)  # as a run before would have left it: to be replaced
    printed = run("demo.py", tmp_path)
    assert "torch no, onnx no" in printed
    assert re.search(r"native .* ok .* ms .* ms .*%", printed), printed
    assert Artifact.open(tmp_path / "build" / "demo.mhsa").manifest.spec == AttentionSpec(embed_dim=512, num_heads=8)


@pytest.mark.thorough
def test_generate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The Llama-shaped decoder, made small. test_cache.py has 256 steps of both shapes."""
    example = loaded("generate.py")
    for name, value in {"LAYERS": 2, "STEPS": 9, "TIMED_AT": (17, 31)}.items():
        monkeypatch.setattr(example, name, value)
    spec = AttentionSpec(embed_dim=64, num_heads=4, num_kv_heads=2, causal=True, rope=True, kv_cache=True)
    assert example.run("Llama", spec, example.LlamaBlock)
    printed = capsys.readouterr().out
    assert printed.count(" ok") == 2
    assert re.search(r"\b31 +[0-9]+ us", printed), printed


@pytest.mark.thorough
def test_train_heads(tmp_path: Path) -> None:
    """Exit code 0: half the information at 1.05 of the task's loss, and the compiled layer within its budget."""
    printed = run("train_heads.py", tmp_path)
    assert "within its error budget of float64: True" in printed
    assert float(re.search(r"nats between two heads .* ([0-9.]+) │$", printed, re.MULTILINE)[1]) <= 0.5, printed


@pytest.mark.thorough
@needs_the_model
def test_sentence_embeddings(tmp_path: Path) -> None:
    printed = run("sentence_embeddings.py", tmp_path)
    assert "FAIL" not in printed
    assert len(re.findall(r"\bok\b", printed)) == 6 + 2  # six layers, the worst of them, and the cosine
    assert "the same nearest sentence for 40 of 40" in printed


@needs_the_model
def test_the_exit_code_of_sentence_embeddings_is_the_verdict() -> None:
    example = loaded("sentence_embeddings.py")
    good, bad = CaseResult({"B": 1}, error=1.0, budget=2.0), CaseResult({"B": 1}, error=2.0, budget=1.0)
    assert example.verdict([good, good], 1.0) == 0
    assert example.verdict([good, bad], 1.0) == 1
    assert example.verdict([good], 0.99999) == 1
    assert example.verdict([good], math.nan) == 1
