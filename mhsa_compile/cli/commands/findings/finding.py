"""One row of what `mhsa doctor` reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """What a check came to, and what to do about it."""

    check: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""
