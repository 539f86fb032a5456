"""What `accelerate` did to a model: a row for each attention, replaced or kept, with the reason; and the way back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

NAME = "_mhsa_acceleration"
"""The attribute of an accelerated model that holds its report."""


@dataclass(frozen=True)
class AccelerationRow:
    """One attention or linear: `name` in the model ("" is the model itself), the class, and why it was kept, "" if it
    was replaced."""

    name: str
    kind: str
    why_kept: str = ""

    @property
    def replaced(self) -> bool:
        return not self.why_kept


class AccelerationReport:
    """The rows, in the order of the model's modules. Printed, it is a table.

    `linears` has rows of its own, where linears were asked for. `calls`: reason -> how many calls of replaced layers
    PyTorch computed itself for it. `checked`: how many first calls of a kind were held against PyTorch's.
    """

    def __init__(self) -> None:
        self.rows: list[AccelerationRow] = []
        self.linears: list[AccelerationRow] = []
        self.calls: dict[str, int] = {}
        self.checked = 0
        self.undo: list[Callable[[], None]] = []  # what `restore` runs, the last first
        self.on_refresh: list[Callable[[], None]] = []
        self.registered: list[Any] = []  # what a copy in another process needs to be there

    def __iter__(self) -> Iterator[AccelerationRow]:
        return iter(self.rows)

    @property
    def replaced(self) -> list[AccelerationRow]:
        return [row for row in self.rows if row.replaced]

    @property
    def kept(self) -> list[AccelerationRow]:
        return [row for row in self.rows if not row.replaced]

    def refresh(self) -> None:
        """Binds the weights of all replaced layers anew, for edits of a few numbers that PyTorch does not count: by
        `.data`, by NumPy's views, and of inference tensors. All others are noticed by the next call: `weight_state`."""
        for bind in self.on_refresh:
            bind()

    def count(self, why: str) -> None:
        """Counts a call that PyTorch computes itself."""
        self.calls[why] = self.calls.get(why, 0) + 1

    def count_check(self) -> None:
        """Counts a call that was held against PyTorch's."""
        self.checked += 1

    def __repr__(self) -> str:
        lines = [f"{len(self.replaced)} of {len(self.rows)} attentions replaced"]
        width = max((len(row.name) for row in self.rows), default=0)
        for row in self.rows:
            outcome = "replaced" if row.replaced else f"kept: {row.why_kept}"
            lines.append(f"  {row.name or '(the model)':{max(width, 11)}}  {row.kind}  {outcome}")
        if self.linears:
            lines.append(f"{sum(row.replaced for row in self.linears)} of {len(self.linears)} linears replaced")
            reasons = Counter(row.why_kept for row in self.linears if not row.replaced)
            lines += [f"  {number} kept: {why}" for why, number in reasons.items()]
        if self.checked:
            lines.append(f"  {self.checked} first calls of a kind checked against PyTorch's")
        lines += [f"  {number} calls computed by PyTorch: {why}" for why, number in self.calls.items()]
        return "\n".join(lines)
