"""`mhsa bench --predict`: how fast a target's inner loops would be, by a model of its CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mhsa_compile.cli.common import output, sources
from mhsa_compile.cli.common.cases import CaseOptions

if TYPE_CHECKING:
    from mhsa_bench.static.predict import KernelReport, LoopReport, Prediction

_NOTE = """A prediction, not a measurement: of the inner loops alone, with all data in the first-level cache. Attention
also spends multiplication slots on its exponentials, between these loops. Tails are for what fills no whole tile."""


def predict(given: CaseOptions, target: str, json: bool) -> None:
    """Prints the prediction for each source or workload. Raises InputError, TargetError, InstallationError."""
    from mhsa_bench.static import llvm_mca
    from mhsa_compile.hardware.profile import load_cpu_profile

    profile = load_cpu_profile(target, "predicting")
    given.check()
    llvm_mca.find(profile)  # what is missing is said before PyTorch is loaded
    sources.require_compiler()
    from mhsa_bench.static.predict import predict as predict_ops
    from mhsa_compile.compiler import pipeline

    found: dict[str, Prediction] = {}
    for case in given.cases():
        with output.stages() as stage:
            stage(f"predict {case.name}")
            ops = pipeline.operations(case.source, dims=case.dims, weights=case.weights)
            found[case.name] = predict_ops(ops, profile)
        if not json:
            _show(f"{case.name} on {profile.name}", found[case.name])
    if json:
        output.print_json({"target": profile.name, "predictions": found})
    else:
        output.line(_NOTE)


def _show(what: str, prediction: Prediction) -> None:
    title = f"{what}, predicted by {prediction.analyzer} with LLVM's model {prediction.model}"
    columns = ("operations", "instruction", "sums>", "loops>", "cycles>", "of its slots>", "bytes each>", "spills>", "")
    rows = [_cells(kernel, loop) for kernel in prediction.kernels for loop in kernel.loops]
    output.print_table(title, columns, rows)


def _cells(kernel: KernelReport, loop: LoopReport) -> tuple[str, ...]:
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
