"""The weights that an artifact is loaded with, its own or those that are given, and how they are packed.

They are packed by the functions of a compiled module that do so, one after the other: `compiler/weight_binding`
says how they share the work. What a function has read is let go of before the next one begins."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import count, takewhile
from typing import Any

from mhsa_compile.errors import InputError
from mhsa_compile.files import input_files
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.runtime.artifact.manifest import WEIGHTS, Manifest
from mhsa_compile.runtime.artifact.tensor_file import read_tensors
from mhsa_compile.runtime.call_arguments import Argument
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.field_notes import tables_of

BIND = "bind_weights"
"""The functions are this, an underscore and a number from 0 on; in artifacts of formats before 6 one has this name, and
takes all weights."""
WEIGHT = "weight_"


Weights = Mapping[str, Any] | str | os.PathLike[str]


class _Results:
    """What a function made of weights: nobody writes into it, and it is gone with the last who loaded an artifact that
    has it."""

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays


class SharedWeights:
    """The packed weights that an artifact has in common with others that are loaded: those of the same file of weights,
    made by functions that do the same, as of a prompt's artifact and a step's. To be kept as long as they are used.

    `weights` are those that it is loaded with, in place of its own: these are their owner's, and never shared.
    """

    def __init__(self, manifest: Manifest, weights: Weights | None) -> None:
        self._keys: list[_Key] = []
        if weights is None and WEIGHTS in manifest.files:
            file, names = manifest.files[WEIGHTS], [info.name for info in manifest.weights]
            self._keys = [(file, tuple(names[i] for i in one.weights), one.digest) for one in manifest.packing]
        pairs = ((number, _results().get(key)) for number, key in enumerate(self._keys))
        self._kept = {number: results for number, results in pairs if results is not None}
        every = {name for _, names, _ in self._keys for name in names}
        missing = (names for number, (_, names, _) in enumerate(self._keys) if number not in self._kept)
        self._unread = every.difference(*missing)

    def needs(self, name: str) -> bool:
        """Whether a weight is to be read: one that only makes what is there already is not."""
        return name not in self._unread

    def get(self, number: int) -> list[Any] | None:
        """What function `number` made for another artifact, if it is still there."""
        results = self._kept.get(number)
        return None if results is None else results.arrays

    def put(self, number: int, arrays: list[Any]) -> None:
        """Lets others have what function `number` made."""
        if number < len(self._keys):
            self._kept[number] = _results()[self._keys[number]] = _Results(arrays)


_Key = tuple[str, tuple[str, ...], str]
"""The digest of a file of weights, names of some of them, and the digest of what a function makes of these."""


@functools.cache
def _results() -> weakref.WeakValueDictionary[_Key, _Results]:
    """What artifacts that this process has loaded have packed, as long as one of them is used."""
    return weakref.WeakValueDictionary()


def bound(
    machine: Any,
    weights: list[Any],
    bind: Callable[[Callable[..., Any], list[Any]], Any],
    shared: SharedWeights | None = None,
) -> tuple[Any, ...]:
    """What `main` takes behind its inputs. `weights`, in the manifest's order, are taken out of their list once they
    were read; `bind` calls one of the machine's functions with some of them, but for what `shared` has."""
    packed: list[Any] = []
    steps = [(machine[name], _weights_of(machine, name, len(weights))) for name in _names(machine)]
    last = {place: number for number, (_, places) in enumerate(steps) for place in places}
    for number, (function, places) in enumerate(steps):
        arguments = [weights[place] for place in places]
        for place in range(len(weights)):
            if last.get(place, 0) <= number:
                weights[place] = None
        results = None if shared is None else shared.get(number)
        if results is None:
            results = list(bind(function, arguments))
            if shared is not None:
                shared.put(number, results)
        packed += results
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
    places = [int(name.removeprefix(WEIGHT)) for name in names]
    if not all(0 <= place < weights for place in places):
        raise ValueError(f"{name} takes {', '.join(names)}, of {weights} weights")
    return places


def own_weights(manifest: Manifest, weights: Weights | None) -> Callable[[str], bool] | None:
    """Which of the weights that an artifact stores are needed: all of them, or those that nobody has to bring; None
    where none are."""
    names = {info.name for info in manifest.weights}
    if weights is None:
        return (lambda name: True) if names else None
    return is_made if any(map(is_made, names)) else None


def is_made(name: str) -> bool:
    """Whether a weight is a table that follows from the spec, or what a function of the spec captured: neither is among
    a module's parameters."""
    return name.startswith(tables_of(AttentionSpec))


def weight_arrays(
    manifest: Manifest,
    own: Mapping[str, Any],
    weights: Weights | None,
    make: Callable[..., Argument],
    needs: Callable[[str], bool] = lambda name: True,
) -> list[Any]:
    """The weights in the manifest's order, checked, None for those that nobody `needs`. `own` are those of the artifact
    that are needed. Raises InputError."""
    arrays = own
    if weights is not None:
        arrays = {**own, **(weights if isinstance(weights, Mapping) else _read(weights))}
    names = {info.name for info in manifest.weights}
    if missing := sorted(filter(needs, names - arrays.keys())):
        raise InputError(
            "weights", f"an array for each of {', '.join(sorted(names))}", f"none for {', '.join(missing)}"
        )
    if extra := sorted(map(str, arrays.keys() - names)):
        raise InputError("weights", f"only {', '.join(sorted(names)) or 'none'}", f"also {', '.join(extra)}")
    # On a cache line, also where the manifest lists no code of TVM's: what prepares weights to be packed is that, too.
    return [
        make(info, "weight", {}, True).ready(arrays[info.name], {}) if needs(info.name) else None
        for info in manifest.weights
    ]


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    expected = "a .safetensors file"
    if not isinstance(path, str | os.PathLike):
        raise InputError("weights", f"arrays by name, or {expected}", type(path).__name__)
    with (
        input_files.open_file(path, InputError, "weights", expected) as file,
        reading(InputError, "weights", f"{expected}, {str(path)!r}"),
    ):
        return read_tensors(file, os.fstat(file.fileno()).st_size)
