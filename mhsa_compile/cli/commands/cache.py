"""Artifacts that were compiled before, which compiling the same thing again takes from the user's cache folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mhsa_compile.cli.common import options, output
from mhsa_compile.runtime.misfits import shape_text

if TYPE_CHECKING:
    from mhsa_compile.runtime.artifact.manifest import Manifest
    from mhsa_compile.spec.attention_spec import AttentionSpec

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
    rows = [
        (entry.path.name[:8], *_words(entry.path), _mib(entry.size), _ago(now - entry.used))
        for entry in entries[:_SHOWN]
    ]
    output.print_table(title, ("key", "what", "compiled with", "target", "size>", "last used>"), rows)
    if len(entries) > _SHOWN:
        output.line(f"and {len(entries) - _SHOWN} more")
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


def _words(place: Path) -> tuple[str, str, str]:
    """What a kept artifact was compiled of, how, and for what, from its manifest."""
    from mhsa_compile.errors import ArtifactError
    from mhsa_compile.runtime.artifact.artifact import open_artifact

    try:
        with open_artifact(place) as files:
            manifest = files.manifest
    except ArtifactError:
        return "damaged; it is compiled again when it is asked for", "", ""
    inputs = ", ".join(f"{info.name} {shape_text(info.dims)} {info.dtype}" for info in manifest.inputs)
    what = f"a graph of {len(manifest.ops)} operations" if manifest.spec is None else _differences(manifest.spec)
    return f"{what}; takes {inputs}", ", ".join(_options(manifest)), manifest.target.name


def _differences(spec: AttentionSpec) -> str:
    """A spec's fields that say something: its first two, and those that are not what they would be by default."""
    fields = spec.to_dict()
    usual = type(spec)(embed_dim=spec.num_heads, num_heads=spec.num_heads).to_dict()
    usual |= {"num_kv_heads": spec.num_heads, "head_dim": spec.embed_dim // spec.num_heads, "v_head_dim": spec.head_dim}
    needed = ("embed_dim", "num_heads")
    values = {name: value for name, value in fields.items() if name in needed or value != usual.get(name)}
    return output.assignments(values)


def _options(manifest: Manifest) -> Iterator[str]:
    """What was asked for beside the source."""
    if manifest.int8_weights:
        yield "weights=int8"
    if manifest.float32_products != "auto":
        yield f"float32_products={manifest.float32_products}"
    if manifest.in_place:
        yield "in_place"
    if tuned := sum(op.source == "record" for op in manifest.ops):
        yield f"{tuned} tuned operations"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _ago(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"
