"""What a profile of a call says, as a table's rows and as a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from mhsa_compile.files.atomic_write import atomic_file

OFTEN_KEPT = 2
"""Bytes come from memory where an operation touches so many times the last-level cache; those that nothing in a call
touched before also where the call has so many of them. Else caches bring them."""

DISTURBED = 0.1
"""A spread above this: times of a quiet machine differ by a few hundredths, and so do those of multiply-adds, which
know no luck of their own: something else was running."""


def spread(times: Sequence[float]) -> float:
    """The interquartile range as a share of the median; of one time 0."""
    if len(times) < 2:
        return 0.0
    lower, _, upper = quantiles(times, n=4, method="inclusive")
    return (upper - lower) / median(times)


@dataclass(frozen=True)
class OpProfile:
    """An operation of the compiled function, or all runs of one function of TVM's own.

    kind, kernel    as the manifest has them; of TVM's own code "fallback" and "tvm"
    config          the kernel's
    runs            of a call: several of one function of TVM's, or of operations that are taken together
    us              microseconds of a call, the mean of the middle half of the rounds
    cpus            that the process kept busy meanwhile, on average: workers of pools that wait awake count, too
    flops, bytes    of a call; None where nobody counted them
    first_bytes     of these bytes, those of arrays that no operation before it touches: weights and inputs, mostly
    share_of_limit  of what the machine can do at best; None unless it was measured (`CallProfile.against`)
    """

    name: str
    kind: str
    kernel: str
    config: dict[str, int]
    runs: int
    us: float
    cpus: float
    flops: int | None
    bytes: int | None
    first_bytes: int | None = None
    share_of_limit: float | None = None

    @property
    def gflops(self) -> float | None:
        """10^9 FLOPs a second."""
        return None if self.flops is None or self.us <= 0 else self.flops / self.us / 1e3

    @property
    def gbs(self) -> float | None:
        """10^9 bytes a second."""
        return None if self.bytes is None or self.us <= 0 else self.bytes / self.us / 1e3

    def joined(self, other: OpProfile, name: str | None = None) -> OpProfile:
        """Both operations as one, under this one's name or another."""
        us = self.us + other.us
        cpus = (self.us * self.cpus + other.us * other.cpus) / us if us else self.cpus
        return replace(
            self,
            name=self.name if name is None else name,
            runs=self.runs + other.runs,
            us=us,
            cpus=cpus,
            flops=_sum(self.flops, other.flops),
            bytes=_sum(self.bytes, other.bytes),
            first_bytes=_sum(self.first_bytes, other.first_bytes),
        )


@dataclass(frozen=True)
class TraceEvent:
    """One run of a kernel in one call: microseconds from its begin."""

    name: str
    kind: str
    begin_us: float
    us: float
    arrays: tuple[str, ...]


@dataclass(frozen=True)
class CallProfile:
    """A call, by operation in the order of its code.

    call_us      microseconds of the same call when nothing is noted, the median; measured in turns with the operations
    function_us  of the compiled function in it: without the checks of arguments, and what Python does beside
    spread       of the call's times: their interquartile range as a share of the median
    threads      that a call uses at most
    rounds       that were measured
    events       of the one call among them whose time was the median
    """

    ops: tuple[OpProfile, ...]
    call_us: float
    function_us: float
    spread: float
    threads: int
    rounds: int
    events: tuple[TraceEvent, ...]

    @property
    def disturbed(self) -> bool:
        """Whether something else took CPU time meanwhile: then the parts of a call need not add up to it."""
        return self.spread > DISTURBED

    @property
    def ops_us(self) -> float:
        """The sum of the operations' times in microseconds."""
        return sum(op.us for op in self.ops)

    @property
    def between_us(self) -> float:
        """What the function takes beside its operations, a difference: memory for arrays, shapes, TVM's VM."""
        return self.function_us - self.ops_us

    @property
    def around_us(self) -> float:
        """What the call takes beside the function, a difference: checks of arguments and results, Python."""
        return self.call_us - self.function_us

    def alike_together(self) -> CallProfile:
        """The profile in which operations of one kernel and config that do as much are one, `op_0 ... op_33`."""
        groups: dict[tuple[object, ...], list[OpProfile]] = {}
        for op in self.ops:
            apart = op.name if op.kind == "fallback" else ""
            groups.setdefault((apart, op.kind, op.kernel, str(op.config), op.flops, op.bytes), []).append(op)
        together = []
        for alike in groups.values():
            name = alike[0].name if len(alike) == 1 else f"{alike[0].name} ... {alike[-1].name}"
            together.append(reduce(lambda one, other: one.joined(other, name), alike))
        return replace(self, ops=tuple(together))

    def by_time(self) -> tuple[OpProfile, ...]:
        """The operations, the longest first."""
        return tuple(sorted(self.ops, key=lambda op: -op.us))

    def against(self, gflops: dict[str, float], bandwidth_gbs: float, cache_bytes: int) -> CallProfile:
        """The profile with the share of what the machine can do: for each kind of operation in `gflops` multiply-adds
        at that rate, or bytes where they cannot stay in a cache of `cache_bytes`, whichever takes longer."""
        cache_share = OFTEN_KEPT * cache_bytes
        is_large = sum(op.first_bytes or 0 for op in self.ops) > cache_share
        return replace(self, ops=tuple(_against(op, gflops, bandwidth_gbs, cache_share, is_large) for op in self.ops))

    def chrome_trace(self) -> dict[str, Any]:
        """One call in the trace event format that chrome://tracing and Perfetto read, times in microseconds.

        https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
        """
        by_name = {op.name: op for op in self.ops}
        names = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "mhsa_compile"}}]
        return {
            "displayTimeUnit": "ms",
            "traceEvents": [*names, *(_event(one, by_name[one.name]) for one in self.events)],
        }

    def save_trace(self, path: str | Path) -> None:
        """Writes `chrome_trace` to a file. Raises OutputError."""
        with atomic_file(Path(path), "trace") as file:
            file.write(json.dumps(self.chrome_trace()).encode() + b"\n")


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _against(
    op: OpProfile, gflops: dict[str, float], bandwidth_gbs: float, cache_share: int, is_large: bool
) -> OpProfile:
    times = [op.flops / gflops[op.kind] / 1e3] if op.flops is not None and op.kind in gflops else []
    if op.bytes is not None and op.bytes / op.runs > cache_share:
        times.append(op.bytes / bandwidth_gbs / 1e3)
    elif op.first_bytes is not None and is_large:
        times.append(op.first_bytes / bandwidth_gbs / 1e3)
    return replace(op, share_of_limit=max(times) / op.us) if times and op.us > 0 else op


def _event(event: TraceEvent, op: OpProfile) -> dict[str, Any]:
    rates = {"GFLOP/s": op.gflops, "GB/s": op.gbs, "CPUs": op.cpus}
    arguments = {"kernel": op.kernel, "config": op.config, "arrays": list(event.arrays), **rates}
    return {"name": event.name, "cat": event.kind, "ph": "X", "pid": 1, "tid": 1, "ts": event.begin_us,
            "dur": event.us, "args": arguments}  # fmt: skip
