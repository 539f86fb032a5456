"""A layer's weights, bound to artifacts: for each kind of call when it is first met, and again once they changed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from mhsa_compile.errors import OutputError
from mhsa_compile.integrations.weight_state import WeightStates
from mhsa_compile.runtime.compiled_attention import CompiledAttention

Kind = TypeVar("Kind", bound=Hashable)


def no_room(error: OutputError) -> str:
    """Why PyTorch computes a call whose artifact no file could hold."""
    return f"no room for what is compiled ({error.argument}: {error.got})"


class BoundWeights(Generic[Kind]):
    """What a layer's calls run on. Any number of threads may ask at once; one of them binds.

    weights   gives the layer's weights as they are now; None stands for one that it lacks
    why_not   says why an artifact cannot have them; "" if it can. It is asked where they are new
    bind      loads the artifact for a kind of call with these weights
    """

    def __init__(
        self,
        weights: Callable[[], Iterable[Tensor | None]],
        why_not: Callable[[], str],
        bind: Callable[[Kind], CompiledAttention],
    ) -> None:
        self._weights, self._why_not, self._bind = weights, why_not, bind
        self._lock = threading.Lock()
        self._bound: tuple[WeightStates, dict[Kind, CompiledAttention | str]] = (WeightStates(), {})

    def get(self, kind: Kind) -> CompiledAttention | str:
        """The artifact for this kind of call, with the weights as they are now; or why none can have them.

        Where no file can grow, which compiling and loading need, a warning says so, and so it stays until the weights
        change or are forgotten: to try with each call would cost seconds.
        """
        weights = tuple(self._weights())
        states, artifacts = self._bound
        if kind in artifacts and states.hold(weights):
            return artifacts[kind]
        # modules draw the weights that they begin with, and a caller's torch.device() may be another
        with self._lock, torch.random.fork_rng(devices=()), torch.device("cpu"):
            states, artifacts = self._bound
            if not states.hold(weights):
                if reason := self._why_not():
                    return reason
                states, artifacts = WeightStates(weights), {}
            if kind not in artifacts:
                artifacts = {**artifacts, kind: self._bound_or_why(kind)}
                self._bound = (states, artifacts)
            return artifacts[kind]

    def _bound_or_why(self, kind: Kind) -> CompiledAttention | str:
        try:
            return self._bind(kind)
        except OutputError as error:
            why = no_room(error)
            rest = "PyTorch computes such calls until the weights change or report.refresh() is called"
            warnings.warn(f"{why}; {rest}. {error.next_step}", stacklevel=5)
            return why

    def forget(self) -> None:
        """Lets go of what is bound: the next call binds the weights again."""
        with self._lock:
            self._bound = (WeightStates(), {})
