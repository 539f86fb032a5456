"""Whether there is room for a file: on the disk, in a quota, and under the limit on sizes that a process may have."""

from __future__ import annotations

import errno
import os
import re
import resource
import tempfile
from pathlib import Path

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
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
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if (limit := size_limit()) is not None and size > limit:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
    except OSError as error:
        if error.errno in NO_ROOM or error.errno in (errno.EACCES, errno.EPERM, errno.ENOENT):
            return error.strerror or str(error)
    return None


def size_limit() -> int | None:
    """The largest file that this process may write (`ulimit -f`), in bytes; None where there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit
