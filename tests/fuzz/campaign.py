"""Random specs, shapes, masks and dtypes against float64 until so many are right, or one is wrong: `make fuzz-parity`.

    python -m fuzz.campaign --kernels 1800 --flows 200 --workers 2 --seed 7
    python -m fuzz.campaign --machine tiles --kernels 2000 --flows 0 --seed 7 --record build/tiles.jsonl --seconds 280

Kernels run through the JIT, in a second or less each; flows are whole compilations, verified with their self-checks.
Hypothesis draws the cases and, where one is over its budget, shrinks it; what is printed then is a Python program.
The seed of a run is printed: the same one draws the same cases on the same kind of machine. With --record a campaign
may be cut into stretches of so many seconds: outcomes are in a file, and the next stretch goes on behind them; what
is over its budget is in the file, too, and not shrunk.

Some calls of a kernel are also held against results that are wrong on purpose (a term left out, the next feature). How
many of these were told is printed, and one of float32 that no budget tells fails the campaign.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import queue
import random
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.strategies import SearchStrategy

from fuzz.cases import MACHINES, AttentionCase, Case, DecodeCase, FlowCase, InsideCase, Outcome, ProductCase
from fuzz.narrowing import ANY, Narrowing
from fuzz.runs import OverBudget, run
from fuzz.specs import flow_cases
from fuzz.strategies import KERNEL_SHARES, kernel_cases
from mhsa_compile.spec.float32_products import TERM_PRODUCTS

DTYPES = ("float32", "bfloat16", "float16")
KINDS = tuple(kind for kind, _ in KERNEL_SHARES)
ROUND = 25
"""Cases that hypothesis draws from one seed. It varies what it has drawn: many rounds are more varied than one."""
SAME_SPEC = {"seed": 0, "magnitude": 1.0, "poison": False, "inputs": (), "weights": ""}
"""What is no part of the spec that a kernel is made for, beside the sizes of later calls."""
EVERY = 15.0
"""Seconds between two lines of progress."""


@dataclass
class Tally:
    """What has run: specs, calls and the largest share of the budget, of everything and of each kind, dtype, ...; and
    how many calls were held against each wrong result, how many were told from it."""

    rows: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0.0]))
    controls: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    def add(self, outcome: Outcome) -> None:
        kind = "flows" if outcome.kind.startswith("flow") else "kernels"
        keys = [("all", kind), ("kind", outcome.kind), ("dtype", outcome.dtype)]
        keys += [("feature", name) for name in outcome.features]
        for key in keys:
            row = self.rows[key]
            row[:] = [row[0] + 1, row[1] + outcome.calls, max(row[2], outcome.share)]
        for name, share in outcome.controls:
            row = self.controls[f"{name}, {outcome.dtype}"]
            row[:] = [row[0] + 1, row[1] + (share > 1)]

    def count(self, kind: str) -> int:
        return int(self.rows[("all", kind)][0])

    def lines(self) -> Iterator[str]:
        yield f"{'':10}{'':26}{'specs':>8}{'calls':>8}{'worst share of the budget':>28}"
        order = ["all", "kind", "dtype", "feature"]
        for (group, name), (specs, calls, share) in sorted(
            self.rows.items(), key=lambda r: (order.index(r[0][0]), r[0])
        ):
            yield f"{group:10}{name:26}{int(specs):>8,}{int(calls):>8,}{share:>28.2f}"
        for name, (held, told) in sorted(self.controls.items()):
            yield f"{told:,} of {held:,} specs told {name}"


def spec_of(case: Case) -> str:
    """What a kernel is made for: two cases of one spec differ in their numbers, or in sizes that are free."""
    if isinstance(case, InsideCase):
        return f"{spec_of(case.attention)} {case.outputs}"
    if isinstance(case, FlowCase | DecodeCase):
        return repr(case)
    axes = {AttentionCase: "BLS", ProductCase: "bhmkn"}.get(type(case), "BL")
    fixed = axes if case.fixed is True else case.fixed or ""
    sizes = tuple(size for axis, size in zip(axes, case.calls[0], strict=True) if axis in fixed)
    same = {name: value for name, value in SAME_SPEC.items() if hasattr(case, name)}
    return repr(replace(case, calls=(sizes,), **same))


def _quiet(count: int, *phases: Phase) -> settings:
    return settings(
        max_examples=count, deadline=None, database=None, phases=phases, suppress_health_check=list(HealthCheck),
        print_blob=False, report_multiple_bugs=False,
    )  # fmt: skip


def _round(strategy: SearchStrategy[Case], number: int) -> list[Case]:
    cases: list[Case] = []

    def trial(case: Case) -> None:
        cases.append(case)

    seeded(number)(_quiet(ROUND, Phase.generate)(given(strategy)(trial)))()
    return cases


def drawn(strategy: SearchStrategy[Case], seed: int) -> Iterator[tuple[int, Case]]:
    """Cases of different specs, without end, each with the seed of its round."""
    specs: set[str] = set()
    numbers = random.Random(seed)
    while True:
        number = numbers.getrandbits(32)
        for case in _round(strategy, number):
            if (spec := spec_of(case)) not in specs:
                specs.add(spec)
                yield number, case


def shrunk(strategy: SearchStrategy[Case], number: int) -> str | None:
    """What is wrong in the round of a seed, with the least case that shows it."""

    def trial(case: Case) -> None:
        run(case)

    try:
        seeded(number)(_quiet(ROUND, Phase.generate, Phase.shrink)(given(strategy)(trial)))()
    except OverBudget as wrong:
        return str(wrong)
    return None


def rounds(what: str, plan: Plan, tell: Callable[[Outcome | str], None]) -> str | None:
    """Runs the cases of "kernels" or "flows" that a plan has. The text of what is wrong, shrunk, or None; in a stretch
    that is told like an outcome, and the others go on."""
    narrowing = plan.narrowing
    plain = flow_cases() if what == "flows" else kernel_cases(narrowing.kind, narrowing.shares)
    strategy, started = plain.map(narrowing), time.monotonic()
    for number, case in islice(drawn(strategy, plan.seed), plan.done, plan.count):
        if plan.seconds is not None and time.monotonic() - started > plan.seconds:
            break
        try:
            tell(run(case))
        except OverBudget as wrong:
            if plan.seconds is None:
                return shrunk(strategy, number) or str(wrong)
            tell(str(wrong))
    return None


@dataclass(frozen=True)
class Plan:
    """The cases of one process: of a seed from number `done` to `count`, or as many as `seconds` have room for."""

    count: int
    seed: int
    narrowing: Narrowing = ANY
    done: int = 0
    seconds: float | None = None


def worker(process: int, plans: dict[str, Plan], results: Any) -> None:
    """One process: its share of the cases, told one by one, then None; or the text of what is wrong."""
    os.environ["TVM_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")  # other libraries', about themselves; the suite has them as errors
    if os.environ.get("MHSA_EMULATED_TILES") == "1":
        from support.tiles import emulator

        emulator.refuse()
        emulator.install()
    logging.disable(logging.WARNING)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # hypothesis prints the falsifying example; we print a program
    gc.freeze()  # no search for garbage walks through the modules of TVM and PyTorch
    for what, plan in plans.items():
        if plan.done >= plan.count:
            continue
        try:
            wrong = rounds(what, plan, lambda result, what=what: results.put((process, what, result)))
        except BaseException as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None:
            results.put((process, what, wrong))
    results.put(None)


class Record:
    """A file of what has run: a line for each case, with its process and its outcome or what is wrong."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        known = path is not None and path.exists()
        self.lines = [json.loads(line) for line in path.read_text().splitlines()] if known and path else []

    def done(self, process: int, what: str) -> int:
        return sum((line["process"], line["what"]) == (process, what) for line in self.lines)

    def results(self) -> Iterator[Outcome | str]:
        for line in self.lines:
            yield line["wrong"] if "wrong" in line else Outcome(**line["outcome"])

    def write(self, process: int, what: str, result: Outcome | str) -> None:
        if self.path is None:
            return
        told = {"wrong": result} if isinstance(result, str) else {"outcome": asdict(result)}
        with self.path.open("a") as file:
            file.write(json.dumps({"process": process, "what": what, **told}) + "\n")


@dataclass
class Campaign:
    """Cases of several processes, and what came of them."""

    kernels: int
    flows: int
    record: Record
    tally: Tally = field(default_factory=Tally)
    wrong: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    spoken: float = 0.0

    def add(self, result: Outcome | str) -> None:
        if isinstance(result, str):
            self.wrong.append(result)
            print(f"\nOver budget: {result}\n", flush=True)
            return
        self.tally.add(result)
        blind = [name for name, share in result.controls if not share > 1]
        if blind and len(blind) == len(result.controls) and result.dtype == "float32" and _is_exact(result):
            self.wrong.append(f"no control was told: {result}")
            print(self.wrong[-1], flush=True)

    def speak(self) -> None:
        seconds = time.monotonic() - self.started
        if seconds - self.spoken > EVERY:
            self.spoken, tally = seconds, self.tally
            share = max((row[2] for row in tally.rows.values()), default=0.0)
            print(
                f"{seconds:6.0f} s  {tally.count('kernels'):5,} of {self.kernels:,} kernels, "
                f"{tally.count('flows'):4,} of {self.flows:,} flows, "
                f"worst {share:.2f} of the budget, {len(self.wrong)} over it",
                flush=True,
            )

    def collect(self, results: Any, processes: list[Any]) -> None:
        """All results, until every process has said that there are no more, or none is alive."""
        left = len(processes)
        while left:
            try:
                result = results.get(timeout=EVERY)
            except queue.Empty:
                if not any(process.is_alive() for process in processes):
                    break  # one of them died; what it did not run is missing in the count
                continue
            if result is None:
                left -= 1
                continue
            process, what, outcome = result
            self.record.write(process, what, outcome)
            self.add(outcome)
            self.speak()


def _is_exact(outcome: Outcome) -> bool:
    """Whether products are float32's, so that the budget has room for no wrong term."""
    return not {"bf16", "bf16x3", "int8"} & set(outcome.features)


def campaign(options: argparse.Namespace, seed: int, narrowing: Narrowing) -> int:
    """Runs the cases in several processes, and returns the exit code."""
    kernels, flows, workers = options.kernels, options.flows, options.workers
    print(f"{kernels:,} kernels and {flows:,} whole compilations, seed {seed}, {workers} processes", flush=True)
    context = multiprocessing.get_context("spawn")
    results, processes, whole = context.Queue(), [], Campaign(kernels, flows, Record(options.record))
    for result in whole.record.results():
        whole.add(result)
    for i in range(workers):
        plans = {
            what: Plan(
                len(range(i, count, workers)), seed * 1000 + i, narrowing, whole.record.done(i, what), options.seconds
            )
            for what, count in (("kernels", kernels), ("flows", flows))
        }
        processes.append(context.Process(target=worker, args=(i, plans, results), daemon=True))
        processes[-1].start()
    whole.collect(results, processes)
    for process in processes:
        process.join()
    tally = whole.tally
    print(*tally.lines(), sep="\n")
    done = tally.count("kernels") + tally.count("flows")
    print(f"{done:,} specs in {time.monotonic() - whole.started:.0f} s, {len(whole.wrong)} over budget, seed {seed}")
    return 1 if whole.wrong or (done < kernels + flows and options.seconds is None) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", type=int, default=1800, help="kernels by themselves (default: %(default)s)")
    parser.add_argument(
        "--flows", type=int, default=200, help="specs through compile and verify (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of the cases; by default one of its own, printed")
    parser.add_argument("--dtype", choices=DTYPES, default=None, help="of all cases (default: any)")
    parser.add_argument("--machine", choices=MACHINES, default=None, help="that kernels are for (default: any)")
    parser.add_argument("--kind", choices=KINDS, default=None, help="of kernels (default: any)")
    parser.add_argument("--products", choices=["ieee", *TERM_PRODUCTS], default=None, help="of float32 (default: any)")
    parser.add_argument("--record", type=Path, default=None, help="a file of outcomes; a next stretch goes on there")
    parser.add_argument("--seconds", type=float, default=None, help="of a stretch (default: until all is done)")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    return campaign(options, seed, Narrowing(options.dtype, options.machine, options.kind, options.products))


if __name__ == "__main__":
    sys.exit(main())
