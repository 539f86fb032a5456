"""`mhsa compile`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mhsa_compile.cli.common import options, output, sources
from mhsa_compile.cli.common.spec_flags import SpecFlags
from mhsa_compile.errors import OutputError
from mhsa_compile.files import places

if TYPE_CHECKING:
    from mhsa_compile.runtime.artifact.artifact import Artifact


_NOTES = 8  # on attention blocks, so that all fits on a screen


def compile_source(
    source: sources.SourceArgument = None,
    *,
    out: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The artifact's folder.")],
    target: Annotated[str, typer.Option(help="A name from `mhsa targets`, or a .toml file.")] = "native",
    force: Annotated[bool, typer.Option("--force", help="Replace the folder if it exists.")] = False,
    dims: options.StatedDims,
    weights: Annotated[
        Literal["int8"] | None, typer.Option("--weights", help="Linears compute in eight bits, rounded at load.")
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Calls write into the caches that they are given: of an .onnx file.")
    ] = False,
    records: options.Records = None,
    dump: Annotated[Path | None, typer.Option(metavar="DIR", help="Write what passes between the stages.")] = None,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Take it from the user's cache folder if it was compiled before.")
    ] = True,
    check: Annotated[
        bool | None,
        typer.Option("--check/--no-check", help="Run it once against another evaluation of SOURCE, an .onnx file."),
    ] = None,
    seed: options.Seed = 0,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Each operation in a row, all notes, and the seconds of each stage.")
    ] = False,
    json: options.Json = False,
    spec: SpecFlags,
) -> None:
    """Compile SOURCE, or a spec given by flags with random weights, for a target.

    --batch, --length, --kv-length, --capacity and --dim fix those dims; they stay symbolic otherwise.
    """
    from mhsa_compile.files.atomic_write import check_place
    from mhsa_compile.runtime.artifact.manifest import MANIFEST

    fields, sizes = spec.stated(), dims.stated()
    check_place(places.resolved(out, OutputError, "-o"), force, MANIFEST)  # before the work, not after it
    started, stages = time.perf_counter(), dict[str, float]()
    artifact = sources.compile_with_progress(
        source,
        fields,
        target,
        dims=sizes,
        dump=dump,
        seed=seed,
        weights=weights,
        in_place=in_place,
        records=records,
        cache=cache,
        check=check,
        seconds=stages,
    )
    artifact.save(out, force=force)
    _report(out, artifact, time.perf_counter() - started, stages, verbose, json)


def _report(out: Path, artifact: Artifact, seconds: float, stages: dict[str, float], verbose: bool, json: bool) -> None:
    from mhsa_compile.cli.common import op_table

    manifest = artifact.manifest
    if json:
        said = {"artifact": out, "target": manifest.target.name, "seconds": seconds, "ops": manifest.ops}
        said |= {"check": manifest.check, "slow": manifest.slow, "stages": stages}
        output.print_json(said | {"attention": manifest.attention, "fused": sum(b.fused for b in manifest.attention)})
        return
    title = f"{out} for {manifest.target.name}, {seconds:.1f} s"
    output.print_table(title, op_table.COLUMNS, op_table.rows(manifest, verbose=verbose))
    if verbose:
        output.line("seconds: " + ", ".join(f"{stage} {taken:.1f}" for stage, taken in stages.items()))
    fused = sum(block.fused for block in manifest.attention)
    output.line(f"{fused} of {len(manifest.attention)} attention blocks fused")
    if manifest.check is not None and manifest.spec is None:
        output.line(manifest.check.sentence())
    for operation in manifest.slow:
        output.line(f"slow: {operation.sentence()}")
    layers = list(enumerate(manifest.attention))
    told = layers if verbose else [(number, block) for number, block in layers if block.note]
    for i, (number, block) in enumerate(told):
        if i == _NOTES and len(told) > _NOTES + 1 and not verbose:
            output.line(f"  and {len(told) - i} more: --verbose shows them")
            break
        what = f"layer {number}, {block.name} ({block.form}), {'fused' if block.fused else 'not fused'}"
        output.line(f"  {what}: {block.note}" if block.note else f"  {what}")
