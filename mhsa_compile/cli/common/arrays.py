"""Arrays for a call: read from .npy files, drawn at random, written as one .npy or .npz."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from mhsa_compile.errors import InputError
from mhsa_compile.files import input_files
from mhsa_compile.files.atomic_write import atomic_file
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.files.room import require_memory
from mhsa_compile.verification.random_inputs import random_array

if TYPE_CHECKING:
    from mhsa_compile.runtime.artifact.manifest import TensorInfo

_DRAWN_BYTES = 8  # of an element that NumPy draws, before it gets its dtype; once more for what comes of it
_MAGIC, _ARCHIVE = b"\x93NUMPY", b"PK"  # what an .npy and an .npz begin with
_ROWS = 2
"""Whole numbers may be indices: every table has as many rows, that of BERT's token types no more."""
_DEFAULT_SIZES = {"B": 1, "L": 128}  # S is L unless given, C twice L


def read(assignments: Sequence[str]) -> dict[str, np.ndarray]:
    """Reads the arrays that arguments NAME=FILE.npy name. Raises InputError."""
    arrays: dict[str, np.ndarray] = {}
    for name, path in map(_split, assignments):
        if name in arrays:
            raise InputError(f"--input {name}", "one file for an input", "two", "Leave one of them out.")
        arrays[name] = _load(name, path)
    return arrays


def complete(
    arrays: Mapping[str, np.ndarray], inputs: Iterable[TensorInfo], dims: Mapping[str, int], seed: int
) -> dict[str, np.ndarray]:
    """`arrays`, and random ones for what is missing there; dims are those of the arrays, else those of `dims`, else
    defaults."""
    inputs = tuple(inputs)
    sizes: dict[str, int] = {**dims}
    for info in inputs:
        if info.name in arrays:
            sizes |= {str(dim): size for dim, size in zip(info.dims, arrays[info.name].shape, strict=False)}
    rng = np.random.default_rng(seed)
    arrays = {**arrays, **_as_bfloat16(arrays, inputs)}
    missing = [info for info in inputs if info.name not in arrays]
    shapes = [tuple(_size(info.name, dim, sizes) for dim in info.dims) for info in missing]
    require_memory("inputs", sum(2 * _DRAWN_BYTES * math.prod(shape) for shape in shapes))
    random_arrays = {
        info.name: random_array(rng, info.name, info.dtype, shape, _ROWS)
        for info, shape in zip(missing, shapes, strict=True)
    }
    return {**arrays, **random_arrays}


def _as_bfloat16(arrays: Mapping[str, np.ndarray], inputs: Iterable[TensorInfo]) -> dict[str, np.ndarray]:
    """float32 arrays for bfloat16 inputs: an .npy file has no word for bfloat16."""
    return {
        info.name: arrays[info.name].astype(ml_dtypes.bfloat16)
        for info in inputs
        if info.dtype == "bfloat16" and info.name in arrays and arrays[info.name].dtype == np.float32
    }


def check_suffix(path: Path, names: Sequence[str]) -> None:
    """Raises InputError unless arrays of these names can be in a file that is named so."""
    if path.suffix not in (".npy", ".npz"):
        raise InputError("--output", "a file named .npy, of one output, or .npz", repr(str(path)))
    if path.suffix == ".npy" and len(names) > 1:
        hint = f"-o {path.with_suffix('.npz')} has them all, each by its name."
        raise InputError("--output", "a file named .npz for several outputs", f"{path} for {', '.join(names)}", hint)


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """One uncompressed .npz, or the .npy of the one array if the file is named so, whole or not at all; bfloat16
    becomes float32, exactly. Raises OutputError."""
    arrays = {n: a.astype(np.float32) if a.dtype == ml_dtypes.bfloat16 else a for n, a in arrays.items()}
    with atomic_file(path, "--output") as file:
        if path.suffix == ".npy":
            (array,) = arrays.values()
            np.save(file, array)
        else:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # its stub mistakes the names for allow_pickle


def _split(assignment: str) -> tuple[str, Path]:
    name, separator, path = assignment.partition("=")
    if not (name and separator and path):
        raise InputError("--input", "NAME=FILE.npy", repr(assignment))
    return name, Path(path)


def _load(name: str, path: Path) -> np.ndarray:
    argument, expected = f"--input {name}", "an .npy file"
    with input_files.open_file(path, InputError, argument, expected) as file:
        beginning = file.read(len(_MAGIC))
        if beginning.startswith(_ARCHIVE):
            raise InputError(argument, "one array in an .npy file", f"{path}, an archive of several")
        if beginning != _MAGIC:
            raise InputError(argument, expected, f"{path}, a file of another kind", "numpy.save writes one.")
        file.seek(0)
        with reading(InputError, argument, f"{expected}, {path}"):
            try:
                return np.asarray(np.load(file, allow_pickle=False))
            except ValueError as error:
                got = f"{path}, with Python objects in it, or cut off"
                raise InputError(argument, "an array of numbers", got, "numpy.save of numbers writes one.") from error


def _size(name: str, dim: int | str, sizes: Mapping[str, int]) -> int:
    """The size of a dim: fixed, given, a mask's axis ("mask_L" is L or 1), or the default."""
    if isinstance(dim, int):
        return dim
    symbol = dim.removeprefix("mask_")
    size = sizes.get(dim) or sizes.get(symbol) or _DEFAULT_SIZES.get(symbol)
    if size is None and symbol == "C":
        size = 2 * sizes.get("L", _DEFAULT_SIZES["L"])
    if size is None and symbol == "S":
        size = sizes.get("L", _DEFAULT_SIZES["L"])
    if size is None and dim.startswith("mask_"):
        size = 1
    if size is None:
        raise InputError(
            name,
            f"a size for its dim {dim!r}",
            "none",
            f"State it: --dim {dim}=N; or give the array: --input {name}={name}.npy.",
        )
    return size
