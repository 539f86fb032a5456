"""Damaged and hostile files for the C++ program of a bundle, built under AddressSanitizer and UBSan with TVM's runtime.

    python -m fuzz.files_cpp --inputs 50000 --seed 0 [--workers 2] [--json build/fuzz-files-cpp.json]

Each input runs in a process of its own (standalone_harness.cpp) and must end, within five seconds of CPU time and
thirty of the clock, by code 0, or by code 2 with a message of four parts. What is under a hash and was changed must be
refused, and so must calls that Python refuses. Exit code 1 if any was not so. A seed gives the same inputs again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import mhsa_compile as mhsa
from fuzz import file_mutations
from fuzz.file_mutations import Case
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.standalone import bundle, runtimes

HERE = Path(__file__).parent
SECONDS, PATIENCE = 5, 30  # of CPU time; of the clock, for others may load the machine
_HANGS = {"signal 14", "signal 24"}  # SIGALRM, SIGXCPU
BATCH = 200
SPECS = {
    "padding": mhsa.AttentionSpec(embed_dim=66, num_heads=6, head_dim=11, num_kv_heads=2, mask="key_padding"),
    "cache": mhsa.AttentionSpec(embed_dim=32, num_heads=4, num_kv_heads=2, causal=True, kv_cache=True),
    "additive": mhsa.AttentionSpec(
        embed_dim=24, num_heads=3, mask="additive", rope=True, outputs=("y", "lse", "top_k:2")
    ),
}
_WORDS = ("-std=c++17", "-fno-sanitize-recover=all")
_SANITIZERS = "-fsanitize=address,undefined"
_RUNTIME = ("-fPIC", "-shared", "-DNDEBUG", "-DTVM_FFI_EXPORTS", "-DTVM_FFI_USE_LIBBACKTRACE=0")
_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:exitcode=99:handle_abort=1",
    "UBSAN_OPTIONS": "exitcode=99",
    "TVM_FFI_BACKTRACE_ON_SEGFAULT": "0",
}
_REFUSAL = re.compile(r"Error: \S.*?: expected \S.*, got \S.*\. \S.*")


class NoCompiler(Exception):
    """There is no compiler whose sanitizers work."""


def compiler() -> str:
    """The C++ compiler of the system, if it links programs with sanitizers. Raises NoCompiler."""
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise NoCompiler("no C++ compiler: apt-get install g++, or name one as CXX")
    with tempfile.TemporaryDirectory() as place:
        words = [found, _SANITIZERS, "-x", "c++", "-", "-o", f"{place}/empty"]
        done = subprocess.run(words, input="int main() {}", capture_output=True, text=True)
    if done.returncode:
        raise NoCompiler(f"{found} lacks the libraries of AddressSanitizer or UBSan:\n{done.stderr[-500:]}")
    return found


def build(folder: Path, quick: bool = False) -> Path:
    """The harness and TVM's runtime, both under sanitizers: minutes. `quick`: the harness alone, and under
    AddressSanitizer alone, with the runtime as it is installed."""
    cxx, tvm, ffi = compiler(), runtimes.package_folder("tvm"), runtimes.package_folder("tvm_ffi")
    words = [cxx, *_WORDS, *(("-fsanitize=address", "-O0") if quick else (_SANITIZERS, "-O1", "-g1"))]
    libraries = [ffi / "lib/libtvm_ffi.so", tvm / "lib/libtvm_runtime.so"]
    if not quick:
        libraries = [folder / runtimes.LIBRARY]
        runtimes.stage(tvm, ffi, folder / "sources")
        own = [*words, *_RUNTIME, "-Iinclude", *runtimes.UNITS, "-o", libraries[0]]
        subprocess.run(list(map(str, own)), cwd=folder / "sources", check=True)
    paths = [*(f"-Wl,-rpath,{library.parent}" for library in libraries), "-Wl,--no-as-needed", *libraries]
    includes = ["-isystem", ffi / "include", "-I", Path(bundle.__file__).parent / "program"]
    words += [*includes, HERE / "standalone_harness.cpp", *paths, "-o", folder / "harness"]
    subprocess.run(list(map(str, words)), check=True)
    return folder / "harness"


@dataclass
class Outcome:
    """How many inputs of each kind ended in each way, and those that ended badly."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)

    def add(self, case: Case, status: str, said: str) -> None:
        end = judged(case, status, said)
        self.counts[case.kind, end] += 1
        if end not in ("accepted", "refused"):
            self.bad.append(f"{end}: {case.kind}, {case.note}: {status}: {said[:2000]}")

    def merge(self, other: Outcome) -> None:
        self.counts.update(other.counts)
        self.bad += other.bad


def judged(case: Case, status: str, said: str) -> str:
    """`accepted` and `refused` are well, every other word is not."""
    if status == "exit 99":
        return "sanitizer report"
    if status.startswith("signal"):
        return "hang" if status in _HANGS else "crash"
    if "runtime error:" in said:
        return "sanitizer report"
    if status == "exit 2":
        if not _REFUSAL.fullmatch(said.strip()):
            return "message without four parts"
        return "refused" if case.must != "accept" else "refused wrongly"
    if status != "exit 0":
        return "odd exit code"
    return "accepted" if case.must != "refuse" else "accepted wrongly"


def ends(harness: Path, cases: list[Case], folder: Path) -> list[tuple[str, str]]:
    """(exit code or signal, what was said) of cases whose files are there; relative names lead to `folder`."""
    lines = "".join("\t".join(case.words) + "\n" for case in cases)
    words, environment = [harness, str(SECONDS), str(PATIENCE)], {**os.environ, **_OPTIONS}
    done = subprocess.run(
        words, input=lines, capture_output=True, text=True, errors="replace", env=environment, cwd=folder
    )
    found = [line.partition("\t")[::2] for line in done.stdout.removesuffix("\n").split("\n")]
    if len(found) != len(cases):
        raise RuntimeError(f"{len(found)} answers to {len(cases)} cases: {done.stderr[-2000:]}")
    return found


def batch(harness: Path, artifacts: list[Artifact], seed: str, count: int) -> Outcome:
    """`count` inputs from a seed, in a folder of their own that is gone afterwards."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="fuzz-files-") as place:
        cases = []
        for number in range(count):
            (folder := Path(place, str(number))).mkdir()
            cases.append(file_mutations.draw(rng, rng.choice(artifacts), folder))
        outcome = Outcome()
        for case, (status, said) in zip(cases, ends(harness, cases, Path(place)), strict=True):
            outcome.add(case, status, said)
        return outcome


def campaign(harness: Path, artifacts: list[Artifact], inputs: int, seed: int, workers: int) -> Outcome:
    """All inputs, by batches, on several processes at once."""
    sizes = [min(BATCH, inputs - begin) for begin in range(0, inputs, BATCH)]
    total, done = Outcome(), 0
    with ThreadPoolExecutor(workers) as pool:
        jobs = [pool.submit(batch, harness, artifacts, f"{seed}/{i}", size) for i, size in enumerate(sizes)]
        for job, size in zip(jobs, sizes, strict=True):
            total.merge(job.result())
            done += size
            print(f"\r{done} of {inputs}, {len(total.bad)} ended badly", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return total


def table(outcome: Outcome) -> str:
    """A row for each kind of input, a column for each way to end."""
    ways = sorted({way for _, way in outcome.counts})
    rows = [["input", "inputs", *ways]]
    for kind in (*sorted({kind for kind, _ in outcome.counts}), "all"):
        found = [sum(n for (k, w), n in outcome.counts.items() if w == way and kind in (k, "all")) for way in ways]
        rows.append([kind, str(sum(found)), *map(str, found)])
    return "\n".join(f"{row[0]:<20}" + "".join(f"{cell:>18}" for cell in row[1:]) for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-files-") as place:
        print(f"seed {options.seed}; the program and TVM's runtime are built first, in minutes", file=sys.stderr)
        try:
            harness = build(Path(place))
        except NoCompiler as error:
            print(f"the C++ half cannot run: {error}", file=sys.stderr)
            return 2
        artifacts = [mhsa.compile(spec, "native") for spec in SPECS.values()]
        outcome = campaign(harness, artifacts, options.inputs, options.seed, options.workers)
    print(table(outcome))
    for line in outcome.bad[:50]:
        print(line)
    if options.json:
        counts = [{"kind": kind, "end": end, "inputs": n} for (kind, end), n in sorted(outcome.counts.items())]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps({"seed": options.seed, "counts": counts, "bad": outcome.bad}, indent=2) + "\n"
        )
    return 1 if outcome.bad else 0


if __name__ == "__main__":
    sys.exit(main())
