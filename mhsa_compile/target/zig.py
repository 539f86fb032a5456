"""Zig's compilers (the package `ziglang`): for every target from any host, with no tool chain of the system's, and the
same bytes twice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from mhsa_compile.errors import BuildError
from mhsa_compile.target import environment


def run(
    language: Literal["cc", "c++"], triple: str, words: Sequence[str | Path], what: str, folder: Path | None = None
) -> None:
    """Compiles or links for a Zig triple, such as aarch64-linux-gnu.2.17, in a folder; `what`, for the message, comes
    of it.

    Raises BuildError with the compiler's words, and InstallationError.
    """
    environment.require("ziglang", extra="compile")
    command = [sys.executable, "-m", "ziglang", language, "-target", triple, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise BuildError("zig", f"{what} for {triple}", done.stderr.strip()[-2000:] or "no message")
