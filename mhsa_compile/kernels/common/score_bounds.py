"""What is known of the whole numbers of a score function before any call: between which bounds each lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mhsa_compile.kernels.interface.ops import AttentionOp, Dim
from mhsa_compile.spec.checks import LONGEST
from mhsa_compile.spec.score_functions import WHOLE, Kind, ScoreFunction, Step, constant_value

Bounds = tuple[int, int]
INT32: Bounds = (-(1 << 31), (1 << 31) - 1)
INT64: Bounds = (-(1 << 63), (1 << 63) - 1)


def place_bounds(op: AttentionOp) -> dict[str, Bounds]:
    """The bounds of the places that the functions of an attention are given."""
    return {
        "b": (0, _last(op.batch)),
        "h": (0, op.num_heads - 1),
        "q_idx": _query_bounds(op),
        "kv_idx": (0, _last(op.kv_length)),
    }


def last_place(op: AttentionOp, leaf: str) -> Dim | None:
    """The size that a place is below at every call, as `AttentionOp` calls it; None where it has no name."""
    sizes = {"b": op.batch, "h": op.num_heads, "kv_idx": op.kv_length}
    if leaf == "q_idx":
        # The last query stands at the last key; the first ones may stand before all, which the bounds tell.
        return op.kv_length if op.from_end else op.q_length
    return sizes[leaf]


def _query_bounds(op: AttentionOp) -> Bounds:
    if not op.from_end:
        return (0, _last(op.q_length))
    counts_keys = op.any_step("counts_keys")
    if isinstance(op.q_length, int) and isinstance(op.kv_length, int):
        first = -op.q_length if counts_keys else op.kv_length - op.q_length
        return (first, op.kv_length - 1)
    if op.q_length == op.kv_length and not counts_keys:
        return (0, LONGEST)
    return (-_last(op.q_length) - 1, _last(op.kv_length))


def _last(size: Dim) -> int:
    return max(0, size - 1) if isinstance(size, int) else LONGEST - 1


def bounds_of(function: ScoreFunction, places: Mapping[str, Bounds]) -> list[Bounds]:
    """The bounds of each step; those of floats and bools mean nothing."""
    bounds: list[Bounds] = []
    for step in function.steps:
        exact = _of_step(function, step, [bounds[arg] for arg in step.args], places)
        bounds.append(exact if _within(exact, INT64) else INT64)
    return bounds


def wrapping(function: ScoreFunction, places: Mapping[str, Bounds]) -> frozenset[int]:
    """The numbers of the steps whose exact value may be one that 64 bits do not hold."""
    bounds = bounds_of(function, places)
    return frozenset(
        number
        for number, step in enumerate(function.steps)
        if not _within(_of_step(function, step, [bounds[arg] for arg in step.args], places), INT64)
    )


def _within(inner: Bounds, outer: Bounds) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _of_step(function: ScoreFunction, step: Step, args: Sequence[Bounds], places: Mapping[str, Bounds]) -> Bounds:
    if step.kind != "int":
        return (0, 1)
    if step.op in places:
        return places[step.op]
    if step.op == "constant":
        value = int(constant_value(step))
        return (value, value)
    if step.op == "load":
        return INT32 if function.tensors[int(step.value)].dtype == "int32" else INT64
    if step.op == "cast":
        return _of_cast(function.steps[step.args[0]].kind, args[0], WHOLE[str(step.value) or "int64"])
    return _OF_OPS[step.op](*args)


def _of_cast(kind: Kind, value: Bounds, dtype: Bounds) -> Bounds:
    if kind == "bool":
        return (0, 1)
    return value if kind == "int" and _within(value, dtype) else dtype


def _corners(combine: Callable[[int, int], int]) -> Callable[[Bounds, Bounds], Bounds]:
    def bounds(one: Bounds, other: Bounds) -> Bounds:
        values = [combine(a, b) for a in one for b in other]
        return min(values), max(values)

    return bounds


def _quotient(one: Bounds, other: Bounds) -> Bounds:
    if other[0] > 0:
        return _corners(lambda a, b: a // b)(one, other)
    most = max(abs(one[0]), abs(one[1]))  # by -1, or by 1
    return (-most, most)


def _remainder(one: Bounds, other: Bounds) -> Bounds:
    return (0, other[1] - 1) if other[0] > 0 else (min(0, other[0] + 1), max(0, other[1] - 1))


def _bits(one: Bounds, other: Bounds) -> Bounds:
    ends = (*one, *other)
    power = 1 << max((~end if end < 0 else end).bit_length() for end in ends)
    return (0 if min(ends) >= 0 else -power, power - 1)


_OF_OPS: dict[str, Callable[..., Bounds]] = {
    "add": lambda one, other: (one[0] + other[0], one[1] + other[1]),
    "sub": lambda one, other: (one[0] - other[1], one[1] - other[0]),
    "mul": _corners(lambda a, b: a * b),
    "min": lambda one, other: (min(one[0], other[0]), min(one[1], other[1])),
    "max": lambda one, other: (max(one[0], other[0]), max(one[1], other[1])),
    "floor_div": _quotient,
    "mod": _remainder,
    "neg": lambda one: (-one[1], -one[0]),
    "abs": lambda one: (0 if one[0] <= 0 <= one[1] else min(map(abs, one)), max(map(abs, one))),
    "where": lambda condition, one, other: (min(one[0], other[0]), max(one[1], other[1])),
    "not": lambda one: (~one[1], ~one[0]),
    **dict.fromkeys(("and", "or", "xor"), _bits),
}
