"""Whether there is room: for a file on the disk, in a quota, and under the limit on sizes that a process may have; and
in memory, for what is about to be allocated. `root` is the root of the file system, as `host` has it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from mhsa_compile.errors import ResourceError
from mhsa_compile.files.input_files import text_or_nothing

NO_ROOM = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG, errno.EROFS})
"""What only a writer meets: a full disk, a quota, a file that would be too large, a file system for reading."""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # as libraries that are written in Rust say it, safetensors among them


def number_of(error: BaseException) -> int | None:
    """The errno behind an exception, also behind one of a library that only spells it."""
    if isinstance(error, OSError):
        return error.errno
    match = _OS_ERROR.search(str(error))
    return int(match[1]) if match else None


def without_room(folder: Path, size: int) -> str | None:
    """Why no file of `size` bytes can be made in a folder, in the system's words; None where it can. It is made,
    without a name, and is gone after this."""
    import shutil
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if (limit := size_limit()) is not None and size > limit:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
            elif size > shutil.disk_usage(folder).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        if error.errno in NO_ROOM or error.errno in (errno.EACCES, errno.EPERM, errno.ENOENT):
            return error.strerror or str(error)
    return None


def size_limit() -> int | None:
    """The largest file that this process may write (`ulimit -f`), in bytes; None where there is no limit."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return None
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def require_memory(argument: str, size: int) -> None:
    """Raises ResourceError unless `size` bytes can be had, for what is about to be allocated and filled: the system
    hands out more than it has, and ends who uses it."""
    free = available_memory()
    if free is not None and size > free:
        got = f"{size / 2**30:,.1f} GiB, where {free / 2**30:,.1f} GiB are free"
        raise ResourceError(argument, "what fits this machine's memory", got, "Ask for smaller sizes.")


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process can have before the system takes them from others, or ends it; None where nobody says."""
    fields = (line.split() for line in text_or_nothing(root / "proc/meminfo").splitlines())
    free = next((1024 * int(words[1]) for words in fields if words[:1] == ["MemAvailable:"]), None)
    bounds = [bound for bound in (free, *_memory_left(root)) if bound is not None]
    return min(bounds, default=None)


def _memory_left(root: Path) -> Iterator[int]:
    """What the control group that a container shows as its root leaves of its limit, of version 2 and 1."""
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used_text = (text_or_nothing(root / "sys/fs/cgroup" / name) for name in (most, used))
        if limit.isdigit() and used_text.isdigit():
            yield max(0, int(limit) - int(used_text))
