"""Runs a small part of the tests on a GPU under NVIDIA's compute-sanitizer; `make sanitize-gpu`.

    python tests/sanitize_gpu.py [--tool memcheck racecheck initcheck synccheck] [-k EXPRESSION]

Each tool runs by itself, over small shapes: it slows kernels down a hundredfold. What it finds ends with exit code 1;
where there is no GPU or no compute-sanitizer, that is said, with exit code 2.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mhsa_compile import gpus
from mhsa_compile.errors import DeviceError, InstallationError, MhsaError

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
FOUND = 97
"""The exit code that compute-sanitizer is told to end with where it found something: no other program's here."""
CASES = (
    "h5-e64 or causal-gqa or bottom-right-gqa or bool-cross or window-both or longformer or e128-f40 "
    "or cache-rope-gqa or sinks-key-padding or bf16-bool or fp16-causal or bf16-longformer"
)
"""Of the parity matrix: each kernel, masks of every kind, tails, each dtype."""
FILES = ("tests/test_on_gpu_parity.py",)


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    try:
        sanitizer = find()
        if not gpus.driver().count:
            raise DeviceError("device", "an NVIDIA GPU", "none that this process may use")
    except MhsaError as error:
        print(error, file=sys.stderr)
        return 2
    outcomes = {tool: run(sanitizer, tool, options.k) for tool in options.tool}
    for tool, outcome in outcomes.items():
        print(f"{tool}: {outcome}")
    return 0 if all(outcome == "clean" for outcome in outcomes.values()) else 1


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("-k", default=CASES, metavar="EXPRESSION", help="which tests, as of pytest")
    return parser.parse_args(words)


def find() -> str:
    """Raises InstallationError."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *PLACES])
    if (found := shutil.which("compute-sanitizer", path=path)) is None:
        next_step = "It comes with NVIDIA's CUDA toolkit."
        raise InstallationError("compute-sanitizer", f"it on the path, or in {PLACES[0]}", "none", next_step)
    return found


def command(sanitizer: str, tool: str, expression: str) -> list[str]:
    """Children are looked at, too: whatever a test starts."""
    asked = [sanitizer, "--tool", tool, "--target-processes", "all", "--error-exitcode", str(FOUND)]
    if tool == "memcheck":
        asked += ["--leak-check", "no", "--padding", "64"]  # bytes around each allocation: what runs over meets them
    return [*asked, sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-x", "-k", expression, *FILES]


def run(sanitizer: str, tool: str, expression: str) -> str:
    """ "clean", or what it came to."""
    # PyTorch would give out parts of large allocations, whose ends nobody watches.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    words = command(sanitizer, tool, expression)
    print(f"== {' '.join(words)}", flush=True)
    code = subprocess.run(words, env=environment, cwd=Path(__file__).parents[1], check=False).returncode
    return {0: "clean", FOUND: "it found something, above", 5: "no test was run"}.get(code, f"exit code {code}")


if __name__ == "__main__":
    sys.exit(main())
