"""What `mhsa tune` shows: a table that lives while it works, on stderr, and one at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mhsa_compile.cli.common import output
from mhsa_compile.runtime.profile.call_profile import DISTURBED

if TYPE_CHECKING:
    from mhsa_compile.hardware.profile import TargetProfile
    from mhsa_compile.records.device import Device
    from mhsa_compile.tuning.fallback_jobs import FallbackTask
    from mhsa_compile.tuning.metaschedule import ScheduleResult
    from mhsa_compile.tuning.speedup import Gain
    from mhsa_compile.tuning.tasks import TaskResult, TuningReport
    from mhsa_compile.tuning.tuner import TaskState, Watch


@contextmanager
def live(name: str, seconds: float, peers: Mapping[str, float]) -> Iterator[Watch]:
    """What `tune` calls: a table on a terminal, elsewhere a line for each operation that is done."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(name)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as view:
        yield lambda states, left: view.update(_table(name, states, seconds, left, peers))


def _lines(name: str) -> Watch:
    names: set[tuple[str, ...]] = set()

    def watch(states: list[TaskState], left: float | None) -> None:
        for state in states:
            if state.result is not None and state.task.names not in names:
                names.add(state.task.names)
                output.line(f"{name}: {_title(state)}: {_result_text(state.result)}", err=True)

    return watch


def _result_text(result: TaskResult) -> str:
    failures = f", {_failures(result.failures)}" if result.failures else ""
    return f"{result.trials} trials{failures}, {result.speedup:.2f} times as fast as the default ({result.stopped})"


def _title(state: TaskState) -> str:
    return f"{state.task.kind} {output.assignments(state.task.sizes)}"


def _failures(failures: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in failures.items())


def _table(name: str, states: list[TaskState], seconds: float, rest: float | None, peers: Mapping[str, float]) -> Any:
    from rich import box
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("operation", "phase", "default µs", "best µs", "speedup", "noise", "trials", "failures"):
        table.add_column(column, justify="left" if column in ("operation", "phase", "failures") else "right")
    for state in states:
        table.add_row(*map(output.text, _live_cells(state)))
    remaining = max(0.0, rest or 0.0)
    bar = ProgressBar(total=seconds, completed=seconds - remaining, width=40)
    return Group(output.text(f"{name}{_overall(states, peers)}", "bold"), table, bar, Text(f"{remaining:.0f} s left"))


def _live_cells(state: TaskState) -> tuple[str, ...]:
    times, progress, result = _times(state), state.progress, state.result
    if times is None:
        return (_title(state), state.phase, "", "", "", "", "", "")
    trials = result.trials if result else progress.trials if progress else 0
    failures = result.failures if result else progress.failures if progress else {}
    noise = result.noise if result else progress.noise if progress else 0.0
    cells = (f"{times[0]:,.1f}", f"{times[1]:,.1f}", f"{times[0] / times[1]:.2f}", f"±{noise:.1%}", str(trials))
    return (_title(state), state.phase, *cells, _failures(failures))


def _times(state: TaskState) -> tuple[float, float] | None:
    """(default, best so far) in microseconds of a call of the operation."""
    if state.result is not None:
        return state.result.default_us, state.result.best_us
    if state.progress is not None:
        return state.progress.default_us, state.progress.default_us * state.progress.best
    return None


def _overall(states: list[TaskState], peers: Mapping[str, float]) -> str:
    """The gain of all operations so far, and beside it that of the fastest peer, both against the default."""
    timed = [(len(state.task.names), *times) for state in states if (times := _times(state)) is not None]
    default, best = (sum(count * pair[i] for count, *pair in timed) for i in (0, 1))
    sentence = f": {default / best:.2f} times as fast as the default so far" if best else ""
    if peers:
        fastest = min(peers, key=lambda name: peers[name])
        sentence += f"; {fastest}, the fastest peer, {1 / peers[fastest]:.2f} times"
    return sentence


def show_device(device: Device, profile: TargetProfile) -> None:
    """What measures, on stderr, and whether compiling for the target will use what it finds."""
    from mhsa_compile.records.record import microarchitecture_of

    output.line(f"measured on {device.name}", err=True)
    own = microarchitecture_of(profile)
    if own and device.microarchitecture and (reason := device.why_unlike(own)) is not None:
        output.line(
            f"Warning: {reason}: compiling for {profile.name} will not use these records. Tune on {own}, or for a "
            "target that states no microarchitecture.",
            err=True,
        )


def show(name: str, report: TuningReport, gain: Gain | None, peers: Mapping[str, float], records: Path) -> None:
    """The final table, on stdout."""
    columns = ("operation", "sizes", "default µs>", "best µs>", "speedup>", "noise>", "config", "trials>", "failures")
    title = f"{name}: {report.trials} trials in {report.seconds:.0f} s, records in {records}"
    output.print_table(title, columns, map(_cells, report.ops))
    if any(op.noise > DISTURBED for op in report.ops):
        output.line(
            "So much noise hides what there is to gain: something else was running. Tune again when it is quiet."
        )
    for op in report.ops:
        if op.found_us is not None:
            output.line(
                f"{op.op}: the search found {op.found_us:,.1f} µs, a sweep of all {op.space:,} configs "
                f"{op.best_us:,.1f} µs: {op.best_us / op.found_us:.1%} of its speed"
            )
    if gain is not None:
        output.line(
            f"{name} as a whole: {gain.default_us:,.0f} µs by default, {gain.best_us:,.0f} µs tuned: "
            f"{gain.speedup:.2f} times as fast, error {gain.error_share:.2f} of the budget"
        )
        for peer, ratio in peers.items():
            output.line(f"  {gain.speedup * ratio:.2f} times as fast as {peer}")


def show_rest(tasks: Sequence[FallbackTask], results: Sequence[ScheduleResult]) -> None:
    """What no kernel claims, on stdout: what MetaSchedule found, and why it was not asked about the others."""
    for one in results:
        outcome = f"{one.best_us:,.1f} µs" if one.record is not None else "nothing faster beyond the noise"
        output.line(
            f"{one.task.name}, of no kernel: {one.default_us:,.1f} µs by default, MetaSchedule found {outcome} "
            f"({one.trials} trials, {one.failures.total()} failures)"
        )
    reasons: dict[str, list[str]] = {}
    for task in tasks:
        if task.reason:
            reasons.setdefault(task.reason, []).append(task.name)
    for reason, names in reasons.items():
        output.line(f"not tuned, of no kernel: {', '.join(names)}: {reason}")


def _cells(op: TaskResult) -> tuple[str, ...]:
    what = op.op if len(op.names) == 1 else f"{len(op.names)} x {op.op}"
    knobs = output.assignments(op.config)
    config = f"{op.kernel} {knobs}" if op.speedup > 1 else f"the default: {op.kernel} {knobs}"
    times = (f"{op.default_us:,.1f}", f"{op.best_us:,.1f}", f"{op.speedup:.2f}", f"±{op.noise:.1%}")
    return (what, output.assignments(op.sizes), *times, config, str(op.trials), _failures(op.failures))
