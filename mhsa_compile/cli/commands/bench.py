"""`mhsa bench`: this project and others on the same inputs, interleaved in one process; with `--predict`, how fast a
target's inner loops would be, by a model of its CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mhsa_bench.plots import bench_plots, figure
from mhsa_compile.cli.common import options, output, sources
from mhsa_compile.cli.common.cases import CaseOptions
from mhsa_compile.errors import InputError
from mhsa_compile.files import places
from mhsa_compile.hardware import data_paths, host
from mhsa_compile.runtime.symbolic_dims import is_expression
from mhsa_compile.spec.float32_products import float32_request

if TYPE_CHECKING:
    from mhsa_bench.report import BenchReport, BenchRow
    from mhsa_compile.bench.workloads import Workload
    from mhsa_compile.runtime.artifact.artifact import Artifact

    _Compiled = tuple[str, Artifact, dict[str, int]]
    """(name, artifact, sizes of its dims)."""
    from mhsa_bench.static.predict import KernelReport, LoopReport, Prediction

_DEFAULT_WORKLOAD = "base128"
_DEFAULT_DIMS = {"B": 1, "L": 128}  # S is L unless given


_NOTE = """A prediction, not a measurement: of the inner loops alone, with all data in the first-level cache. Attention
also spends multiplication slots on its exponentials, between these loops. Tails are for what fills no whole tile."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="Instead of a source: tiny, base128, ...; a group: blocks, tails, cores, decode, sparse, growth, "
            "windows; or all. Repeat it for more."
        ),
    ] = None
    against: Annotated[str, typer.Option(help="Peers, separated by commas, or all; an empty text is none.")] = (
        "torch,onnxruntime"
    )
    dtype: Annotated[
        str | None, typer.Option(help="Of the workloads: float32, bfloat16 or float16. A source states its own.")
    ] = None
    dims: options.StatedDims
    threads: options.Threads = None
    seconds: Annotated[float, typer.Option(min=0.1, help="Time for each candidate.")] = 2.0
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the shares of the limit: .svg, .png or .pdf.")
    ] = None
    predict: Annotated[
        bool, typer.Option("--predict", help="Run nothing: LLVM's model of the target's CPU on the inner loops.")
    ] = False
    target: Annotated[
        str | None, typer.Option(metavar="TARGET", help="With --predict: a target's name, or a .toml file of your own.")
    ] = None
    weights: Annotated[
        str | None, typer.Option("--weights", metavar="WORD", help="With --predict: as of `mhsa compile`.")
    ] = None
    float32_products: options.Float32ProductsWord = "auto"
    json: options.Json = False


def bench(
    source: Annotated[
        Path | None,
        typer.Argument(metavar="DIR_OR_SOURCE", help="An artifact, an .onnx file or a spec .toml."),
    ] = None,
    *,
    request: BenchOptions,
) -> None:
    """Time a compiled attention against other runtimes: medians, ratios, and the share of this machine's limit.

    The limit is the useful operations at the measured rate of multiply-adds, or the bytes at the measured rate of
    memory, whichever takes longer. Without a source: the workload base128. Without --batch, --length and --kv-length:
    what the artifact fixes, else B = 1, L = 128, S = L; symbols of other names have their sizes by --dim. What is not
    compiled yet is compiled for these sizes.
    Exit code 1 where our own output is over its error budget. With --predict nothing runs, so any target will do.
    """
    dims = request.dims.sizes()
    if request.predict:
        return _predict(source, request, dims)
    peers = _check(source, request, dims)
    attentions = _of_workloads(request, dims) if source is None else _of_source(source, request, dims)
    sources.require_compiler()
    reports = _timed(attentions, peers, request)
    if request.json:
        output.print_json(reports)
    if request.plot is not None:
        bench_plots.shares(reports, request.plot)
    if not all(report.ok for report in reports.values()):
        raise typer.Exit(1)


def _predict(source: Path | None, request: BenchOptions, dims: dict[str, int]) -> None:
    """Prints the prediction for each source or workload. Raises InputError, TargetError, InstallationError."""
    from mhsa_bench.static import llvm_mca
    from mhsa_compile.hardware.profile import load_cpu_profile

    words = request.workload or ([_DEFAULT_WORKLOAD] if source is None else [])
    products = float32_request(request.float32_products)
    options = CaseOptions(source, words, request.dtype, dims, weights=request.weights, float32_products=products)
    profile = load_cpu_profile(request.target or data_paths.NATIVE, "predicting")
    options.check()
    llvm_mca.find(profile)  # what is missing is said before PyTorch is loaded
    sources.require_compiler()
    from mhsa_bench.static.predict import predict as predict_ops
    from mhsa_compile.compiler import pipeline
    from mhsa_compile.compiler.selection.float32_products import resolved_ops

    predictions: dict[str, Prediction] = {}
    for case in options.cases():
        with output.stages() as stage:
            stage(f"predict {case.name}")
            ops = pipeline.import_source(case.source, dims=case.dims, weights=case.weights).ops
            predictions[case.name] = predict_ops(resolved_ops(ops, case.float32_products, profile), profile)
        if not request.json:
            _show_prediction(f"{case.name} on {profile.name}", predictions[case.name])
    if request.json:
        output.print_json({"target": profile.name, "predictions": predictions})
    else:
        output.line(_NOTE)


def _check(source: Path | None, request: BenchOptions, dims: dict[str, int]) -> tuple[str, ...]:
    """The peers. Raises InputError and OutputError for what is wrong or does not go together, before the work."""
    if request.target is not None or request.weights is not None:
        option = "--target" if request.target is not None else "--weights"
        hint = "What runs here is compiled for this machine; an artifact says the rest."
        raise InputError(option, "it with --predict", "it alone", hint)
    float32_request(request.float32_products)
    host.thread_count(request.threads)
    peers = options.peers(request.against)
    if request.workload and (source is not None or dims):
        hint = "A workload brings its own spec and dims."
        raise InputError("--workload", "it alone", "a source or dims beside it", hint)
    if request.dtype is not None and source is not None:
        hint = "A source states its own dtype."
        raise InputError("--dtype", "it without a source", f"{request.dtype!r} beside one", hint)
    if request.plot is not None:
        figure.check_path(request.plot)
    return peers


def _timed(attentions: Iterable[_Compiled], peers: tuple[str, ...], request: BenchOptions) -> dict[str, BenchReport]:
    """A report of each, shown as soon as it is there."""
    from mhsa_bench.bench import bench as measure

    reports: dict[str, BenchReport] = {}
    for name, artifact, dims in attentions:
        with output.stages() as stage:
            stage(f"time {name}")
            reports[name] = measure(
                artifact, against=peers, dims=dims, threads=request.threads, seconds=request.seconds
            )
        if not request.json:
            _show(name, reports[name])
    return reports


def _of_source(source: Path, request: BenchOptions, dims: dict[str, int]) -> Iterator[_Compiled]:
    """An artifact, or what is compiled for these dims."""
    if places.is_folder(source):
        from mhsa_compile.runtime.artifact.artifact import Artifact

        artifact = Artifact.open(source)
        request.dims.check_symbols(artifact.manifest.inputs)
        symbols = {dim for info in artifact.manifest.inputs for dim in info.dims if isinstance(dim, str)}
        yield str(source), artifact, _sizes_of(symbols, dims) | dims
    else:
        from mhsa_compile.frontend.export.source import symbols_of

        spec_or_file = sources.resolve(source, {})
        sizes = _with_defaults(dims)
        if isinstance(spec_or_file, Path):
            sizes = _sizes_of(symbols_of(spec_or_file), dims) | dims
        options: dict[str, Any] = {"seed": 0, "cache": False, "float32_products": request.float32_products}
        yield str(source), sources.compile_with_progress(source, {}, "native", dims=sizes, **options), sizes


def _sizes_of(symbols: set[str], dims: dict[str, int]) -> dict[str, int]:
    """Sizes of symbols, by default those of B, L and S. Raises InputError for another that was not stated."""
    sizes = {symbol: size for symbol, size in _with_defaults(dims).items() if symbol in symbols}
    own = {symbol for symbol in symbols - sizes.keys() if not symbol.startswith("mask_") and not is_expression(symbol)}
    if missing := sorted(own):
        hint = f"State it: --dim {missing[0]}=128." if len(missing) == 1 else "State each: --dim NAME=N."
        raise InputError("--dim", f"sizes for {', '.join(missing)}", "none", hint)
    return sizes


def _of_workloads(request: BenchOptions, dims: dict[str, int]) -> Iterator[_Compiled]:
    """The workloads that are asked for, checked before the first of them is compiled; dims that are stated take the
    place of the default workload's."""
    from dataclasses import replace

    from mhsa_compile.bench.workloads import choose, compile_workload

    workloads = choose(request.workload or [_DEFAULT_WORKLOAD])
    workloads = tuple(workload.at(request.dtype or workload.spec.dtype) for workload in workloads)
    if dims:
        B, L, S = (_with_defaults(dims)[symbol] for symbol in "BLS")
        workloads = tuple(replace(workload, B=B, L=L, S=S) for workload in workloads)

    def compiled(workload: Workload) -> _Compiled:
        with output.stages() as stage:
            stage(f"compile {workload.name}")
            artifact = compile_workload(workload, float32_products=float32_request(request.float32_products))
            return workload.name, artifact, workload.dims

    return map(compiled, workloads)


def _with_defaults(sizes: dict[str, int]) -> dict[str, int]:
    dims = {**_DEFAULT_DIMS, **sizes}
    dims.setdefault("S", dims["L"])
    return dims


def _show(name: str, report: BenchReport) -> None:
    title = f"{name}, {output.assignments(report.dims)}, {report.dtype}: {report.threads} threads, "
    title += f"{report.peak_gflops:,.0f} GFLOP/s and {report.bandwidth_gbs:.0f} GB/s at most"
    if report.floor is not None:
        title += f", so {report.floor.us:,.0f} µs at least ({report.floor.limit})"
    if report.disturbed:
        title += f". ±{report.peak_spread / 2:.0%} of the peak: something else was running, measure again"
    columns = ("runtime", "median µs>", "spread>", "ratio>", "GFLOP/s>", "of limit>", "error / budget>", "form")
    output.print_table(title, columns, map(_cells, report.rows))
    for row in report.rows:
        if row.missing:
            output.line(f"{row.name} is missing: {row.missing}")
    if rows := report.unsteady:
        names = ", ".join(f"{row.name} by {row.spread:.0%}" for row in rows)
        output.line(f"Times spread over a quarter of their median ({names}): compare them with care, or measure again")
    if beyond := report.beyond_limit:
        advice = "The limit was measured too low, in rounds that something else disturbed: measure again."
        output.line(f"{', '.join(beyond)}: more than 100 % of the limit. {advice}")
    if not report.ok:
        output.line(f"{report.ours.name} is over its error budget of {report.budget:.1e}")


def _cells(row: BenchRow) -> tuple[str, ...]:
    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        row.name,
        cell(row.median_us, ",.0f"),
        cell(row.spread, ".1%"),
        cell(row.ratio, ".2f"),
        cell(row.gflops, ",.0f"),
        cell(row.share_of_limit, ".0%"),
        cell(row.error_share, ".2f"),
        row.form,
    )


def _show_prediction(what: str, prediction: Prediction) -> None:
    title = f"{what}, predicted by {prediction.analyzer} with LLVM's model {prediction.model}"
    columns = ("operations", "instruction", "sums>", "loops>", "cycles>", "of its slots>", "bytes each>", "spills>", "")
    rows = [_loop_cells(kernel, loop) for kernel in prediction.kernels for loop in kernel.loops]
    output.print_table(title, columns, rows)


def _loop_cells(kernel: KernelReport, loop: LoopReport) -> tuple[str, ...]:
    return (
        ", ".join(kernel.ops) if loop is kernel.loops[0] else "",
        f"{loop.multiplies} {loop.instruction}",
        str(loop.sums),
        str(loop.loops),
        f"{loop.cycles:.1f}",
        f"{loop.share:.1%}",
        f"{loop.bytes:.1f}",
        str(loop.spills),
        "tail" if loop.tail else "",
    )
