"""What each test reaches, and which marks `thorough` therefore have to change.

`measure` runs all tests but those on a GPU, and notes of each its seconds, the lines of the package that it runs, and
the kernels that it emits, for which features and pairs of them (`support/kernel_features.py`). `choose` reads that and
writes which tests are to be marked (`+`) and which marks are to go (`-`), one id a line; marks stand at the tests, so
that whoever reads one sees it. A test stays in the suite if it is quick, if it is the quickest
case of a function that is not slow, or if without it something would be reached by no test that stays, and enough of it
in a second: of those, the ones that reach the most in a second first (greedy set cover). Emulated ARM machines and
compilers for GPUs, which have targets of their own, choose each for itself, behind the suite, and keep all they reach.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from support import kernel_features

ROOT = Path(__file__).parents[2]
QUICK = 0.1  # seconds: such a test stays whatever it reaches
SLOW = 1.2  # seconds: a function whose quickest case takes longer stays only for what it alone reaches
WORTH = 6  # lines, and pairs of features: a test stays for what it alone reaches if it is so many a second
EVERYTHING = "not gpu"
PACKAGES = "mhsa_compile, mhsa_analysis, mhsa_bench"  # whose lines count

Reached = frozenset[tuple[str, str]]  # (file, line), or (kernel, feature or two of them)


@dataclass(frozen=True)
class MeasuredTest:
    """One case: its id, what it took, what it reached, and the targets of the Makefile that run it beside the suite."""

    id: str
    seconds: float
    lines: Reached
    pairs: Reached
    tier: str
    thorough: bool = False  # as it is marked now

    @property
    def function(self) -> str:
        return self.id.partition("[")[0]

    @property
    def reached(self) -> Reached:
        return self.lines | self.pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("measure", "choose"))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "reached", help="where the measurements are")
    parser.add_argument("--marker", default=EVERYTHING, help="which tests `measure` runs")
    given = parser.parse_args()
    if given.step == "measure":
        sys.exit(measure(given.folder, given.marker))
    tests = read(given.folder)
    left_out = choose(tests)
    (given.folder / "marks.txt").write_text("".join(f"{line}\n" for line in changes(tests, left_out)), encoding="utf-8")
    Console().print(table(tests, left_out), f"marks to change: {given.folder / 'marks.txt'}")


def measure(folder: Path, marker: str) -> int:
    """Runs the tests, and returns the exit code of pytest."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = folder / "coverage.ini"
    settings.write_text(f"[run]\nsource = {PACKAGES}\nparallel = true\ndata_file = {folder / 'lines'}\n")
    words = [sys.executable, "-m", "pytest", "-m", marker, "-n", "2", "--dist", "worksteal", "-q"]
    words += ["-p", "support.kernel_features"]
    words += ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
    # The database of contexts is closed when it is collected.
    words += ["-W", "ignore::ResourceWarning", "-W", "ignore::pytest.PytestUnraisableExceptionWarning"]
    environment = os.environ | {kernel_features.FOLDER: str(folder)}
    return subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode


def read(folder: Path) -> list[MeasuredTest]:
    """What `measure` left in a folder."""
    from coverage import CoverageData

    lines = defaultdict[str, set[tuple[str, str]]](set)
    for file in folder.glob("lines*"):
        data = CoverageData(str(file))
        data.read()
        for name in data.measured_files():
            for line, contexts in data.contexts_by_lineno(name).items():
                for context in contexts:
                    lines[context.partition("|")[0]].add((name, str(line)))
    rows = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return [
        MeasuredTest(
            row["test"],
            row["seconds"],
            frozenset(lines[row["test"]]),
            frozenset((kernel, feature) for kernel, feature in row["pairs"]),
            row["tier"],
            row["thorough"],
        )
        for row in rows
    ]


def choose(tests: Collection[MeasuredTest]) -> set[str]:
    """The ids of the tests that `make test`, `make test-arm` and `make test-cuda` leave out."""
    stay, reached = set[str](), set[tuple[str, str]]()
    for tier in ("", *sorted({test.tier for test in tests} - {""})):
        of_tier = [test for test in tests if test.tier == tier]
        kept = [test for test in of_tier if test.seconds <= QUICK] + [*_quickest_cases(of_tier)]
        reached.update(*(test.reached for test in kept))
        kept += _cover([test for test in of_tier if test not in kept], reached, 0 if tier else WORTH)
        stay |= {test.id for test in kept}
    return {test.id for test in tests} - stay


def changes(tests: Iterable[MeasuredTest], left_out: Collection[str]) -> Iterator[str]:
    """Which tests are to be marked, `+ id`, and of which the mark is to go, `- id`."""
    for test in sorted(tests, key=lambda test: test.id):
        if test.thorough != (test.id in left_out):
            yield f"{'-' if test.thorough else '+'} {test.id}"


def _quickest_cases(tests: Iterable[MeasuredTest]) -> Iterator[MeasuredTest]:
    """The quickest case of each test function that is not slow."""
    functions = defaultdict[str, list[MeasuredTest]](list)
    for test in tests:
        functions[test.function].append(test)
    for cases in functions.values():
        quickest = min(cases, key=lambda test: test.seconds)
        if quickest.seconds <= SLOW:
            yield quickest


def _cover(tests: Iterable[MeasuredTest], reached: set[tuple[str, str]], worth: float) -> Iterator[MeasuredTest]:
    """Tests that together reach all that any of them reaches, but for those that add less than `worth` a second; adds
    what they reach to `reached`."""
    # What a test adds only shrinks, so the first of the queue whose figure still stands is the best of all.
    queue = [(-len(test.reached - reached) / test.seconds, test.id, test) for test in tests]
    heapq.heapify(queue)
    while queue:
        _, _, test = heapq.heappop(queue)
        gain = len(test.reached - reached) / test.seconds
        if gain and queue and gain < -queue[0][0]:
            heapq.heappush(queue, (-gain, test.id, test))
        elif gain and gain >= worth:
            reached |= test.reached
            yield test


def table(tests: Collection[MeasuredTest], left_out: Collection[str]) -> Table:
    """What each target of the Makefile reaches."""
    result = Table("", "tests", "functions", "lines", "kernel with one or two features", "seconds of one CPU")
    suite = [test for test in tests if not test.tier]
    rows = {"make test-all": tests, "of which no emulated ARM, no CUDA compiler": suite}
    rows |= {"make test": [test for test in suite if test.id not in left_out]}
    for tier in sorted({test.tier for test in tests} - {""}):
        of_tier = [test for test in tests if test.tier == tier]
        rows |= {f"marked {tier}": of_tier, f"make test-{tier}": [test for test in of_tier if test.id not in left_out]}
    for name, of_row in rows.items():
        sizes = (
            len(of_row),
            len({test.function for test in of_row}),
            len(frozenset().union(*(test.lines for test in of_row))),
            len(frozenset().union(*(test.pairs for test in of_row))),
            round(sum(test.seconds for test in of_row)),
        )
        result.add_row(name, *map(str, sizes))
    return result


if __name__ == "__main__":
    main()
