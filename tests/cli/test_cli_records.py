"""`mhsa records`."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from support.command import mhsa, printed_json, refused
from support.records_made import DEVICE, made

from mhsa_compile.hardware import data_paths
from mhsa_compile.records import record_files
from mhsa_compile.records.record import Record


def written(path: Path, *records: Record) -> Path:
    for record in records:
        record_files.append(path, record)
    return path


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of shipped records: empty, for now."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(data_paths, "schedules_folder", lambda: folder)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "own"))
    return folder


def test_a_file_is_listed(tmp_path: Path) -> None:
    key = {"q_length": "any", "num_heads": 8, "mask": None}
    emulated = made(op="attention", key=key, median_us=1234.5, device=msgspec.structs.replace(DEVICE, emulated=True))
    path = written(tmp_path / "some.jsonl", made(), emulated)
    table = mhsa("records", "list", path).stdout
    for cell in ("2 records", "linear", "in_features=512", "rows=100", "tile_rows=8", "80.00", "1.25 x", "2026-11-21",
                 "num_heads=8", "for any", "1,234.50", "a CPU", "(zen4)", "emulated"):  # fmt: skip
        assert cell in table
    assert "mask" not in table and "does not fit" not in table
    listed = printed_json("records", "list", path)
    assert [line["file"] for line in listed] == [str(path)] * 2
    assert msgspec.convert([line["record"] for line in listed], list[Record]) == [made(), emulated]


def test_records_of_a_target_are_its_users_and_the_shipped_ones(shipped: Path) -> None:
    nothing = mhsa("records", "list", "--target", "znver4")
    assert nothing.exit_code == 0 and "none at" in nothing.stdout
    own = written(data_paths.own_records("znver4"), made("znver4"))
    ours = written(shipped / "znver4.jsonl", made("x86-64-v4"), made("x86-64-v3"))
    listed = printed_json("records", "list", "--target", "znver4")
    assert [(line["file"], bool(line["misfit"])) for line in listed] == [
        (str(own), False), (str(ours), False), (str(ours), True),
    ]  # fmt: skip
    assert "made for 16 vectors" in listed[2]["misfit"]
    assert "does not fit" in mhsa("records", "list", "--target", "znver4").stdout.replace("\n", " ")


def test_a_torn_line_is_one_warning(tmp_path: Path) -> None:
    path = written(tmp_path / "some.jsonl", made())
    path.write_bytes(path.read_bytes() * 2 + b'{"format"')
    result = mhsa("records", "list", path, "--json")
    assert len(json.loads(result.stdout)) == 2
    assert result.stderr.count("\n") == 1 and "torn" in result.stderr


def test_files_are_merged(tmp_path: Path) -> None:
    a = written(tmp_path / "a.jsonl", made(median_us=90.0), made(op="attention"))
    b = written(tmp_path / "b.jsonl", made(median_us=70.0), made("x86-64-v3"))
    c = written(tmp_path / "c.jsonl", made(threads=2))
    told = printed_json("records", "merge", a, b, "-o", c)
    assert told == {"file": str(c), "records": 4, "read": {str(a): 2, str(b): 2}}
    kept = [made(threads=2), made(median_us=70.0), made(op="attention"), made("x86-64-v3")]
    assert list(record_files.read(c).records) == kept
    assert mhsa("records", "merge", a, "-o", tmp_path / "new.jsonl").exit_code == 0
    assert record_files.read(tmp_path / "new.jsonl") == record_files.read(a)


@pytest.mark.parametrize("foreign", ["a.jsonl", "c.jsonl"])
def test_a_foreign_line_is_no_merge(tmp_path: Path, foreign: str) -> None:
    for name in ("a.jsonl", "c.jsonl"):
        written(tmp_path / name, made())
    lines = (tmp_path / foreign).read_text() + "my notes\n"
    (tmp_path / foreign).write_text(lines)
    message = refused(mhsa("records", "merge", tmp_path / "a.jsonl", "-o", tmp_path / "c.jsonl"))
    assert f"{foreign}', line 2" in message and "--repair" in message
    assert (tmp_path / foreign).read_text() == lines


def test_a_merge_of_nothing_writes_nothing(tmp_path: Path) -> None:
    assert "absent.jsonl" in refused(mhsa("records", "merge", tmp_path / "absent.jsonl", "-o", tmp_path / "c.jsonl"))
    assert list(tmp_path.iterdir()) == []


def test_the_best_is_promoted_and_what_is_doubtful_is_not(tmp_path: Path, shipped: Path) -> None:
    emulated = made("znver4", op="attention", device=msgspec.structs.replace(DEVICE, emulated=True))
    unsteady, steady = made("znver4", median_us=50.0, spread=0.2), made("znver4", median_us=60.0)
    other = made("x86-64-v3", op="attention")
    place = written(shipped / "znver4.jsonl", made("znver4", median_us=99.0), made("znver4", threads=2))
    path = written(tmp_path / "znver4.jsonl", unsteady, steady, made("znver4", median_us=61.0))
    result = mhsa("records", "promote", path, "--json")
    assert result.exit_code == 0, result.output  # another record of that operation was taken
    told = json.loads(result.stdout)
    assert (told["promoted"], told["records"], len(told["refused"])) == (1, 2, 1)
    assert record_files.read(place).records == (steady, made("znver4", threads=2))
    before = place.read_bytes()
    result = mhsa("records", "promote", written(tmp_path / "my.jsonl", emulated, other), "--target", "znver4", "--json")
    assert result.exit_code == 1
    reasons = [refusal["reason"] for refusal in json.loads(result.stdout)["refused"]]
    assert "emulator" in reasons[0] and "made for 16 vectors" in reasons[1]
    assert place.read_bytes() == before


@pytest.mark.thorough_but("native")
@pytest.mark.parametrize("name", ["native", "mine"])
def test_records_are_promoted_to_a_target_that_is_shipped(tmp_path: Path, shipped: Path, name: str) -> None:
    path = written(tmp_path / f"{name}.jsonl", made("znver4"))
    message = refused(mhsa("records", "promote", path))
    assert "--target znver4: all of them fit znver4" in message
    assert list(shipped.iterdir()) == []
    assert mhsa("records", "promote", path, "--target", "znver4").exit_code == 0
    assert record_files.read(shipped / "znver4.jsonl").records == (made("znver4"),)


def test_a_file_is_checked_and_repaired(tmp_path: Path) -> None:
    path = written(tmp_path / "some.jsonl", made())
    assert mhsa("records", "check", path).exit_code == 0
    path.write_bytes(b'my notes\n{"format":7}\n' + path.read_bytes() + b'{"for')
    before = path.read_bytes()
    result = mhsa("records", "check", path, "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["records"] == 1 and told["rejected"] is None
    assert [line["line"] for line in told["no_records"]] == [1, 2, 4]
    assert [line["reason"] for line in told["no_records"]][1:] == ["format 7", "torn: its writer died"]
    assert path.read_bytes() == before
    repaired = mhsa("records", "check", path, "--repair")
    assert repaired.exit_code == 0 and "some.jsonl.rejected" in repaired.stdout.replace("\n", "")
    assert record_files.read(path) == record_files.Contents((made(),), torn=False)
    assert (tmp_path / "some.jsonl.rejected").read_bytes() == b'my notes\n{"format":7}\n{"for\n'
    assert mhsa("records", "check", path).exit_code == 0


def test_bad_lists_are_refused(tmp_path: Path) -> None:
    assert "absent.jsonl" in refused(mhsa("records", "list", tmp_path / "absent.jsonl"))
    assert "znver5" in refused(mhsa("records", "list", "--target", "znver6"))
    assert "Leave one" in refused(mhsa("records", "list", tmp_path / "a.jsonl", "--target", "znver4"))
    assert "absent.jsonl" in refused(mhsa("records", "check", tmp_path / "absent.jsonl", "--repair"))
    assert list(tmp_path.iterdir()) == []
