"""The weights that an artifact is loaded with: its own, or those that are given."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from safetensors.numpy import load_file

from mhsa_compile.errors import InputError
from mhsa_compile.files import input_files
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.runtime.artifact.manifest import WEIGHTS, Manifest
from mhsa_compile.runtime.artifact.stored_weights import parsed
from mhsa_compile.runtime.call_arguments import Argument
from mhsa_compile.spec.position_encoding import TABLES

Weights = Mapping[str, Any] | str | os.PathLike[str]


def reads_own(manifest: Manifest, weights: Weights | None) -> bool:
    """Whether the weights that an artifact stores are needed: all of them, or the tables, which nobody has to bring
    since they follow from the spec."""
    names = {info.name for info in manifest.weights}
    return bool(names if weights is None else names.intersection(TABLES))


def weight_arrays(
    manifest: Manifest, stored: bytes | None, weights: Weights | None, make: Callable[..., Argument]
) -> list[Any]:
    """In the manifest's order, checked. `stored` is the artifact's own file, where it is needed. Raises InputError."""
    found: Mapping[str, Any] = {}
    if stored is not None:
        with reading(InputError, "weights", f"a .safetensors file, {WEIGHTS!r}"):
            found = parsed(stored)
    if weights is not None:
        tables = {name: array for name, array in found.items() if name in TABLES}
        found = {**tables, **(weights if isinstance(weights, Mapping) else _read(weights))}
    names = {info.name for info in manifest.weights}
    if missing := sorted(names - found.keys()):
        raise InputError(
            "weights", f"an array for each of {', '.join(sorted(names))}", f"none for {', '.join(missing)}"
        )
    if extra := sorted(map(str, found.keys() - names)):
        raise InputError("weights", f"only {', '.join(sorted(names)) or 'none'}", f"also {', '.join(extra)}")
    return [make(info, "weight", {}, manifest.has_fallbacks).ready(found[info.name], {}) for info in manifest.weights]


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    expected = "a .safetensors file"
    if not isinstance(path, str | os.PathLike):
        raise InputError("weights", f"arrays by name, or {expected}", type(path).__name__)
    with (
        input_files.opened(path, InputError, "weights", expected) as file,
        reading(InputError, "weights", f"{expected}, {str(path)!r}"),
    ):
        found: Mapping[str, Any] = load_file(f"/proc/self/fd/{file.fileno()}")
        return found
