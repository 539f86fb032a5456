"""Inputs for `fuzz.files_cpp`: artifacts, safetensors, other files and calls, with something wrong in most of them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from safetensors.numpy import save, save_file

from mhsa_compile.errors import InputError
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.manifest import MANIFEST, MODULE, WEIGHTS
from mhsa_compile.runtime.call_arguments import Signature

Tree = Any
_DEEP = "a hundred thousand brackets"
_VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, 2**31, 2**57, 2**61, 2**63 - 1, -(2**63), 2**64, 1e300, -0.5, True, False, None),
    *(
        "",
        "B",
        "L",
        "P + S",
        "B * L // 0",
        "((((B",
        "c/d",
        "x" * 1000,
        "\0",
        "\x1b[31m",
        "\ud83d\ude00",
        "../x",
        "0" * 64,
    ),
    *(
        [],
        {},
        [[]],
        [1],
        [2**57, 1, 32],
        [2**62, 2, 4],
        [0, 2**62, 8],
        {"": 0},
        {"x": "y"},
        _DEEP,
        "F32",
        "BOOL",
        "int64",
    ),
)
_SIZES = (0, 1, 2, 3, 5, 7, 11)


@dataclass(frozen=True)
class Case:
    """The words of a command line, and how it must end, where that is known. `note` helps to find it again."""

    kind: str
    words: tuple[str, ...]
    note: str = ""
    must: Literal["accept", "refuse", ""] = ""


def draw(rng: random.Random, artifact: Artifact, folder: Path) -> Case:
    """One case; its files are written into an empty folder."""
    return rng.choice(KINDS)(rng, artifact, folder)


def _manifest(rng: random.Random, artifact: Artifact, folder: Path) -> Case:
    raw = (artifact.path / MANIFEST).read_bytes()
    changed = mutated_bytes(rng, raw)
    return _changed(artifact, folder, "manifest", {MANIFEST: changed}, changed != raw)


def _resealed(rng: random.Random, artifact: Artifact, folder: Path) -> Case:
    tree = json.loads((artifact.path / MANIFEST).read_bytes())
    note = "; ".join(mutate_tree(rng, tree) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    return _changed(artifact, folder, "resealed manifest", {MANIFEST: resealed(tree)}, note=note)


def _module(rng: random.Random, artifact: Artifact, folder: Path) -> Case:
    raw = bytearray((artifact.path / MODULE).read_bytes())
    for _ in range(rng.choice((1, 1, 2, 100))):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    whole = (artifact.path / MODULE).read_bytes()
    changed = bytes(raw) if rng.random() < 0.8 else whole[: rng.randrange(len(whole))]
    return _changed(artifact, folder, "module.so", {MODULE: changed}, changed != whole)


def _weights(rng: random.Random, artifact: Artifact, folder: Path) -> Case:
    raw = (artifact.path / WEIGHTS).read_bytes()
    changed = mutated_safetensors(rng, raw)
    if rng.random() < 0.2:
        return _changed(artifact, folder, "weights", {WEIGHTS: changed}, changed != raw)
    (folder / "w").write_bytes(changed)
    return Case("weights", (*_call(artifact.path), "--weights", str(folder / "w")))


def _inputs(rng: random.Random, artifact: Artifact, folder: Path) -> Case:
    tensors = _tensors(rng, artifact, odd=0.1)
    (folder / "in").write_bytes(mutated_safetensors(rng, save(tensors)))
    return Case("safetensors", _call(artifact.path, folder / "in"))


def _calls(rng: random.Random, artifact: Artifact, folder: Path) -> Case:
    """Sound files whose tensors may not fit: what Python refuses must be refused, and what it takes, taken."""
    tensors = _tensors(rng, artifact, odd=0.15)
    save_file(tensors, folder / "in")
    note = ", ".join(f"{name} {array.dtype}{array.shape}" for name, array in tensors.items())
    manifest = artifact.manifest
    signature = Signature(
        manifest.inputs,
        manifest.outputs,
        aligned=manifest.wants_cache_lines,
        in_place=manifest.in_place,
        limits=manifest.limits,
    )
    try:
        signature.arrays((), dict(tensors))
    except InputError:
        must: Literal["accept", "refuse", ""] = "refuse"
    else:
        must = "" if manifest.in_place else "accept"  # compiled code itself refuses what overruns a cache
    return Case("call", _call(artifact.path, folder / "in"), note, must)


def _other(rng: random.Random, artifact: Artifact, folder: Path) -> Case:
    """Files of other kinds, and what is no file, in the place of any file that the program reads or writes."""
    path = folder / "other"
    name, make = rng.choice(list(_OTHERS.items()))
    made = make(rng, path) or path
    option = rng.choice(("--inputs", "--weights", "--artifact", "--outputs", MANIFEST, MODULE, WEIGHTS))
    if not option.startswith("--"):
        return _changed(artifact, folder / "artifact", "other file", {option: made}, True, f"{name} as {option}")
    words = tuple(word for word in _call(artifact.path) if word != str(artifact.path) or option != "--artifact")
    words = tuple(word for word in words if word != "--artifact" or option != "--artifact")
    must: Literal["refuse", ""] = "" if option == "--outputs" else "refuse"
    return Case("other file", (*words, option, str(made)), f"{name} as {option}", must)


def _options(rng: random.Random, artifact: Artifact, folder: Path) -> Case:
    words = list(_call(artifact.path))
    for _ in range(rng.randrange(1, 4)):
        word = rng.choice(("--dim", "--threads", "--inputs", "--help", "--x", "", "--dim", "--outputs"))
        dim = (
            f"{rng.choice(('B', 'L', 'S', 'C', 'T', 'mask_B', '', '8'))}={rng.choice((0, 1, 5, -1, 10**9, 10**30, ''))}"
        )
        value = rng.choice((dim, dim, dim, "0", "-1", "99999", "1e3", "x" * 5000, "\x1b]0;x", "=", "L"))
        words += [word, value] if rng.random() < 0.9 else [word]
    return Case("options", tuple(words), " ".join(words)[:200])


KINDS: tuple[Callable[[random.Random, Artifact, Path], Case], ...] = (
    *(_manifest, _resealed, _resealed, _module, _weights, _inputs, _inputs, _calls, _other, _options),
)


def _fifo(rng: random.Random, path: Path) -> None:
    os.mkfifo(path)


def _sparse(rng: random.Random, path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(rng.choice((2**20, 2**40)))


def _numpy(rng: random.Random, path: Path) -> None:
    array = np.ones((2, 3, 24), np.float32)
    with path.open("wb") as file:
        rng.choice((np.save, np.savez))(file, array)
    path.write_bytes(mutated_bytes(rng, path.read_bytes()))


_OTHERS: dict[str, Callable[[random.Random, Path], Path | None]] = {
    "a FIFO": _fifo,
    "a folder": lambda rng, path: path.mkdir(),
    "nothing": lambda rng, path: None,
    "an empty file": lambda rng, path: path.touch(),
    "a device": lambda rng, path: Path(rng.choice(("/dev/zero", "/dev/null", "/dev/full", "/dev/tty"))),
    "a file of /proc": lambda rng, path: Path(rng.choice(("/proc/self/mem", "/proc/self/maps", "/proc/self/environ"))),
    "a link to itself": lambda rng, path: path.symlink_to(path),
    "holes": _sparse,
    "NumPy's": _numpy,
    "noise": lambda rng, path: path.write_bytes(rng.randbytes(rng.randrange(1, 2000))) and None,
    "brackets": lambda rng, path: path.write_bytes(struct.pack("<Q", 10**5) + b"[" * 10**5) and None,
}


def mutated_bytes(rng: random.Random, raw: bytes) -> bytes:
    """Some bits flipped, something cut, doubled or put in."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
        end = min(end, at + rng.choice((1, 4, 64, len(data))))
        way = rng.randrange(5)
        if way == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif way == 1:
            del data[at:end]
        elif way == 2:
            data[at:at] = data[at:end][:4096]
        elif way == 3:
            data[at:at] = rng.choice(
                (b"[" * 10**5, b'{"a":' * 10**5, b'"', b"\\", b"\xff", b"\0", b",", b"-", b"1e999")
            )
        else:
            del data[at:]
    return bytes(data)


def mutated_safetensors(rng: random.Random, raw: bytes) -> bytes:
    """A damaged file of tensors: its header is changed as a tree, or its length, or any of its bytes."""
    if rng.random() < 0.3:
        return mutated_bytes(rng, raw)
    if rng.random() < 0.15:
        return struct.pack("<Q", rng.choice((0, 1, 2**31, 2**63, 2**64 - 1, 2**64 - 8, len(raw)))) + raw[8:]
    (size,) = struct.unpack("<Q", raw[:8])
    tree = json.loads(raw[8 : 8 + size])
    for _ in range(rng.choice((1, 1, 2))):
        mutate_tree(rng, tree)
    header = encoded(tree)
    return struct.pack("<Q", len(header)) + header + raw[8 + size :]


def mutate_tree(rng: random.Random, tree: Tree) -> str:
    """Changes one place of a JSON object, and says which."""
    spots = [(node, key) for node in _nodes(tree) for key in (node if isinstance(node, dict) else range(len(node)))]
    if not spots:
        return "nothing"
    node, key = rng.choice(spots)
    way = rng.randrange(5)
    if way == 0:
        del node[key]
        return f"{key} left out"
    if way == 1:
        other, its = rng.choice(spots)
        node[key] = json.loads(json.dumps(other[its]))
        return f"{key} is {str(node[key])[:60]}, that of {its}"
    if way == 2 and isinstance(node, dict):
        name = str(rng.choice(("x", "", "\0", "\x1b[2J", *(str(word) for _, word in spots))))
        node[name] = node.pop(key)
        return f"{key} is called {name!r}"
    if way == 3 and isinstance(node[key], int):
        node[key] += rng.choice((-1, 1, 8))
        return f"{key} is {node[key]}"
    node[key] = rng.choice(_VALUES)
    return f"{key} is {str(node[key])[:60]!r}"


def _nodes(tree: Tree) -> list[Tree]:
    below = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    own = [tree] if isinstance(tree, dict | list) else []
    return own + [node for child in below for node in _nodes(child)]


def encoded(tree: Tree) -> bytes:
    return json.dumps(tree).replace(f'"{_DEEP}"', "[" * 10**5).encode()


def resealed(tree: Tree) -> bytes:
    """A manifest with a hash that fits."""
    digest = tree.get("sha256")
    if not isinstance(digest, str) or len(digest) != 64:
        return encoded(tree)
    tree["sha256"] = "0" * 64
    tree["sha256"] = hashlib.sha256(encoded(tree)).hexdigest()
    return encoded(tree)


def _changed(
    artifact: Artifact,
    folder: Path,
    kind: str,
    files: dict[str, bytes | Path],
    differs: bool = False,
    note: str = "",
) -> Case:
    """A copy of the artifact by links, with other files in the places of some: bytes, or what lies at a path."""
    folder.mkdir(exist_ok=True)
    for name in (MANIFEST, MODULE, WEIGHTS):
        new = files.get(name)
        if isinstance(new, bytes):
            (folder / name).write_bytes(new)
        else:
            (folder / name).symlink_to(artifact.path / name if new is None else new)
    return Case(kind, _call(folder), note, "refuse" if differs else "")


def _call(artifact: Path, inputs: Path | None = None) -> tuple[str, ...]:
    given = () if inputs is None else ("--inputs", str(inputs))
    return ("--artifact", str(artifact), "--repeat", "1", "--threads", "2", *given)


def _tensors(rng: random.Random, artifact: Artifact, odd: float) -> dict[str, np.ndarray[Any, Any]]:
    """An array for each input; a size, the rank or the dtype of one may not fit."""
    sizes: dict[str, int] = {}
    found = {}
    for info in msgspec.to_builtins(artifact.manifest.inputs):
        full = info.get("broadcast") or info["dims"]
        shape = [dim if isinstance(dim, int) else sizes.setdefault(dim, rng.choice(_SIZES[1:])) for dim in full]
        if info.get("broadcast"):
            shape = [size if rng.random() < 0.6 else 1 for size in shape][rng.choice((0, 0, 0, 1)) :]
        if shape and rng.random() < odd:
            shape[rng.randrange(len(shape))] = rng.choice(_SIZES)
        if rng.random() < odd / 4:
            shape = shape[1:]
        dtype = rng.choice(("float32", "float64", "int64", "bool")) if rng.random() < odd / 2 else info["dtype"]
        found[info["name"]] = np.asarray(np.random.default_rng(rng.randrange(2**32)).random(shape) * 3).astype(dtype)
    return found
