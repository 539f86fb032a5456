"""Kill -9 at random moments while records are written, and look at what is left: `make kill-tuning`.

    python -m campaigns.kill --kills 200 --seed 7

Two processes write to one file; one appends, the other appends or merges, and says so only when a record is on the
disk. Each round kills both, now and then leaves a part of a line behind as a power cut would, and then asks: does the
file load, is everything there that was said to be, and is at most the record lost that was being written? The next
round goes on where this one ended.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # forked below

from support.records_made import made

from mhsa_compile.records import record_files
from mhsa_compile.records.record import Record, encoded

LONGEST = 0.03
"""Seconds that the writers get at most: some records' worth."""
TRIALS = 6
"""The trials of each operation, after which a search has come to its end."""
WORD = 8


def numbered(writer: int, number: int) -> Record:
    return made(key={"writer": writer, "number": number})


def append_forever(path: Path, writer: int, number: int, said: int) -> None:
    while True:
        record_files.append(path, numbered(writer, number))
        os.write(said, number.to_bytes(WORD))
        number += 1


def merge_forever(path: Path, writer: int, number: int, said: int) -> None:
    while True:
        record_files.merge_into(path, [numbered(writer, number)])
        os.write(said, number.to_bytes(WORD))
        number += 1


def forked(work: Callable[[], None]) -> int:
    """A process that does some work, and then ends with 0; with 1 where it could not, and says why."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


@dataclass
class Writer:
    """A process that writes, from a number on."""

    pid: int
    heard: int

    @classmethod
    def start(cls, write: Callable[[Path, int, int, int], None], path: Path, writer: int, number: int) -> Writer:
        heard, said = os.pipe()
        pid = forked(lambda: write(path, writer, number, said))
        os.close(said)
        return cls(pid, heard)

    def kill(self) -> int | None:
        """Kills it; the last number that it said was written, None if it said nothing."""
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        with os.fdopen(self.heard, "rb") as pipe:
            said = pipe.read()
        if not os.WIFSIGNALED(status):
            raise AssertionError(f"a writer ended by itself, after {len(said) // WORD} records")
        return int.from_bytes(said[-WORD:]) if said else None


@dataclass
class Tally:
    kills: int = 0
    records: int = 0
    torn: int = 0
    unsaid: int = 0  # written, but killed before it could say so
    merges: int = 0


def count(path: Path) -> tuple[list[int], bool]:
    """(how many records of each writer the file holds, 0 1 2 ... without a gap; whether its last line is torn)."""
    contents = record_files.read(path)
    numbers: list[list[int]] = [[], []]
    for record in contents.records:
        numbers[record.key["writer"]].append(record.key["number"])
    for writer, found in enumerate(numbers):
        assert sorted(found) == list(range(len(found))), f"writer {writer}: records lost or doubled"
    return [len(found) for found in numbers], contents.torn


def campaign(kills: int, seed: int, path: Path) -> Tally:
    """Kills writers of records, and counts what is left. Raises AssertionError for the first record that is lost, and
    RecordsError for a file that does not load."""
    draw, tally, held = random.Random(seed), Tally(), [0, 0]
    while tally.kills < kills:
        ways = [append_forever, draw.choice([append_forever, append_forever, merge_forever])]
        writers = [Writer.start(way, path, i, held[i]) for i, way in enumerate(ways)]
        time.sleep(draw.uniform(0, LONGEST))
        said = [writer.kill() for writer in writers]
        if path.exists() and draw.random() < 0.25:
            line = encoded(numbered(9, 9))
            with path.open("ab") as file:
                file.write(line[: draw.randrange(1, len(line))])
        before, held = held, count(path)[0] if path.exists() else held
        tally.torn += path.exists() and count(path)[1]
        for i, last in enumerate(said):
            told = before[i] if last is None else last + 1
            assert told <= held[i] <= told + 1, f"writer {i} said {told}, the file has {held[i]}"
            tally.unsaid += held[i] - told
        tally.kills += 2
        tally.merges += ways[1] is merge_forever
    tally.records = sum(held)
    return tally


@dataclass
class Tuned:
    kills: int = 0
    finished: int = 0  # runs that ended before they were killed
    records: int = 0
    trials: int = 0


def tuning(kills: int, seed: int, folder: Path) -> Tuned:
    """Kills `mhsa tune`'s search of a tiny layer, which goes on from there each time. Raises AssertionError where a
    record or a trial that was there is gone, or where it does not come to its end at last."""
    import optuna  # noqa: F401  # here, not in each run

    from mhsa_compile import AttentionSpec
    from mhsa_compile.compiler import pipeline
    from mhsa_compile.hardware.profile import detect
    from mhsa_compile.tuning.measure import sessions
    from mhsa_compile.tuning.search import search
    from mhsa_compile.tuning.tasks import Request
    from mhsa_compile.tuning.tuner import tune

    tempfile.tempdir = str(folder)  # what the killed leave there goes with it
    search.FIRST = search.LAST = 0.05  # seconds: how fast it is is not looked at, and more runs come to their end
    draw, tally, profile = random.Random(seed), Tuned(), detect()
    ops = pipeline.import_source(AttentionSpec(embed_dim=32, num_heads=2), dims={"B": 1, "L": 17}).ops
    ops = dict([*ops.items()][:2])  # a linear layer and attention
    records = folder / "tuned.jsonl"

    def run() -> None:
        storage = f"sqlite:///{folder}/{tally.finished}.db"  # what came to its end is searched anew
        request = Request({}, records, storage, seconds=None, trials=TRIALS)
        with sessions.local(1) as session:
            tune(ops, profile, session, request)

    held: list[bytes] = []
    whole, spared = 0.0, True  # seconds of the first run, which nobody kills, as nobody does the last
    while not spared or tally.kills < kills:
        spared, started = not whole or tally.kills >= kills, time.monotonic()
        pid = forked(run)
        time.sleep(0 if spared else draw.uniform(0, whole))
        ended, status = os.waitpid(pid, 0 if spared else os.WNOHANG)
        whole = whole or time.monotonic() - started
        if ended:
            assert status == 0, "a run that nobody killed has failed"
            tally.finished += 1
        else:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            tally.kills += 1
        if records.exists():
            record_files.read(records)
            lines = records.read_bytes().split(b"\n")[:-1]
            assert lines[: len(held)] == held, "a record that was there is gone"
            held = lines
        trials = sum(map(count_trials, folder.glob("*.db")))
        assert trials >= tally.trials, "a trial that was there is gone"
        tally.trials = trials
        if tally.kills and tally.kills % 20 == 0 and not ended:
            print(f"{tally.kills} kills, {trials} trials, {len(held)} records, {tally.finished} finished", flush=True)
    tally.records = len(held)
    return tally


def count_trials(database: Path) -> int:
    """Trials that are done, in a study's database; none where that is not there yet."""
    with closing(sqlite3.connect(database)) as connection, suppress(sqlite3.OperationalError):
        return int(connection.execute("SELECT count(*) FROM trials WHERE state IN ('COMPLETE', 'FAIL')").fetchone()[0])
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="of writers of records (default: %(default)s)")
    parser.add_argument("--tuning", type=int, default=200, help="of a search (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; by default one of its own, printed")
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="mhsa-kills-") as folder:
        if given.kills:
            tally = campaign(given.kills, seed, Path(folder) / "some.jsonl")
            print(
                f"{tally.kills} writers killed: {tally.records} records, none of those that were said to be written is "
                f"missing; {tally.unsaid} written and not yet said, {tally.torn} torn lines left out, {tally.merges} "
                "kills while merging",
                flush=True,
            )
        if given.tuning:
            tuned = tuning(given.tuning, seed, Path(folder))
            print(
                f"{tuned.kills} searches killed, {tuned.finished} came to their end: {tuned.trials} trials and "
                f"{tuned.records} records, none of which was lost again"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
