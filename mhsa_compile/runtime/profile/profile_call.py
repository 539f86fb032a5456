"""Times the kernels of a call in turns with the call itself.

Each round makes the call as it is, then runs its kernels one after another and reads the clock between them. Two things
that a call does not have are taken off: reading the clock, and calling a function of TVM's from Python with so many
arrays, which is measured with a function that does nothing. A second pass of each round also reads the CPU time of the
process's threads.

TVM's VM tells an instrument of each of its instructions, but an instrument in Python takes several microseconds for
each of the dozens that a call has, which is longer than a small call. So it only notes, once, what is run. The kernels
are then run again in their order, by themselves: on the same arrays, so with the same in the CPU's caches as in a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from mhsa_compile.files.proc import thread_numbers
from mhsa_compile.runtime.artifact.manifest import Manifest, OpReport
from mhsa_compile.runtime.profile.call_profile import CallProfile, OpProfile, TraceEvent, spread
from mhsa_compile.runtime.profile.op_work import Work, array_bytes, work_of
from mhsa_compile.runtime.tvm_runtime import Runtime, Vm

_OF_THE_VM = ("vm.builtin.", "shape_func")
"""Instructions that are no kernels: memory, shapes, checks."""


LEAST_ROUNDS, MOST_ROUNDS = 5, 3000
_WARM, _WARM_SECONDS = 20, 0.2
"""Calls before the first that counts, no longer than so many seconds: the loops of a call settle how they are cut."""
_NOTHINGS = 51


@dataclass(frozen=True)
class KernelRun:
    """`run(*arguments)` computes what the call computes there.

    symbol   its name in the code; operations with the same code share one
    counts   what the arguments that are lists of integers held then, as numbers of keys: later arrays of the call may
             lie in the same memory
    """

    symbol: str
    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    counts: tuple[tuple[int, ...], ...] = ()


def capture(runtime: Runtime, vm: Vm, arguments: Sequence[Any]) -> list[KernelRun]:
    """The kernels that one call runs, in their order; it is made on a VM that nobody else uses."""
    runs: list[KernelRun] = []

    def is_list(value: Any) -> bool:
        return isinstance(value, runtime.ffi.Tensor) and str(value.dtype) == "int64" and len(value.shape) == 1

    def note(function: Any, symbol: str, before: bool, result: Any, *values: Any) -> None:
        if before and not symbol.startswith(_OF_THE_VM) and any(isinstance(one, runtime.ffi.Tensor) for one in values):
            runs.append(KernelRun(symbol, function, values, tuple(map(_numbers, filter(is_list, values)))))

    vm.instrument(runtime.ffi.convert(note))
    vm.main(*arguments)
    return runs


def _numbers(tensor: Any) -> tuple[int, ...]:
    return tuple(np.from_dlpack(tensor).tolist())


@dataclass(frozen=True)
class Turns:
    """What takes turns with the kernels: the whole call, and the compiled function, on arrays that are ready. `alone`
    prepares this thread for running kernels or the function, and holds what a call holds."""

    call: Callable[[], Any]
    function: Callable[[], Any]
    alone: Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class _Times:
    """Nanoseconds: for each round the call and the function, and for each kernel the wall clock; in `cpus`, of another
    pass, the threads' time and the wall clock."""

    call: list[int]
    function: list[int]
    kernels: np.ndarray[Any, Any]
    cpus: np.ndarray[Any, Any]


def profile_call(
    runtime: Runtime, manifest: Manifest, kernels: Sequence[KernelRun], turns: Turns, threads: int, seconds: float
) -> CallProfile:
    """Times a call and its kernels, for about so many seconds. `kernels` are those of the call that `turns` makes,
    which uses at most so many threads."""
    _settle(kernels, turns)
    times = _measure(kernels, turns, seconds)
    nothing = np.array([_of_nothing(runtime, kernel.arguments) for kernel in kernels])
    wall = np.maximum(times.kernels - nothing, 0.0) / 1e3
    arrays = [[array for array in kernel.arguments if isinstance(array, runtime.ffi.Tensor)] for kernel in kernels]
    usual = _usual_rounds(wall)
    us, first = wall[usual].mean(axis=0), _first_bytes(arrays)
    rows: dict[str, OpProfile] = {}
    names = []
    for i, (kernel, op) in enumerate(zip(kernels, _operations(manifest, kernels), strict=True)):
        threads_time, elapsed = times.cpus[:, i].sum(axis=0)
        busy = float(threads_time / max(1, elapsed))
        work = work_of(manifest, op, kernel.symbol, arrays[i], kernel.counts)
        row = _row(kernel, op, float(us[i]), busy, work, first[i])
        rows[row.name] = rows[row.name].joined(row) if row.name in rows else row
        names.append(row.name)
    events = _events(names, rows, [_shapes(array) for array in arrays], wall[usual[len(usual) // 2]])
    return CallProfile(
        ops=tuple(rows.values()),
        call_us=median(times.call) / 1e3,
        function_us=median(times.function) / 1e3,
        spread=spread(times.call),
        threads=threads,
        rounds=len(times.call),
        events=tuple(events),
    )


def _settle(kernels: Sequence[KernelRun], turns: Turns) -> None:
    begin = time.perf_counter()
    for _ in range(_WARM):
        turns.call()
        with turns.alone():
            _run(kernels, time.perf_counter_ns)
        if time.perf_counter() - begin > _WARM_SECONDS:
            return


def _measure(kernels: Sequence[KernelRun], turns: Turns, seconds: float) -> _Times:
    calls: list[int] = []
    functions: list[int] = []
    wall: list[list[int]] = []
    cpus: list[list[Any]] = []
    both_clocks = _both_clocks()
    end = time.perf_counter() + seconds
    while len(calls) < LEAST_ROUNDS or (len(calls) < MOST_ROUNDS and time.perf_counter() < end):
        calls.append(_timed(turns.call))
        with turns.alone():
            wall.append(_run(kernels, time.perf_counter_ns))
        with turns.alone():
            functions.append(_timed(turns.function))
        with turns.alone():
            cpus.append(_run(kernels, both_clocks))
    shape = len(calls), len(kernels)
    return _Times(calls, functions, np.array(wall).reshape(shape), np.array(cpus).reshape(*shape, 2))


def _both_clocks() -> Callable[[], Any]:
    """A clock of the CPU time that the threads which this process has now have had, and of the wall. The process's own
    clock counts what a thread does on another CPU at each tick of the kernel only, milliseconds apart."""
    clocks = [~thread << 3 | 6 for thread in thread_numbers()]  # CPUCLOCK_SCHED of one thread

    def read() -> Any:
        total = 0
        for clock in clocks:
            with suppress(OSError):  # a thread that has ended
                total += time.clock_gettime_ns(clock)
        return np.array((total, time.perf_counter_ns()))

    return read


def _timed(call: Callable[[], Any]) -> int:
    begin = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin


def _usual_rounds(wall: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The middle half of the rounds, by the sum of their kernels, and in its order. Medians of kernels would not add up
    to the median of calls: what else runs on a machine now and then lengthens many calls, and of each one kernel."""
    quarter = len(wall) // 4
    return np.argsort(wall.sum(axis=1))[quarter : len(wall) - quarter]


def _run(kernels: Sequence[KernelRun], clock: Callable[[], Any]) -> list[Any]:
    """Runs the kernels, and returns the nanoseconds of each by `clock`."""
    ticks = [clock()]
    for kernel in kernels:
        kernel.run(*kernel.arguments)
        ticks.append(clock())
    return [after - before for before, after in pairwise(ticks)]


def _of_nothing(runtime: Runtime, arguments: tuple[Any, ...]) -> float:
    """Nanoseconds that running a kernel takes here beside the kernel."""
    kernel = KernelRun("", runtime.nothing, arguments)
    return float(median(_run([kernel], time.perf_counter_ns)[0] for _ in range(_NOTHINGS)))


def _first_bytes(arrays: Sequence[Sequence[Any]]) -> list[int]:
    """For each kernel, the bytes of those of its arrays that none before it touched."""
    addresses: set[int] = set()
    totals = []
    for tensors in arrays:
        new = {array.data_ptr(): array_bytes(array) for array in tensors if array.data_ptr() not in addresses}
        addresses |= new.keys()
        totals.append(sum(new.values()))
    return totals


def _row(kernel: KernelRun, op: OpReport | None, us: float, cpus: float, work: Work, first_bytes: int) -> OpProfile:
    name, kind, code, config = (
        (kernel.symbol, "fallback", "tvm", {}) if op is None else (op.name, op.op, op.kernel, op.config)
    )
    first = None if work.bytes is None else min(first_bytes, work.bytes)
    return OpProfile(name, kind, code, config, 1, us, cpus, work.flops, work.bytes, first)


def _operations(manifest: Manifest, kernels: Sequence[KernelRun]) -> list[OpReport | None]:
    """The operation that each run computes, None of code of TVM's own. Code bears the name of the first operation that
    it is for; those of the same words run it after that one, in their order."""
    by_symbol = {f"{op.op}_{op.name}": op for op in manifest.ops}
    own = {by_symbol[kernel.symbol].name for kernel in kernels if kernel.symbol in by_symbol}
    others = [op for op in manifest.ops if op.name not in own]
    names: set[str] = set()
    operations: list[OpReport | None] = []
    for kernel in kernels:
        op = by_symbol.get(kernel.symbol)
        if op is not None and op.name in names:
            op = next((other for other in others if _words(other) == _words(op)), op)
            others = [other for other in others if other is not op]
        if op is not None:
            names.add(op.name)
        operations.append(op)
    return operations


def _words(op: OpReport) -> tuple[Any, ...]:
    return op.op, op.kernel, op.config, op.note


def _shapes(arrays: Sequence[Any]) -> tuple[str, ...]:
    return tuple(f"{array.dtype} ({', '.join(map(str, array.shape))})" for array in arrays)


def _events(
    names: Sequence[str], rows: dict[str, OpProfile], shapes: Sequence[tuple[str, ...]], us: Sequence[float]
) -> Iterator[TraceEvent]:
    begin = 0.0
    for name, arrays, duration in zip(names, shapes, us, strict=True):
        yield TraceEvent(name, rows[name].kind, begin, float(duration), arrays)
        begin += float(duration)
