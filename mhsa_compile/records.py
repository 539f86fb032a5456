"""Tuned records: which config of which kernel was the fastest for an operation, on which device, and how right it was.

A file of records is JSON Lines, one for each target. It only grows while tuning; several processes may append to it,
and a process that dies in the middle of a line costs that line and no other. The schema: schedules/README.md.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mhsa_compile.errors import RecordsError
from mhsa_compile.jobs import Device
from mhsa_compile.profile import TargetProfile

FORMAT = 1


class Isa(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the code of a record was generated for: a record is never used for anything else."""

    architecture: str
    vector_bits: int
    vector_registers: int
    features: tuple[str, ...]  # that the code may use


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line.

    op, key      the operation; its lengths in buckets, so that neighbours share a record (`op_keys`)
    sizes        the lengths at which it was measured
    kernel       its name; "tvm" for an operator of TVM's, whose schedule is `trace`
    config       a value for each knob of the kernel
    median_us    microseconds a call, `spread` their interquartile range as a share of the median
    default_us   of the default config in the same rounds
    error_share  its largest error as a share of the error budget: at most 1
    threads      that a call used
    """

    format: int = FORMAT
    op: str
    key: dict[str, Any]
    sizes: dict[str, int]
    kernel: str
    config: dict[str, int]
    median_us: float
    spread: float
    default_us: float
    error_share: float
    threads: int
    isa: Isa
    device: Device
    versions: dict[str, str]
    date: str
    trace: str = ""


def isa_of(profile: TargetProfile) -> Isa:
    hardware = profile.hardware
    return Isa(
        architecture=profile.tvm.mtriple.partition("-")[0],
        vector_bits=hardware.vector_bits,
        vector_registers=hardware.vector_registers,
        features=hardware.features,
    )


def misfit(record: Record, profile: TargetProfile) -> str | None:
    """Why a record's code must not be used for a target, or None."""
    own, isa = isa_of(profile), record.isa
    if isa.architecture != own.architecture:
        return f"it is of {isa.architecture}"
    if (isa.vector_bits, isa.vector_registers) != (own.vector_bits, own.vector_registers):
        return f"it is of {isa.vector_registers} vectors of {isa.vector_bits} bits"
    if missing := sorted(set(isa.features) - set(own.features)):
        return f"its code may use {', '.join(missing)}"
    return None


@dataclass(frozen=True)
class Contents:
    """What a file of records holds. `torn` is whether its last line was cut off, and left out."""

    records: tuple[Record, ...]
    torn: bool


def read(path: Path) -> Contents:
    """Raises RecordsError for a line that is no record: the file is someone else's, or was edited."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RecordsError(f"records {str(path)!r}", "a file that can be read", error.strerror or str(error)) from error
    whole, _, torn = raw.rpartition(b"\n")
    lines = whole.split(b"\n") if whole else []
    return Contents(tuple(_parsed(path, number, line) for number, line in enumerate(lines, 1) if line), bool(torn))


def _parsed(path: Path, number: int, line: bytes) -> Record:
    what = f"records {str(path)!r}, line {number}"
    try:
        stated = msgspec.json.decode(line, type=_Versioned).format
        if stated > FORMAT:
            raise RecordsError(what, f"format {FORMAT}", f"format {stated}", "Update mhsa-compile.")
        return msgspec.json.decode(line, type=Record)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "Remove the line, or the file: records only make code faster. `mhsa tune` measures them again."
        raise RecordsError(what, "a record", str(error), hint) from error


class _Versioned(msgspec.Struct):
    format: int


def append(path: Path, record: Record) -> None:
    """Adds one line, on the disk when this returns. What a dead writer left of its last line is cut off first, so that
    no two lines grow together. Raises RecordsError where there is no room, and leaves the file as it was."""
    line = msgspec.json.encode(record) + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path) as file:
            end = _end_of_last_line(file)
            os.ftruncate(file, end)
            try:
                if os.pwrite(file, line, end) != len(line):
                    raise OSError("the disk is full")
                os.fsync(file)
            except OSError:
                os.ftruncate(file, end)
                raise
    except OSError as error:
        hint = "Free some space, or name another file with --records. What is in the file is whole."
        raise RecordsError(f"records {str(path)!r}", "room for a line", error.strerror or str(error), hint) from error


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file, created where there is none, and nobody else's meanwhile."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _end_of_last_line(file: int) -> int:
    """Bytes up to and with the last newline."""
    end = os.fstat(file).st_size
    while end:
        begin = max(0, end - 65_536)
        found = os.pread(file, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


def merged(records: Iterable[Record]) -> list[Record]:
    """The fastest right one for each operation, number of threads, ISA and device, in the order in which they came."""
    best: dict[bytes, Record] = {}
    for record in records:
        if record.error_share > 1:
            continue
        place = identity(record)
        if place not in best or _faster(record, best[place]):
            best[place] = record
    return list(best.values())


def _faster(record: Record, other: Record) -> bool:
    """By its time, or where that is of other lengths in the same bucket, by what it gains there."""
    if record.sizes == other.sizes:
        return record.median_us < other.median_us
    return record.median_us / record.default_us < other.median_us / other.default_us


def identity(record: Record) -> bytes:
    """What two records must share to be about the same thing; sizes within a bucket are not part of it."""
    return _ENCODER.encode((record.op, record.key, record.threads, record.isa, record.device))


def key_bytes(op: str, key: dict[str, Any]) -> bytes:
    return _ENCODER.encode((op, key))


_ENCODER = msgspec.json.Encoder(order="deterministic")


class Shelf:
    """Records at hand for a target, by operation."""

    def __init__(self, records: Iterable[Record], profile: TargetProfile) -> None:
        self.profile = profile
        self._by_key: dict[bytes, list[Record]] = {}
        for record in records:
            self._by_key.setdefault(key_bytes(record.op, record.key), []).append(record)

    def candidates(self, op: str, key: dict[str, Any]) -> tuple[list[Record], str]:
        """(the records of this operation that fit the target, the most alike device first; why the others do not)."""
        found = self._by_key.get(key_bytes(op, key), [])
        if not found:
            return [], "no record of this operation at these lengths"
        reasons = [misfit(record, self.profile) for record in found]
        fitting = [record for record, reason in zip(found, reasons, strict=True) if reason is None]
        refused = "; ".join(dict.fromkeys(reason for reason in reasons if reason is not None))
        return sorted(fitting, key=self._distance), refused

    def _distance(self, record: Record) -> tuple[Any, ...]:
        hardware, device = self.profile.hardware, record.device
        caches = (device.l1d_kib, device.l2_kib) != (hardware.l1d_kib, hardware.l2_kib)
        return (device.emulated, caches, abs(record.threads - hardware.cores), record.median_us / record.default_us)
