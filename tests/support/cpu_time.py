"""What a machine spends on a test, whatever else it does meanwhile."""

from __future__ import annotations

import os


def cpu_seconds() -> float:
    """CPU seconds of this process and of the children that it has waited for."""
    return sum(os.times()[:4])
