"""Kill -9 at random moments while records are written, and look at what is left: `make kill-tuning`.

    python tests/kill_campaign.py --kills 200 --seed 7

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
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # forked below

from records_made import made

from mhsa_compile import record_files
from mhsa_compile.records import Record, encoded

LONGEST = 0.03
"""Seconds that the writers get at most: some records' worth."""
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


@dataclass
class Writer:
    """A process that writes, from a number on."""

    pid: int
    heard: int

    @classmethod
    def start(cls, write: Callable[[Path, int, int, int], None], path: Path, writer: int, number: int) -> Writer:
        heard, said = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(heard)
                write(path, writer, number, said)
            finally:
                os._exit(1)  # only an error comes here
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
    """Raises AssertionError for the first record that is lost, and RecordsError for a file that does not load."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="processes that are killed (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; by default one of its own, printed")
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
    print(f"{given.kills} kills, seed {seed}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mhsa-kills-") as folder:
        tally = campaign(given.kills, seed, Path(folder) / "some.jsonl")
    print(
        f"{tally.kills} kills in {time.monotonic() - started:.0f} s: {tally.records} records, none of those that were "
        f"said to be written is missing; {tally.unsaid} written and not yet said, {tally.torn} torn lines left out, "
        f"{tally.merges} kills while merging"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
