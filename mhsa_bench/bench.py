"""What is fast: all candidates in one process, interleaved, warm, on equal threads, and the machine's limits with them.

How they are timed is in `timing`, whether they were right in `accuracy`, what the machine can do in `roofline`.
Notation: B batch, L query length, S key length.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from mhsa_bench.peers.peer import Opened, Peer, Problem
from mhsa_bench.peers.registry import Compiled, find
from mhsa_bench.report import BenchReport, BenchRow, Floor
from mhsa_compile.bench.timing import INPUT_SETS, Call, interleave, tasks, workers_apart
from mhsa_compile.errors import InputError
from mhsa_compile.files.foreign_errors import entry_point
from mhsa_compile.hardware import environment, host
from mhsa_compile.hardware.profile import detect
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.profile.call_profile import spread
from mhsa_compile.verification.random_inputs import random_inputs

BEYOND_CACHE = 2
"""What calls go through must be so many times the last-level cache before bytes are said to come from memory."""


@dataclass(frozen=True)
class BenchCandidate:
    """One that runs, or `missing` says why it does not. `sole_workers` are threads whose caller only waits."""

    name: str
    calls: Sequence[Call] = ()
    form: str = ""
    error_share: float | None = None
    sole_workers: frozenset[int] = frozenset()
    missing: str | None = None


@dataclass(frozen=True)
class _Timed:
    """Every candidate, ours first; seconds a call in each round of those that ran, in order; and the limits."""

    candidates: tuple[BenchCandidate, ...]
    times: Sequence[Sequence[float]]
    rounds: int
    peak_gflops: float
    peak_spread: float
    kind_gflops: dict[str, float]
    bandwidth_gbs: float


@entry_point
def bench(
    artifact: Artifact | str | os.PathLike[str],
    *,
    against: Iterable[str] = ("torch", "onnxruntime"),
    dims: Mapping[str, int],
    threads: int | None = None,
    seconds: float = 5.0,
) -> BenchReport:
    """Times an artifact and its peers on random inputs.

    against   names of `registry.PEERS`; one that cannot run is a row that says why
    dims      sizes of the symbolic dims; those that the artifact fixes may be left out
    threads   for every candidate and for the limits; by default the CPUs this process may use
    seconds   for each candidate, beside the warm-up; at least five rounds are made

    Raises InputError, InstallationError and, for our own side, what `load` raises.
    """
    threads = host.thread_count(threads)
    peers = find(against)
    environment.check_tvm_pair()
    from mhsa_bench import roofline  # PyTorch, TVM
    from mhsa_compile.bench import accuracy

    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    _check_family(opened)
    _check_returns_y_alone(opened)
    inputs = [random_inputs(opened.manifest, dims, seed) for seed in range(INPUT_SETS)]
    problem = Problem(opened, inputs)
    sizes = _sizes(problem, dims)
    expected = accuracy.truth(opened, inputs[0], problem.weights)
    problem = replace(problem, error_share=expected.share)
    dtype = problem.float_dtype
    timed = _time(problem, peers, dtype, threads, seconds)
    floor = _floor(problem, timed.kind_gflops, timed.bandwidth_gbs, roofline.last_level_cache())
    return BenchReport(
        dims=sizes,
        dtype=dtype,
        threads=threads,
        rounds=timed.rounds,
        peak_gflops=timed.peak_gflops,
        peak_spread=timed.peak_spread,
        bandwidth_gbs=timed.bandwidth_gbs,
        floor=floor,
        budget=expected.budget,
        rows=_rows(timed, floor),
    )


def _check_family(artifact: Artifact) -> None:
    if (family := artifact.manifest.target.family) != "cpu":
        expected = "one for a CPU, whose clock times it"
        raise InputError("artifact", expected, f"one for {family}", "benchmarks/gpu.py times GPUs, on one of them.")


def _check_returns_y_alone(artifact: Artifact) -> None:
    from mhsa_compile.bench import accuracy

    if not accuracy.returns_y_alone(artifact):
        names = ", ".join(info.name for info in artifact.manifest.outputs)
        hint = "The others return nothing else: compile the same spec without outputs."
        raise InputError("artifact", "one that returns y alone", f"outputs {names}", hint)


def _time(problem: Problem, peers: Iterable[Peer], dtype: str, threads: int, seconds: float) -> _Timed:
    """Times all candidates in one process and in turns, the limits among them."""
    from mhsa_bench import limits, roofline

    with ExitStack() as stack:
        ours = open_candidate(stack, Compiled(), problem, threads, problem.error_share)
        others = [attempt(stack, peer, problem, threads) for peer in peers]
        running = [ours, *(other for other in others if other.missing is None)]
        products = limits.ProductRates.opened(stack, problem.artifact.manifest, threads, dtype)
        probes = [stack.enter_context(roofline.reading(detect(), threads)), *products.all]
        for probe in probes:
            probe.run()
        stack.enter_context(workers_apart(frozenset().union(*(candidate.sole_workers for candidate in running))))
        turns = [*(candidate.calls for candidate in running), *([probe.run] for probe in probes)]
        times = interleave(turns, seconds)
    peak_times = times[len(running) + 1]
    # A limit is what the machine did at best.
    bandwidth, *rates = (
        probe.amount / min(seconds) / 1e9 for probe, seconds in zip(probes, times[len(running) :], strict=True)
    )
    return _Timed(
        candidates=(ours, *others),
        times=times[: len(running)],
        rounds=len(peak_times),
        peak_gflops=rates[0],
        peak_spread=spread(peak_times),
        kind_gflops=products.by_kind(rates),
        bandwidth_gbs=bandwidth,
    )


def open_candidate(
    stack: ExitStack, peer: Peer, problem: Problem, threads: int, judge: Callable[[list[np.ndarray]], float]
) -> BenchCandidate:
    before = tasks()
    opened: Opened = stack.enter_context(peer.open(problem, threads))
    error_share = judge(opened.arrays(opened.calls[0]()))
    for call in opened.calls[1:]:
        call()
    sole = frozenset() if opened.caller_works else frozenset(tasks() - before)
    return BenchCandidate(peer.name, opened.calls, opened.form, error_share, sole)


def attempt(stack: ExitStack, peer: Peer, problem: Problem, threads: int) -> BenchCandidate:
    """A peer, or why it is missing: whatever it raises, since what others refuse is not ours to foresee."""
    try:
        return open_candidate(stack, peer, problem, threads, problem.check)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return BenchCandidate(peer.name, missing=lines[0][:300])


def _sizes(problem: Problem, dims: Mapping[str, int]) -> dict[str, int]:
    """Sizes by symbol, from the inputs themselves. Raises InputError where `dims` say otherwise."""
    spec = problem.manifest_spec
    if spec is None or spec.kv_cache:
        return dict(dims)
    source_is_query = not problem.is_core and not spec.is_cross
    for symbol, size in problem.sizes.items():
        if (dim := dims.get(symbol, size)) != size:
            why = "S is L in self-attention" if symbol == "S" and source_is_query else "the artifact fixes it"
            raise InputError("dims", f"{symbol} = {size}: {why}", f"{symbol} = {dim}")
    return problem.sizes


def _floor(problem: Problem, gflops: Mapping[str, float], bandwidth_gbs: float, cache: int) -> Floor | None:
    """The least time of a call, by the spec; calls go through all the sets of inputs and outputs, and the weights.

    gflops   by kind of operation

    None where the spec does not tell: of a cache its lengths say how much is read, and of weights in eight bits or
    linears of which only some multiply by terms nobody measured the rate.
    """
    spec = problem.manifest_spec
    if spec is None or spec.kv_cache:
        return None
    sizes = problem.sizes
    flops_by_kind = {"attention": spec.attention_flops(**sizes)}
    if not problem.is_core:
        flops_by_kind["linear"] = spec.projection_flops(**sizes)
    if not flops_by_kind.keys() <= gflops.keys():
        return None
    flops = sum(flops_by_kind.values())
    columns = spec.num_heads * spec.v_head_dim if problem.is_core else spec.embed_dim
    outputs = sizes["B"] * sizes["L"] * columns * problem.dtype.itemsize
    moving = outputs + sum(array.nbytes for array in problem.inputs[0].values())
    weights = sum(array.nbytes for array in problem.weights.values())
    sets = len(problem.inputs)
    working_set = sets * moving + weights
    from_memory = (working_set - cache) / sets  # of each call: the cache may have kept the rest from the last time
    compute_us = sum(number / gflops[kind] for kind, number in flops_by_kind.items()) / 1e3
    memory_us = from_memory / bandwidth_gbs / 1e3 if working_set > BEYOND_CACHE * cache else None
    limit = "memory" if memory_us is not None and memory_us > compute_us else "compute"
    return Floor(limit, compute_us, memory_us, flops, moving + weights)


def _rows(timed: _Timed, floor: Floor | None) -> tuple[BenchRow, ...]:
    times = iter(timed.times)
    return tuple(
        _row(candidate, next(times), timed.times[0], floor)
        if candidate.missing is None
        else BenchRow(candidate.name, missing=candidate.missing)
        for candidate in timed.candidates
    )


def _row(
    candidate: BenchCandidate, samples: Sequence[float], our_samples: Sequence[float], floor: Floor | None
) -> BenchRow:
    middle = median(samples)
    return BenchRow(
        candidate.name,
        median_us=middle * 1e6,
        spread=spread(samples),
        ratio=median(theirs / our for theirs, our in zip(samples, our_samples, strict=True)),
        gflops=None if floor is None else floor.flops / middle / 1e9,
        share_of_peak=None if floor is None else floor.compute_us / middle / 1e6,
        share_of_limit=None if floor is None else floor.us / middle / 1e6,
        error_share=candidate.error_share,
        form=candidate.form,
    )
