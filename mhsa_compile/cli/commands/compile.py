"""`mhsa compile`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mhsa_compile.cli.common import options, output, sources
from mhsa_compile.cli.common.spec_flags import SpecFlags

if TYPE_CHECKING:
    from mhsa_compile.runtime.artifact.artifact import Artifact


def compile_source(
    source: sources.Source = None,
    *,
    out: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The artifact's folder.")],
    target: Annotated[str, typer.Option(help="A name from `mhsa targets`, or a .toml file.")] = "native",
    force: Annotated[bool, typer.Option("--force", help="Replace the folder if it exists.")] = False,
    dims: options.StatedDims,
    weights: Annotated[
        Literal["int8"] | None, typer.Option("--weights", help="Linears compute in eight bits, rounded at load.")
    ] = None,
    records: options.Records = None,
    dump: Annotated[Path | None, typer.Option(metavar="DIR", help="Write what passes between the stages.")] = None,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Take it from the user's cache folder if it was compiled before.")
    ] = True,
    seed: options.Seed = 0,
    json: options.Json = False,
    spec: SpecFlags,
) -> None:
    """Compile SOURCE, or a spec given by flags with random weights, for a target.

    --batch, --length, --kv-length, --capacity and --dim fix those dims; they stay symbolic otherwise.
    """
    from mhsa_compile.files.atomic_write import check_place
    from mhsa_compile.runtime.artifact.manifest import MANIFEST

    fields, sizes = spec.stated(), dims.stated()
    check_place(out.resolve(), force, MANIFEST)  # before the work, not after it
    started = time.perf_counter()
    artifact = sources.compile_with_progress(
        source,
        fields,
        target,
        dims=sizes,
        dump=dump,
        seed=seed,
        weights=weights,
        records=records,
        cache=cache,
    )
    artifact.save(out, force=force)
    _report(out, artifact, time.perf_counter() - started, json)


def _report(out: Path, artifact: Artifact, seconds: float, json: bool) -> None:
    manifest = artifact.manifest
    if json:
        said = {"artifact": out, "target": manifest.target.name, "seconds": seconds, "ops": manifest.ops}
        output.print_json(said | {"attention": manifest.attention, "fused": sum(b.fused for b in manifest.attention)})
        return
    rows = ((op.name, op.op, op.kernel, op.source, op.note) for op in manifest.ops)
    title = f"{out} for {manifest.target.name}, {seconds:.1f} s"
    output.print_table(title, ("operation", "kind", "kernel", "config from", "note"), rows)
    fused = sum(block.fused for block in manifest.attention)
    output.line(f"{fused} of {len(manifest.attention)} attention blocks fused")
    for block in manifest.attention:
        if block.note:
            output.line(f"  {block.name} ({block.form}), {'fused' if block.fused else 'not fused'}: {block.note}")
