"""What an operation has to do: FLOPs, 2 for a multiply-add, and bytes, each array that it touches once.

From what the manifest says of it and the shapes of its arrays. Of masks that a call brings, every pair counts; of
causality, windows and numbers of keys, only the pairs that are seen. Notation: B batch, L query length, S key length,
H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mhsa_compile.runtime.artifact.manifest import Manifest, OpReport
from mhsa_compile.spec.semantics import Semantics

_PICKS = re.compile(r"(^|_)(take|gather)")
"""In the name of a function of TVM's own: it reads rows of a table, and shapes do not say how many."""
_LINEAR = re.compile(r"(\d+) -> (\d+(?: \+ \d+)*)")
"""The note of a linear in a manifest, its in-features and the widths of its weights: 512 -> 512 + 512 + 512."""

_SOFTMAX = 5
"""FLOPs an element: a comparison, a subtraction, an exponential, an addition, a product."""


@dataclass(frozen=True)
class Work:
    """The FLOPs and bytes of an operation, each None where nobody counted it."""

    flops: int | None = None
    bytes: int | None = None


def work_of(
    manifest: Manifest, op: OpReport | None, symbol: str, arrays: Sequence[Any], counts: Sequence[Sequence[int]] = ()
) -> Work:
    """The work of one run of a kernel on these arrays (TVM's tensors), its inputs before its outputs; `counts` are what
    those of them hold that are lists of integers. `op` is None for code of TVM's own, which has its name, `symbol`."""
    if op is None and _PICKS.search(symbol):
        return Work()
    size = sum({(array.data_ptr(), array_bytes(array)): array_bytes(array) for array in arrays}.values())
    if op is not None and op.op == "linear":
        return Work(linear_flops(op, math.prod(arrays[0].shape[:-1])), size)
    if op is not None and op.op == "product":
        return Work(product_flops([tuple(array.shape) for array in arrays[:3]]), size)
    if op is not None and op.op == "softmax":
        return Work(_SOFTMAX * math.prod(arrays[0].shape), size)
    if op is not None and op.op == "scatter":
        return Work()  # of the cache it touches what it writes, which shapes do not say
    if op is None or op.op != "attention":
        return Work(None, size)
    meaning = next((one for one in manifest.semantics if one.op == op.name), None)
    return Work(None, size) if meaning is None else _attention(manifest, meaning, arrays, counts, size)


def linear_flops(op: OpReport, rows: int) -> int | None:
    """The FLOPs of a linear of so many rows; None where its note does not state its widths."""
    match = _LINEAR.match(op.note)
    if match is None:
        return None
    return 2 * rows * int(match[1]) * sum(map(int, match[2].split("+")))


def product_flops(shapes: Sequence[tuple[int, ...]]) -> int | None:
    """The FLOPs of a product by the shapes of A and B, whose axes may lie in any order, and of Y (batch, M, N). None
    where these leave open which axis is summed over."""
    left, right, (*batch, M, N) = shapes
    inner = _sum_sizes(left, M, batch) & _sum_sizes(right, N, batch)
    return 2 * math.prod(shapes[2]) * inner.pop() if len(inner) == 1 else None


def _sum_sizes(shape: tuple[int, ...], other: int, batch: Sequence[int]) -> set[int]:
    """The sizes that may be those of the axis of a factor that is summed over: `other` is that of its other one, and
    what remains are axes of the batch."""
    sizes = set()
    for axis, size in enumerate(shape):
        rest = Counter(shape[:axis] + shape[axis + 1 :])
        if rest[other] and not {one for one in (rest - Counter((other,)) - Counter(batch)) if one != 1}:
            sizes.add(size)
    return sizes


def attention_flops(manifest: Manifest, meaning: Semantics, L: int, S: int, keys: Sequence[int]) -> int | None:
    """The FLOPs of an attention with one batch entry for each of `keys`, the numbers of its keys. None for a constant
    mask that no spec states."""
    if meaning.needs_lengths:
        spec = manifest.spec
        return None if spec is None else len(keys) * spec.attention_flops(B=1, L=L, S=S)
    pairs = sum(meaning.visible_pairs(L, count) for count in keys)
    return 2 * meaning.num_heads * pairs * (meaning.head_dim + meaning.v_head_dim)


def _attention(
    manifest: Manifest, meaning: Semantics, arrays: Sequence[Any], counts: Sequence[Sequence[int]], size: int
) -> Work:
    """The work of an attention. The arrays: those of Q, K and V, which may lie in one; a mask and others; the output,
    perhaps a workspace."""
    query = tuple(arrays[0].shape)
    B, L = query[0], query[1 if len(query) == 3 else 2]
    source = _keys_shape(meaning, arrays, B, L)
    S = source[1 if len(source) == 3 else 2]
    keys = [S] * B
    if meaning.lengths is not None:
        if len(counts) != 1:
            return Work(None, None)
        keys = [min(max(count, 0), S) for count in counts[0]]
        unread = B * S - sum(keys)  # rows of K and V that are not read
        size -= unread * meaning.num_kv_heads * (meaning.head_dim + meaning.v_head_dim) * _itemsize(arrays[0])
    return Work(attention_flops(manifest, meaning, L, S, keys), size)


def _keys_shape(meaning: Semantics, arrays: Sequence[Any], B: int, L: int) -> tuple[int, ...]:
    """The shape of the array in which K lies."""
    shapes = [tuple(array.shape) for array in arrays if array.dtype == arrays[0].dtype and len(array.shape) in (3, 4)]
    heads = (B, meaning.num_heads, L, meaning.v_head_dim)
    outputs = [i for i, shape in enumerate(shapes) if shape == heads or (len(shape) == 3 and shape[:2] == (B, L))]
    before = shapes[: max(1, outputs[-1])] if outputs else shapes[:1]
    # A mask of floats is an array like the others.
    has_bias = meaning.mask is not None and meaning.mask.startswith(meaning.dtype)
    sources = before[: len(before) - has_bias]
    return sources[1] if len(sources) > 1 else sources[0]


def array_bytes(array: Any) -> int:
    elements: int = math.prod(array.shape)
    return elements * _itemsize(array)


def _itemsize(array: Any) -> int:
    return -(-int(array.dtype.bits) * int(array.dtype.lanes) // 8)
