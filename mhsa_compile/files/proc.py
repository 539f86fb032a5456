"""/proc, which minimal sandboxes do not mount. Artifacts load and run without it; some things are said nowhere else."""

from __future__ import annotations

import os
import sys

from mhsa_compile.errors import InstallationError

_SELF, _TASKS = "/proc/self/fd", "/proc/self/task"


def is_mounted() -> bool:
    """Whether it tells of this process."""
    return os.path.exists(_SELF)


def require_proc(why: str) -> None:
    """Raises InstallationError where it is not mounted; `why` is a sentence on what cannot be done without it. Other
    systems than Linux do all without."""
    if sys.platform == "linux" and not is_mounted():
        raise InstallationError("/proc", "mounted", f"no {_SELF}", f"{why} Mount /proc, or do it where it is.")


def thread_numbers() -> list[int]:
    """The threads of this process, those of native pools among them. Raises InstallationError."""
    require_proc("The threads of a process, whose times are measured one by one, are listed there.")
    return [int(task) for task in os.listdir(_TASKS)]
