"""What is fast: every candidate in one process, interleaved, warm, on equal threads, with the FMA peak beside them.

Candidates take turns in bursts. A thread pool's workers spin for a while after a call (TVM's, OpenMP's and ONNX
Runtime's, up to a millisecond), at the cost of whoever comes next; so each turn begins with calls that do not count,
until the others' workers sleep and its own are awake, and a burst of calls follows, whose median is one sample. The
order is reversed from round to round, so that no candidate always follows the same one. The calling thread keeps one
CPU, and the workers of every pool the others.
Notation: B batch, L query length, S key length.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from statistics import median, quantiles
from time import perf_counter

from mhsa_compile import host, installation, peers
from mhsa_compile.artifact import Artifact
from mhsa_compile.errors import InputError
from mhsa_compile.peers import Array, Arrays, Call, Peer
from mhsa_compile.profile import detect
from mhsa_compile.spec import AttentionSpec
from mhsa_compile.verify import max_error, random_inputs

SETTLE = 0.005
"""Seconds of calls that open a turn and do not count: every pool here was seen to spin for less than 1 ms."""
BURST = 0.02
"""Seconds of calls that make one sample."""
LEAST_ROUNDS = 5
INPUT_SETS = 4
"""Calls go through so many sets of inputs, so that none finds its own in the cache."""
DISTURBED = 0.1
"""A spread of the FMA peak above this: it knows no luck of its own, so something else was running."""


@dataclass(frozen=True)
class Row:
    """One candidate: `missing` says why it did not run, and then there are no numbers.

    median_us       microseconds a call, median over the rounds
    spread          interquartile range over the rounds, as a share of the median
    ratio           this candidate's time by ours in the same round, median over the rounds: above 1, we are faster
    gflops          useful FLOPs a second; None for a foreign .onnx, whose FLOPs nobody counted
    share_of_peak   of the FMA peak
    max_difference  largest difference of an output to ours; infinite where one side alone is not finite
    """

    name: str
    median_us: float | None = None
    spread: float | None = None
    ratio: float | None = None
    gflops: float | None = None
    share_of_peak: float | None = None
    max_difference: float | None = None
    missing: str | None = None


@dataclass(frozen=True)
class Report:
    """What `bench` found; the first row is this project."""

    dims: dict[str, int]
    threads: int
    rounds: int
    peak_gflops: float
    peak_spread: float
    rows: tuple[Row, ...]

    @property
    def disturbed(self) -> bool:
        """Whether something else took CPU time meanwhile; the figures then mean little."""
        return self.peak_spread > DISTURBED


@dataclass(frozen=True)
class _Candidate:
    """`calls` are one for each set of inputs, `results` what they returned; or `missing` says why there are none."""

    name: str
    calls: Sequence[Call] = ()
    results: Sequence[Sequence[Array]] = ()
    missing: str | None = None


def bench(
    artifact: Artifact | str | os.PathLike[str],
    *,
    against: Iterable[str] = ("torch", "onnxruntime"),
    dims: Mapping[str, int],
    threads: int | None = None,
    seconds: float = 5.0,
) -> Report:
    """Times an artifact and its peers on random inputs.

    against   names of `peers.PEERS`; one that cannot run is a row that says why
    dims      sizes of the symbolic dims; those that the artifact fixes may be left out
    threads   for every candidate and for the peak; by default the CPUs this process may use
    seconds   for each candidate, beside the warm-up; at least five rounds are made

    Raises InputError, InstallationError and, for our own side, what `load` raises.
    """
    chosen = peers.find(against)
    installation.check_tvm_pair()
    from mhsa_compile.peak import fma_peak  # imports TVM

    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    threads = host.allowed_cpus() if threads is None else threads
    inputs = [random_inputs(opened.manifest, dims, seed) for seed in range(INPUT_SETS)]
    sizes, flops = _work(opened, dims, inputs[0])
    with ExitStack() as stack:
        ours = _open(stack, peers.Compiled(), opened, threads, inputs)
        others = [_attempt(stack, peer, opened, threads, inputs) for peer in chosen]
        peak = stack.enter_context(fma_peak(detect(), threads))
        running = [ours, *(other for other in others if other.missing is None)]
        peak.run()
        stack.enter_context(_workers_apart())
        *times, peak_times = interleave([*(candidate.calls for candidate in running), [peak.run]], seconds)
    peak_gflops = peak.flops / median(peak_times) / 1e9
    rows = {
        candidate.name: _row(candidate, ours, samples, times[0], flops, peak_gflops)
        for candidate, samples in zip(running, times, strict=True)
    }
    complete = tuple(rows.get(c.name) or Row(c.name, missing=c.missing) for c in (ours, *others))
    return Report(sizes, threads, len(peak_times), peak_gflops, _spread(peak_times), complete)


def interleave(
    candidates: Sequence[Sequence[Call]], seconds: float, clock: Callable[[], float] = perf_counter
) -> list[list[float]]:
    """Seconds a call, as [candidate][round]; a candidate is a list of calls, taken in turn.

    Rounds go on for `seconds` per candidate; the first is a warm-up and is left out.
    """
    endless = [cycle(calls) for calls in candidates]
    samples: list[list[float]] = [[] for _ in candidates]
    order = list(range(len(candidates)))
    with _no_garbage_collection():
        for index in order:
            _burst(endless[index], clock)
        end = clock() + seconds * len(candidates)
        while len(samples[0]) < LEAST_ROUNDS or clock() < end:
            for index in order:
                samples[index].append(_burst(endless[index], clock))
            order.reverse()
    return samples


def _burst(calls: Iterator[Call], clock: Callable[[], float]) -> float:
    """One turn: the median seconds of the calls after it has settled."""
    settled = clock() + SETTLE
    next(calls)()
    while clock() < settled:
        next(calls)()
    times: list[float] = []
    end = clock() + BURST
    while not times or clock() < end:
        call = next(calls)
        start = clock()
        call()
        times.append(clock() - start)
    return median(times)


@contextmanager
def _workers_apart() -> Iterator[None]:
    """Keeps this thread on one CPU and every pool's workers on the others.

    Some kernels of virtual machines pack threads that wake up often onto one CPU to save another; a pool whose worker
    lands behind its caller then waits out whole time slices, up to a thousand times longer than the call takes.
    """
    cpus = os.sched_getaffinity(0)
    own, workers = threading.get_native_id(), {int(task) for task in os.listdir("/proc/self/task")}
    before = {task: os.sched_getaffinity(task) for task in workers}
    if len(cpus) > 1:
        for task in workers:
            os.sched_setaffinity(task, {min(cpus)} if task == own else cpus - {min(cpus)})
    try:
        yield
    finally:
        for task in before.keys() & {int(task) for task in os.listdir("/proc/self/task")}:
            os.sched_setaffinity(task, before[task])


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _open(stack: ExitStack, peer: Peer, artifact: Artifact, threads: int, inputs: Sequence[Arrays]) -> _Candidate:
    bind = stack.enter_context(peer.open(artifact, threads))
    calls = [bind(arrays) for arrays in inputs]
    return _Candidate(peer.name, calls, [peer.arrays(call()) for call in calls])


def _attempt(stack: ExitStack, peer: Peer, artifact: Artifact, threads: int, inputs: Sequence[Arrays]) -> _Candidate:
    """A peer, or why it is missing: whatever it raises, since what others refuse is not ours to foresee."""
    try:
        return _open(stack, peer, artifact, threads, inputs)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return _Candidate(peer.name, missing=lines[0])


def _work(artifact: Artifact, dims: Mapping[str, int], inputs: Arrays) -> tuple[dict[str, int], int | None]:
    """(sizes by symbol, useful FLOPs), from the inputs themselves. Raises InputError where `dims` say otherwise."""
    if artifact.manifest.spec is None:
        return dict(dims), None
    spec = AttentionSpec.from_dict(artifact.manifest.spec)
    query = inputs["q"] if "q" in inputs else inputs["x"]
    source = inputs["k"] if "k" in inputs else inputs.get("context", query)
    sizes = {"B": query.shape[0], "L": query.shape[-2], "S": source.shape[-2]}
    for symbol, size in sizes.items():
        if (stated := dims.get(symbol, size)) != size:
            why = "S is L in self-attention" if symbol == "S" and source is query else "the artifact fixes it"
            raise InputError("dims", f"{symbol} = {size}: {why}", f"{symbol} = {stated}")
    projections = 0 if "q" in inputs else spec.projection_flops(**sizes)
    return sizes, projections + spec.attention_flops(**sizes)


def _row(
    candidate: _Candidate,
    ours: _Candidate,
    samples: Sequence[float],
    our_samples: Sequence[float],
    flops: int | None,
    peak_gflops: float,
) -> Row:
    middle = median(samples)
    gflops = None if flops is None else flops / middle / 1e9
    pairs = zip(ours.results, candidate.results, strict=True)
    return Row(
        candidate.name,
        median_us=middle * 1e6,
        spread=_spread(samples),
        ratio=median(theirs / our for theirs, our in zip(samples, our_samples, strict=True)),
        gflops=gflops,
        share_of_peak=None if gflops is None else gflops / peak_gflops,
        max_difference=max(max_error(a, b) for left, right in pairs for a, b in zip(left, right, strict=True)),
    )


def _spread(samples: Sequence[float]) -> float:
    """The interquartile range as a share of the median."""
    lower, _, upper = quantiles(samples, n=4, method="inclusive")
    return (upper - lower) / median(samples)
