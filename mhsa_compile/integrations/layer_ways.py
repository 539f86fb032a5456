"""How calls of a whole layer go: as one artifact, by the layer's parts, or by PyTorch's own layer, and why.

Notation: B batch, L query length.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from mhsa_compile.integrations.timed_turns import in_turns

LayerChoice: TypeAlias = Literal["fastest", "whole", "parts"]
"""What becomes of the layers that attention is in: whatever is faster, one artifact each, or their parts alone."""
_GAIN = 0.98
"""The part of PyTorch's time from which on an artifact is taken: turns on a quiet machine differ by less."""


class WayTiming(NamedTuple):
    """What a first call of some sizes was measured at, in seconds of a call."""

    sizes: tuple[int, int]
    whole: float
    pytorch: float

    @property
    def is_whole(self) -> bool:
        return self.whole < _GAIN * self.pytorch

    def __str__(self) -> str:
        way = "whole" if self.is_whole else "left to PyTorch"
        ours, theirs = self.whole * 1e3, self.pytorch * 1e3
        return f"{way} at {self.sizes[0]} x {self.sizes[1]} ({ours:.3g} ms, PyTorch's {theirs:.3g})"


class WayTimings:
    """The timings of a model: layers of one kind share those of their sizes, to a factor of two. One thread measures
    at a time, and all others that want the same wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timings: dict[Hashable, WayTiming] = {}

    def __reduce__(self) -> Any:  # a copy, perhaps on another machine, measures anew
        return type(self), ()

    def of(self, kind: Hashable, B: int, L: int, whole: Callable[[], Any], pytorch: Callable[[], Any]) -> WayTiming:
        """The timing for a call of these sizes; it is measured where it is new."""
        key = (kind, (B * L).bit_length(), L.bit_length())
        if (timing := self._timings.get(key)) is None:
            with self._lock:
                if (timing := self._timings.get(key)) is None:
                    timing = self._timings[key] = WayTiming((B, L), *in_turns(whole, pytorch))
        return timing


@dataclass
class LayerRow:
    """One layer around attention: `name` in the model ("" is the model itself), its class, and how its calls went.

    why_parts  why none of its calls is one artifact; "" if they may be
    timings    what decided between the artifact and PyTorch's own layer
    parts      why its parts were called -> in how many calls
    """

    name: str
    kind: str
    why_parts: str = ""
    timings: list[WayTiming] = field(default_factory=list)
    parts: dict[str, int] = field(default_factory=dict)
    is_whole: bool = False

    def count_parts(self, why: str) -> None:
        """Counts a call of the layer's parts."""
        self.parts[why] = self.parts.get(why, 0) + 1

    def note(self, timing: WayTiming | None) -> None:
        """Notes how a call went; None: as one artifact, unmeasured."""
        if timing is None:
            self.is_whole = True
        elif timing not in self.timings:
            self.timings.append(timing)

    def outcome(self) -> str:
        """How calls went, in words."""
        if self.why_parts:
            return f"its parts: {self.why_parts}"
        words = [str(timing) for timing in self.timings] + ["whole"] * self.is_whole
        words += [f"its parts in {number} calls: {why}" for why, number in self.parts.items()]
        return "; ".join(words) or "whole or left to PyTorch: first calls tell which is faster"
