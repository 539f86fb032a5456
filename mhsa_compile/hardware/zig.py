"""Zig's compilers (the package `ziglang`): for every target from any host, with no tool chain of the system's, and the
same bytes twice.

They keep what they built for a target (its C library, what code calls without saying so) in a cache folder: the first
build takes seconds, the others a tenth of it. Where that cannot be written, one among the temporary files serves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Literal

from mhsa_compile.errors import BuildError, OutputError
from mhsa_compile.files import system, user_folders
from mhsa_compile.files.proc import require_proc
from mhsa_compile.files.room import without_room
from mhsa_compile.hardware import environment

CACHE = "ZIG_GLOBAL_CACHE_DIR"
SECONDS = {"cc": 300.0, "c++": 1800.0}
"""The longest that a run may take. Linking takes 0.4 s, and 4 s where the cache is new; C++, which TVM's runtime is in,
a minute or two."""
_ROOM = ("NoSpaceLeft", "FileTooBig", "DiskQuota", "ReadOnlyFileSystem", "No space left on device", "File too large")
"""How Zig and LLVM's linker in it say that they could not write."""
_KILLED_AS_IT_WROTE = (
    () if system.IS_WINDOWS else (signal.SIGXFSZ, signal.SIGBUS)
)  # beyond a limit on sizes; into mapped pages that no disk has


def first_cache() -> Path:
    """The folder in which Zig keeps what it built: what its variable says, by default in the user's cache."""
    return Path(os.environ.get(CACHE) or user_folders.cache_home() / "zig")


def cache_folder() -> Path:
    """`first_cache`, or where that cannot be written a folder of this user's among the temporary files."""
    folder = first_cache()
    return folder if user_folders.can_write(folder) else user_folders.spare() / "zig"


def run(
    language: Literal["cc", "c++"], triple: str, words: Sequence[str | Path], what: str, folder: Path | None = None
) -> None:
    """Compiles or links for a Zig triple, such as aarch64-linux-gnu.2.17, in a folder; `what`, for the message, comes
    of it.

    Raises BuildError with the compiler's words, also where it does not end; OutputError where it found no room for what
    it writes, and InstallationError.
    """
    environment.require("ziglang", extra="compile")
    require_proc("Zig's compiler, which links, finds itself there.")
    command = [*_program(), language, "-target", triple, *map(str, words)]
    cache = cache_folder()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=folder,
        env={**os.environ, CACHE: str(cache)},
        start_new_session=True,  # so that its own children end with it
    )
    try:
        _, message = child.communicate(timeout=SECONDS[language])
    except subprocess.TimeoutExpired:
        hint = f"Its cache, {cache}, may be locked by a process that hangs: end that, or set {CACHE} to another."
        expected = f"{what} for {triple} within {SECONDS[language]:.0f} s"
        raise BuildError("zig", expected, "no end of it", hint) from None
    finally:
        _end(child)
    if child.returncode:
        raise _refusal(child.returncode, message, words, cache, f"{what} for {triple}")


def _program() -> list[str]:
    """The program in the package: `python -m ziglang` would start Python first, which is half of a link's time."""
    spec = find_spec("ziglang")
    folders = (spec and spec.submodule_search_locations) or ()
    programs = (Path(folder, name) for folder in folders for name in ("zig", "zig.exe"))
    program = next((str(path) for path in programs if path.is_file()), None)
    return [sys.executable, "-m", "ziglang"] if program is None else [program]


def _end(child: subprocess.Popen[str]) -> None:
    """Ends what runs still, as when its time is over or the user interrupts."""
    if child.poll() is None:
        child.kill() if system.IS_WINDOWS else os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def _refusal(code: int, message: str, words: Sequence[str | Path], cache: Path, what: str) -> BuildError | OutputError:
    output = next((Path(word) for flag, word in pairwise(words) if flag == "-o"), Path())
    size = sum(Path(word).stat().st_size for word in words if Path(word).is_file())
    for place in (output.absolute().parent, cache):
        if (reason := without_room(place, size)) is not None:
            return OutputError(f"folder {str(place)!r}", f"room for {what}", reason, _hint(place == cache))
    if -code in _KILLED_AS_IT_WROTE or any(word in message for word in _ROOM):
        places = f"folders {str(output.absolute().parent)!r} and {str(cache)!r}"
        return OutputError(places, f"room for {what}", "no room for what Zig writes", _hint(True))
    return BuildError("zig", what, message.strip()[-2000:] or f"it ended with code {code}, and no message")


def _hint(of_cache: bool) -> str:
    other = f", and {CACHE} to another for what Zig keeps" if of_cache else ""
    return f"Free some space, lift the limit on sizes of files, or point TMPDIR to another place{other}."
