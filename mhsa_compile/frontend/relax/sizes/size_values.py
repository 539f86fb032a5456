"""A tensor whose elements the graph computes from sizes, as expressions instead of an array."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.sym import Analyzer, ConstIntBound
from tvm_ffi import structural_equal

from mhsa_compile.frontend.relax.sizes.call_checks import OPAQUE, CallChecks, Entry
from mhsa_compile.frontend.relax.values import is_constant

MOST = 64
"""So many elements a value has at most that is followed as expressions: shapes, pads, bounds."""
_LARGE = 8  # so many operations an expression has before it gets a name
_OPAQUE = (
    tirx.Min, tirx.Max, tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod, tirx.Select, tirx.Cast, tvm.ir.Call
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class SizeValues:
    """The elements of a small tensor, in its shape, and their dtype."""

    entries: np.ndarray[Any, Any]
    dtype: str
    ty: None = None  # TVM's importer asks every value of the graph for one


def entries_of(value: Any) -> SizeValues | None:
    """A value of the graph as entries: it is followed as such, or a small constant. None for any other."""
    if isinstance(value, SizeValues):
        return value
    if not isinstance(value, tvm.ir.GenericConst) or not isinstance(value.ty, relax.TensorType):
        return None
    kind = str(value.ty.dtype)
    if not kind.startswith(("int", "bool", "float32", "float64")):
        return None
    array = value.value.numpy()
    if array.size > MOST:
        return None
    return SizeValues(objects([literal(item, kind) for item in array.reshape(-1).tolist()], array.shape), kind)


def is_known(value: Any) -> bool:
    """Whether a value is one of sizes that holds numbers alone."""
    return isinstance(value, SizeValues) and all(number(entry) is not None for entry in value.entries.reshape(-1))


def is_fixed(value: Any) -> bool:
    """Whether a value is a constant, or sizes that are numbers alone."""
    return is_constant(value) or is_known(value)


def number(entry: Entry) -> int | float | None:
    """The number that an entry is, None where it is an expression."""
    if isinstance(entry, int | float):
        return entry
    if isinstance(entry, tirx.IntImm):
        return int(entry.value)
    return float(entry.value) if isinstance(entry, tirx.FloatImm) else None


def array_of(sizes: SizeValues) -> np.ndarray[Any, Any]:
    """The array of numbers that known sizes are."""
    numbers = [number(entry) for entry in sizes.entries.reshape(-1)]
    return np.array(numbers, dtype=sizes.dtype).reshape(sizes.entries.shape)


def as_tensor(bb: Any, value: Any) -> Any:
    """Sizes as a tensor of Relax, for an operator that computes with tensors; other values as they are."""
    if not isinstance(value, SizeValues):
        return value
    if is_known(value):
        return relax.const(array_of(value), value.dtype)
    flat = list(value.entries.reshape(-1))
    if value.dtype == "int64" and value.entries.ndim == 1:
        return bb.normalize(relax.op.shape_to_tensor(relax.ShapeExpr(flat)))
    shape = value.entries.shape

    def elements(entries: list[Entry]) -> Any:
        def element(*at: Any) -> Any:
            place: Any = tirx.const(0, "int64")
            for index, size in zip(at, shape, strict=True):
                place = place * size + index
            result = entries[-1]
            for i in reversed(range(len(entries) - 1)):
                result = tirx.Select(place == i, entries[i], result)
            return result

        return te.compute(shape, element, "sizes")

    return emitted(bb, elements, flat, name="sizes")


def emitted(bb: Any, function: Any, *arguments: Any, name: str) -> Any:
    """A tensor computed by `te` from tensors, sizes and lists of sizes, as a function that TVM fuses with no other:
    of one that takes sizes as scalars, and what it is fused with, TVM declares them twice."""
    return bb.emit_te(function, *arguments, primfunc_name_hint=name, primfunc_attrs={"op_pattern": OPAQUE})


class SizeNames:
    """Dims of values: short expressions stay as they are, others are computed once and have a name from then on.

    Analyses and generated code grow with every expression that stands in a shape; a name stands for what it was
    computed from. Equal expressions have one name.
    """

    def __init__(
        self, bb: Any, checks: CallChecks, symbols: Sequence[Any] = (), limits: Mapping[str, int] | None = None
    ) -> None:
        """`limits`: the largest size of a symbol that a call may have, by its name."""
        self.checks = checks
        self._bb, self._names = bb, {str(symbol.name) for symbol in symbols}
        self._symbolic, self._meanings = set(self._names), Analyzer()  # names that symbols tell; what they stand for
        self._scope: list[tuple[Entry, Any]] = []
        self._analyzer, self._proofs = Analyzer(), Analyzer()  # the latter knows what names stand for
        self._count = 0
        for symbol in symbols:
            bound = ConstIntBound(0, (limits or {}).get(str(symbol.name), ConstIntBound.POS_INF))
            for analyzer in (self._analyzer, self._proofs):
                analyzer.update(symbol, bound, True)

    def scope(self) -> list[tuple[Entry, Any]]:
        """The names that are known, for `restore` to come back to where a branch of an If ends."""
        return list(self._scope)

    def restore(self, scope: list[tuple[Entry, Any]]) -> None:
        self._scope = scope

    def simplify(self, entry: Entry) -> Entry:
        """A whole number's expression, simplified."""
        return self._analyzer.simplify(literal(entry))

    def same(self, one: Entry, other: Entry) -> bool:
        """Whether two sizes are equal at every call, as far as their forms show it."""
        one, other = literal(one), literal(other)
        if structural_equal(one, other):
            return True
        return _is_provable(one, other) and bool(self._proofs.can_prove_equal(one, other))

    def at_least(self, one: Entry, other: Entry) -> bool:
        """Whether, by the forms of both, one is never less than the other. Sizes are not negative."""
        one, other = literal(one), literal(other)
        return _is_provable(one, other) and bool(self._proofs.can_prove(one >= other))

    def variable(self) -> Any:
        """A size of a name that nobody has."""
        while (name := f"size_{self._count}") in self._names:
            self._count += 1
        self._count += 1
        return tirx.Var(name, "int64")

    def size(self, entry: Entry) -> Any:
        """A size as a dim: itself, or its name."""
        return self.shape([entry])[0]

    def shape(self, entries: Sequence[Entry]) -> list[Any]:
        """Sizes as dims: numbers, symbols, sums and products of few, and names for all others."""
        simple = [self.simplify(entry) for entry in entries]
        new: list[tuple[Entry, Any]] = []
        dims: list[Any] = []
        for entry in simple:
            name = None if _is_short(entry) else self._name(entry, new)
            if name is None and not _is_short(entry):
                name = self.variable()
                new.append((entry, name))
            dims.append(entry if name is None else name)
        if new:
            self._bind([entry for entry, _ in new], [name for _, name in new])
            for entry, name in new:
                self._bind_name(entry, name)
        return dims

    def _bind_name(self, entry: Entry, name: Any) -> None:
        if self.at_least(entry, 0):
            self._analyzer.update(name, ConstIntBound(0, ConstIntBound.POS_INF), True)
        self._proofs.bind(name, entry, True)
        if (meaning := self.of_symbols(entry)) is not None:
            self._symbolic.add(str(name.name))
            self._meanings.bind(name, meaning, True)
        self._scope.append((entry, name))

    def of_symbols(self, entry: Entry) -> Entry | None:
        """A size as an expression of symbols alone; None where values make it, and for one without an end."""
        entry = literal(entry)
        if not _is_provable(entry) or any(str(one.name) not in self._symbolic for one in _variables(entry)):
            return None
        whole = self._meanings.simplify(entry)
        return whole if _is_provable(whole) else None

    def hold_equal(self, entries: Sequence[Entry], dims: Sequence[Any]) -> None:
        """Holds every call to sizes being what `dims` says."""
        self._bind(entries, dims)

    def common_name(self, one: Entry, other: Entry) -> Any:
        """A name for a size that two expressions give, to which every call is held."""
        first, second = self.simplify(one), self.simplify(other)
        name = self._name(first, ())
        if name is None:
            name = self.variable()
            self._bind([first, second], [name, name])
            self._bind_name(first, name)
        else:
            self._bind([second], [name])
        return name

    def opaque(self, entries: Sequence[Entry]) -> list[Any]:
        """Names for expressions that no proof is to look into: choices that only a call makes."""
        names = [self.variable() for _ in entries]
        self._bind(entries, names)
        return names

    def of_tensor(self, tensor: Any, count: int) -> list[Any]:
        """The elements of a tensor that a call computes, as sizes."""
        if str(tensor.ty.dtype) != "int64":
            tensor = self._bb.normalize(relax.op.astype(tensor, "int64"))
        if tensor.ty.ndim != 1:
            tensor = self._bb.normalize(relax.op.reshape(tensor, [count]))
        names = [self.variable() for _ in range(count)]
        shape = self._bb.emit(relax.op.tensor_to_shape(self._bb.emit(tensor)))
        self._bb.match_cast(shape, relax.ShapeType(names))
        return names

    def _name(self, entry: Entry, new: Sequence[tuple[Entry, Any]]) -> Any:
        return next((name for other, name in (*self._scope, *new) if structural_equal(other, entry)), None)

    def _bind(self, entries: Sequence[Entry], names: Sequence[Any]) -> None:
        # through a tensor: what a shape is matched with directly, Relax's passes write into every type again
        tensor = self._bb.emit(relax.op.shape_to_tensor(relax.ShapeExpr(list(entries))))
        self._bb.match_cast(self._bb.emit(relax.op.tensor_to_shape(tensor)), relax.ShapeType(list(names)))


def _variables(entry: Entry) -> Sequence[Any]:
    return tirx.analysis.undefined_vars(entry)  # type: ignore[no-any-return]


def _is_provable(*entries: Entry) -> bool:
    """Whether TVM's prover ends soon on these: what it takes grows steeply with their parts."""
    parts, waiting = 0, list(entries)
    while waiting and parts <= _PROVABLE:
        part = waiting.pop()
        parts += 1
        if not isinstance(part, tvm.ir.Var | tirx.IntImm | tirx.FloatImm):
            waiting += [getattr(part, name) for name in _PARTS if hasattr(part, name)]
            waiting += list(getattr(part, "args", ()))
    return parts <= _PROVABLE


_PARTS = ("a", "b", "value", "condition", "true_value", "false_value")
_PROVABLE = 100


def _is_short(entry: Entry) -> bool:
    operations = 0
    stack = [entry]
    while stack:
        item = stack.pop()
        if isinstance(item, _OPAQUE):
            return False
        if not isinstance(item, tirx.IntImm | tvm.ir.Var):
            operations += 1
            stack += [item.a, item.b]
    return operations <= _LARGE


def ceil_div(a: Entry, b: int) -> Entry:
    """a / b, rounded up, for a positive b."""
    return tirx.floordiv(a + (b - 1), tirx.const(b, "int64")) if b != 1 else a


def product(entries: Sequence[Entry]) -> Entry:
    """The product of sizes."""
    return math.prod((literal(entry) for entry in entries), start=tirx.const(1, "int64"))


def literal(value: Any, dtype: str = "int64") -> Entry:
    """A number as an entry; an entry as it is."""
    return tirx.const(value, dtype) if isinstance(value, bool | int | float | np.generic) else value


def equals(one: Entry, other: Entry) -> Entry:
    """Whether two entries are equal, as an entry."""
    comparison = one == other  # of some expressions TVM makes a Python object first
    return comparison if isinstance(comparison, tvm.ir.Expr) else comparison.asobject()


def objects(values: Sequence[Any], shape: Sequence[int] | None = None) -> np.ndarray[Any, Any]:
    """Entries as an array, of one axis unless another shape is stated."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array if shape is None else array.reshape(tuple(shape))
