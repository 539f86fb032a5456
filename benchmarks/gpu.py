"""Attention on an NVIDIA GPU: this project against PyTorch's SDPA backends, FlexAttention, FlashAttention where it is
installed, and whole blocks against torch.compile. `make bench-gpu`; without a GPU it says so, and ends.

    python benchmarks/gpu.py [--workload NAME|GROUP ...] [--against PEER ...] [--json FILE] [--text FILE]
    python benchmarks/gpu.py --artifacts FOLDER ... # all compiled first, on all CPUs; kept for the next run
    python benchmarks/gpu.py --read FILE            # the table again, of what was measured

How it is timed: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import date
from itertools import repeat
from pathlib import Path

import msgspec
from gpu_bench import bench
from gpu_bench.report import Figures, GpuResult, Machine, text
from gpu_bench.workloads import WORKLOADS, choose

import mhsa_compile as mhsa
from mhsa_compile.bench.workloads import Workload
from mhsa_compile.errors import DeviceError, MhsaError
from mhsa_compile.hardware import host
from mhsa_compile.hardware.environment import installed_version
from mhsa_compile.hardware.profile import CudaProfile, profile_of_gpu
from mhsa_compile.spec.checks import DTYPES

PACKAGES = ("apache-tvm", "torch", "triton", "nvidia-cudnn-cu13", "flash-attn", "flash-attn-3", "flash-attn-4")


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    try:
        figures = read(options.read) if options.read else measured(options)
    except MhsaError as error:
        print(error, file=sys.stderr)
        return 2
    print(text(figures), end="")
    if options.text:
        options.text.write_text(text(figures), encoding="utf-8")
    return 0 if figures.ok else 1


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    names = ", ".join(workload.name for workload in WORKLOADS)
    parser.add_argument("--workload", nargs="+", default=["all"], metavar="NAME", help=f"names or groups: {names}")
    parser.add_argument("--against", nargs="*", default=["all"], metavar="PEER", help="by default all")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of every workload")
    parser.add_argument("--device", default="cuda:0", metavar="cuda:N")
    parser.add_argument("--target", help="by default the latest that the GPU runs")
    parser.add_argument("--seconds", type=float, default=0.5, help="of the GPU's, for each candidate (default: 0.5)")
    parser.add_argument("--eager", action="store_true", help="call by call, with the host's share; else CUDA graphs")
    parser.add_argument("--artifacts", type=Path, metavar="FOLDER", help="compile all first, on all CPUs, and keep it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure, with device, versions and date")
    parser.add_argument("--text", type=Path, metavar="FILE", help="write the table")
    parser.add_argument("--read", type=Path, metavar="FILE", help="take the figures from this JSON, measure nothing")
    return parser.parse_args(words)


def read(path: Path) -> Figures:
    return msgspec.json.decode(path.read_bytes(), type=Figures)


def written(figures: Figures) -> bytes:
    return msgspec.json.format(msgspec.json.encode(figures), indent=2)


def measured(options: argparse.Namespace) -> Figures:
    """Measures all workloads. Raises MhsaError where there is no GPU, or none that a target is for. The JSON grows with
    each workload."""
    workloads = [workload.at(options.dtype) for workload in choose(options.workload)]
    machine = bench.require_gpu(options.device)
    request = bench.Options(
        target=options.target or _target(machine),
        device=options.device,
        against=tuple(options.against),
        seconds=options.seconds,
        graphs=not options.eager,
        artifacts=options.artifacts,
    )
    versions = {"mhsa-compile": mhsa.__version__, **{name: installed_version(name) for name in PACKAGES}}
    figures = Figures(machine, versions, date.today(), options.seconds)

    def note(workload: Workload, outcome: GpuResult | str) -> None:
        if isinstance(outcome, GpuResult):
            figures.results.append(outcome)
        else:
            figures.failed[workload.name] = outcome
        print(f"{workload.name}: {'measured' if isinstance(outcome, GpuResult) else outcome}", file=sys.stderr)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_bytes(written(figures))

    if request.artifacts is not None:
        compile_all(workloads, request)
    in_turn(workloads, request, note)
    return figures


def _target(machine: Machine) -> CudaProfile:
    if (profile := profile_of_gpu(machine.capability)) is None:
        capability = f"compute capability {machine.capability[0]}.{machine.capability[1]}"
        raise DeviceError("device", "a GPU that a target is for", f"{machine.name}, of {capability}", "Name --target.")
    return profile


def compile_all(workloads: Sequence[Workload], options: bench.Options) -> None:
    """Compiles all workloads side by side: the GPU, which one workload has for itself, waits for none of it. What fails
    fails again, later, where its words are kept."""
    with ProcessPoolExecutor(host.allowed_cpus(), mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compiles, workloads, repeat(options)))


def compiles(workload: Workload, options: bench.Options) -> bool:
    try:
        bench.compiled(workload, options)
    except Exception:
        return False
    return True


def in_turn(
    workloads: Sequence[Workload],
    options: bench.Options,
    note: Callable[[Workload, GpuResult | str], None],
    new_pool: Callable[[], Executor] = lambda: ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")),
) -> None:
    """Measures one workload after the other in one process, and after a failure in a new one: a kernel that dies takes
    the GPU away from its process. `note` is told each outcome."""
    pool: Executor | None = None
    for workload in workloads:
        pool = pool or new_pool()
        try:
            outcome = pool.submit(attempt, workload, options).result()
        except BrokenProcessPool as error:
            outcome = str(error)
        note(workload, outcome)
        if isinstance(outcome, str):
            pool.shutdown()
            pool = None
    if pool is not None:
        pool.shutdown()


def attempt(workload: Workload, options: bench.Options) -> GpuResult | str:
    """Measures a workload, in the child process: the result, or in words why there is none. The others go on."""
    try:
        return bench.measure(workload, options)
    except Exception as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]


if __name__ == "__main__":
    sys.exit(main())
