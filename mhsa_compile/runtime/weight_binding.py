"""Weights are packed by the functions of a compiled module that do so, one after the other: `compiler/weight_binding`
says how they share the work. What a function has read is let go of before the next one begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, takewhile
from typing import Any

BIND = "bind_weights"
"""The functions are this, an underscore and a number from 0 on; in artifacts of formats before 6 one has this name, and
takes all weights."""
_WEIGHT = "weight_"


def bound(machine: Any, weights: list[Any], bind: Callable[[Callable[..., Any], list[Any]], Any]) -> tuple[Any, ...]:
    """What `main` takes behind its inputs. `weights`, in the manifest's order, are taken out of their list once they
    were read; `bind` calls one of the machine's functions with some of them."""
    packed: list[Any] = []
    steps = [(machine[name], _weights_of(machine, name, len(weights))) for name in _names(machine)]
    last = {place: number for number, (_, places) in enumerate(steps) for place in places}
    for number, (function, places) in enumerate(steps):
        arguments = [weights[place] for place in places]
        for place in range(len(weights)):
            if last.get(place, 0) <= number:
                weights[place] = None
        packed += bind(function, arguments)
        del arguments
    return tuple(packed)


def _names(machine: Any) -> Iterator[str]:
    if machine.implements_function(BIND):
        return iter([BIND])
    return takewhile(machine.implements_function, (f"{BIND}_{number}" for number in count()))


def _weights_of(machine: Any, name: str, weights: int) -> list[int]:
    """The places of the weights that a function takes. Raises ValueError for what no compiler of ours wrote."""
    if name == BIND:
        return list(range(weights))
    names = [str(machine["get_function_param_name"](name, i)) for i in range(machine["get_function_arity"](name))]
    places = [int(name.removeprefix(_WEIGHT)) for name in names]
    if not all(0 <= place < weights for place in places):
        raise ValueError(f"{name} takes {', '.join(names)}, of {weights} weights")
    return places
