"""`mhsa run` and `mhsa verify`: what an artifact computes, and whether it is right."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mhsa_compile.cli.common import options, output
from mhsa_compile.runtime.misfits import shape_text

if TYPE_CHECKING:
    from mhsa_compile.verification.paired_runs import SelfCheck


def run(
    artifact: options.ArtifactFolder,
    *,
    inputs: options.InputArrays = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="An .npz of all outputs, or the .npy of one.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option("--weights", metavar="FILE.safetensors", help="Instead of the artifact's own.")
    ] = None,
    dims: options.StatedDims,
    threads: options.Threads = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Call a compiled artifact once, on arrays from files or on random ones (by default B = 1, L = S = 128)."""
    from mhsa_compile.cli.common import arrays
    from mhsa_compile.files.atomic_write import check_file
    from mhsa_compile.runtime.compiled_attention import load

    if out is not None:
        check_file(out, "--output")  # before the work, not after it
    arrays_by_name = arrays.read(inputs or ())
    sizes = dims.sizes()
    attention = load(artifact, weights=weights, threads=threads)
    dims.check_symbols(attention.inputs)
    if out is not None:
        arrays.check_suffix(out, [info.name for info in attention.outputs])
    arguments = arrays.complete(arrays_by_name, attention.inputs, sizes, seed)
    begin = time.perf_counter()
    result = attention.from_host(**arguments)
    seconds = time.perf_counter() - begin
    values = result if isinstance(result, (tuple, list)) else (result,)
    outputs = {info.name: value for info, value in zip(attention.outputs, values, strict=True)}
    if out is not None:
        arrays.write(out, outputs)
    rows = [
        (name, value.shape, str(value.dtype), *((float(value.min()), float(value.max())) if value.size else (0.0, 0.0)))
        for name, value in outputs.items()
    ]
    if json:
        keys = ("name", "dims", "dtype", "min", "max")
        report = [dict(zip(keys, row, strict=True)) for row in rows]
        output.print_json({"outputs": report, "seconds": seconds, "threads": attention.threads, "saved": out})
        return
    cells = ((name, shape_text(dims), dtype, f"{low:.4g}", f"{high:.4g}") for name, dims, dtype, low, high in rows)
    title = f"{artifact}: first call {seconds * 1e3:.2f} ms, {attention.threads} threads"
    output.print_table(title, ("output", "dims", "dtype", "min>", "max>"), cells)


def verify(artifact: options.ArtifactFolder, *, seed: options.Seed = 0, json: options.Json = False) -> None:
    """Compare an artifact with the float64 oracle, and its runs with each other; exit 1 if anything is over budget."""
    from mhsa_compile.cli.common.sources import require_compiler

    require_compiler()
    with output.stages() as stage:
        stage("compare with the float64 oracle, and runs with each other")
        from mhsa_compile.verification.verify import verify as judge

        verdict = judge(artifact, seed=seed)
    if json:
        cases = [
            {"dims": case.dims, "error": case.error, "budget": case.budget, "ok": case.ok, "note": case.note}
            for case in verdict.cases
        ]
        checks = [_description(check) for check in verdict.checks]
        output.print_json({"ok": verdict.ok, "cases": cases, "self_checks": checks})
    else:
        rows = [
            (
                output.assignments(case.dims),
                f"{case.error:.3g}",
                f"{case.budget:.3g}",
                output.ok_cell(case.ok),
                case.note,
            )
            for case in verdict.cases
        ]
        output.print_table(f"{artifact}: max error against float64", ("dims", "error>", "budget>", "", "note"), rows)
        columns = ("property", "difference>", "budget>", "", "note")
        output.print_table("Runs against each other", columns, map(_cells, verdict.checks))
    if not verdict.ok:
        raise typer.Exit(1)


def _description(check: SelfCheck) -> dict[str, object]:
    """`ok` is null where the check does not apply."""
    verdict = check.ok if check.applies else None
    return {"name": check.name, "ok": verdict, "difference": check.difference, "budget": check.budget,
            "note": check.note}  # fmt: skip


def _cells(check: SelfCheck) -> tuple[object, ...]:
    if check.difference is None or check.budget is None:
        return check.name, "", "", "-", f"does not apply: {check.note}"
    return check.name, f"{check.difference:.3g}", f"{check.budget:.3g}", output.ok_cell(check.ok), check.note
