"""Random specs, shapes, masks and dtypes against float64 until so many are right, or one is wrong: `make fuzz-parity`.

    python -m fuzz.campaign --kernels 1800 --flows 200 --workers 2 --seed 7
    python -m fuzz.campaign --dtype bfloat16 --machine tiles --kind linear

Kernels run through the JIT, in a second or less each; flows are whole compilations, verified with their self-checks.
Hypothesis draws the cases and, where one is over its budget, shrinks it; what is printed then is a Python program.
The seed of a run is printed: the same one draws the same cases on the same kind of machine.
"""

from __future__ import annotations

import argparse
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
from dataclasses import dataclass, field
from typing import Any

from fuzz.cases import MACHINES
from fuzz.narrowing import ANY, Narrowing

DTYPES = ("float32", "bfloat16", "float16")
KINDS = ("attention", "decode", "linear", "inside")
ROUND = 25
"""Cases that hypothesis draws from one seed. It varies what it has drawn: many rounds are more varied than one."""
EVERY = 15.0
"""Seconds between two lines of progress."""


@dataclass
class Tally:
    """What has run: specs, calls and the largest share of the budget, of everything and of each kind, dtype, ..."""

    rows: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0.0]))

    def add(self, outcome: Any) -> None:
        kind = "flows" if outcome.kind.startswith("flow") else "kernels"
        keys = [("all", kind), ("kind", outcome.kind), ("dtype", outcome.dtype)]
        keys += [("feature", name) for name in outcome.features]
        for key in keys:
            row = self.rows[key]
            row[:] = [row[0] + 1, row[1] + outcome.calls, max(row[2], outcome.share)]

    def count(self, kind: str) -> int:
        return int(self.rows[("all", kind)][0])

    def lines(self) -> Iterator[str]:
        yield f"{'':10}{'':26}{'specs':>8}{'calls':>8}{'worst share of the budget':>28}"
        order = ["all", "kind", "dtype", "feature"]
        for (group, name), (specs, calls, share) in sorted(
            self.rows.items(), key=lambda r: (order.index(r[0][0]), r[0])
        ):
            yield f"{group:10}{name:26}{int(specs):>8,}{int(calls):>8,}{share:>28.2f}"


def rounds(what: str, count: int, seed: int, tell: Callable[[Any], None], narrowing: Narrowing = ANY) -> str | None:
    """Runs `count` different cases of "kernels" or "flows". The text of what is wrong, shrunk, or None."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    from fuzz.runs import OverBudget, run
    from fuzz.specs import flow_cases
    from fuzz.strategies import kernel_cases

    seen: set[str] = set()
    numbers = random.Random(seed)

    def trial(case: Any) -> None:
        if repr(case) in seen or len(seen) == count:
            return  # drawn again: hypothesis begins every round with the simplest case, and likes to repeat itself
        outcome = run(case)
        seen.add(repr(case))
        tell(outcome)

    strategy = (flow_cases() if what == "flows" else kernel_cases(narrowing.kind)).map(narrowing)
    quiet = settings(
        max_examples=min(ROUND, count), deadline=None, database=None, phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck), print_blob=False, report_multiple_bugs=False,
    )  # fmt: skip
    while len(seen) < count:
        try:
            seeded(numbers.getrandbits(32))(quiet(given(strategy)(trial)))()
        except OverBudget as wrong:
            return str(wrong)
    return None


def worker(shares: dict[str, int], seed: int, narrowing: Narrowing, results: Any) -> None:
    """One process: its share of the cases, told one by one, then None; or the text of what is wrong."""
    os.environ["TVM_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")  # other libraries', about themselves; the suite has them as errors
    if os.environ.get("MHSA_EMULATED_TILES") == "1":
        from support.tiles import emulator

        emulator.refuse()
        emulator.install()
    logging.disable(logging.WARNING)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # hypothesis prints the falsifying example; we print a program
    for what, count in shares.items():
        if not count:
            continue
        try:
            wrong = rounds(what, count, seed, results.put, narrowing)
        except BaseException as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None:
            results.put(wrong)
    results.put(None)


def campaign(kernels: int, flows: int, workers: int, seed: int, narrowing: Narrowing) -> int:
    """Runs the cases in several processes, and returns the exit code."""
    print(f"{kernels:,} kernels and {flows:,} whole compilations, seed {seed}, {workers} processes", flush=True)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = []
    for i in range(workers):
        shares = {"kernels": len(range(i, kernels, workers)), "flows": len(range(i, flows, workers))}
        process = context.Process(target=worker, args=(shares, seed * 1000 + i, narrowing, results), daemon=True)
        process.start()
        processes.append(process)
    tally, wrong, started, told = Tally(), [], time.monotonic(), 0.0
    while workers:
        try:
            result = results.get(timeout=EVERY)
        except queue.Empty:
            if not any(process.is_alive() for process in processes):
                break  # one of them died; what it did not run is missing in the count
            continue
        if result is None:
            workers -= 1
        elif isinstance(result, str):
            wrong.append(result)
            print(f"\nOver budget: {result}\n", flush=True)
        else:
            tally.add(result)
        seconds = time.monotonic() - started
        if seconds - told > EVERY:
            told = seconds
            share = max((row[2] for row in tally.rows.values()), default=0.0)
            print(
                f"{seconds:6.0f} s  {tally.count('kernels'):5,} of {kernels:,} kernels, {tally.count('flows'):4,} of "
                f"{flows:,} flows, worst {share:.2f} of the budget, {len(wrong)} over it",
                flush=True,
            )
    for process in processes:
        process.join()
    print(*tally.lines(), sep="\n")
    done = tally.count("kernels") + tally.count("flows")
    print(f"{done:,} specs in {time.monotonic() - started:.0f} s, {len(wrong)} over budget, seed {seed}")
    return 1 if wrong or done < kernels + flows else 0


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
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
    return campaign(given.kernels, given.flows, given.workers, seed, Narrowing(given.dtype, given.machine, given.kind))


if __name__ == "__main__":
    sys.exit(main())
