"""Every rule of the fallbacks and every kernel under valgrind, which watches each access to memory; `make helgrind`.

    python -m campaigns.helgrind [--threads 3] [--length 67] [--tool helgrind] [--only WORDS] [--json FILE]

A whole artifact runs in the C++ program of a bundle, as it ships, for x86-64-v3: valgrind knows no AVX-512. Only what
hands loops to threads is another one (parallel_driver.c), whose threads begin and end with a loop. So what two tasks of
a loop do to one place is reported whenever it happens, whichever of them came first, and though bits be equal.

A race is a report with a frame in compiled code. Others are glibc's and TVM's own, from before the first call. Races
that are planted must be found, in a fallback and in kernels; one of them neither `races` nor equal bits can see.

Exit code 1 if a race was found, or a planted one was not, or a case ran no loop in parallel; 2 without valgrind.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any
from unittest.mock import patch

import torch
from safetensors.numpy import save_file
from support import planted_races

import mhsa_compile as mhsa
from campaigns import races as races_campaign
from campaigns.races import Case
from mhsa_compile.compiler.codegen import build
from mhsa_compile.compiler.codegen import data_races as races
from mhsa_compile.hardware import zig
from mhsa_compile.hardware.profile import CpuProfile, load_profile
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.standalone.bundle import bundle
from mhsa_compile.runtime.standalone.templates import PROGRAM

TARGET = "x86-64-v3"
DRIVER = Path(__file__).with_name("parallel_driver.c")
SECONDS = 1200
COLUMNS = "{:9}{:42}{:>9}{:>10}{:>8}{:>8}"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found in one case: parallel launches, the loops that were launched and those that there are, and reports
    of races."""

    group: str
    name: str
    launches: int = 0
    loops: int = 0
    of: int = 0
    races: int = 0
    seconds: float = 0.0
    failure: str = ""

    @property
    def is_planted(self) -> bool:
        return self.group == "planted"

    @property
    def wrong(self) -> str:
        """What speaks against the case; "" where nothing does."""
        if self.failure or not self.launches:
            return self.failure or "no loop ran in parallel: this proves nothing"
        if self.is_planted:
            return "" if self.races else "the planted race was not seen"
        return "races" if self.races else ""

    def __str__(self) -> str:
        loops, seconds = f"{self.loops} of {self.of}", f"{self.seconds:.0f} s"
        row = COLUMNS.format(self.group, self.name, self.launches, loops, self.races, seconds)
        return f"{row.rstrip()}  {self.wrong}".rstrip()


class Watched:
    """The program of a bundle with the driver, both built once, and valgrind."""

    def __init__(self, folder: Path, tool: str, threads: int) -> None:
        self._folder, self._tool, self._threads = folder, tool, threads
        profile = load_profile(TARGET)
        assert isinstance(profile, CpuProfile)
        self._driver = folder / "parallel_driver.so"
        words = ["-std=gnu11", "-O2", "-shared", "-fPIC", "-o", self._driver, DRIVER, "-lpthread"]
        zig.run("cc", profile.link.triple, words, "the driver")
        attention = mhsa.compile(mhsa.AttentionSpec(embed_dim=16, num_heads=2), TARGET)
        bundle(attention, folder / "bundle", build=True)

    def run(self, artifact: Artifact, length: int) -> tuple[int, int, int]:
        """(launches, loops that were launched, reports of races) of two calls and of what packs weights."""
        given, report, found = (self._folder / name for name in ("in.safetensors", "report.txt", "found.xml"))
        save_file(races_campaign.drawn(artifact, length), given)
        for path in (report, found):
            path.unlink(missing_ok=True)
        words = [
            *("valgrind", f"--tool={self._tool}", "--fair-sched=yes", "--default-suppressions=no"),
            *("--xml=yes", f"--xml-file={found}", self._folder / "bundle" / PROGRAM, "--artifact", artifact.path),
            *("--inputs", given, "--repeat", "1", "--threads", "1"),
        ]
        environment = os.environ | {
            "LD_PRELOAD": str(self._driver),
            "PARALLEL_THREADS": str(self._threads),
            "PARALLEL_REPORT": str(report),
        }
        done = subprocess.run(
            list(map(str, words)), env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
        launches, loops = map(int, report.read_text().split()) if report.exists() else (0, 0)
        return launches, loops, in_compiled_code(found.read_text(errors="replace"))


def in_compiled_code(report: str) -> int:
    """How many errors of valgrind's XML have a frame in an artifact's library, or begin in code of no file."""
    return sum(any(map(_is_ours, error.findall("stack"))) for error in ElementTree.fromstring(report).iter("error"))


def _is_ours(stack: ElementTree.Element) -> bool:
    files = [frame.findtext("obj", "") for frame in stack.findall("frame")]
    return files[:1] == [""] or any("module.so" in file for file in files)


Planting = Callable[[], AbstractContextManager[None]]


def planted() -> Iterator[tuple[Case, Planting]]:
    """Cases, and what makes their code wrong."""
    attention = mhsa.AttentionSpec(embed_dim=64, num_heads=4)  # narrow: thousands of reports take minutes
    yield Case("planted", "scratch in front of a fallback's loop", eager(), eager_options()), _scratch_of_rows
    for kernel in ("attention", "linear"):
        yield Case("planted", f"scratch in front of {kernel}'s loop", attention, {}), partial(_scratch_of, kernel)
    yield Case("planted", "iterations done twice", attention, {}), planted_races.iterations_twice


@contextmanager
def _scratch_of_rows() -> Iterator[None]:
    with planted_races.scratch_in_front(), planted_races.unrefused():
        yield


@contextmanager
def _scratch_of(kernel: str) -> Iterator[None]:
    with planted_races.scratch_of_kernels_in_front(kernel), planted_races.unrefused():
        yield


def eager() -> torch.nn.Module:
    return planted_races.EagerCausal()


def eager_options() -> dict[str, Any]:
    return races_campaign.by_example(3, (2, 4, 144, 32))


def cases() -> Iterator[tuple[Case, Planting]]:
    sound = Case("rules", "eager causal attention, softmax", eager(), eager_options())
    for case in (*races_campaign.rules(), sound, *races_campaign.kernels(), *races_campaign.table()):
        yield case, nullcontext
    yield from planted()


def judged(watched: Watched, case: Case, planting: Planting, length: int) -> Finding:
    began = time.monotonic()
    try:
        with warnings.catch_warnings(), planting(), _counted() as loops:
            warnings.simplefilter("ignore")  # of dims that a module fixes
            with patch.object(build, "POOL", ()):  # loops go through TVM's runtime, which the driver stands before
                artifact = mhsa.compile(case.source, TARGET, **case.options)
        lengths = case.lengths if len(case.lengths) == 1 else (length,)
        launches, launched, found = watched.run(artifact, *lengths)
    except Exception as error:
        return Finding(case.group, case.name, failure=f"{type(error).__name__}: {str(error)[:500]}")
    seconds = time.monotonic() - began
    return Finding(case.group, case.name, launches, launched, sum(loops), found, seconds)


@contextmanager
def _counted() -> Iterator[list[int]]:
    """How many parallel loops each function has of which code is made."""
    counts: list[int] = []
    look = races.shared_writes

    def counting(function: Any) -> list[str]:
        counts.append(sum(1 for _ in races._parallel_loops(function.body)))
        return look(function)

    with patch.object(races, "shared_writes", counting):
        yield counts


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--length", type=int, default=67, help="of sources whose length is free")
    parser.add_argument("--tool", choices=("helgrind", "drd"), default="helgrind")
    parser.add_argument("--only", default="", help="cases whose group or name holds this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    if which("valgrind") is None:
        print("valgrind: expected it on the path, got none. Install it: apt-get install valgrind", file=sys.stderr)
        return 2
    chosen = [(case, how) for case, how in cases() if options.only in f"{case.group} {case.name}"]
    findings = []
    with tempfile.TemporaryDirectory(prefix="mhsa-helgrind-") as place:
        print(f"{options.tool}, {options.threads} threads; the program is built first, in a minute or two", flush=True)
        watched = Watched(Path(place), options.tool, options.threads)
        print(COLUMNS.format("", "case", "launches", "loops", "races", "").rstrip())
        for case, planting in chosen:
            findings.append(judged(watched, case, planting, options.length))
            print(findings[-1], flush=True)
    return concluded(findings, options.json)


def concluded(findings: list[Finding], path: Path | None) -> int:
    sound, wrong = [one for one in findings if not one.is_planted], [one for one in findings if one.wrong]
    launches, loops = sum(one.launches for one in sound), sum(one.loops for one in sound)
    print(
        f"{len(sound)} cases, {launches} launches of {loops} loops: {sum(one.races for one in sound)} races; "
        f"{len(findings) - len(sound)} planted, {len(wrong)} not as they must be"
    )
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([dataclasses.asdict(one) for one in findings], indent=2) + "\n", encoding="utf-8")
    return 1 if wrong or not findings else 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
