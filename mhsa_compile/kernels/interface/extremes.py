"""The larger and the smaller of numbers as ONNX has them at the edge: NaN where one is, infinities of nothing.

TVM's max and min lose a NaN or keep it by the order of their operands, and begin with the lowest and the highest float.
Along an axis floats are compared by ranks, whole numbers in their order: NaN has the highest. The largest of those is a
reduction that TVM's schedules know how to split.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx
from tvm.ir import Expr


def larger(one: Expr, other: Expr, dtype: str) -> Expr:
    """The larger of two; NaN where one is."""
    return _of_two(one, other, one > other, other > one, dtype)


def smaller(one: Expr, other: Expr, dtype: str) -> Expr:
    """The smaller of two; NaN where one is."""
    return _of_two(one, other, one < other, other < one, dtype)


def largest(shape: Any, elements: Callable[..., Expr], axes: Any, dtype: str) -> Any:
    """A tensor of the largest of the elements at each place along reduction axes; NaN where one is. Of nothing it is
    -inf, or the least number of the dtype."""
    if not axes:
        return te.compute(shape, elements, "extreme")
    ranks = te.compute(shape, lambda *at: te.max(_rank(elements(*at), dtype), axis=axes), "ranks")
    return te.compute(shape, lambda *at: _of_rank(ranks(*at), dtype), "extreme") if dtype in _RANKS else ranks


def largest_of(elements: Sequence[Expr], dtype: str) -> Expr:
    """The largest of some numbers, of one at least, as one expression; NaN where one is."""
    rank = functools.reduce(tirx.max, (_rank(element, dtype) for element in elements))
    return _of_rank(rank, dtype) if dtype in _RANKS else rank


def smallest(shape: Any, elements: Callable[..., Expr], axes: Any, dtype: str) -> Any:
    """A tensor of the smallest of the elements, as `largest` is of the largest."""
    if not axes:
        return te.compute(shape, elements, "extreme")
    if dtype not in _RANKS:
        return te.compute(shape, lambda *at: te.min(elements(*at), axis=axes), "extreme")
    ranks = te.compute(shape, lambda *at: te.max(_rank(-elements(*at), dtype), axis=axes), "ranks")
    return te.compute(shape, lambda *at: -_of_rank(ranks(*at), dtype), "extreme")


_RANKS = {"float32": "int32", "float64": "int64"}


def _of_two(one: Expr, other: Expr, condition: Expr, refused: Expr, dtype: str) -> Expr:
    if isinstance(other, tirx.FloatImm | tirx.IntImm) or not dtype.startswith(("float", "bfloat")):
        return tirx.Select(refused, other, one)
    return tirx.Select(tirx.any(condition, is_nan(one, dtype)), one, other)


def is_nan(value: Expr, dtype: str) -> Expr:
    """Whether a number is none: by its bits, of which LLVM makes vectors."""
    if dtype not in _RANKS:
        return tirx.isnan(value.astype("float32"))
    kind = _RANKS[dtype]
    bits = tirx.reinterpret(kind, value)
    return (bits & tirx.max_value(kind)) > tirx.const(_INFINITY[kind], kind)


def _rank(value: Expr, dtype: str) -> Expr:
    """A number in the order of its kind. Bits of floats are in that order but for those below 0, which are reversed."""
    if dtype not in _RANKS:
        return value
    kind = _RANKS[dtype]
    rank = _ranks(tirx.reinterpret(kind, value), kind)
    return tirx.Select(is_nan(value, dtype), tirx.max_value(kind), rank)


def _of_rank(rank: Expr, dtype: str) -> Expr:
    kind = _RANKS[dtype]
    lowest = tirx.const(-_INFINITY[kind] - 1, kind)  # that of -inf: of nothing, TVM's least is below it
    return tirx.reinterpret(dtype, _ranks(tirx.max(rank, lowest), kind))


_INFINITY = {"int32": 0x7F800000, "int64": 0x7FF0000000000000}


def _ranks(bits: Expr, kind: str) -> Expr:
    """The bits behind the sign reversed where that is set: ranks of bits, and bits of ranks."""
    last = int(kind.removeprefix("int")) - 1
    return bits ^ ((bits >> tirx.const(last, kind)) & tirx.max_value(kind))
