"""Times the kernels of a call in turns with the call itself.

Each round makes the call as it is, then runs its kernels one after another and reads the clock between them. Two things
that a call does not have are taken off: reading the clock, and calling a function of TVM's from Python with so many
arrays, which is measured with a function that does nothing. A second pass of each round reads the process's CPU time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from mhsa_compile.runtime.artifact.manifest import Manifest, OpReport
from mhsa_compile.runtime.profile.call_profile import CallProfile, OpProfile, TraceEvent
from mhsa_compile.runtime.profile.captured_call import KernelRun
from mhsa_compile.runtime.profile.op_work import Work, work_of
from mhsa_compile.runtime.tvm_runtime import Runtime

LEAST_ROUNDS, MOST_ROUNDS = 5, 3000
_WARM, _WARM_SECONDS = 20, 0.2
"""Calls before the first that counts, no longer than so many seconds: the loops of a call settle how they are cut."""
_NOTHINGS = 51


@dataclass(frozen=True)
class _Times:
    """In nanoseconds: of each round the call, and of each round and kernel the wall clock and the CPUs' time."""

    call: list[int]
    kernels: np.ndarray[Any, Any]
    cpus: np.ndarray[Any, Any]


def profile_call(
    runtime: Runtime,
    manifest: Manifest,
    kernels: Sequence[KernelRun],
    call: Callable[[], Any],
    alone: Callable[[], AbstractContextManager[Any]],
    threads: int,
    seconds: float,
) -> CallProfile:
    """`call` is the whole call; `alone` prepares this thread for running kernels, and holds what a call holds."""
    started = time.perf_counter()
    for _ in range(_WARM):
        call()
        with alone():
            _run(kernels, time.perf_counter_ns)
        if time.perf_counter() - started > _WARM_SECONDS:
            break
    times = _measured(kernels, call, alone, seconds)
    nothing = np.array([_of_nothing(runtime, kernel.arguments) for kernel in kernels])
    wall = np.maximum(times.kernels - nothing, 0.0) / 1e3
    tensor = runtime.ffi.Tensor
    arrays = [[held for held in kernel.arguments if isinstance(held, tensor)] for kernel in kernels]
    reports = {f"{op.op}_{op.name}": op for op in manifest.ops}
    rows: dict[str, OpProfile] = {}
    names = []
    for i, kernel in enumerate(kernels):
        op = reports.get(kernel.symbol)
        busy = float(times.cpus[:, i].sum() / max(1, times.kernels[:, i].sum()))
        row = _row(kernel, op, float(np.median(wall[:, i])), busy, work_of(manifest, op, arrays[i]))
        rows[row.name] = _joined(rows[row.name], row) if row.name in rows else row
        names.append(row.name)
    typical = int(np.argsort(wall.sum(axis=1))[len(wall) // 2]) if kernels else 0
    events = _events(names, rows, [_shapes(held) for held in arrays], wall[typical])
    return CallProfile(tuple(rows.values()), median(times.call) / 1e3, threads, len(times.call), tuple(events))


def _measured(
    kernels: Sequence[KernelRun],
    call: Callable[[], Any],
    alone: Callable[[], AbstractContextManager[Any]],
    seconds: float,
) -> _Times:
    calls, wall, cpus = [], [], []
    end = time.perf_counter() + seconds
    while len(calls) < LEAST_ROUNDS or (len(calls) < MOST_ROUNDS and time.perf_counter() < end):
        begin = time.perf_counter_ns()
        call()
        calls.append(time.perf_counter_ns() - begin)
        with alone():
            wall.append(_run(kernels, time.perf_counter_ns))
        with alone():
            cpus.append(_run(kernels, time.process_time_ns))
    return _Times(calls, np.array(wall).reshape(len(calls), -1), np.array(cpus).reshape(len(calls), -1))


def _run(kernels: Sequence[KernelRun], clock: Callable[[], int]) -> list[int]:
    """Nanoseconds of each."""
    ticks = [clock()]
    for kernel in kernels:
        kernel.run(*kernel.arguments)
        ticks.append(clock())
    return [after - before for before, after in zip(ticks, ticks[1:], strict=False)]


def _of_nothing(runtime: Runtime, arguments: tuple[Any, ...]) -> float:
    """Nanoseconds that running a kernel takes here beside the kernel."""
    kernel = KernelRun("", runtime.nothing, arguments)
    return median(_run([kernel], time.perf_counter_ns)[0] for _ in range(_NOTHINGS))


def _row(kernel: KernelRun, op: OpReport | None, us: float, cpus: float, work: Work) -> OpProfile:
    if op is None:
        return OpProfile(kernel.symbol, "fallback", "tvm", {}, 1, us, cpus, work.flops, work.bytes)
    return OpProfile(op.name, op.op, op.kernel, op.config, 1, us, cpus, work.flops, work.bytes)


def _joined(one: OpProfile, other: OpProfile) -> OpProfile:
    """Two runs of one function."""
    us = one.us + other.us
    cpus = (one.us * one.cpus + other.us * other.cpus) / us if us else one.cpus
    flops, size = (None if None in pair else sum(pair) for pair in ((one.flops, other.flops), (one.bytes, other.bytes)))
    return replace(one, runs=one.runs + other.runs, us=us, cpus=cpus, flops=flops, bytes=size)


def _shapes(arrays: Sequence[Any]) -> tuple[str, ...]:
    return tuple(f"{array.dtype} ({', '.join(map(str, array.shape))})" for array in arrays)


def _events(
    names: Sequence[str], rows: dict[str, OpProfile], shapes: Sequence[tuple[str, ...]], us: Sequence[float]
) -> Iterator[TraceEvent]:
    begin = 0.0
    for name, arrays, duration in zip(names, shapes, us, strict=True):
        yield TraceEvent(name, rows[name].kind, begin, float(duration), arrays)
        begin += float(duration)
