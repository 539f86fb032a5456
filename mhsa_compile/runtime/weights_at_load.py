"""The weights that an artifact is loaded with: its own, or those that are given."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from mhsa_compile.errors import InputError
from mhsa_compile.files import input_files
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.runtime.artifact.manifest import Manifest
from mhsa_compile.runtime.artifact.tensor_file import read_tensors
from mhsa_compile.runtime.call_arguments import Argument
from mhsa_compile.spec.position_encoding import TABLES
from mhsa_compile.spec.score_functions import CAPTURED

Weights = Mapping[str, Any] | str | os.PathLike[str]


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
    return name in TABLES or name.startswith(CAPTURED)


def weight_arrays(
    manifest: Manifest, stored: Mapping[str, Any], weights: Weights | None, make: Callable[..., Argument]
) -> list[Any]:
    """The weights in the manifest's order, checked. `stored` are those of the artifact that are needed. Raises
    InputError."""
    found = stored
    if weights is not None:
        found = {**stored, **(weights if isinstance(weights, Mapping) else _read(weights))}
    names = {info.name for info in manifest.weights}
    if missing := sorted(names - found.keys()):
        raise InputError(
            "weights", f"an array for each of {', '.join(sorted(names))}", f"none for {', '.join(missing)}"
        )
    if extra := sorted(map(str, found.keys() - names)):
        raise InputError("weights", f"only {', '.join(sorted(names)) or 'none'}", f"also {', '.join(extra)}")
    # On a cache line, also where the manifest lists no code of TVM's: what prepares weights to be packed is that, too.
    return [make(info, "weight", {}, True).ready(found[info.name], {}) for info in manifest.weights]


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    expected = "a .safetensors file"
    if not isinstance(path, str | os.PathLike):
        raise InputError("weights", f"arrays by name, or {expected}", type(path).__name__)
    with (
        input_files.opened(path, InputError, "weights", expected) as file,
        reading(InputError, "weights", f"{expected}, {str(path)!r}"),
    ):
        return read_tensors(file, os.fstat(file.fileno()).st_size)
