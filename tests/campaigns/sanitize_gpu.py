"""Runs a small part of the tests on a GPU under NVIDIA's compute-sanitizer; `make sanitize-gpu`.

    python -m campaigns.sanitize_gpu [--tool memcheck racecheck initcheck synccheck] [-k EXPRESSION]

All tools at once, each in a process of its own, over small shapes: they slow kernels down a hundredfold. The tests run
without them first, side by side: what that compiles the tools then use. What they find ends with exit code 1; where
there is no GPU or no compute-sanitizer, that is said, with exit code 2.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from support.cuda.gpu_machine import KEEP

from mhsa_compile.errors import DeviceError, InstallationError, MhsaError
from mhsa_compile.hardware import host
from mhsa_compile.runtime import cuda_devices

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
FOUND = 97
"""The exit code that compute-sanitizer is told to end with where it found something: no other program's here."""
CASES = (
    "h5-e64 or causal-gqa or bottom-right-gqa or bool-cross or window-both or longformer or e128-f40 "
    "or cache-rope-gqa or sinks-key-padding or bf16-bool or fp16-causal or bf16-longformer"
)
"""Cases of the parity matrix, as pytest's -k names them: each kernel, masks of every kind, tails, each dtype."""
FILES = ("tests/devices/test_on_gpu_parity.py",)
ROOT = Path(__file__).parents[2]
MOST_WORKERS = 14
"""The most workers of the run without tools: each has PyTorch and TVM, most of 2 GB."""


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    try:
        sanitizer = find()
        if not cuda_devices.driver().count:
            raise DeviceError("device", "an NVIDIA GPU", "none that this process may use")
    except MhsaError as error:
        print(error, file=sys.stderr)
        return 2
    with kept() as environment:
        # What fails here is the more reason to look at it with the tools.
        alone = subprocess.run(compiling(options.k), env=environment, cwd=ROOT, check=False).returncode
        with ThreadPoolExecutor(len(options.tool)) as pool:
            found = list(pool.map(lambda tool: run(sanitizer, tool, options.k, environment), options.tool))
    outcomes = {"no tool": said(alone), **dict(zip(options.tool, found, strict=True))}
    for tool, outcome in outcomes.items():
        print(f"{tool}: {outcome}")
    return 0 if all(outcome == "clean" for outcome in outcomes.values()) else 1


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("-k", default=CASES, metavar="EXPRESSION", help="which tests, as of pytest")
    return parser.parse_args(words)


def find() -> str:
    """The path of compute-sanitizer. Raises InstallationError where there is none."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *PLACES])
    if (found := shutil.which("compute-sanitizer", path=path)) is None:
        next_step = "It comes with NVIDIA's CUDA toolkit."
        raise InstallationError("compute-sanitizer", f"it on the path, or in {PLACES[0]}", "none", next_step)
    return found


def command(sanitizer: str, tool: str, expression: str) -> list[str]:
    """The command that runs the tests with a tool of compute-sanitizer. Children are looked at, too: whatever a test
    starts."""
    asked = [sanitizer, "--tool", tool, "--target-processes", "all", "--error-exitcode", str(FOUND)]
    if tool == "memcheck":
        asked += ["--leak-check", "no", "--padding", "64"]  # bytes around each allocation: what runs over meets them
    return [*asked, sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-k", expression, *FILES]


@contextmanager
def kept() -> Iterator[dict[str, str]]:
    """The environment of the tests, with a folder for what they compile: of whoever calls, or for this time."""
    with tempfile.TemporaryDirectory(prefix="mhsa-sanitized-") as folder:
        yield {KEEP: folder, **os.environ}


def compiling(expression: str) -> list[str]:
    workers = str(min(host.allowed_cpus(), MOST_WORKERS))
    return [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-n", workers, "-k", expression, *FILES]


def run(sanitizer: str, tool: str, expression: str, environment: Mapping[str, str]) -> str:
    """ "clean", or what it came to. What it said is printed as one piece."""
    # PyTorch would give out parts of large allocations, whose ends nobody watches.
    environment = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    words = command(sanitizer, tool, expression)
    done = subprocess.run(
        words, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(f"== {' '.join(words)}\n{done.stdout}", flush=True)
    return said(done.returncode)


def said(code: int) -> str:
    return {0: "clean", FOUND: "it found something, above", 5: "no test was run"}.get(code, f"exit code {code}")


if __name__ == "__main__":
    sys.exit(main())
