"""How much memory this process can still have, and whether that is enough for what is about to be allocated.

`root` is the root of the file system, as `host` has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mhsa_compile.errors import ResourceError
from mhsa_compile.files.input_files import text_or_nothing


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
