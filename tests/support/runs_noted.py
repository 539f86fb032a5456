"""Runs of artifacts elsewhere than in the test's own process, noted for the last lines of a test run (conftest.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mhsa_compile.verification.parity import CaseResult

PROPERTY = "run elsewhere"
"""The property of a test's report that holds (on which machine, what ran, its error as a share of the budget)."""

Run = tuple[str, str, float]


def note(record_property: Callable[[str, Any], None], name: str, *cases: CaseResult, machine: str) -> None:
    for case in cases:
        sizes = " ".join(f"{symbol}={size}" for symbol, size in case.dims.items())
        record_property(PROPERTY, (machine, f"{name}, {sizes}", float(case.ratio)))


def summary(pairs: Iterable[Run]) -> list[str]:
    """Lines that say for each machine how many runs were held against float64, and the worst of them."""
    lines, all_runs = [], list(pairs)
    for machine in dict.fromkeys(machine for machine, _, _ in all_runs):
        runs = [(what, share) for where, what, share in all_runs if where == machine]
        what, share = max(runs, key=lambda run: run[1])
        within = sum(share <= 1 for _, share in runs)
        lines += [
            f"{machine}: {within} of {len(runs)} runs within the error budget",
            f"the largest error / budget: {share:.3f}, {what}",
        ]
    return lines
