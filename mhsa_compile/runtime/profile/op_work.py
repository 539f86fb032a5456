"""What an operation has to do: FLOPs, 2 for a multiply-add, and bytes, each array that it touches once.

From what the manifest says of it and the shapes of its arrays. Of masks that a call brings, every pair counts; of
causality, windows and numbers of keys, only the pairs that are seen. Notation: B batch, L query length, S key length,
H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mhsa_compile.runtime.artifact.manifest import Manifest, OpReport
from mhsa_compile.spec.semantics import Semantics

_LINEAR = re.compile(r"(\d+) -> (\d+(?: \+ \d+)*)")
"""The note of a linear in a manifest, its in-features and the widths of its weights: 512 -> 512 + 512 + 512."""


@dataclass(frozen=True)
class Work:
    """None where nobody counted it."""

    flops: int | None = None
    bytes: int | None = None


def work_of(manifest: Manifest, op: OpReport | None, arrays: Sequence[Any]) -> Work:
    """Of one run of a kernel on these arrays (TVM's tensors), its inputs before its outputs. `op` is None for code of
    TVM's own."""
    size = sum({(array.data_ptr(), _bytes(array)): _bytes(array) for array in arrays}.values())
    if op is not None and op.op == "linear":
        return Work(linear_flops(op, math.prod(arrays[0].shape[:-1])), size)
    if op is not None and op.op == "scatter":
        return Work()  # of the cache it touches what it writes, which shapes do not say
    if op is None or op.op != "attention":
        return Work(None, size)
    meaning = next((one for one in manifest.semantics if one.op == op.name), None)
    return Work(None, size) if meaning is None else _attention(manifest, meaning, arrays, size)


def linear_flops(op: OpReport, rows: int) -> int | None:
    """Of a linear of so many rows."""
    found = _LINEAR.match(op.note)
    if found is None:
        return None
    return 2 * rows * int(found[1]) * sum(map(int, found[2].split("+")))


def attention_flops(manifest: Manifest, meaning: Semantics, L: int, S: int, keys: Sequence[int]) -> int | None:
    """Of one batch entry for each of `keys`, the numbers of its keys. None for a constant mask that no spec states."""
    if meaning.static_mask is not None:
        stated = manifest.spec
        return None if stated is None else len(keys) * stated.attention_flops(B=1, L=L, S=S)
    pairs = sum(_visible_pairs(meaning, L, count) for count in keys)
    return 2 * meaning.num_heads * pairs * (meaning.head_dim + meaning.v_head_dim)


def _attention(manifest: Manifest, meaning: Semantics, arrays: Sequence[Any], size: int) -> Work:
    """The arrays: those of Q, K and V, which may lie in one, then a mask and others."""
    query, heads, groups = arrays[0].shape, meaning.num_heads, meaning.num_kv_heads
    together = heads * meaning.head_dim + groups * (meaning.head_dim + meaning.v_head_dim)
    if len(query) == 3:
        B, L = query[:2]
    else:
        B, L = query[0], query[2]
    in_one = len(query) == 3 and query[2] >= together
    source = query if in_one or len(arrays) < 2 else arrays[1].shape
    S = source[1] if len(source) == 3 else source[2]
    keys = [S] * B
    if meaning.lengths is not None:
        counts = [array for array in arrays if str(array.dtype) == "int64" and len(array.shape) == 1]
        if len(counts) != 1:
            return Work(None, None)
        keys = np.clip(np.from_dlpack(counts[0]), 0, S).tolist()
        hidden = B * S - sum(keys)  # rows of K and V that are not read
        size -= hidden * groups * (meaning.head_dim + meaning.v_head_dim) * _itemsize(arrays[0])
    return Work(attention_flops(manifest, meaning, L, S, keys), size)


def _visible_pairs(meaning: Semantics, L: int, S: int) -> int:
    """Pairs of a query and a key that the band leaves."""
    if meaning.band is None:
        return L * S
    left, right = meaning.band.left, meaning.band.right
    place = np.arange(L) + (S - L if meaning.band.alignment == "bottom_right" else 0)
    first = np.zeros(L, np.int64) if left is None else np.clip(place - left, 0, S)
    last = np.full(L, S) if right is None else np.clip(place + right + 1, 0, S)
    return int(np.maximum(last - first, 0).sum())


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * _itemsize(array)


def _itemsize(array: Any) -> int:
    return -(-int(array.dtype.bits) * int(array.dtype.lanes) // 8)
