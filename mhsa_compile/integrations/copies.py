"""Where a layer's forward is replaced, and what its copies get: deep ones and pickles a forward of their own, shallow
ones their class's, which computes with what lies in the copy.

A forward in a layer's __dict__ is bound to that layer, and `copy.copy` would hand it on as it is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from mhsa_compile.integrations.call_context import StandsForFunction

REPLACED = frozenset({"forward", "__getstate__"})
"""The fields of a layer whose forward is replaced that it had not before."""


def put_forward(layer: nn.Module, forward: StandsForFunction) -> None:
    """Has a layer call `forward`."""
    vars(layer).update(forward=forward, __getstate__=partial(_state, layer))


def take_forward(layer: nn.Module) -> Any:
    """Lets a layer have its class's forward again; the one that it had."""
    vars(layer).pop("__getstate__", None)
    return vars(layer).pop("forward")


def fields_of_its_own(layer: nn.Module) -> dict[str, Any]:
    """A layer's fields without those of a replaced forward."""
    return {name: value for name, value in vars(layer).items() if name not in REPLACED}


class _State(dict[str, Any]):
    """The fields that a shallow copy takes along. Pickled and copied deeply it is `whole`, all fields."""

    def __init__(self, whole: dict[str, Any]) -> None:
        # a forward that somebody put over ours stays
        ours = REPLACED if isinstance(whole.get("forward"), StandsForFunction) else {"__getstate__"}
        super().__init__((name, value) for name, value in whole.items() if name not in ours)
        self._whole = whole

    def __reduce__(self) -> Any:
        return dict, (), None, None, iter(self._whole.items())


def _state(layer: nn.Module) -> Any:
    kind: Any = type(layer)
    fields = kind.__getstate__(layer)
    return _State(fields) if type(fields) is dict else fields
