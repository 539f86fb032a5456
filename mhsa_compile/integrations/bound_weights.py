"""A layer's weights, bound to artifacts: for each kind of call when it is first met, and again once they changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from torch import Tensor

from mhsa_compile.runtime.compiled_attention import CompiledAttention

Kind = TypeVar("Kind", bound=Hashable)


class BoundWeights(Generic[Kind]):
    """What a layer's calls run on. Any number of threads may ask at once; one of them binds.

    weights   gives the layer's weights as they are now; None stands for one that it lacks
    bind      loads the artifact for a kind of call with these weights
    """

    def __init__(
        self, weights: Callable[[], Iterable[Tensor | None]], bind: Callable[[Kind], CompiledAttention]
    ) -> None:
        self._weights, self._bind = weights, bind
        self._lock = threading.Lock()
        self._bound: tuple[tuple[object, ...], dict[Kind, CompiledAttention]] = ((), {})

    def get(self, kind: Kind) -> CompiledAttention:
        """The artifact for this kind of call, with the weights as they are now."""
        state = tuple(map(_state, self._weights()))
        known, found = self._bound
        if known == state and kind in found:
            return found[kind]
        with self._lock:
            known, found = self._bound
            if known != state:
                found = {}
            if kind not in found:
                found = {**found, kind: self._bind(kind)}
                self._bound = (state, found)
            return found[kind]

    def forget(self) -> None:
        """Lets go of what is bound: the next call binds the weights again."""
        with self._lock:
            self._bound = ((), {})


def _state(weight: Tensor | None) -> tuple[object, ...]:
    """What changes when somebody writes into a weight, or puts another in its place."""
    if weight is None:
        return ()
    version = 0 if weight.is_inference() else weight._version
    return id(weight), weight.data_ptr(), version, weight.dtype
