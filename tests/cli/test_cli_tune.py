"""`mhsa tune`: what it says, what it writes, and what it refuses before it does anything."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from support.command import mhsa, printed

from mhsa_compile import AttentionSpec
from mhsa_compile.cli.common.cases import CaseOptions
from mhsa_compile.frontend.export.export import export
from mhsa_compile.nn.modules import ScaledDotProductAttention
from mhsa_compile.records import record_files
from mhsa_compile.tuning.search import search

SPEC = "embed_dim = 32\nnum_heads = 2\n"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "layer.toml"
    path.write_text(SPEC)
    return path


@pytest.mark.thorough
def test_a_model_is_tuned_and_compiled_with_what_was_found(tmp_path: Path, monkeypatch):
    for name in ("FIRST", "LAST", "SECONDS"):
        monkeypatch.setattr(search, name, 0.01)
    monkeypatch.setattr("mhsa_compile.cli.commands.tune.GAIN_SECONDS", 0.01)
    module = ScaledDotProductAttention(AttentionSpec(embed_dim=16, num_heads=2)).eval()
    onnx.save(export(module, dims={}), tmp_path / "core.onnx")
    records = tmp_path / "records.jsonl"
    words = ["--batch", 1, "--length", 3, "--kv-length", 7, "--threads", 1, "--against", "", "--trials", 3, "--json"]
    plot = tmp_path / "search.svg"
    result = printed("tune", tmp_path / "core.onnx", "--records", records, "--plot", plot, *words)
    said = json.loads(result)
    (source,) = said["sources"].values()
    (op,) = source["ops"]
    assert said["trials"] == op["trials"] == 3 and said["failures"] == 0
    assert said["default_us"] > 0 and said["best_us"] > 0 and said["speedup"] > 0
    assert source["gain"]["error_share"] <= 1
    assert (op["op"], op["sizes"]) == ("attention", {"B": 1, "L": 3, "S": 7}) and op["speedup"] >= 1
    (record,) = record_files.read(records).records
    assert (record.kernel, record.config) == (op["kernel"], op["config"])
    assert (tmp_path / "records.studies.db").is_file() and plot.is_file()


def test_lengths_around_are_tuned_too():
    def dims(word: str) -> list[tuple[str, int, int]]:
        given = CaseOptions(None, [word], None, {}, symbolic=False, around=True, weights=None, seed=0)
        given.check()
        cases = list(given.cases())
        assert all(case.sizes == case.dims and case.dims["B"] == 1 for case in cases)
        return [(case.name, case.dims["L"], case.dims["S"]) for case in cases]

    assert dims("tiny") == [("tiny", 16, 16), ("tiny, half as long", 8, 8), ("tiny, twice as long", 32, 32)]
    assert [lengths for _, *lengths in dims("decode512")] == [[1, 512], [1, 256], [1, 1024]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "SOURCE: expected an .onnx file, a spec .toml, or --workload, got none of them"),
        (["{spec}", "--workload", "tiny"], "--workload: expected it alone"),
        (["--workload", "nothing"], "workload: expected all, a group"),
        (["{spec}", "--dtype", "float16"], "--dtype: expected it with --workload"),
        (["{spec}", "too.many"], "arguments: expected one source, got 'too.many', too"),
        (["{spec}", "--on", "tracker"], "--on tracker: expected HOST:PORT/KEY at the end"),
        (["{spec}", "here/pi", "--on", "tracker"], "--on tracker: expected HOST:PORT"),
        (["{spec}", "127.0.0.1:9/pi", "--on", "tracker"], "tracker 127.0.0.1:9: expected one that answers"),
        (["{spec}", "--on", "bundle"], "--on bundle: expected -o WORK.zip, or later --results RESULTS.json"),
        (["{spec}", "-o", "work.zip"], "-o: expected it with --on bundle"),
        (["{spec}", "--results", "none.json"], "results 'none.json': expected a file that can be read"),
        (["{spec}", "--around"], "--around: expected lengths that are fixed, got symbolic ones. Give --length."),
        (["{spec}", "--plot", "search.txt"], "--plot: expected a file named"),
        (["{spec}", "--target", "z80"], "target: expected a known target"),
        (["{spec}", "--against", "nobody"], "expected"),
        (["{spec}", "--storage", "nobase://x", "--trials", "1", "--against", ""], "--storage: expected a database"),
    ],
)
def test_bad_input_is_one_message(words: list[str], said: str, spec: Path):
    result = mhsa("tune", *(word.format(spec=spec) for word in words))
    assert result.exit_code == 2
    assert said in result.stderr and "Traceback" not in result.output
