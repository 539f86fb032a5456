"""JSON in which no object names one thing twice: readers disagree on which of the two counts. Standard library only."""

from __future__ import annotations

import json
from typing import Any


def require_unique_keys(raw: bytes | str) -> None:
    """Raises ValueError for JSON with an object that has two entries of one name, and for what is no JSON."""
    json.loads(raw, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two entries of one name, {twice!r}")
    return entries


def require_unique_tensors(raw: bytes | bytearray | memoryview) -> None:
    """The same for the header of a safetensors file, its length in front, of which `raw` is the beginning at least."""
    size = int.from_bytes(raw[:8], "little")
    if size <= len(raw) - 8:  # else safetensors itself says what is wrong
        require_unique_keys(bytes(raw[8 : 8 + size]))
