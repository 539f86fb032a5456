"""Tuning for an ARM device from here, by a tracker and by a bundle; the device is emulated: `make test-arm`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from support.arm import machine
from support.command import mhsa, refused
from support.rpc_processes import TRACKER, process

from mhsa_compile.hardware import data_paths
from mhsa_compile.records import record_files
from mhsa_compile.records.device import Device
from mhsa_compile.records.record import Record
from mhsa_compile.tuning import offline_tuner
from mhsa_compile.tuning.measure import work_results
from mhsa_compile.tuning.measure.job import Timing
from mhsa_compile.tuning.search import search

pytestmark = pytest.mark.arm

TARGET = "aarch64-neoverse-n1"
WORDS = ("--batch", 1, "--length", 7, "--target", TARGET, "--threads", 1)
OPERATIONS = {("linear", 48), ("attention", None), ("linear", 16)}


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "layer.toml"
    path.write_text("embed_dim = 16\nnum_heads = 2\n")
    return path


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST", "LAST", "SECONDS"):
        monkeypatch.setattr(search, name, 0.05)
    monkeypatch.setattr(offline_tuner, "SECONDS", 0.05)


@pytest.fixture(scope="module")
def tracker() -> Iterator[int]:
    with process("-P", "-c", TRACKER) as child:
        yield int(child.stdout.readline())


@contextmanager
def device(port: int, cpu: str) -> Iterator[Device]:
    """`mhsa serve` on an emulated machine, known to the tracker as its CPU. Nobody tells it that it is emulated."""
    root = machine.require()
    words = ["serve", "--port", "0", "--tracker", f"127.0.0.1:{port}", "--key", cpu, "--threads", "1", "--json"]
    command = machine.command(root, "-m", "mhsa_compile", *words)
    child = subprocess.Popen(command, env=machine.environment(root, cpu), stdout=subprocess.PIPE, text=True)
    try:
        text = ""
        while not text.endswith("\n}\n"):
            line = child.stdout.readline()
            assert line, "the device ended"
            text += line
        yield msgspec.convert(json.loads(text)["device"], Device)
    finally:
        child.kill()
        child.communicate()


def checked(path: Path) -> tuple[Record, ...]:
    """The records of a file: of every operation, right, marked, and refused where records are shipped."""
    records = record_files.read(path).records
    assert {(record.op, record.key.get("out_features")) for record in records} == OPERATIONS
    assert all(record.device.emulated and record.isa.architecture == "aarch64" for record in records)
    assert all(0 <= record.error_share <= 1 and record.median_us > 0 for record in records)
    shipped = data_paths.shipped_records("neoverse-n1")
    before = shipped.read_bytes() if shipped.is_file() else None
    result = mhsa("records", "promote", path, "--target", TARGET, "--json")
    assert result.exit_code == 1, result.output
    told = json.loads(result.stdout)
    assert (told["promoted"], len(told["refused"])) == (0, len(records))
    assert all("an emulator ran it" in refusal["reason"] for refusal in told["refused"])
    assert (shipped.read_bytes() if shipped.is_file() else None) == before
    return records


def test_a_device_of_a_tracker_is_tuned_for(tracker: int, spec: Path, tmp_path: Path) -> None:
    records, place = tmp_path / "records.jsonl", f"127.0.0.1:{tracker}/neoverse-n1"
    with device(tracker, "neoverse-n1") as found:
        assert (found.architecture, found.emulated, found.microarchitecture) == ("aarch64", True, "neoverse-n1")
        assert {"asimddp", "fphp"} <= set(found.features) and "i8mm" not in found.features
        result = mhsa(
            "tune",
            spec,
            place,
            "--on",
            "tracker",
            *WORDS,
            "--records",
            records,
            "--trials",
            3,
            "--seconds",
            60,
            "--json",
        )
        assert result.exit_code == 0, result.output
        told = json.loads(result.stdout)
        assert (told["trials"], told["failures"]) == (9, 0)
        wanting = refused(mhsa("tune", spec, place, "--on", "tracker", *WORDS[:4], "--target", "neoverse-v1"))
    assert "expected one with asimd asimddp asimdfhm " in wanting and "got one without asimdfhm bf16 fcma " in wanting
    checked(records)
    compiled = mhsa("compile", spec, *WORDS[:6], "--records", records, "-o", tmp_path / "n1.mhsa", "--json")
    assert compiled.exit_code == 0, compiled.output
    tuning = [op["tuning"] for op in json.loads(compiled.stdout)["ops"]]
    device_words = "an emulated aarch64 CPU (neoverse-n1), 1 threads, emulated"
    assert len(tuning) == 3 and all(device_words in said for said in tuning)


def test_a_bundle_is_measured_there(spec: Path, tmp_path: Path) -> None:
    work, out, records = (tmp_path / name for name in ("work.zip", "results.json", "records.jsonl"))
    made = mhsa("tune", spec, "--on", "bundle", "-o", work, *WORDS, "--records", records, "--trials", 2)
    assert made.exit_code == 0, made.output
    root = machine.require()
    command = machine.command(root, "-m", "mhsa_compile", "measure", work, "-o", out, "--json")
    done = subprocess.run(
        command, env=machine.environment(root, "neoverse-n1"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = work_results.read(out)
    assert found.device.emulated and found.device.architecture == "aarch64"
    assert len(found.measured) == found.total
    assert all(isinstance(measured.outcome, Timing) for measured in found.measured)
    told = mhsa("tune", spec, "--on", "bundle", "--results", out, *WORDS, "--records", records, "--json")
    assert told.exit_code == 0, told.output
    checked(records)
