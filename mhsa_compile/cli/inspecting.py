"""`mhsa inspect` and `mhsa targets`: what an artifact holds, what can be compiled for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mhsa_compile.cli import options, output

if TYPE_CHECKING:
    from mhsa_compile.artifact import Artifact


def inspect(artifact: options.ArtifactFolder, *, json: options.Json = False) -> None:
    """Show what an artifact holds, after checking every file against its hash."""
    from mhsa_compile.artifact import Artifact

    opened = Artifact.open(artifact)  # raises ArtifactError for whatever does not match the manifest
    sizes = {name: (Path(opened.path) / name).stat().st_size for name in opened.manifest.files}
    if json:
        output.print_json({"manifest": opened.manifest, "bytes": sizes, "hashes_ok": True})
        return
    _show(opened, sizes)


def _show(opened: Artifact, sizes: dict[str, int]) -> None:
    manifest = opened.manifest
    tensors = [("input", info) for info in manifest.inputs] + [("output", info) for info in manifest.outputs]
    tensors += [("weight", info) for info in manifest.weights]
    output.print_table(
        f"{opened.path}: format {manifest.format_version}, target {manifest.target['name']}",
        ("tensor", "name", "dtype", "dims"),
        ((role, info.name, info.dtype, output.dims_text(info.dims)) for role, info in tensors),
    )
    output.print_table(
        "Operations",
        ("name", "kind", "kernel", "config", "config from", "note"),
        ((op.name, op.op, op.kernel, output.assignments(op.config), op.source, op.note) for op in manifest.ops),
    )
    facts: list[tuple[str, str, object]] = [
        (f"attention {s['op']}", key, value) for s in manifest.semantics for key, value in s.items()
    ]
    facts += [("linears", "weights", "int8, rounded when they are bound")] if manifest.int8_weights else []
    facts += [("spec", key, value) for key, value in (manifest.spec or {}).items()]
    facts += [("target", key, value) for key, value in _flat(manifest.target)]
    facts += [("version", key, value) for key, value in manifest.versions.items()]
    output.print_table("Facts", ("of", "key", "value"), facts)
    files = ((name, f"{sizes[name]:,}", digest[:12], output.ok_cell(True)) for name, digest in manifest.files.items())
    output.print_table("Files", ("file", "bytes>", "sha256", ""), files)


def targets(
    name: Annotated[str | None, typer.Argument(help="A target, `native`, or a .toml file.")] = None,
    *,
    json: options.Json = False,
) -> None:
    """List the targets, or print one as the TOML that a file of your own could start from."""
    from mhsa_compile import profile

    if name is not None:
        found = profile.load_profile(name)
        output.print_json(found) if json else typer.echo(found.to_toml(), nl=False)
        return
    profiles = [profile.load_profile(known) for known in profile.profile_names()]
    if json:
        output.print_json(profiles)
        return
    columns = ("target", "family", "triple", "CPU", "vector bits>", "registers>", "L1d KiB>", "L2 KiB>", "cores>")
    rows = (
        (p.name, p.family, p.tvm.mtriple, p.tvm.mcpu, p.hardware.vector_bits, p.hardware.vector_registers,
         p.hardware.l1d_kib, p.hardware.l2_kib, p.hardware.cores)
        for p in profiles
    )  # fmt: skip
    output.print_table("Targets", columns, rows)


def _flat(table: dict[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    """{"a": {"b": 1}} -> [("a.b", 1)]"""
    pairs: list[tuple[str, object]] = []
    for key, value in table.items():
        if isinstance(value, dict):
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            pairs.append((prefix + key, shown))
    return pairs
