"""First guesses of a search: the default, then what was the fastest for the most alike operations on record."""

from __future__ import annotations

from collections.abc import Iterable
from math import log2
from typing import Any

from mhsa_compile.compiler.selection.op_key import key_of
from mhsa_compile.kernels.interface.ops import Op
from mhsa_compile.records.record import Isa, Record, isa_of
from mhsa_compile.tuning.search.space import Point, Space

MOST = 5
"""The most first guesses of a search, the default among them."""
_LENGTHS = ("rows", "batch", "q_length", "kv_length")


def first_guesses(space: Space, records: Iterable[Record]) -> list[Point]:
    """The default, then the fastest of the most alike operations. Records of another ISA help only as guesses, and only
    within an architecture, or from GPU to GPU; each knob is moved to the nearest choice of this space."""
    op = space.op
    key, own = key_of(op) or {}, isa_of(space.profile)
    near = [record for record in records if _is_alike(record, op) and _is_akin(record.isa, own)]
    near.sort(key=lambda record: (record.isa != own, *_distance(record.key, key), record.median_us / record.default_us))
    points = [space.default, *(space.nearest(record.kernel, record.config) for record in near)]
    return list(dict.fromkeys(point for point in points if point is not None))[:MOST]


def _is_akin(isa: Isa, own: Isa) -> bool:
    """Whether two machines are of one architecture, or both have GPUs."""
    return bool(isa.gpu and own.gpu) or (isa.gpu == own.gpu and isa.architecture == own.architecture)


def _is_alike(record: Record, op: Op) -> bool:
    return record.op == op.kind and record.key.get("dtype") == (key_of(op) or {}).get("dtype")


def _distance(one: dict[str, Any], other: dict[str, Any]) -> tuple[int, float]:
    """(What else than lengths differs, how many times two the lengths are apart)."""
    differing = sum(one.get(name) != other.get(name) for name in {*one, *other} - set(_LENGTHS))
    return differing, sum(_apart(one.get(name), other.get(name)) for name in _LENGTHS)


def _apart(one: Any, other: Any) -> float:
    """How far two buckets are apart; a symbolic length, which has to serve all, is a step from each."""
    if one == other:
        return 0.0
    return abs(log2(one / other)) if isinstance(one, int) and isinstance(other, int) else 1.0
