"""Where no file can grow: one error of ours, or the work goes on and says so; nothing is left half-written, and no
process ends.

A limit on the sizes of files stands in for a full disk: what goes beyond it fails with an error code, as it does there.
Each case is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import tiny_artifact

from mhsa_compile.hardware import environment
from mhsa_compile.runtime.standalone.bundle import bundle

PRELUDE = """
import resource, sys, warnings
from pathlib import Path
import mhsa_compile as mhsa
folder, source = Path(sys.argv[1]), sys.argv[2]
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
def refused(work):
    try:
        work()
        print("went on")
    except mhsa.errors.MhsaError as error:
        print(type(error).__name__, error)
"""
ACCELERATED = """
import torch
warnings.simplefilter("always")
torch.manual_seed(0)
model = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval()
x = torch.randn(2, 5, 32)
with torch.inference_mode():
    expected = model(x, x, x)[0]
    report = mhsa.accelerate(model)
    limit(20_000)
    for _ in range(2):
        print(torch.equal(model(x, x, x)[0], expected))
    print(sum(report.calls.values()), *report.calls)
    limit(resource.RLIM_INFINITY)
    report.refresh()
    print(torch.allclose(model(x, x, x)[0], expected, atol=1e-5), sum(report.calls.values()))
"""
CASES = {
    "a dump": (
        "limit(4_000); refused(lambda: mhsa.compile(mhsa.AttentionSpec(embed_dim=16, num_heads=2), dump=folder / 'd'))",
        "OutputError dump: expected room for it, and permission, got File too large",
    ),
    "an artifact": (
        "a = mhsa.Artifact.open(source); limit(4_000); refused(lambda: a.save(folder / 'a'))",
        "OutputError output folder '{folder}/a': expected room for it, and permission, got File too large",
    ),
    "a bundle": (
        "from mhsa_compile.runtime.standalone.bundle import bundle\n"
        "a = mhsa.Artifact.open(source); limit(4_000); refused(lambda: bundle(a, folder / 'b'))",
        "OutputError output folder '{folder}/b': expected room for it, and permission, got File too large",
    ),
    "loading": (
        "limit(4_000); refused(lambda: mhsa.load(source))",
        "OutputError file system (temporary files are in ",
    ),
    "records": (
        "from mhsa_compile.records import record_files\n"
        "sys.path.insert(0, sys.argv[3])\n"
        "from support.records_made import made\n"
        "path = folder.parent / 'r.jsonl'; record_files.append(path, made(key={'a': 1})); before = path.read_bytes()\n"
        "limit(len(before) + 9); refused(lambda: record_files.append(path, made(key={'a': 2})))\n"
        "assert path.read_bytes() == before",
        "RecordsError records '{parent}/r.jsonl': expected a file that can be written, with room for a line",
    ),
    "a measuring process": (
        "from mhsa_compile.tuning.measure import sessions\n"
        "limit(20_000); refused(lambda: sessions.local(threads=1).__enter__())",
        "OutputError '{temporary}': expected room for 16 MiB of libraries, got File too large",
    ),
}
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TVM_USE_RUNTIME_LIB"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_artifact.make(tmp_path_factory.mktemp("made") / "tiny").path


def said(program: str, folder: Path, source: Path) -> subprocess.CompletedProcess[str]:
    (temporary := folder.parent / "temporary").mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)
    words = [sys.executable, "-c", PRELUDE + program, str(folder), str(source), str(Path(__file__).parents[1])]
    environment = {**ENVIRONMENT, "MHSA_CACHE": "0", "TMPDIR": str(temporary)}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert not [path for path in temporary.iterdir() if not path.name.startswith("torchinductor")]
    return done


@pytest.mark.thorough_but("records")
@pytest.mark.parametrize(("program", "expected"), CASES.values(), ids=CASES.keys())
def test_it_is_one_error_of_ours_and_nothing_half_written(
    program: str, expected: str, tmp_path: Path, source: Path
) -> None:
    folder = tmp_path / "f"
    stated = expected.format(folder=folder, parent=tmp_path, temporary=tmp_path / "temporary")
    assert said(program, folder, source).stdout.startswith(stated)
    whole = {"1_exported.onnx", "2_imported.py"}  # of a dump: what was written before there was no room
    assert {path.name for path in folder.rglob("*") if path.is_file()} <= whole


@pytest.mark.thorough
def test_a_call_of_an_accelerated_model_goes_on_by_pytorch(tmp_path: Path, source: Path) -> None:
    done = said(ACCELERATED, tmp_path / "f", source)
    first, second, counted, again = done.stdout.splitlines()
    assert (first, second) == ("True", "True")
    assert counted.startswith("2 no room for what is compiled (")
    assert again == "True 2"  # with room, once it is refreshed, ours computes
    assert done.stderr.count("UserWarning: no room for what is compiled") == 1
    assert "PyTorch computes such calls" in done.stderr


def test_a_profile_is_saved_whole_or_not_at_all(tmp_path: Path, source: Path) -> None:
    command = (
        "limit(100); from mhsa_compile.cli.app import main; sys.argv[1:] = ['targets', 'native', '-o', sys.argv[1]]"
    )
    words = [sys.executable, "-c", f"{PRELUDE}{command}; main()", str(tmp_path / "m.toml"), str(source)]
    done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2
    assert "-o: expected room for it, and permission, got File too large" in " ".join(done.stderr.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_the_program_of_a_bundle_is_not_ended(tmp_path: Path, source: Path) -> None:
    """It writes into memory to map its code, which the limit holds for, too."""
    from mhsa_compile.runtime.artifact.artifact import Artifact

    if environment.installed_version("ziglang") is None:
        pytest.skip("no compiler")
    bundle(Artifact.open(source), tmp_path / "b", build=True)
    output = tmp_path / "y.safetensors"

    def run(blocks: int, length: int) -> subprocess.CompletedProcess[str]:
        words = f"{tmp_path}/b/attention --repeat 1 --dim B=1 --dim L={length} --outputs {output}"
        return subprocess.run(["sh", "-c", f"ulimit -f {blocks}; exec {words}"], capture_output=True, text=True)

    done = run(4, 3)
    assert done.returncode == 2, done
    assert "expected room for a copy in memory, got File too large" in done.stderr
    assert run(4000, 300).returncode == 0
    before = output.read_bytes()
    done = run(4000, 200_000)
    assert done.returncode == 2, done
    assert f"--outputs '{output}': expected room for it, and permission, got File too large" in done.stderr
    assert output.read_bytes() == before and {path.name for path in tmp_path.iterdir()} == {"b", output.name}
