"""Files of tuned records: JSON Lines, one file for each target.

They only grow while tuning; several processes may append to one, and a process that dies in the middle of a line costs
that line and no other (`append_log`). A line that is no record is named, never passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mhsa_compile.errors import RecordsError
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.records import append_log
from mhsa_compile.records.record import FORMAT, Record, does_not_tell, encoded, merge_best

_SPLIT = "Split the file by device first."
_BEGIN = b'{"format":'


@dataclass(frozen=True)
class Contents:
    """What a file of records holds. `torn` is whether its last line was cut off, and left out."""

    records: tuple[Record, ...]
    torn: bool


@dataclass(frozen=True)
class Flaw:
    """A line that is no record, and what to say about it; None where a writer died before its end."""

    number: int
    line: bytes
    error: RecordsError | None


def read(path: Path) -> Contents:
    """What a file holds. Raises RecordsError for a line that is no record: it is someone else's, or was edited."""
    records, flaws = examine(path)
    for flaw in flaws:
        if flaw.error is not None:
            raise flaw.error
    return Contents(tuple(records), bool(flaws))


def gather(paths: Iterable[Path]) -> tuple[list[Record], list[str]]:
    """(the records of several files, a sentence for each file whose last line is torn, or whose records do not tell the
    microarchitecture that they were measured on). Raises RecordsError."""
    records: list[Record] = []
    warnings = []
    for path in paths:
        contents = read(path)
        records += contents.records
        if contents.torn:
            warnings.append(f"records {str(path)!r}: the last line is torn, and left out; the next record replaces it")
        if count := sum(does_not_tell(record) for record in contents.records):
            warnings.append(
                f"records {str(path)!r}: {count} do not tell the microarchitecture that they were measured on, and "
                f"serve targets for many alone: `mhsa records measured-on {path} NAME` adds it"
            )
    return records, warnings


def examine(path: Path) -> tuple[list[Record], list[Flaw]]:
    """(the records of a file, the lines that are none). Raises RecordsError where it cannot be read."""
    try:
        lines, tail = append_log.read(path)
    except OSError as error:
        raise RecordsError(f"records {str(path)!r}", "a file that can be read", error.strerror or str(error)) from error
    rows, flaws = _sorted_out(path, lines, tail)
    return [record for _, record in rows], flaws


def append(path: Path, record: Record) -> None:
    """Adds one line, on the disk when this returns. What a dead writer left of its last line is cut off first, so that
    no two lines grow together. Raises RecordsError for a record that is wrong, or where there is no room, and leaves
    the file as it was."""
    line = encoded(record)
    what = f"record of {record.op}"
    if not record.error_share <= 1:
        raise RecordsError(what, "an error within its budget", f"{record.error_share} of it")
    _parsed(what, line)  # what cannot be read again, such as a time of NaN, must not make the file foreign
    with _room_for(path):
        append_log.append(path, line, lambda tail: _is_whole(path, tail))


def merge_into(path: Path, more: Iterable[Record]) -> list[Record]:
    """Leaves in a file, which need not be there yet, the best of what it holds and of `more`. Returns that.

    Raises RecordsError, and leaves the file as it was.
    """
    best: list[Record] = []

    def change(lines: list[bytes], tail: bytes) -> list[bytes]:
        rows = _sound_rows(path, lines, tail)
        best.extend(merge_best([*(record for _, record in rows), *more]))
        return [encoded(record) for record in best]

    with _room_for(path):
        append_log.rewrite(path, change)
    return best


def state_microarchitecture(path: Path, name: str, cpu: str | None) -> int:
    """Says of the records of a file that do not tell on which microarchitecture they were measured: this one. Of those
    of a CPU's marketing name alone, if that is given. Returns how many. Raises RecordsError, and leaves the file as it
    was."""
    count = 0

    def change(lines: list[bytes], tail: bytes) -> list[bytes]:
        nonlocal count
        rows = _sound_rows(path, lines, tail)
        untold = [does_not_tell(record) and cpu in (None, record.device.cpu) for _, record in rows]
        own_devices = [record.device for (_, record), is_untold in zip(rows, untold, strict=True) if is_untold]
        devices = {(device.cpu, device.l1d_kib, device.l2_kib) for device in own_devices}
        if len({device[0] for device in devices}) > 1:
            names = ", ".join(sorted({repr(device[0]) for device in devices}))
            raise RecordsError("--cpu", "one of the names that the records have", names, "Name one at a time.")
        if len(devices) > 1:
            expected = "records of one microarchitecture"
            raise RecordsError(f"records {str(path)!r}", expected, f"caches of several: {sorted(devices)}", _SPLIT)
        count = len(own_devices)
        return [
            _stated(record, name) if is_untold else line for (line, record), is_untold in zip(rows, untold, strict=True)
        ]

    with _room_for(path):
        append_log.rewrite(path, change)
    return count


def _stated(record: Record, name: str) -> bytes:
    device = msgspec.structs.replace(record.device, microarchitecture=name)
    return encoded(msgspec.structs.replace(record, device=device, format=FORMAT))


def repair(path: Path, rejected: Path) -> list[Flaw]:
    """Moves every line that is no record to the end of another file. Returns them. Raises RecordsError."""
    flaws: list[Flaw] = []

    def change(lines: list[bytes], tail: bytes) -> list[bytes]:
        rows, wrong = _sorted_out(path, lines, tail)
        flaws.extend(wrong)
        for flaw in wrong:
            append_log.append(rejected, flaw.line, lambda _: True)
        return [line for line, _ in rows]

    with _room_for(path):
        append_log.rewrite(path, change)
    return flaws


def _sorted_out(path: Path, lines: list[bytes], tail: bytes) -> tuple[list[tuple[bytes, Record]], list[Flaw]]:
    """(the lines that are records, and those; the lines that are none). Empty lines are nothing."""
    rows, flaws = [], []
    for number, line in enumerate([*lines, tail], 1):
        if not line.strip():
            continue
        try:
            rows.append((line, _parsed(_line_name(path, number), line)))
        except RecordsError as error:
            is_torn = number > len(lines) and _is_torn(line)
            flaws.append(Flaw(number, line, None if is_torn else error))
    return rows, flaws


def _sound_rows(path: Path, lines: list[bytes], tail: bytes) -> list[tuple[bytes, Record]]:
    """The lines that are records, and those. Raises RecordsError for one that is none, and is not torn."""
    rows, flaws = _sorted_out(path, lines, tail)
    for flaw in flaws:
        if flaw.error is not None:
            raise flaw.error
    return rows


def _is_whole(path: Path, tail: bytes) -> bool:
    """Whether what stands behind the last newline of a file is a record. Raises RecordsError where it is nothing of
    ours, as in a file that was named by mistake: what is not ours is not cut off."""
    try:
        _parsed(f"records {str(path)!r}, the last line", tail)
    except RecordsError:
        if not _is_torn(tail):
            raise
        return False
    return True


def _is_torn(tail: bytes) -> bool:
    """Whether a line that is no record may be the beginning of one. After a power cut it may end in zeros."""
    beginning = tail.rstrip(b"\0")
    return beginning[: len(_BEGIN)] == _BEGIN[: len(beginning)]


def _parsed(what: str, line: bytes) -> Record:
    hint = "`mhsa records check --repair` sets such lines aside; what is missing then can be tuned again."
    with reading(RecordsError, what, "a record", hint):
        version = msgspec.json.decode(line, type=_RecordVersion).format
        if version > FORMAT:
            raise RecordsError(what, f"format {FORMAT}", f"format {version}", "Update mhsa-compile.")
        return msgspec.json.decode(line, type=Record)


class _RecordVersion(msgspec.Struct):
    format: int


def _line_name(path: Path, number: int) -> str:
    return f"records {str(path)!r}, line {number}"


@contextmanager
def _room_for(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        expected = "a file that can be written, with room for a line"
        hint = "Free some space, or name another file. What is in the file is whole."
        raise RecordsError(f"records {str(path)!r}", expected, error.strerror or str(error), hint) from error
