"""The pool of threads that artifacts carry, at length; `make sanitize-threads`.

    python -m campaigns.threads [--launches 1000000] [--calls 1000000] [--loads 1000] [--seconds 600]

By itself (pool_stress.c): launches by 1 to 64 callers, every task once, some loops failing, some inside of others; then
a tenth of them under ThreadSanitizer. In artifacts: calls by 64 threads, all of the same bits; large ones of the same
artifact and of several at once (`campaigns.callers`); and loads of one, in Python and in a C++ program
(load_cycles.cpp). What is left behind is counted: threads, open files, memory. Exit code 1
if anything is wrong.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import mhsa_compile as mhsa
from campaigns.callers import campaign as differing_calls
from mhsa_compile.hardware import zig
from mhsa_compile.runtime.standalone import templates
from mhsa_compile.runtime.standalone.bundle import bundle

SUPPORT = Path(__file__).parents[1] / "support"
STRESS, CYCLES = SUPPORT / "pool_stress.c", SUPPORT / "load_cycles.cpp"
SOURCES = Path(mhsa.__file__).parent / "runtime" / "threads"
WAYS = ((1, 2, 0), (2, 2, 1), (8, 8, 1), (64, 3, 1))
"""(callers, threads of a call, whether some launches come after a sleep)"""
PATIENCE = 1200
GROWTH = 64
"""MiB that a process may have grown by: TVM's memory of as many threads as there were callers."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=1_000_000)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--loads", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=600, help="of calls by large artifacts at once")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        right = [
            *stressed(Path(place), "plain", (), given.launches),
            *stressed(Path(place), "ThreadSanitizer", ("-fsanitize=thread",), given.launches // 10),
            calls(given.calls),
            not differing_calls(given.seconds),
            loads(given.loads),
            loads_in_cpp(Path(place), given.loads),
        ]
    return 0 if all(right) else 1


def stressed(folder: Path, name: str, sanitizer: tuple[str, ...], launches: int) -> list[bool]:
    program = folder / name
    words = ["-O2", "-g", "-fno-sanitize=undefined", *sanitizer, f"-I{SOURCES}", STRESS, "-o", program]
    zig.run("cc", "x86_64-linux-gnu", words, "a test of the pool")
    found = []
    for callers, limit, pauses in WAYS:
        begin = time.monotonic()
        command = [program, *map(str, (callers, limit, max(1, launches // len(WAYS) // callers), pauses))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        said = (done.stdout + done.stderr).strip()
        print(f"{name}, {callers} callers, {limit} threads: {said}, {time.monotonic() - begin:.1f} s", flush=True)
        found.append(done.returncode == 0)
    return found


def left() -> tuple[int, int, float]:
    """Threads, open files and MiB of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads, files = (len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))
    return threads, files, pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def calls(count: int, callers: int = 64) -> bool:
    attention = mhsa.load(mhsa.compile(mhsa.AttentionSpec(embed_dim=32, num_heads=2)), threads=3, pool="own")
    x = np.random.default_rng(0).standard_normal((1, 33, 32)).astype("f4")
    expected, each = attention(x), count // callers

    def call(times: int) -> int:
        return sum(not np.array_equal(attention(x), expected) for _ in range(times))

    with ThreadPoolExecutor(callers) as executor:
        list(executor.map(call, [20] * callers))
    before, begin = left(), time.monotonic()
    with ThreadPoolExecutor(callers) as executor:
        wrong = sum(executor.map(call, [each] * callers))
    after = left()
    took = time.monotonic() - begin
    print(f"{each * callers} calls by {callers} threads: {wrong} wrong, {took:.1f} s; {grown(before, after)}")
    return wrong == 0 and after[0] <= before[0] and after[1] == before[1] and after[2] < before[2] + GROWTH


def loads(count: int) -> bool:
    """Whether `count` loads of one artifact leave nothing: the same bytes are mapped once, and their file stays
    open."""
    artifact = mhsa.compile(mhsa.AttentionSpec(embed_dim=32, num_heads=2))
    x = np.ones((1, 33, 32), np.float32)
    expected = mhsa.load(artifact, threads=3)(x)
    before, begin = left(), time.monotonic()
    wrong = sum(not np.array_equal(mhsa.load(artifact, threads=3)(x), expected) for _ in range(count))
    after = left()
    print(f"{count} loads: {wrong} wrong, {time.monotonic() - begin:.1f} s; {grown(before, after)}")
    return wrong == 0 and after[0] <= before[0] and after[1] == before[1] and after[2] < before[2] + GROWTH


def loads_in_cpp(folder: Path, count: int) -> bool:
    """The same in a bundle's program, at a size whose loops run on several threads."""
    artifact = mhsa.compile(mhsa.AttentionSpec(embed_dim=64, num_heads=2))
    made, triple = bundle(artifact, folder / "bundle"), artifact.manifest.target.link.triple
    shutil.copyfile(CYCLES, made.path / templates.MAIN)
    words = templates.compiler_words((path.name for path in (made.path / "lib").glob("*.so*")), "linux")
    zig.run("c++", triple, words, "a test of loading", folder=made.path)
    begin = time.monotonic()
    command = [made.path / templates.PROGRAM, made.path / "artifact", str(count), "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    print(f"{count} loads in C++: {(done.stdout + done.stderr).strip()}, {time.monotonic() - begin:.1f} s")
    return done.returncode == 0


def grown(before: tuple[int, int, float], after: tuple[int, int, float]) -> str:
    threads, files, memory = (late - early for early, late in zip(before, after, strict=True))
    return f"{threads:+d} threads, {files:+d} open files, {memory:+.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
