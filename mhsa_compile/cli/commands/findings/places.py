"""Where this machine keeps what is written, and /proc: what is missing, full or for reading only."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from mhsa_compile.cli.commands.findings.finding import Finding
from mhsa_compile.errors import MhsaError
from mhsa_compile.files import proc, user_folders
from mhsa_compile.files.room import size_limit, without_room
from mhsa_compile.hardware import data_paths, zig

_CACHE_BYTES = 500 * 2**20  # what Zig's cache grows to over a few targets, with room
_PROBE_BYTES = 16 * 2**20  # what a compilation writes: more than a quota or a limit leaves where one is in the way


def proc_mounted() -> Iterator[Finding]:
    """A finding on /proc: artifacts run without it, compiling does not."""
    if proc.is_mounted():
        yield Finding("/proc", "ok", "mounted")
        return
    advice = "Mount it to compile, profile and bench. Artifacts load: their code goes through a temporary file."
    yield Finding("/proc", "warn", "not mounted", advice)


def folders() -> Iterator[Finding]:
    """Findings on the folders into which something is written: temporary files, without which nothing can be compiled;
    Zig's cache, which has a second place; artifacts that were compiled before; the user's own records."""
    if not user_folders.has_home():
        where = "HOME is unset, and this user has none: caches and records go to the temporary files"
        yield Finding("home", "warn", where, "Set HOME, or XDG_CACHE_HOME and XDG_DATA_HOME, to folders that last.")
    if (limit := size_limit()) is not None and limit < _CACHE_BYTES:
        yield Finding("file sizes", "warn", f"at most {limit} bytes (ulimit -f)", "ulimit -f unlimited, to compile.")
    try:
        temporary = user_folders.temporary_place()
        yield _folder("temporary files", temporary, "Nothing can be compiled: point TMPDIR to another folder.", "fail")
        yield _linker_cache()
        artifacts = data_paths.artifact_cache()
        advice = "Each artifact is compiled anew. Set XDG_CACHE_HOME to a folder that can be written."
        yield _folder("artifact cache", artifacts, advice, "warn")
        records = data_paths.own_records(data_paths.NATIVE).parent
        yield _folder("own records", records, "mhsa tune needs --records FILE, or XDG_DATA_HOME.", "warn")
    except (MhsaError, OSError) as error:
        yield Finding("temporary files", "fail", str(error), "Point TMPDIR to a folder that can be written.")


def own_records() -> Iterator[Finding]:
    """A finding on the records that this user tuned for this machine, where there are any."""
    from mhsa_compile.records import record_files
    from mhsa_compile.records.record import does_not_tell

    try:
        path = data_paths.own_records(data_paths.NATIVE)
        if not path.is_file():
            return
        records = record_files.read(path).records
    except (MhsaError, OSError) as error:
        advice = "Until it can be read, compile with --records /dev/null."
        yield Finding("records", "warn", str(error), advice)
        return
    untold = sum(map(does_not_tell, records))
    told, advice = "", ""
    if untold:
        told = f", {untold} of which do not tell the microarchitecture, and do not count"
        advice = f"Say where they were tuned: mhsa records measured-on {path} NAME."
    yield Finding("records", "warn" if untold else "ok", f"{len(records)} of your own{told}", advice)


def _linker_cache() -> Finding:
    """Into which Zig links: nothing can be compiled without it."""
    wanted, folder = zig.wanted_cache(), zig.cache_folder()
    if folder != wanted:
        advice = "Set ZIG_GLOBAL_CACHE_DIR to a folder that can be written, and lasts."
        return Finding("cache folder", "warn", f"{wanted} cannot be written, {folder} takes its place", advice)
    free = shutil.disk_usage(_existing(folder)).free
    advice = "Free some space, or set ZIG_GLOBAL_CACHE_DIR to another disk."
    if free < _CACHE_BYTES:
        return Finding("cache folder", "warn", f"{folder}, {free // 2**20} MiB free", advice)
    return _folder("cache folder", folder, advice, "warn")


def _folder(check: str, folder: Path, advice: str, status: Literal["warn", "fail"]) -> Finding:
    """What keeps a file of _PROBE_BYTES out of a folder: permissions, a file system for reading, a disk, a quota."""
    place = _existing(folder)
    reason = without_room(place, _PROBE_BYTES) if place.is_dir() else f"{place} is no folder"
    if reason is None:
        return Finding(check, "ok", f"{folder}, {shutil.disk_usage(place).free // 2**30} GiB free")
    return Finding(check, status, f"{folder}: {reason}", advice)


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
