"""record.py, record_files.py and journal.py: what a record is used for, and that its file survives everything."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from support.records_made import DEVICE, device_of, made

from mhsa_compile.errors import RecordsError
from mhsa_compile.hardware import data_paths, environment
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.records import append_log, record_files
from mhsa_compile.records import record as records
from mhsa_compile.records.record import Record, RecordSet, encoded, merge_best, why_not_on

LINE = encoded(made())


def numbered(number: int) -> Record:
    return made(key={"rows": number}, median_us=1.0 + number)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of three records."""
    path = tmp_path / "schedules" / "some.jsonl"
    for number in range(3):
        record_files.append(path, numbered(number))
    return path


def test_records_come_back_as_they_were(path: Path) -> None:
    assert record_files.read(path) == record_files.Contents(tuple(map(numbered, range(3))), torn=False)
    assert LINE.startswith(record_files._BEGIN)


@pytest.mark.parametrize("length", [1, 9, 10, 200, len(LINE) - 1])
def test_a_torn_last_line_is_left_out_and_then_replaced(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes() + LINE[:length])
    assert record_files.read(path) == record_files.Contents(tuple(map(numbered, range(3))), torn=True)
    found, warnings = record_files.gather([path, path])
    assert len(found) == 6
    assert len(warnings) == 2 and all(str(path) in warning and "torn" in warning for warning in warnings)
    record_files.append(path, numbered(3))
    assert record_files.read(path) == record_files.Contents(tuple(map(numbered, range(4))), torn=False)


def test_a_power_cut_may_leave_zeros(path: Path) -> None:
    whole = path.read_bytes()
    for tail in (b"\0" * 4096, LINE[:100] + b"\0" * 100):
        path.write_bytes(whole + tail)
        assert record_files.read(path).torn
        record_files.append(path, numbered(3))
        assert len(record_files.read(path).records) == 4


def test_a_last_line_that_lacks_only_its_newline_stays(path: Path) -> None:
    """Some editors leave a file so."""
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert record_files.read(path) == record_files.Contents(tuple(map(numbered, range(3))), torn=False)
    record_files.append(path, numbered(3))
    assert record_files.read(path).records == tuple(map(numbered, range(4)))


FOREIGN = {
    "not JSON": (b"threads = 2", "malformed"),
    "other JSON": (b'{"trials": 3}', "missing required field `format`"),
    "a field too many": (LINE[:-1] + b',"speed":9}', "unknown field `speed`"),
    "a field missing": (LINE.replace(b'"threads":1,', b""), "missing required field `threads`"),
    "a time of nothing": (LINE.replace(b'"median_us":80.0', b'"median_us":0.0'), "$.median_us"),
    "not text": (b"\xff" + LINE, "malformed"),
    "two grown together": (LINE[:50] + LINE, "record"),
    "newer": (LINE.replace(b'"format":2', b'"format":3'), "expected format 2, got format 3. Update mhsa-compile."),
}


@pytest.mark.parametrize(("line", "reason"), FOREIGN.values(), ids=FOREIGN.keys())
def test_a_foreign_line_is_named_by_its_number(path: Path, line: bytes, reason: str) -> None:
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"\n" + line + b"\n" + b"".join(rest))
    with pytest.raises(RecordsError, match=r"some\.jsonl', line 3: expected") as refusal:
        record_files.read(path)
    assert reason in str(refusal.value)
    with pytest.raises(RecordsError, match="line 3"):
        record_files.merge_into(path, [made()])
    assert line in path.read_bytes()


@pytest.mark.parametrize("text", ['{"trials": 3}', "# Notes\n- measure again", '{"form'[:-1] + 's": 1}'])
def test_a_file_that_was_named_by_mistake_is_left_alone(tmp_path: Path, text: str) -> None:
    """Nothing of it is taken for a torn line, and cut off."""
    path = tmp_path / "other.json"
    path.write_text(text)
    for attempt in (record_files.read, lambda path: record_files.append(path, made())):
        with pytest.raises(RecordsError, match=r"other\.json"):
            attempt(path)
    assert path.read_text() == text


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match=r"absent\.jsonl.*No such file"):
        record_files.read(tmp_path / "absent.jsonl")


@pytest.mark.parametrize("wrong", [{"error_share": 1.5}, {"error_share": float("nan")}, {"median_us": float("inf")}])
def test_a_wrong_record_is_never_written(path: Path, wrong: dict[str, float]) -> None:
    before = path.read_bytes()
    with pytest.raises(RecordsError, match="record of linear: expected"):
        record_files.append(path, made(**wrong))
    assert path.read_bytes() == before


@contextmanager
def disk_full_at(size: int) -> Iterator[None]:
    """Files of this process end at `size` bytes, as on a disk that is full there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 1, 300])
@pytest.mark.parametrize("tail", [b"", LINE[:20], LINE])
def test_a_full_disk_leaves_the_file_whole(path: Path, room: int, tail: bytes) -> None:
    whole = path.stat().st_size + (len(tail) if tail == LINE else 0)
    path.write_bytes(path.read_bytes() + tail)
    for attempt in (
        lambda: record_files.append(path, numbered(3)),
        lambda: record_files.merge_into(path, map(numbered, range(5))),
    ):
        with disk_full_at(whole + room), pytest.raises(RecordsError, match=r"room for a line, got (File too|No space)"):
            attempt()
    kept = (*map(numbered, range(3)), *([made()] if tail == LINE else []))
    assert record_files.read(path) == record_files.Contents(kept, torn=False)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def write_some(path: str, first: int, count: int) -> None:
    for number in range(first, first + count):
        record_files.append(Path(path), numbered(number))


def test_several_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    """Two append while a third merges: no record goes to a file that is no longer there."""
    path, context = tmp_path / "some.jsonl", multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_some, args=(str(path), first, 20)) for first in (0, 20)]
    for writer in writers:
        writer.start()
    merges = 0
    while merges < 5 or any(writer.is_alive() for writer in writers):
        record_files.merge_into(path, [numbered(99)])
        merges += 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    contents = record_files.read(path)
    assert not contents.torn
    assert sorted(record.key["rows"] for record in contents.records) == [*range(40), 99]


def test_what_kills_a_merge_leaves_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        record_files.merge_into(path, [numbered(7)])
    assert path.read_bytes() == before
    monkeypatch.undo()
    record_files.merge_into(path, [numbered(8)])
    assert [record.key["rows"] for record in record_files.read(path).records] == [0, 1, 2, 8]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_merge_goes_through_a_link(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    path.chmod(0o600)
    record_files.merge_into(link, [numbered(7)])
    assert link.is_symlink()
    assert len(record_files.read(path).records) == 4
    assert path.stat().st_mode & 0o777 == 0o600


def test_repair_sets_aside_what_is_no_record(path: Path, tmp_path: Path) -> None:
    rejected = tmp_path / "rejected"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], b"my notes", *lines[1:], LINE[:30]]))
    flaws = record_files.repair(path, rejected)
    assert [(flaw.number, flaw.error is None) for flaw in flaws] == [(2, False), (5, True)]
    assert path.read_bytes().splitlines() == lines
    assert rejected.read_bytes().splitlines() == [b"my notes", LINE[:30]]


def test_the_tail_of_a_file_is_found_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append_log, "_BLOCK", 7)
    path = tmp_path / "lines"
    for before, tail in itertools.product(
        (b"", b"one\n", b"a line\n" * 3), (b"", b"t", b"torn", b"0123456", b"x" * 40)
    ):
        path.write_bytes(before + tail)
        append_log.append(path, b"next", lambda _: False)
        assert path.read_bytes() == before + b"next\n"


def test_killed_writers_cost_at_most_the_line_they_were_writing() -> None:
    """A slice of `make kill-tuning`."""
    campaign = "campaigns.kill"
    child = subprocess.run(
        [sys.executable, "-m", campaign, "--kills", "20", "--tuning", "0", "--seed", "5"],
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout + child.stderr


ISAS = ["x86-64-v3", "x86-64-v4", "znver4", "sapphirerapids", "neoverse-n1", "neoverse-v1"]
FITS = {  # (what a record was made for, the targets that may use it), besides itself
    "x86-64-v4": {"znver4", "sapphirerapids"},
    "neoverse-n1": {"neoverse-v1"},
}


@pytest.mark.parametrize("target", ISAS)
@pytest.mark.parametrize("of", ISAS)
def test_a_record_is_used_only_where_its_instructions_are(of: str, target: str) -> None:
    profile = load_profile(target)
    record = made(of, device=device_of(profile))
    fits = target == of or target in FITS.get(of, set())
    assert (why_not_on(record, profile) is None) == fits
    found, reason = RecordSet([record], profile).candidates(record.op, record.key)
    assert found == ([record] if fits else [])
    assert bool(reason) != fits


@pytest.mark.parametrize(
    ("of", "target", "reason"),
    [
        ("x86-64-v4", "x86-64-v3", "made for 32 vectors of 512 bits, not 16 vectors of 256 bits"),
        ("x86-64-v3", "x86-64-v4", "made for 16 vectors of 256 bits, not 32 vectors of 512 bits"),
        ("x86-64-v4", "neoverse-n1", "made for x86_64, not aarch64"),
        ("neoverse-v1", "cortex-a72", "made for asimddp, asimdfhm"),
    ],
)
def test_why_a_record_is_not_used(of: str, target: str, reason: str) -> None:
    assert reason in str(why_not_on(made(of), load_profile(target)))
    assert reason in RecordSet([made(of)], load_profile(target)).candidates("linear", made().key)[1]


def test_a_shelf_answers_for_each_operation_and_prefers_its_own_kind_of_device() -> None:
    profile = load_profile("x86-64-v4")
    alike = msgspec.structs.replace(DEVICE, l1d_kib=profile.hardware.l1d_kib, l2_kib=profile.hardware.l2_kib)
    other = msgspec.structs.replace(alike, l2_kib=64)
    emulator = msgspec.structs.replace(alike, emulated=True)
    threads = profile.hardware.cores
    best = [
        made(device=alike, threads=threads, median_us=80.0),
        made(device=alike, threads=threads, median_us=90.0),
        made(device=alike, threads=threads + 1, median_us=10.0),
        made(device=other, threads=threads, median_us=10.0),
        made(device=emulator, threads=threads, median_us=10.0),
    ]
    wrong = made(device=alike, threads=threads, median_us=1.0, error_share=1.5)
    shelf = RecordSet([wrong, *reversed(best), made(key={"rows": 1})], profile)
    assert shelf.candidates("linear", dict(reversed(made().key.items()))) == (best, "over the error budget")
    assert shelf.candidates("linear", {"rows": 2}) == ([], "no record of this operation at these lengths")
    assert shelf.candidates("attention", made().key)[0] == []


def test_merging_keeps_the_fastest_right_one_of_each() -> None:
    slow, fast, wrong = made(median_us=90.0), made(median_us=70.0), made(median_us=1.0, error_share=1.01)
    others = [
        made(op="attention"),
        made(key={"rows": 256}),
        made(threads=2),
        made("x86-64-v3"),
        made(device=msgspec.structs.replace(DEVICE, cpu="another CPU")),
    ]
    for order in itertools.permutations([slow, fast, wrong]):
        assert merge_best([*order, *others]) == [fast, *others]
    assert merge_best([wrong]) == []


def test_merging_weighs_other_lengths_of_a_bucket_by_their_gain() -> None:
    """A time at 65 rows and one at 128 say nothing about each other; what was gained does. In any order."""
    short = made(sizes={"rows": 65}, median_us=40.0, default_us=50.0)
    shorter = made(sizes={"rows": 65}, median_us=39.0, default_us=40.0)
    long = made(sizes={"rows": 128}, median_us=85.0, default_us=100.0)
    for order in itertools.permutations([short, shorter, long]):
        assert merge_best(order) == [long]
    assert merge_best([short, long]) == [short]


DOUBTS = {
    "wrong": ({"error_share": 1.2}, "over the error budget: 1.2 of it"),
    "emulated": ({"device": msgspec.structs.replace(DEVICE, emulated=True)}, "an emulator"),
    "unsteady": ({"spread": 0.07}, "spread over 7.0% of their median, where 5% are allowed"),
    "slower": ({"median_us": 101.0}, "slower than the default config: 101 us, not 100"),
    "dirty": ({"versions": {"source": f"1234abcd{environment.CHANGED}"}}, "in no commit"),
}


@pytest.mark.parametrize(("changes", "reason"), DOUBTS.values(), ids=DOUBTS.keys())
def test_what_is_not_shipped(changes: dict[str, object], reason: str) -> None:
    assert reason in str(records.why_doubtful(made(**changes)))
    assert (
        records.why_doubtful(made(spread=0.05, median_us=100.0, error_share=1.0, versions={"source": "1234abcd"}))
        is None
    )


def test_versions_say_whether_a_checkout_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mhsa_compile"
    (package / "target").mkdir(parents=True)
    file = package / "target" / "environment.py"
    file.touch()
    monkeypatch.setattr(environment, "__file__", str(file))
    assert environment.source() is None  # installed: no repository around it
    git = ("git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "notes").touch()  # outside the package
    commit = environment.source()
    assert commit is not None and len(commit) == 12
    assert environment.versions()["source"] == commit
    (package / "kernel.py").touch()
    assert environment.source() == commit + environment.CHANGED


def test_where_records_of_a_target_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    monkeypatch.setattr(data_paths, "schedules_folder", lambda: shipped)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert load_profile("znver4").records() == []
    own = load_profile("znver4").own_records()
    assert own == tmp_path / "mhsa_compile/schedules/znver4.jsonl"
    record_files.append(own, made("znver4"))
    for name in ("znver4", "x86-64-v3"):
        record_files.append(shipped / f"{name}.jsonl", made(name))
    assert data_paths.records_for("znver4") == load_profile("znver4").records() == [own, shipped / "znver4.jsonl"]
    assert data_paths.records_for("native") == [shipped / "x86-64-v3.jsonl", shipped / "znver4.jsonl"]
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert data_paths.own_records("native") == Path("/home/me/.local/share/mhsa_compile/schedules/native.jsonl")


def test_what_is_shipped_may_be_shipped() -> None:
    for path in data_paths.schedules_folder().glob("*.jsonl"):
        profile = load_profile(path.stem)
        contents = record_files.read(path)
        assert not contents.torn
        assert merge_best(contents.records) == list(contents.records)
        assert [(records.why_doubtful(record), why_not_on(record, profile)) for record in contents.records] == [
            (None, None) for _ in contents.records
        ]


def test_reading_records_needs_no_compiler() -> None:
    child = subprocess.run(
        [sys.executable, "-c", "import sys, mhsa_compile.records.record_files; print('tvm' in sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert child.stdout.strip() == "False"
