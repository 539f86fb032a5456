"""What is fast on a GPU: this project and PyTorch's ways on the same tensors, in turns, with the GPU's ceilings in the
same rounds. `benchmarks/gpu.py` runs it; without a GPU nothing here does more than say so.

Every candidate computes the same: sampled rows of its output are held against float64 before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gpu_bench import artifact_cache, peers
from gpu_bench.problem import Ceiling, GpuProblem, draw, first, large_copy, matrix_product
from gpu_bench.report import OURS, Ceilings, GpuResult, GpuRow, Machine, Sample, rows
from gpu_bench.timing import Call, Stopwatch, interleave
from gpu_bench.workloads import work
from mhsa_compile.bench.workloads import Workload, module_of
from mhsa_compile.compiler.pipeline import compile
from mhsa_compile.errors import DeviceError, ModelError
from mhsa_compile.hardware import host
from mhsa_compile.hardware.profile import TargetProfile, load_profile
from mhsa_compile.runtime import cuda_devices
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.manifest import WEIGHTS, OpReport
from mhsa_compile.runtime.compiled_attention import load
from mhsa_compile.runtime.profile.call_profile import spread

WRONG = 10
"""An error of so many budgets is no rounding: a mask was ignored."""


@dataclass(frozen=True)
class Options:
    """target   as `compile` takes it
    against  names of `registry.PEERS`, or "all"
    seconds  of the GPU's, for each candidate of each workload
    graphs   whether each call is captured and replayed: then the host's share of a call does not count, for anybody
    artifacts  the folder where they are kept for the next run; None is nowhere
    """

    target: str | TargetProfile
    device: str = "cuda:0"
    against: tuple[str, ...] = ("all",)
    seconds: float = 0.5
    graphs: bool = True
    artifacts: Path | None = None


def require_gpu(device: str) -> Machine:
    """This machine, which must have a GPU. Raises InstallationError and DeviceError: no driver, no GPU, a PyTorch that
    is not for it."""
    driver = cuda_devices.driver()
    if not driver.count:
        raise DeviceError("device", "an NVIDIA GPU", "none that this process may use", "Look at CUDA_VISIBLE_DEVICES.")
    if not torch.cuda.is_available():
        raise DeviceError("PyTorch", "one for CUDA", torch.__version__, "Install it from https://pytorch.org.")
    gpu = driver.gpu(torch.device(device).index or 0)
    memory = torch.cuda.get_device_properties(gpu.index).total_memory
    return Machine(gpu.name, gpu.capability, gpu.multiprocessors, memory / 2**30, driver.cuda, host.cpu_model())


def measure(workload: Workload, options: Options) -> GpuResult:
    """Ours and its peers on random inputs. Raises what `compile` and `load` raise, and DeviceError."""
    artifact = compiled(workload, options)
    cache = torch.cuda.get_device_properties(options.device).L2_cache_size
    with torch.cuda.device(options.device), torch.inference_mode():
        torch._dynamo.reset()  # what it keeps of other workloads would be guarded against
        problem = draw(workload, _weights(artifact), options.device, cache)
        attention = load(artifact, device=options.device)
        names = [info.name for info in attention.inputs]
        ours = peers.GpuPeer(OURS, workload.kind, partial(_our_calls, attention, names))
        candidates = [ours, *peers.find(options.against, workload.kind)]
        contenders = [_attempt(peer, problem, artifact, options.graphs) for peer in candidates]
        return timed(workload, contenders, artifact.manifest.ops, options)


def compiled(workload: Workload, options: Options) -> Artifact:
    """Ours, which needs no GPU. Raises what `compile` raises."""
    profile = options.target if isinstance(options.target, TargetProfile) else load_profile(options.target)
    records = (path.read_bytes() for path in profile.records())
    return artifact_cache.artifact(
        options.artifacts,
        lambda: compile(module_of(workload), profile, dims=workload.dims, cache=False),
        repr((workload, profile)).encode(),
        *records,
    )


@dataclass(frozen=True)
class Prepared:
    """A candidate that is ready: `error_share` as of its first output."""

    name: str
    calls: Sequence[Call]
    error_share: float


def timed(
    workload: Workload,
    contenders: Sequence[Prepared | GpuRow],
    ops: Iterable[OpReport],
    options: Options,
    limits: tuple[Ceiling, Ceiling] | None = None,
    stopwatch: Stopwatch | None = None,
) -> GpuResult:
    """Times all candidates in turns, the ceilings among them."""
    matrix, copy = limits or (matrix_product(options.device), large_copy(options.device))
    running = [candidate for candidate in contenders if isinstance(candidate, Prepared)]
    turns = [*(candidate.calls for candidate in running), [matrix.call], [copy.call]]
    *times, matrix_times, copy_times = interleave(turns, options.seconds, stopwatch)
    samples = {c.name: Sample(c.name, t, c.error_share) for c, t in zip(running, times, strict=True)}
    rates = [[limit.amount / t for t in times] for limit, times in ((matrix, matrix_times), (copy, copy_times))]
    total = work(workload)
    return GpuResult(
        workload=workload.name,
        group=workload.group,
        dims=workload.dims,
        dtype=workload.spec.dtype,
        graphs=options.graphs,
        work=total,
        rounds=len(matrix_times),
        ceilings=Ceilings(median(rates[0]) / 1e12, median(rates[1]) / 1e9, spread(matrix_times)),
        kernels=tuple(described(op) for op in ops),
        rows=rows([samples[c.name] if isinstance(c, Prepared) else c for c in contenders], total, *rates),
    )


def described(op: OpReport) -> str:
    """One operation of ours: "attention: cuda.attention rows=128 stages=2, default"."""
    knobs = "".join(f" {name}={value}" for name, value in op.config.items())
    return f"{op.op}: {op.kernel}{knobs}, {op.source}"


def _our_calls(attention: Any, names: Sequence[str], problem: GpuProblem) -> list[Call]:
    return [partial(attention, *(inputs[name] for name in names)) for inputs in problem.sets]


def _attempt(peer: peers.GpuPeer, problem: GpuProblem, artifact: Artifact, graphs: bool) -> Prepared | GpuRow:
    """A candidate, or why it is missing: whatever it raises, since what others refuse is not ours to foresee."""
    try:
        calls = peer.calls(problem)
        share = problem.error_share(artifact, first(calls[0]()))
        if not share <= WRONG:
            message = f"outputs that are wrong by {share:.0f} times the budget"
            raise ModelError("candidate", "the same computation", message)
        return Prepared(peer.name, captured(calls) if graphs else calls, share)
    except Exception as error:
        torch.cuda.synchronize()  # raises where the GPU itself is lost to this process: then nothing else will run
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return GpuRow(peer.name, missing=lines[0][:200])


def captured(calls: Sequence[Call]) -> list[Callable[[], Any]]:
    """Captures each call as a CUDA graph; returns their replays. A call runs before: what loads code or allocates may
    not be captured."""
    replays: list[Callable[[], Any]] = []
    for call in calls:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = call()
        replays.append(partial(_replay, graph, output))
    return replays


def _replay(graph: Any, output: Any) -> Any:
    """Replays a graph; returns `output`, which lives in the graph's memory: that would be free without it."""
    graph.replay()
    return output


def _weights(artifact: Artifact) -> dict[str, Tensor]:
    from safetensors.torch import load

    return load(artifact.contents(WEIGHTS)[WEIGHTS]) if artifact.manifest.weights else {}
