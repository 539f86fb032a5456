"""How calls of a whole layer go: as one artifact, by the layer's parts, or by PyTorch's own layer, and why.

Notation: B batch, L query length.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, TypeAlias

from mhsa_compile.integrations.layers.timed_turns import in_turns

LayerChoice: TypeAlias = Literal["fastest", "whole", "parts"]
"""What becomes of the layers that attention is in: whatever is faster, one artifact each, or their parts alone."""
LayerWay: TypeAlias = Literal["whole", "parts", "pytorch"]
"""One artifact; attention replaced, and linears where they were asked for; the layer as it was before."""
_GAIN = 0.92
"""The part of the other ways' time below which an artifact is taken. Turns of one layer promise more than a model gains
of it: 0.64 to 0.69 of the time became 1.38 to 1.47 times as fast, 0.75 became 1.15, 0.90 became 1.05, and 0.935
became 0.96 (docs/lab/2026-11-27-ways.md)."""
_FAR_AHEAD = 0.8
"""The part of the second way's time from which on a third one is not tried."""
_LATER = 9
"""So many later calls are looked at, by their median."""
_SLOWER = 1.1
"""What they may take of the time that another way had, before all ways are timed again."""
_MOST_MEASUREMENTS = 3
_WORDS: dict[LayerWay, str] = {"whole": "whole", "parts": "its parts", "pytorch": "left to PyTorch"}
_WHOSE: dict[LayerWay, str] = {"whole": "", "pytorch": "PyTorch's ", "parts": "its parts' "}


class WayTiming:
    """What a call of some sizes was measured at, in seconds of a call by each way. Where later calls of these sizes
    take longer than another way did, it is due to be measured again, twice at most."""

    def __init__(self, sizes: tuple[int, int], note: str = "") -> None:
        self.sizes, self._note = sizes, note
        self.seconds: dict[LayerWay, float] = {}
        self.measurements = 0
        self._later = deque[float](maxlen=_LATER)

    def measure(self, ways: Mapping[LayerWay, Callable[[], Any]]) -> None:
        """Times the first two ways in turns, and all of them where the first is not far ahead: what a third one needs
        may take seconds to compile."""
        first = dict(list(ways.items())[:2])
        self.seconds = dict(zip(first, in_turns(*first.values()), strict=True))
        if len(ways) > 2 and self.seconds["whole"] > _FAR_AHEAD * max(self.seconds.values()):
            self.seconds = dict(zip(ways, in_turns(*ways.values()), strict=True))
        self.measurements += 1
        self._later.clear()

    @property
    def way(self) -> LayerWay:
        """The fastest one; an artifact has to be faster by more than turns differ."""
        others = {way: seconds for way, seconds in self.seconds.items() if way != "whole"}
        best = min(others, key=others.__getitem__)
        return "whole" if self.seconds["whole"] < _GAIN * others[best] else best

    def watch(self, sizes: tuple[int, int], seconds: float) -> None:
        """Notes what a later call took, by the way that was taken."""
        if sizes == self.sizes:
            self._later.append(seconds)

    @property
    def is_due(self) -> bool:
        """Whether later calls contradict the measurement."""
        if len(self._later) < _LATER or self.measurements >= _MOST_MEASUREMENTS:
            return False
        others = [seconds for way, seconds in self.seconds.items() if way != self.way]
        return median(self._later) > _SLOWER * min(others)

    def __str__(self) -> str:
        order = sorted(self.seconds, key=list(_WHOSE).index)
        times = ", ".join(f"{_WHOSE[way]}{self.seconds[way] * 1e3:.3g}{' ms' * (way == 'whole')}" for way in order)
        again = f", measured {self.measurements} times" if self.measurements > 1 else ""
        return f"{_WORDS[self.way]} at {self.sizes[0]} x {self.sizes[1]}{self._note} ({times}{again})"


class WayTimings:
    """The timings of a model: layers of one kind share those of their sizes, to a factor of two. One thread measures
    at a time, and all others that want the same wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timings: dict[Hashable, WayTiming] = {}

    def __reduce__(self) -> Any:  # a copy, perhaps on another machine, measures anew
        return type(self), ()

    def known(self, kind: Hashable, sizes: tuple[int, int]) -> WayTiming | None:
        """The timing for calls of these sizes, B and L, unless it is new or due."""
        timing = self._timings.get(_bucket(kind, sizes))
        return None if timing is None or timing.is_due else timing

    def of(
        self, kind: Hashable, sizes: tuple[int, int], ways: Mapping[LayerWay, Callable[[], Any]], note: str = ""
    ) -> WayTiming:
        """The timing for calls of these sizes, B and L; it is measured where it is new, or due to be measured again."""
        with self._lock:
            if (timing := self.known(kind, sizes)) is None:
                bucket = _bucket(kind, sizes)
                timing = self._timings.get(bucket) or WayTiming(sizes, note)
                timing.measure(ways)
                self._timings[bucket] = timing
        return timing


def _bucket(kind: Hashable, sizes: tuple[int, int]) -> Hashable:
    B, L = sizes
    return kind, (B * L).bit_length(), L.bit_length()


@dataclass
class LayerRow:
    """One layer around attention: `name` in the model ("" is the model itself), its class, and how its calls went.

    why_parts  why none of its calls is one artifact; "" if they may be
    timings    what decided between the artifact, the layer's parts and PyTorch's own layer
    parts      why its parts were called, unmeasured -> in how many calls
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
        elif not any(timing is one for one in self.timings):
            self.timings.append(timing)

    def outcome(self) -> str:
        """How calls went, in words."""
        if self.why_parts:
            return f"its parts: {self.why_parts}"
        words = [str(timing) for timing in self.timings] + ["whole"] * self.is_whole
        words += [f"its parts in {number} calls: {why}" for why, number in self.parts.items()]
        return "; ".join(words) or "whole or left to PyTorch: first calls tell which is faster"
