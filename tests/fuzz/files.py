"""Damaged files of every kind into whatever reads them: `make fuzz-files`.

    python -m fuzz.files --inputs 100000 --seed 7
    python -m fuzz.files --seed 7 --only onnx 1234        # one case again, with its traceback

Every input must be accepted, or refused by an error of ours. A traceback of anything else, a process that dies, and one
that is busy or waits for too long are failures: the exit code is 1, and the files are kept in build/fuzz-files.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

HANG_CPU, HANG_WALL = 5.0, 60.0
"""Seconds of its own that a case may compute, and seconds that it may take: on a busy machine only the first count."""
WHOLE_CPU = 60.0
"""Seconds of its own that a case with an ONNX model may compute: some are compiled to the end."""
MEMORY = 3 << 30
"""Bytes that a process may have beside what its libraries map."""
EVERY = 30.0
"""Seconds between two lines of progress."""
KEPT = Path("build/fuzz-files")

Numbered = tuple[str, int]  # the kind, the number of the case


def cases(inputs: int, kinds: Sequence[str]) -> Iterator[Numbered]:
    """`inputs` cases, shared out as KINDS says, in turns, so that a run cut short has some of each kind."""
    from fuzz.file_kinds import KINDS

    shares = {kind: KINDS[kind][1] for kind in kinds}
    counts = {kind: inputs * share // sum(shares.values()) for kind, share in shares.items()}
    counts[kinds[0]] += inputs - sum(counts.values())
    places = [((number + 0.5) / counts[kind], kind, number) for kind in kinds for number in range(counts[kind])]
    yield from ((kind, number) for _, kind, number in sorted(places))


def outcome(files: Any, seed: int, kind: str, number: int) -> tuple[str, str]:
    """("accepted", ""), ("refused", the class of error) or ("traceback", what was raised where)."""
    from fuzz.file_kinds import drawn
    from mhsa_compile.errors import MhsaError

    case = drawn(files, kind, seed, number)
    try:
        case()
    except MhsaError as error:
        return "refused", type(error).__name__
    except Exception as error:
        places = [f"{Path(step.filename).name}:{step.lineno}" for step in traceback.extract_tb(error.__traceback__)]
        return "traceback", f"{type(error).__name__}: {str(error)[:200]!r} at {' '.join(places[-5:])}"
    return "accepted", ""


def worker(work: Path, seed: int, todo: list[Numbered], said: Connection) -> None:
    """One process: each case is announced, then its outcome told."""
    import mhsa_compile.compiler.pipeline  # noqa: F401  # PyTorch and TVM: no case is to wait for them
    from fuzz.file_kinds import Files, keep, own_folder

    quiet()
    files = Files(work / "good", own_folder(work))
    limit_memory()
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        for kind, number in todo:
            said.send(("begin", kind, number))
            found = outcome(files, seed, kind, number)
            if found[0] == "traceback":
                keep(files, KEPT / f"{kind}-{seed}-{number}")
            said.send((*found, kind))
    said.close()


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


def limit_memory() -> None:
    """Limits this process to MEMORY beside what it has mapped: what asks for more gets an error, and not the machine's
    last page."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@dataclass
class Process:
    """A worker, and what it is at."""

    process: Any
    said: Connection
    left: list[Numbered]
    at: Numbered | None = None
    begun: float = 0.0
    cpu: float = 0.0

    def begin(self, case: Numbered) -> None:
        self.at, self.begun, self.cpu = case, time.monotonic(), self._cpu()
        del self.left[: self.left.index(case) + 1]

    def hangs(self) -> bool:
        if self.at is None:
            return False
        allowed = WHOLE_CPU if self.at[0] == "onnx" else HANG_CPU
        return self._cpu() - self.cpu > allowed or time.monotonic() - self.begun > max(allowed, HANG_WALL)

    def _cpu(self) -> float:
        with suppress(OSError, IndexError):
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return self.cpu


@dataclass
class Tally:
    """What became of the inputs."""

    rows: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, kind: str, what: str) -> None:
        self.rows.setdefault(kind, Counter())[what] += 1

    def fail(self, kind: str, number: int, seed: int, what: str, words: str) -> None:
        self.add(kind, what)
        self.failures.append(f"{what}: --seed {seed} --only {kind!r} {number}  {words}")
        print(self.failures[-1], flush=True)

    @property
    def count(self) -> int:
        return sum(row.total() for row in self.rows.values())

    def lines(self) -> Iterator[str]:
        bad = ("tracebacks", "crashes", "hangs")
        yield f"{'':20}{'inputs':>9}{'accepted':>10}" + "".join(f"{name:>12}" for name in bad) + "  refused by"
        for kind, row in self.rows.items():
            refused = ", ".join(f"{n:,} {w}" for w, n in row.most_common() if w not in (*bad, "accepted"))
            yield (
                f"{kind:20}{row.total():>9,}{row['accepted']:>10,}"
                + "".join(f"{row[name]:>12,}" for name in bad)
                + f"  {refused}"
            )


def campaign(inputs: int, workers: int, seed: int, kinds: Sequence[str]) -> int:
    """Runs the cases in several processes, and returns the exit code."""
    from fuzz.file_kinds import make

    print(f"{inputs:,} inputs, seed {seed}, {workers} processes", flush=True)
    started, told, tally = time.monotonic(), 0.0, Tally()
    context = multiprocessing.get_context("spawn")
    todo = list(cases(inputs, kinds))
    with tempfile.TemporaryDirectory() as folder:
        (work := Path(folder), good := work / "good")[1].mkdir()
        make(good)

        def start(left: list[Numbered]) -> Process:
            heard, said = context.Pipe(duplex=False)
            process = context.Process(target=worker, args=(work, seed, left, said), daemon=True)
            process.start()
            said.close()
            return Process(process, heard, list(left))

        running = [start(todo[i::workers]) for i in range(workers)]
        while running:
            wait([one.said for one in running], timeout=1.0)
            running = [now for one in running if (now := _watched(one, tally, seed, start)) is not None]
            seconds = time.monotonic() - started
            if seconds - told > EVERY:
                told = seconds
                print(f"{seconds:6.0f} s  {tally.count:7,} of {inputs:,}, {len(tally.failures)} failures", flush=True)
    print(*tally.lines(), sep="\n")
    print(f"{tally.count:,} inputs in {time.monotonic() - started:.0f} s, {len(tally.failures)} failures, seed {seed}")
    print(*tally.failures, sep="\n")
    return 1 if tally.failures or tally.count != inputs else 0


def _watched(one: Process, tally: Tally, seed: int, start: Any) -> Process | None:
    """The process, another one in its place where it died or hung, or None where all is done."""
    try:
        while one.said.poll():
            what, word, *rest = one.said.recv()
            if what == "begin":
                one.begin((word, rest[0]))
                continue
            assert one.at is not None
            if what == "traceback":
                tally.fail(*one.at, seed, "tracebacks", word)
            else:
                tally.add(rest[0], word or what)
            one.at = None
    except EOFError:
        one.process.join()
        if one.at is None and not one.left:
            return None
        if one.at is not None:
            tally.fail(*one.at, seed, "crashes", f"exit code {one.process.exitcode}")
        else:
            raise SystemExit(f"A process ended before its first case, exit code {one.process.exitcode}") from None
        return start(one.left) if one.left else None
    if one.hangs():
        assert one.at is not None
        tally.fail(*one.at, seed, "hangs", f"{time.monotonic() - one.begun:.0f} s")
        one.process.kill()
        one.process.join()
        return start(one.left) if one.left else None
    return one


def again(seed: int, kind: str, number: int) -> int:
    """One case, here, with all that it prints."""
    from fuzz.file_kinds import Files, drawn, make, own_folder

    with tempfile.TemporaryDirectory() as folder:
        (good := Path(folder) / "good").mkdir()
        make(good)
        print(drawn(Files(good, own_folder(Path(folder))), kind, seed, number)())
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="in all (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of the cases; by default one of its own, printed")
    parser.add_argument("--kinds", nargs="+", default=None, help="only these")
    parser.add_argument("--only", nargs=2, metavar=("KIND", "NUMBER"), default=None, help="one case again")
    given = parser.parse_args()
    from fuzz.file_kinds import KINDS

    seed = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
    if given.only is not None:
        return again(seed, given.only[0], int(given.only[1]))
    return campaign(given.inputs, given.workers, seed, given.kinds or list(KINDS))


if __name__ == "__main__":
    sys.exit(main())
