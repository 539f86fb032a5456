"""Artifacts that were compiled before, which compiling the same thing again takes from the user's cache folder."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from mhsa_compile.cli.common import options, output
from mhsa_compile.runtime.misfits import shape_text

_SHOWN = 20


def show(context: typer.Context, *, json: options.Json = False) -> None:
    """Show where artifacts are kept, how many there are, and how large they are. MHSA_CACHE=0 switches it off."""
    if context.invoked_subcommand is not None:
        return
    from mhsa_compile.compiler.cache import artifact_store
    from mhsa_compile.hardware.data_paths import artifact_cache

    place, on, entries = artifact_cache(), artifact_store.is_on(), artifact_store.entries()
    total = sum(entry.size for entry in entries)
    if json:
        summary = {"folder": place, "on": on, "bytes": total, "limit_bytes": artifact_store.LIMIT, "entries": entries}
        output.print_json(summary)
        return
    title = f"{place}: {len(entries)} artifacts, {_mib(total)} of at most {_mib(artifact_store.LIMIT)}"
    now = time.time()
    rows = [(entry.path.name[:12], _what(entry.path), _mib(entry.size), _ago(now - entry.used)) for entry in entries]
    output.print_table(title, ("key", "what", "size>", "last used>"), rows[:_SHOWN])
    if len(rows) > _SHOWN:
        output.line(f"and {len(rows) - _SHOWN} more")
    if not on:
        output.line(f"It is off: {artifact_store.SWITCH}=0")


def clear(*, json: options.Json = False) -> None:
    """Delete all artifacts that the cache keeps."""
    from mhsa_compile.compiler.cache import artifact_store

    entries = artifact_store.clear()
    total = sum(entry.size for entry in entries)
    if json:
        output.print_json({"deleted": len(entries), "bytes": total})
    else:
        output.line(f"{len(entries)} artifacts deleted, {_mib(total)}")


def _what(place: Path) -> str:
    """Describes a kept artifact in a few words, from its manifest."""
    from mhsa_compile.errors import ArtifactError
    from mhsa_compile.runtime.artifact.artifact import open_artifact

    try:
        with open_artifact(place) as files:
            manifest = files.manifest
    except ArtifactError:
        return "damaged; it is compiled again when it is asked for"
    inputs = ", ".join(f"{info.name} {shape_text(info.dims)} {info.dtype}" for info in manifest.inputs)
    return f"{inputs}, for {manifest.target.name}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _ago(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"
