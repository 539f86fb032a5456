"""A block tuned by stock TVM's MetaSchedule, beside ours: one table.

    python benchmarks/metaschedule.py --seconds 600 [--workload base128] [--threads 2] [--records FILE] [--json FILE]

The block is written in Relax operators (projections, softmax of the scaled products, output projection), its weights
are constants, and it goes through TVM as its users would take it: LegalizeOps, fusion, `tune_relax` with evolutionary
search on this machine, and the schedules of its database. The cost model is XGBoost's where that is installed
(pip install xgboost-cpu), else random. Then all are timed in turns in one process, on the same inputs, and held
against float64.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import msgspec
import numpy as np
import tvm
from rich import box
from rich.console import Console
from rich.table import Table
from tvm import relax
from tvm.ir.utils import derived_object
from tvm.relax.backend.cpu_generic.pipeline import dataflow_lower_passes, finalize_passes
from tvm.s_tir import meta_schedule

import mhsa_compile as mhsa
from mhsa_compile.bench import accuracy
from mhsa_compile.bench.timing import interleave, workers_apart
from mhsa_compile.bench.workloads import Workload, choose
from mhsa_compile.errors import InputError
from mhsa_compile.hardware import host
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.nn.modules import MultiHeadAttention, weights
from mhsa_compile.records import record_files
from mhsa_compile.runtime.array_memory import aligned_copy
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.profile.call_profile import spread
from mhsa_compile.verification.random_inputs import Arrays, random_inputs

BATCH = 64
"""Candidates that MetaSchedule measures at once, its own default; fewer where there is little time."""
DEFAULT, TUNED, META, UNTOUCHED = "ours, default", "ours, tuned", "MetaSchedule", "TVM untouched"


@dataclass(frozen=True)
class Row:
    name: str
    median_us: float
    spread: float
    ratio: float  # its time by that of ours with default configs, the median over the rounds
    error_share: float


def main() -> None:
    options = parse()
    console = Console()
    (workload,) = choose([options.workload])
    check(workload)
    module = MultiHeadAttention(workload.spec).eval()
    arrays = {name: np.asarray(value) for name, value in weights(module).items()}
    artifact = mhsa.compile(module, dims=workload.dims, records=())
    calls: dict[str, Callable[[np.ndarray], np.ndarray]] = {DEFAULT: mhsa.load(artifact, threads=options.threads)}
    if options.records is not None:
        tuned = mhsa.compile(module, dims=workload.dims, records=record_files.read(options.records).records)
        calls[TUNED] = mhsa.load(tuned, threads=options.threads)
    target = tvm.target.Target({**load_profile("native").tvm_config(), "num-cores": options.threads})
    with target:
        block = relax.get_pipeline("zero")(in_relax(workload, arrays))  # LegalizeOps and fusion
    trials, stock = tuned_by_metaschedule(block, target, options, console)
    calls[META] = stock
    if options.untouched:
        calls[UNTOUCHED] = vm(relax.build(block, target))
    inputs = [{"x": aligned_copy(random_inputs(artifact.manifest, {}, seed)["x"])} for seed in range(4)]
    rows = timed(calls, artifact, inputs, arrays, options.timing)
    model = "XGBoost" if find_spec("xgboost") else "random"
    title = (
        f"{workload.name}, {options.threads} threads; MetaSchedule: {options.seconds:g} s, {trials} trials, "
        f"{model} cost model"
    )
    console.print(table(rows, title))
    if options.json:
        figures = {"workload": workload.name, "threads": options.threads, "seconds": options.seconds, "trials": trials}
        figures |= {"cost_model": model, "cpu": host.cpu_model(), "rows": [asdict(row) for row in rows]}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="for MetaSchedule to tune in (default: 600)")
    parser.add_argument("--workload", default="base128", help="a block of self-attention (default: base128)")
    parser.add_argument("--threads", type=int, default=host.allowed_cpus(), help="default: all of this process")
    parser.add_argument("--records", type=Path, metavar="FILE", help="of `mhsa tune`: adds a row of ours, tuned")
    parser.add_argument("--timing", type=float, default=2.0, help="seconds for each row, at the end (default: 2)")
    parser.add_argument("--untouched", action="store_true", help="adds a row of TVM without tuning")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    return parser.parse_args()


def check(workload: Workload) -> None:
    """Raises InputError for what `in_relax` does not say."""
    plain = mhsa.AttentionSpec(embed_dim=workload.spec.embed_dim, num_heads=workload.spec.num_heads)
    if workload.kind != "block" or workload.spec != plain:
        raise InputError("--workload", "a block of plain self-attention in float32", workload.name, "Such as base128.")


def in_relax(workload: Workload, arrays: Arrays) -> tvm.IRModule:
    """The block in Relax operators: x (B, L, D) -> y (B, L, D)"""
    spec, B, L = workload.spec, workload.B, workload.L
    H, E, D = spec.num_heads, spec.embed_dim // spec.num_heads, spec.embed_dim
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((B, L, D), "float32"))

    def linear(value: Any, name: str) -> Any:
        weight = relax.const(np.ascontiguousarray(arrays[f"{name}.weight"].T))
        return relax.op.add(relax.op.matmul(value, weight), relax.const(arrays[f"{name}.bias"]))

    def heads(name: str, axes: list[int]) -> Any:
        rows = builder.emit(linear(x, name))
        return builder.emit(relax.op.permute_dims(relax.op.reshape(rows, (B, L, H, E)), axes))

    with builder.function("main", [x]):
        with builder.dataflow():
            q, k, v = heads("q_proj", [0, 2, 1, 3]), heads("k_proj", [0, 2, 3, 1]), heads("v_proj", [0, 2, 1, 3])
            scores = builder.emit(relax.op.multiply(relax.op.matmul(q, k), relax.const(E**-0.5, "float32")))
            weighted = builder.emit(relax.op.matmul(relax.op.nn.softmax(scores, axis=-1), v))
            rows = builder.emit(relax.op.reshape(relax.op.permute_dims(weighted, [0, 2, 1, 3]), (B, L, D)))
            y = builder.emit_output(linear(rows, "out_proj"))
        builder.emit_func_output(y)
    return builder.get()


@derived_object
class _Deadline(meta_schedule.measure_callback.PyMeasureCallback):
    """Counts the trials, and ends the tuning, which has no limit of its own by time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.end, self.trials = seconds, float("inf"), 0
        self.is_over = False

    def begin(self) -> None:
        self.end = monotonic() + self.seconds

    def apply(self, task_scheduler: Any, task_id: int, candidates: Any, built: Any, results: Any) -> None:
        self.trials += len(results)
        if monotonic() > self.end:
            self.is_over = True
            raise TimeoutError("the time for tuning is over")  # which TVM makes a RuntimeError of


def build_alone(module: Any, target: Any, _: Any) -> Any:
    """MetaSchedule's own build, but for an import of all intrinsics, which would cost each batch 20 s of CPU time."""
    from tvm.driver import build
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

    return build(RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module), target=target)


def tuned_by_metaschedule(
    block: tvm.IRModule, target: Any, options: argparse.Namespace, console: Console
) -> tuple[int, Callable[[np.ndarray], np.ndarray]]:
    """(trials, the compiled block)"""
    import tvm.s_tir.tensor_intrin  # noqa: F401 (MetaSchedule imports it, in up to 20 s that are not tuning)

    deadline = _Deadline(options.seconds)
    callbacks = [*meta_schedule.measure_callback.MeasureCallback.create("default"), deadline]
    with tempfile.TemporaryDirectory(prefix="metaschedule-") as folder:
        database = meta_schedule.database.JSONDatabase(work_dir=folder)
        console.print(f"MetaSchedule tunes for {options.seconds:g} s", highlight=False)
        deadline.begin()
        try:
            meta_schedule.relax_integration.tune_relax(
                block, {}, target, folder,
                max_trials_global=1 << 20,
                num_trials_per_iter=int(min(BATCH, max(4, options.seconds // 10))),
                builder=meta_schedule.builder.LocalBuilder(f_build=build_alone),
                database=database,
                cost_model="xgb" if find_spec("xgboost") else "random",
                measure_callbacks=callbacks,
                seed=1,
            )  # fmt: skip
        except (RuntimeError, TimeoutError):
            if not deadline.is_over:
                raise
        return deadline.trials, vm(with_schedules(block, database, target))


def with_schedules(block: tvm.IRModule, database: Any, target: Any) -> Any:
    """The block compiled with what was found for it. `compile_relax` would fuse it once more, which leaves attributes
    on the fused functions, and by these they are other functions than those that were tuned."""
    with target, database, tvm.transform.PassContext(opt_level=3):
        scheduled = relax.transform.MetaScheduleApplyDatabase(enable_warning=True)(block)
        lowering = [*dataflow_lower_passes(target), *finalize_passes(target)]
        return relax.build(scheduled, target, relax_pipeline=tvm.transform.Sequential(lowering))


def vm(executable: Any) -> Callable[[np.ndarray], np.ndarray]:
    run = relax.VirtualMachine(executable, tvm.cpu())["main"]
    return lambda x: run(tvm.runtime.from_dlpack(x)).numpy()


def timed(
    calls: dict[str, Callable[[np.ndarray], np.ndarray]],
    artifact: Artifact,
    inputs: list[Arrays],
    parameters: Arrays,
    seconds: float,
) -> list[Row]:
    truth = accuracy.truth(artifact, inputs[0], parameters)
    shares = {name: truth.share([np.asarray(call(inputs[0]["x"]))]) for name, call in calls.items()}
    with workers_apart():
        samples = interleave([[partial(call, arrays["x"]) for arrays in inputs] for call in calls.values()], seconds)
    return [
        Row(name, 1e6 * median(own), spread(own), median(a / b for a, b in zip(own, samples[0], strict=True)), share)
        for (name, share), own in zip(shares.items(), samples, strict=True)
    ]


def table(rows: list[Row], title: str) -> Table:
    result = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    result.add_column("")
    for column in ("µs", "spread", "time / ours, default", "error / budget"):
        result.add_column(column, justify="right")
    for row in rows:
        style = "" if row.error_share <= 1 else "red"
        shown = (f"{row.median_us:,.0f}", f"{row.spread:.1%}", f"{row.ratio:.2f}", f"{row.error_share:.2f}")
        result.add_row(row.name, *shown, style=style)
    return result


if __name__ == "__main__":
    main()
