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
