"""A layer whose calls may go several ways, as one artifact, by its parts or by PyTorch: the fastest one is taken.

The first call of some sizes times all ways in turns. Later calls are timed by themselves, and where they take longer
than another way did, all ways are timed again: `ways`. Notation: B batch, L query length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from mhsa_compile.integrations.layers.ways import LayerRow, LayerWay, WayTiming, WayTimings
from mhsa_compile.integrations.weight_state import Kind, LayerInUse, ReplacedForward, Result


class MeasuredCall(Protocol):
    """What is asked of a call."""

    @property
    def form(self) -> Hashable:
        """All that decides how fast a call is."""

    @property
    def is_masked(self) -> bool:
        """Whether anything is hidden that no hint says to be the future."""


Call = TypeVar("Call", bound=MeasuredCall)


class MeasuredForward(ReplacedForward[Kind, Result], Generic[Kind, Result, Call]):
    """The forward of a layer. `row` is told how calls went; `timings` decide between the ways, None: an artifact is
    taken wherever it can be. A subclass knows the layer's arguments, and the ways."""

    def __init__(self, use: LayerInUse, row: LayerRow, timings: WayTimings | None) -> None:
        super().__init__(use)
        self._row, self._timings = row, timings
        self._other_ways: dict[Hashable, WayTiming] = {}  # form of calls that no artifact computes fastest

    def _arguments(self) -> tuple[Any, ...]:
        return (*super()._arguments(), self._row, self._timings)

    def _why_not(self, call: Call) -> str:
        """Why the parts' result is wanted; "" if an artifact has a form for the call. Raises InputError."""
        raise NotImplementedError

    def _by_artifact(self, call: Call) -> tuple[Result, Kind] | str:
        """The result as one artifact, and of which kind; or why none can have the layer's weights."""
        raise NotImplementedError

    def _why_wrong(self, call: Call, kind: Kind, result: Result) -> str:
        """How the first result of a kind differs from the layer's by more than rounding; "" if it does not."""
        raise NotImplementedError

    def _sizes(self, call: Call) -> tuple[int, int]:
        """B and L of a call that an artifact has a form for."""
        raise NotImplementedError

    def _others(self, call: Call) -> Mapping[LayerWay, Callable[[], Result]]:
        """The other ways that a call may go."""
        raise NotImplementedError

    def _may_go_unasked(self, call: Call) -> bool:
        """Whether a call may go another way than an artifact's with nothing asked of the layer."""
        raise NotImplementedError

    def _fastest(self, call: Call) -> Result | None:
        """The result by the fastest way; None: the parts' is wanted."""
        if self._row.why_parts:
            return None
        if self._other_ways and self._may_go_unasked(call) and (timing := self._other_ways.get(call.form)):
            if (way := timing.way) != "whole" and not timing.is_due:
                return self._by_other(way, timing, call)
            self._other_ways.pop(call.form, None)  # all ways are, or were, timed again
        result = self._measured(call)
        if isinstance(result, _WantsParts):
            self._row.count_parts(result.why)
            return None
        return result

    def _measured(self, call: Call) -> Result | _WantsParts:
        """The result; or why the parts' is wanted."""
        if why := self._why_not(call):
            return _WantsParts(why)
        with torch.no_grad():
            begin = time.perf_counter()
            result = self._by_artifact(call)
            seconds = time.perf_counter() - begin
            if isinstance(result, str):
                return _WantsParts(result)
            y, kind = result
            if why := self._why_wrong(call, kind, y):
                return _WantsParts(why)
            timing = self._timing(call, kind, seconds)
        self._row.note(timing)
        if timing is None or (way := timing.way) == "whole":
            return y
        self._other_ways[call.form] = timing
        return self._by_other(way, timing, call)

    def _timing(self, call: Call, kind: Kind, seconds: float) -> WayTiming | None:
        """What decides on the call, which an artifact computed in these seconds; None: it is to be an artifact's."""
        if self._timings is None:
            return None
        sizes = self._sizes(call)
        if (timing := self._timings.known(kind, sizes)) is not None:
            if timing.way == "whole":
                timing.watch(sizes, seconds)
            return timing
        ours = (self._why_not, self._by_artifact)
        ways: dict[LayerWay, Callable[[], Any]] = {"whole": lambda: [one(call) for one in ours], **self._others(call)}
        timing = self._timings.of(kind, sizes, ways, ", masked" if call.is_masked else "")
        self._forget_all_but(timing.way)
        return timing

    def _by_other(self, way: LayerWay, timing: WayTiming, call: Call) -> Result:
        begin = time.perf_counter()
        result = self._others(call)[way]()
        timing.watch(self._sizes(call), time.perf_counter() - begin)
        return result

    def _forget_all_but(self, way: LayerWay) -> None:
        """Lets go of the packed weights that were bound to be timed, and that calls of this way have no use for."""
        if way != "whole":
            self.forget()
        if way != "parts":
            for part in replaced_parts(self._layer):
                part.forget()


class _WantsParts:
    """That the parts' result is wanted, and why."""

    def __init__(self, why: str) -> None:
        self.why = why


def replaced_parts(layer: nn.Module) -> list[ReplacedForward[Any, Any]]:
    """The forwards that replace those of a layer's parts."""
    own = (vars(part).get("forward") for part in layer.modules() if part is not layer)
    return [forward for forward in own if isinstance(forward, ReplacedForward)]
