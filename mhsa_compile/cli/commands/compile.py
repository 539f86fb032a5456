"""`mhsa compile`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mhsa_compile.cli.common import options, output, sources
from mhsa_compile.cli.common.options import SpecFlags
from mhsa_compile.errors import OutputError
from mhsa_compile.files import places
from mhsa_compile.runtime.profile.op_work import attention_flops, linear_flops

if TYPE_CHECKING:
    from mhsa_compile.runtime.artifact.artifact import Artifact
    from mhsa_compile.runtime.artifact.manifest import Manifest, OpReport

_NOTES = 8  # on attention blocks, so that all fits on a screen


_SHOWN = 14
_BATCH, _LENGTH = 1, 128
COLUMNS = ("operations", "kind", "kernel", "predicted>", "config from", "note")


def compile_source(
    source: sources.SourceArgument = None,
    *,
    out: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The artifact's folder.")],
    target: Annotated[str, typer.Option(help="A name from `mhsa targets`, or a .toml file.")] = "native",
    force: Annotated[bool, typer.Option("--force", help="Replace the folder if it exists.")] = False,
    dims: options.StatedDims,
    weights: options.WeightWord = None,
    float32_products: options.Float32ProductsWord = "auto",
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

    fields, sizes = spec.spec_fields(), dims.sizes()
    check_place(places.resolve(out, OutputError, "-o"), force, MANIFEST)  # before the work, not after it
    begin, stages = time.perf_counter(), dict[str, float]()
    artifact = sources.compile_with_progress(
        source,
        fields,
        target,
        dims=sizes,
        dump=dump,
        seed=seed,
        weights=weights,
        float32_products=float32_products,
        in_place=in_place,
        records=records,
        cache=cache,
        check=check,
        seconds=stages,
    )
    artifact.save(out, force=force)
    _report(out, artifact, time.perf_counter() - begin, stages, verbose, json)


def _report(out: Path, artifact: Artifact, seconds: float, stages: dict[str, float], verbose: bool, json: bool) -> None:

    manifest = artifact.manifest
    if json:
        report = {"artifact": out, "target": manifest.target.name, "seconds": seconds, "ops": manifest.ops}
        report |= {"check": manifest.check, "slow": manifest.slow, "cost": manifest.cost, "stages": stages}
        report |= {"float32_products": manifest.float32_products}
        output.print_json(report | {"attention": manifest.attention, "fused": sum(b.fused for b in manifest.attention)})
        return
    title = f"{out} for {manifest.target.name}, {seconds:.1f} s"
    output.print_table(title, COLUMNS, rows(manifest, verbose=verbose))
    if verbose:
        output.line("seconds: " + ", ".join(f"{stage} {time_of_stage:.1f}" for stage, time_of_stage in stages.items()))
    fused = sum(block.fused for block in manifest.attention)
    output.line(f"{fused} of {len(manifest.attention)} attention blocks fused")
    if manifest.check is not None and manifest.spec is None:
        output.line(manifest.check.sentence())
    if outcome := manifest.float32_outcome():
        output.line(f"float32 products: {outcome}")
    layers = list(enumerate(manifest.attention))
    notes = layers if verbose else [(number, block) for number, block in layers if block.note]
    for i, (number, block) in enumerate(notes):
        if i == _NOTES and len(notes) > _NOTES + 1 and not verbose:
            output.line(f"  and {len(notes) - i} more: --verbose shows them")
            break
        what = f"layer {number}, {block.name} ({block.form}), {'fused' if block.fused else 'not fused'}"
        output.line(f"  {what}: {block.note}" if block.note else f"  {what}")
    for line in manifest.cost_lines():
        output.line(line)


@dataclass(frozen=True)
class _Group:
    """Operations with the same kind, kernel, origin of the config, and note."""

    ops: tuple[OpReport, ...]
    flops: int | None


def rows(manifest: Manifest, *, verbose: bool) -> list[tuple[str, ...]]:
    """The rows of a table with COLUMNS; `verbose` gives each operation a row, in the order of the code."""
    flops = {op.name: _flops(manifest, op) for op in manifest.ops}
    total = sum(number for number in flops.values() if number is not None)
    if verbose:
        return [_row(_Group((op,), flops[op.name]), total) for op in manifest.ops]
    groups = _groups(manifest, flops)
    head = groups if len(groups) <= _SHOWN + 1 else groups[:_SHOWN]
    rest = sum(len(group.ops) for group in groups[len(head) :])
    more = [(f"{rest} others", "", "", "", "", "--verbose shows all")] if rest else []
    return [*(_row(group, total) for group in head), *more]


def _groups(manifest: Manifest, flops: Mapping[str, int | None]) -> list[_Group]:
    """Groups of operations that are alike, the longest time first; those of unknown time last, the largest first."""
    alike: dict[tuple[str, ...], list[OpReport]] = {}
    for op in manifest.ops:
        by_tvm = op.kernel == "tvm"
        alike.setdefault((op.op, op.kernel, op.source, "" if by_tvm else op.note), []).append(op)
    groups = []
    for ops in alike.values():
        numbers = [number for op in ops if (number := flops[op.name]) is not None]
        groups.append(_Group(tuple(ops), sum(numbers) if numbers else None))
    return sorted(groups, key=lambda group: (group.flops is None, -(group.flops or 0), -len(group.ops)))


def _row(group: _Group, total: int) -> tuple[str, ...]:
    first, count = group.ops[0], len(group.ops)
    name = first.name if count == 1 else f"{count}: {first.name} ... {group.ops[-1].name}"
    share = "" if group.flops is None or not total else f"{group.flops / total:.0%}"
    return name, first.op, first.kernel, share, first.source, first.note


def _flops(manifest: Manifest, op: OpReport) -> int | None:
    B, L, S = _sizes(manifest)
    if op.op == "linear":
        return linear_flops(op, B * L)
    meaning = next((one for one in manifest.semantics if one.op == op.name), None)
    return None if op.op != "attention" or meaning is None else attention_flops(manifest, meaning, L, S, [S] * B)


def _sizes(manifest: Manifest) -> tuple[int, int, int]:
    """B, L and S: those of the inputs, where they are fixed and say so."""
    spec, dims = manifest.spec, {info.name: info.dims for info in manifest.inputs}
    batch, length = next(((d[0], d[-2]) for d in dims.values() if len(d) > 2), (_BATCH, _LENGTH))
    if len(next(iter(dims.values()), ())) == 2:  # tokens (B, L)
        batch, length = next(iter(dims.values()))
    B, L = (size if isinstance(size, int) else usual for size, usual in ((batch, _BATCH), (length, _LENGTH)))
    of_keys = () if spec is None else ("past_key", "context", "key", "k")
    other = next((dims[name][-2] for name in of_keys if name in dims), L)
    return B, L, other if isinstance(other, int) else max(L, _LENGTH)
