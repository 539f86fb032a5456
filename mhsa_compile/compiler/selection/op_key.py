"""What makes two operations the same to a tuner: the key under which records are kept.

A key says everything that the time of a kernel depends on, and no names. Lengths are in buckets, so that neighbours
share a record; what a model fixes (heads, widths) is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from mhsa_compile.kernels.interface.ops import AttentionOp, Dim, HeadLayout, LinearOp, Op
from mhsa_compile.kernels.scores.order import STEPS

ANY = "any"
"""The bucket of a length that is symbolic: every size has to be served."""
APART, FARTHEST = 4, 2048
"""How many times shorter and longer the lengths are at which a record for every length is tried as well; no longer ones
than the second number, which would take longer than the search."""
Bucket = int | str


def bucket(dim: Dim) -> Bucket:
    """The next power of two, from 1 on: 129 to 256 is one bucket; "any" where the dim is symbolic."""
    return ANY if isinstance(dim, str) else 1 << max(0, dim - 1).bit_length()


def key_of(op: Op) -> dict[str, Any] | None:
    """The key of an operation, or None where its kernels have nothing to tune."""
    tunable = _TUNABLE.get(type(op))
    # Nobody draws what functions capture, nor keys and values in another dtype.
    undrawn = isinstance(op, AttentionOp) and (op.any_step("function") or op.kv_dtype is not None)
    return None if tunable is None or undrawn else tunable.key(op)


def symbols(op: Op) -> frozenset[str]:
    """The symbolic dims of an operation that has a key."""
    tunable = _TUNABLE.get(type(op))
    return frozenset() if tunable is None else frozenset(_symbolic(tunable.dims(op)))


def measured_at(op: Op, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of an operation that has a key, as its records state them. A symbol without one raises KeyError."""
    return _TUNABLE[type(op)].measured_at(op, sizes)


def elsewhere(op: Op, sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Sizes of the symbols, shorter and longer than these, for which a record of this operation would be used as well:
    none where its lengths are fixed."""
    lengths = _TUNABLE[type(op)].lengths(op)
    others = {dim: sizes[dim] // APART for dim in lengths}, {dim: sizes[dim] * APART for dim in lengths}
    return [{**sizes, **own} for own in others if own and min(own.values()) > 0 and max(own.values()) <= FARTHEST]


def size_in(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The size of a dim; a symbol that is not among `sizes` raises KeyError."""
    return dim if isinstance(dim, int) else sizes[dim]


@dataclass(frozen=True)
class _Tunable:
    """What a tuner asks of the operations of one type.

    dims         those whose symbols need a size
    lengths      the symbols that a record for every length is for
    measured_at  its sizes at the sizes of the symbols, by the names that records give them
    """

    key: Callable[[Any], dict[str, Any]]
    dims: Callable[[Any], tuple[Dim, ...]]
    lengths: Callable[[Any], list[str]]
    measured_at: Callable[[Any, Mapping[str, int]], dict[str, int]]


def _symbolic(dims: tuple[Dim, ...]) -> list[str]:
    return [dim for dim in dims if isinstance(dim, str)]


def _linear_key(op: LinearOp) -> dict[str, Any]:
    return {
        "rows": ANY if op.row_count is None else bucket(op.row_count),
        "in_features": op.in_features,
        "out_features": op.out_features,
        "padding": op.padding,
        "dtype": op.dtype,
        "int8_weights": op.int8_weights,
        **_products_key(op),
    }


def _attention_key(op: AttentionOp) -> dict[str, Any]:
    places = {"query": op.query, "key": op.key, "value": op.value, "output": op.output}
    return {
        "batch": bucket(op.batch),
        "q_length": bucket(op.q_length),
        "kv_length": bucket(op.kv_length),
        "num_heads": op.num_heads,
        "num_kv_heads": op.num_kv_heads,
        "head_dim": op.head_dim,
        "v_head_dim": op.v_head_dim,
        "dtype": op.dtype,
        **{word: value for kind in STEPS for word, value in kind.absent_key.items()},
        **{word: value for step in op.scores for word, value in step.key().items()},
        "extras": sorted(step.extra for step in op.scores if step.extra),
        "places": {name: _place(place) for name, place in places.items()},
        **_products_key(op),
    }


def _products_key(op: LinearOp | AttentionOp) -> dict[str, Any]:
    """How float32 is multiplied, where it is not as in all records from before there was a choice."""
    return {} if op.float32_products == "ieee" else {"float32_products": op.float32_products}


def _place(place: HeadLayout) -> list[Any]:
    """A layout in a key: heads that lie together are near each other whatever the width; rows are a width apart."""
    return [place.layout, place.width if place.layout == "rows" else 0]


def _attention_dims(op: AttentionOp) -> tuple[Dim, ...]:
    own = (dim for step in op.scores for _, kind in step.arguments(op) for dim in kind.dims)
    return (op.batch, op.q_length, op.kv_length, *own)


def _attention_sizes(op: AttentionOp, sizes: Mapping[str, int]) -> dict[str, int]:
    dims = {"B": op.batch, "L": op.q_length, "S": op.kv_length}
    return {name: size_in(dim, sizes) for name, dim in dims.items()}


_TUNABLE: dict[type[Op], _Tunable] = {
    LinearOp: _Tunable(
        key=_linear_key,
        dims=lambda op: op.rows,
        lengths=lambda op: _symbolic(op.rows)[-1:],
        measured_at=lambda op, sizes: {"rows": prod(size_in(dim, sizes) for dim in op.rows)},
    ),
    AttentionOp: _Tunable(
        key=_attention_key,
        dims=_attention_dims,
        lengths=lambda op: _symbolic((op.q_length, op.kv_length)),
        measured_at=_attention_sizes,
    ),
}
"""The types of operations that have something to tune."""
