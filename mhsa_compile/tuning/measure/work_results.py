"""What was measured of a bundle: measured on the device, written as it goes, read where the bundle came from.

results.measure("work.zip", "results.json")           # there; begun again, it goes on where it was
results.read("results.json").measured                 # here
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from statistics import median

import msgspec

from mhsa_compile.errors import BundleError, DeviceError
from mhsa_compile.files import input_files, places
from mhsa_compile.files.atomic_write import atomic_file
from mhsa_compile.hardware import environment
from mhsa_compile.records.device import Device
from mhsa_compile.runtime.artifact.manifest import Digest
from mhsa_compile.tuning.measure import rpc_server, sessions, work_bundle
from mhsa_compile.tuning.measure.job import LOST, Failure, Outcome, Timing
from mhsa_compile.tuning.measure.work_bundle import WorkBundle, WorkOrder


class Measurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of one candidate, and of the incumbent in the same rounds (of the incumbent alone: the same)."""

    task: str
    label: str
    outcome: Outcome
    incumbent: Outcome


class Results(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results of a bundle. `work` is the sha256 of its manifest; `total` is how many there will be, when whole."""

    format: int = work_bundle.FORMAT
    work: Digest
    order: WorkOrder
    device: Device
    versions: dict[str, str]
    total: int
    measured: tuple[Measurement, ...] = ()


def measure(
    path: str | os.PathLike[str],
    results: str | os.PathLike[str],
    progress: Callable[[Results], None] = lambda _: None,
) -> Results:
    """Measures on this machine what is left of a bundle, and writes the results after each candidate.

    Raises BundleError for a bundle or results that are damaged or do not belong together, DeviceError where this
    machine cannot run the code (before it runs any) or its process dies for good, and OutputError.
    """
    with WorkBundle.opened(Path(path)) as work:
        device = rpc_server.this_device(gpu=bool(work.order.isa.gpu))
        sessions.require(device, work.order.isa)
        if device.cores < work.order.threads:
            raise DeviceError(f"device {device.cpu!r}", f"{work.order.threads} CPUs, one a thread", str(device.cores))
        outcome = _earlier_results(Path(results), work, device)
        _write(Path(results), outcome)  # what cannot be written is known before hours of measuring
        progress(outcome)
        if not (pairs := work.pairs[len(outcome.measured) :]):
            return outcome
        with sessions.local(work.order.threads) as session:
            for pair in pairs:
                outcome = msgspec.structs.replace(outcome, measured=(*outcome.measured, _measure(work, session, *pair)))
                _write(Path(results), outcome)
                progress(outcome)
    return outcome


def _measure(work: WorkBundle, session: sessions.Session, number: int, which: int) -> Measurement:
    entry = work.tasks[number]
    candidates = [work.candidate(number, i) for i in dict.fromkeys((0, which))]
    outcomes = session.measure(work.job(number), candidates, work.order.seconds)
    for outcome in outcomes:
        if isinstance(outcome, Failure) and outcome.reason == LOST:
            hint = "What was measured is kept: begin again, and it goes on."
            raise DeviceError("the measuring process", "one that stays", outcome.detail, hint)
    label = entry.candidates[which].label
    return Measurement(task=entry.label, label=label, outcome=outcomes[-1], incumbent=outcomes[0])


def read(path: str | os.PathLike[str]) -> Results:
    """Reads the results in a file. Raises BundleError for what is damaged, newer, or no results."""
    what = f"results {str(path)!r}"
    return work_bundle.decoded(what, input_files.read(path, BundleError, what, "a file that can be read"), Results)


class Summary(msgspec.Struct, frozen=True):
    """One task's candidates. Microseconds are medians; the speedup is that of the best over the incumbent, round by
    round. None where nothing ran."""

    task: str
    trials: int
    failures: int
    default_us: float | None
    best_us: float | None
    speedup: float | None


def summary(results: Results) -> list[Summary]:
    by_task: dict[str, list[Measurement]] = {}
    for row in results.measured:
        by_task.setdefault(row.task, []).append(row)
    return [_summary(task, rows) for task, rows in by_task.items()]


def _summary(task: str, rows: list[Measurement]) -> Summary:
    incumbents = [m.incumbent.samples_us for m in rows if isinstance(m.incumbent, Timing)]
    pairs = [
        (median(a / b for a, b in zip(m.incumbent.samples_us, m.outcome.samples_us, strict=False)), m.outcome)
        for m in rows
        if isinstance(m.outcome, Timing) and isinstance(m.incumbent, Timing)
    ]
    failures = sum(isinstance(m.outcome, Failure) for m in rows)
    speedup, best = max(pairs, key=lambda pair: pair[0], default=(None, None))
    return Summary(
        task=task,
        trials=len(rows),
        failures=failures,
        default_us=median(chain.from_iterable(incumbents)) if incumbents else None,
        best_us=median(best.samples_us) if best is not None else None,
        speedup=speedup,
    )


def _earlier_results(path: Path, work: WorkBundle, device: Device) -> Results:
    """The results that are there already, or new ones."""
    versions = {name: environment.installed_version(name) or "" for name in ("apache-tvm", "mhsa-compile")}
    fresh = Results(work=work.digest, order=work.order, device=device, versions=versions, total=len(work.pairs))
    if not places.is_there(path):
        return fresh
    results = read(path)
    for part in ("work", "device", "versions"):
        if getattr(results, part) != getattr(fresh, part):
            got = f"some of {'another device' if part == 'device' else f'other {part}'}"
            raise BundleError(f"results {str(path)!r}", "some of this work here, to go on", got, "Choose another -o.")
    return results


def _write(path: Path, results: Results) -> None:
    with atomic_file(path, repr(str(path))) as file:
        file.write(msgspec.json.format(work_bundle.encoded(results)) + b"\n")
