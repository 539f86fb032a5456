"""Which sizes the operands of a node must share, where the graph alone does not show that they do: a call may bring
others, and is then refused by the name of the node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from mhsa_compile.frontend.relax.imported_module import dim_of
from mhsa_compile.frontend.relax.sizes.broadcasting import BROADCAST, UNIDIRECTIONAL, gemm_sizes
from mhsa_compile.frontend.relax.sizes.call_checks import Entry
from mhsa_compile.frontend.relax.sizes.size_values import SizeNames, equals, literal, number
from mhsa_compile.runtime.artifact.manifest import Agreement
from mhsa_compile.runtime.symbolic_dims import is_expression

SizeEntries = Sequence[Entry]

UNKNOWN = "?"
"""A size that no symbol of the inputs tells: values of the call make it."""


@dataclass(frozen=True)
class Demand:
    """Pairs of sizes that must be equal, and groups of shapes that must broadcast to one."""

    equal: Sequence[tuple[Entry, Entry]] = ()
    broadcast: Sequence[Sequence[SizeEntries]] = ()


def demand(op_name: str, shapes: Sequence[SizeEntries | None], attrs: Mapping[str, Any]) -> Demand:
    """What a node of ONNX asks of the sizes of its operands; nothing where their ranks are others than it takes, which
    is refused elsewhere."""
    present = [shape for shape in shapes if shape is not None]
    if op_name in BROADCAST | UNIDIRECTIONAL:
        return Demand(broadcast=[present])
    rule = _RULES.get(op_name)
    if rule is None or len(present) < 2 or shapes[0] is None or shapes[1] is None:
        return Demand()
    try:
        return rule(shapes, attrs)
    except IndexError:
        return Demand()


def agreement(
    names: SizeNames, node: str, shapes: Sequence[SizeEntries | None], requirement: Demand
) -> Agreement | None:
    """What of a demand only a call can tell, for the manifest; None where nothing is left."""
    equal = [pair for pair in requirement.equal if not names.same(*pair)]
    broadcast = [group for group in requirement.broadcast if not _broadcasts(names, group)]
    if not equal and not broadcast:
        return None

    def dims(shape: SizeEntries) -> tuple[int | str, ...]:
        return tuple(_manifest_dim(names, size) for size in shape)

    return Agreement(
        node=node,
        operands=tuple(dims(shape) for shape in shapes if shape is not None),
        equal=tuple((_manifest_dim(names, one), _manifest_dim(names, other)) for one, other in equal),
        broadcast=tuple(tuple(map(dims, group)) for group in broadcast),
    )


def hold(names: SizeNames, op_name: str, shapes: Sequence[SizeEntries | None], attrs: Mapping[str, Any]) -> None:
    """Ends a call whose operands do not fit, for operators whose converters read them as if they did."""
    if op_name == "GatherElements":
        _hold_within(names, shapes, attrs)
    if op_name in UNIDIRECTIONAL and shapes[0] is not None and shapes[1] is not None:
        _hold_to(names, shapes[1], shapes[0])
    if op_name not in _RULES or op_name in _HELD_BY_TYPES:
        return
    requirement = demand(op_name, shapes, attrs)
    for one, other in requirement.equal:
        if not names.same(one, other):
            names.hold_equal([literal(one)], [literal(other)])
    for whole, *parts in requirement.broadcast:
        for part in parts:
            _hold_to(names, part, whole)
    if op_name == "ScatterElements":
        _hold_within(names, shapes, attrs)


def _hold_to(names: SizeNames, shape: SizeEntries, whole: SizeEntries) -> None:
    """Ends a call in which an array does not broadcast to a shape."""
    for size, full in zip(reversed(list(shape)), reversed(list(whole)), strict=False):
        if 1 not in (number(size), number(full)) and not names.same(size, full):
            names.hold_equal([tirx.Select(equals(size, literal(1)), literal(full), literal(size))], [literal(full)])


def _hold_within(names: SizeNames, shapes: Sequence[SizeEntries | None], attrs: Mapping[str, Any]) -> None:
    """Ends a call in which indices of single elements have more places than there are, on an axis that they leave."""
    data, indices, axis = shapes[0] or [], shapes[1] or [], int(attrs.get("axis", 0))
    for place, (size, most) in enumerate(zip(indices, data, strict=False)):
        if place != axis % max(len(data), 1) and not names.at_least(most, size):
            names.checks.hold(literal(size) <= literal(most), "indices no longer than its data on every other axis")


def _broadcasts(names: SizeNames, shapes: Sequence[SizeEntries]) -> bool:
    for axis in range(1, max(map(len, shapes), default=0) + 1):
        sizes = [shape[-axis] for shape in shapes if len(shape) >= axis and number(shape[-axis]) != 1]
        if any(not names.same(size, sizes[0]) for size in sizes[1:]):
            return False
    return True


def _manifest_dim(names: SizeNames, size: Entry) -> int | str:
    """A size as a manifest has it: an expression of the inputs' symbols."""
    size = names.of_symbols(size)
    dim = UNKNOWN if size is None else dim_of(size)
    is_expressible = dim >= 0 if isinstance(dim, int) else isinstance(size, tirx.Var) or is_expression(dim)
    return dim if is_expressible else UNKNOWN


def _product(shapes: Sequence[Any], attrs: Mapping[str, Any]) -> Demand:
    one, other = shapes[0], shapes[1]
    return Demand([(one[-1], other[-2 if len(other) > 1 else -1])], [[one[:-2], other[:-2]]])


def _gemm(shapes: Sequence[Any], attrs: Mapping[str, Any]) -> Demand:
    rows, inner, other_inner, columns = gemm_sizes(shapes, attrs)
    added = shapes[2] if len(shapes) > 2 else None
    return Demand([(inner, other_inner)], [] if added is None else [[[rows, columns], added]])


def _concat(shapes: Sequence[Any], attrs: Mapping[str, Any]) -> Demand:
    first = shapes[0]
    axis = int(attrs.get("axis", 0)) % max(len(first), 1)
    others = [shape for shape in shapes[1:] if shape is not None]
    return Demand([(first[i], shape[i]) for shape in others for i in range(len(first)) if i != axis])


def _conv(shapes: Sequence[Any], attrs: Mapping[str, Any]) -> Demand:
    bias = shapes[2] if len(shapes) > 2 else None
    channels = (shapes[0][1], literal(shapes[1][1]) * int(attrs.get("group", 1)))
    return Demand([channels, *([] if bias is None else [(bias[0], shapes[1][0])])])


def _conv_transpose(shapes: Sequence[Any], attrs: Mapping[str, Any]) -> Demand:
    return Demand([(shapes[0][1], shapes[1][0])])


def _einsum(shapes: Sequence[Any], attrs: Mapping[str, Any]) -> Demand:
    equation = attrs.get("equation", "")
    text = (equation.decode() if isinstance(equation, bytes) else str(equation)).replace(" ", "")
    terms = text.split("->")[0].split(",")
    if "." in text or len(terms) != len(shapes):
        return Demand()
    sizes: dict[str, Entry] = {}
    groups = []
    for term, shape in zip(terms, shapes, strict=True):
        for letter, size in zip(term, shape or (), strict=False):
            groups.append([[sizes.setdefault(letter, size)], [size]])
    return Demand(broadcast=groups)


def _scatter(shapes: Sequence[Any], attrs: Mapping[str, Any]) -> Demand:
    return Demand(list(zip(shapes[1], shapes[2] or (), strict=False)))


_RULES: dict[str, Callable[[Sequence[Any], Mapping[str, Any]], Demand]] = {
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "Gemm": _gemm,
    "MatMul": _product,
    "ScatterElements": _scatter,
}
_HELD_BY_TYPES = frozenset(("Concat", "MatMul"))
"""Operators whose operands TVM's own checks, or those of `broadcasting`, hold to their types in each call."""
