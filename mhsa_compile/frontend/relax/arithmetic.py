"""Cast, Div, Mod, Pow and BitShift with one meaning for all numbers: where ONNX leaves it open, a processor would end
the process, or TVM has another."""

from __future__ import annotations

from typing import Any

from tvm import relax, te, tirx
from tvm.relax.frontend.onnx.onnx_frontend import Div, Mod, get_type

from mhsa_compile.frontend.relax.float8 import cast_to_float8
from mhsa_compile.frontend.relax.values import Converter, dtype_of, is_constant, is_floating

_WIDE = {"int8": 32, "uint8": 32, "int16": 32, "uint16": 32, "int32": 32, "int64": 64, "uint32": 64}


def cast_of_floats(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """A Cast of floats to whole numbers, or to eight-bit floats; None for any other.

    ONNX leaves open what NaN, infinities and numbers beyond the dtype become; LLVM makes of them whatever suits the
    neighbouring code. Here it is what x86's instructions give, and with them ONNX Runtime and NumPy there, on every
    target: the least number of 32 bits, cut to the dtype; of 64 bits for int64 and uint32. uint64 is left to LLVM.
    """
    (x,), kind = inputs, get_type(attributes["to"])
    if (narrow := cast_to_float8(bb, inputs, attributes)) is not None:
        return narrow
    own = str(getattr(x.ty, "dtype", ""))
    if kind not in _WIDE or not own.startswith(("float16", "float32", "float64", "bfloat16")) or x.ty.shape is None:
        return None
    wide = own if own in ("float32", "float64") else "float32"
    bits = _WIDE[kind]
    edge = 2.0 ** (bits - 1)
    least = tirx.const(-(1 << (bits - 1)), f"int{bits}")

    def number(value: Any) -> Any:
        inside = tirx.all(value >= tirx.const(-edge, wide), value < tirx.const(edge, wide))
        return tirx.Select(inside, value.astype(f"int{bits}"), least).astype(kind)

    def cast(x: Any) -> Any:
        return te.compute(x.shape, lambda *at: number(x[at].astype(wide)), "cast")

    return bb.emit_te(cast, x, primfunc_name_hint="cast")


def quotient(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Div of whole numbers: 0 where the divisor is 0, as NumPy has it, and the least number by -1 is itself."""
    if not _may_trap(inputs):
        return None
    x, divisor = inputs
    none, opposite, safe = _divisor(divisor)
    result, zero = Div._impl_v7(bb, [x, bb.normalize(safe)], attributes, ({}, {})), relax.const(0, str(x.ty.dtype))
    if opposite is not None:
        result = relax.op.where(opposite, relax.op.subtract(zero, x), result)
    return relax.op.where(none, zero, result)


def remainder(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Mod of whole numbers: 0 where the divisor is 0, as NumPy has it, or -1. Of floats without fmod: where nothing is
    left, a zero of the divisor's sign; by an infinity, the number itself, or that infinity where the signs differ."""
    x, divisor = inputs
    kind = dtype_of(x)
    if is_floating(kind):
        return None if attributes.get("fmod", 0) else _remainder_of_floats(x, divisor, kind)
    if not _may_trap(inputs):
        return None
    none, opposite, safe = _divisor(divisor)
    result = Mod._impl_v10(bb, [x, bb.normalize(safe)], attributes, ({}, {}))
    nothing = none if opposite is None else relax.op.logical_or(none, opposite)
    return relax.op.where(nothing, relax.const(0, kind), result)


def _may_trap(inputs: list[Any]) -> bool:
    """Whether these are whole numbers, and the divisor is not known to be neither 0 nor -1."""
    if any(dtype_of(value) is None for value in inputs) or not str(dtype_of(inputs[0])).startswith(("int", "uint")):
        return False
    if not is_constant(inputs[1]):
        return True
    numbers = inputs[1].value.numpy()
    return bool(((numbers == 0) | (numbers == -1)).any())


def _divisor(divisor: Any) -> tuple[Any, Any, Any]:
    """(where it is 0, where it is -1, if it may be, and itself, but 1 in these places)."""
    kind = str(divisor.ty.dtype)
    none = relax.op.equal(divisor, relax.const(0, kind))
    safe = relax.op.where(none, relax.const(1, kind), divisor)
    if kind.startswith("u"):
        return none, None, safe
    opposite = relax.op.equal(divisor, relax.const(-1, kind))
    return none, opposite, relax.op.where(opposite, relax.const(1, kind), safe)


def _remainder_of_floats(x: Any, divisor: Any, kind: str | None) -> Any:
    zero = relax.const(0, kind)
    below, negative = (relax.op.less(value, zero) for value in (x, divisor))
    endless = relax.op.logical_and(relax.op.isinf(divisor), relax.op.isfinite(x))
    at_the_end = relax.op.where(relax.op.logical_xor(below, negative), divisor, x)
    remainder = relax.op.where(endless, at_the_end, relax.op.floor_mod(x, divisor))
    none = relax.op.logical_or(relax.op.equal(remainder, zero), relax.op.equal(x, zero))
    is_whole = relax.op.logical_and(none, relax.op.logical_not(relax.op.isnan(remainder)))
    return relax.op.where(is_whole, relax.op.where(negative, relax.const(-0.0, kind), zero), remainder)


_MOST = 63
"""A larger exponent leaves 64 bits, or is told from this by no more than whether it is odd."""


def power(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Pow of any two kinds of numbers: computed, and given, in the base's, as ONNX has it."""
    base, exponent = inputs
    kind, other = map(dtype_of, inputs)
    if kind is None or other is None or (is_floating(kind) and kind == other):
        return None
    if is_floating(kind):
        return relax.op.power(base, relax.op.astype(exponent, kind))
    if is_floating(other):
        return relax.op.astype(relax.op.power(*(relax.op.astype(value, "float64") for value in inputs)), kind)
    return _power_of_whole_numbers(base, exponent, kind)


def _power_of_whole_numbers(base: Any, exponent: Any, kind: str) -> Any:
    """By squares, which wrap: of unsigned numbers, as LLVM knows no meaning of a signed one that overflows. Below 0 the
    exponent leaves what is of a number of size 1, and 0 of others."""

    def whole(number: int) -> Any:
        return relax.const(number, "int64")

    e, square = relax.op.astype(exponent, "int64"), relax.op.astype(base, "uint64")
    one = relax.const(1, "uint64")
    minus_one = relax.op.subtract(relax.const(0, "uint64"), one)
    parity = relax.op.where(relax.op.equal(relax.op.bitwise_and(e, whole(1)), whole(1)), minus_one, one)
    is_one, is_minus_one = (relax.op.equal(square, value) for value in (one, minus_one))
    inverse = relax.op.where(is_minus_one, parity, relax.op.astype(is_one, "uint64"))
    many = relax.op.add(relax.op.bitwise_and(e, whole(1)), whole(_MOST + 1))
    bits = relax.op.where(relax.op.greater(e, whole(_MOST)), many, e)
    product = one
    for bit in range((_MOST + 2).bit_length()):
        is_set = relax.op.equal(relax.op.bitwise_and(relax.op.right_shift(bits, whole(bit)), whole(1)), whole(1))
        product = relax.op.multiply(product, relax.op.where(is_set, square, one))
        square = relax.op.multiply(square, square)
    return relax.op.astype(relax.op.where(relax.op.less(e, whole(0)), inverse, product), kind)


def shift_of_any_length(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """BitShift: by as many bits as the number has, or more, or fewer than 0, what the sign's extension leaves."""
    x, amount = inputs
    kind = dtype_of(x)
    if kind is None or not kind.lstrip("u").startswith("int") or dtype_of(amount) != kind:
        return None
    bits, right, signed = int(kind.lstrip("uint")), attributes["direction"] in (b"RIGHT", "RIGHT"), kind[0] != "u"
    within = relax.op.less(amount, relax.const(bits, kind))
    if signed:
        within = relax.op.logical_and(within, relax.op.greater_equal(amount, relax.const(0, kind)))
    last, none = relax.const(bits - 1, kind), relax.const(0, kind)
    by = relax.op.where(within, amount, last if right and signed else none)
    result = (relax.op.right_shift if right else relax.op.left_shift)(x, by)
    return result if right and signed else relax.op.where(within, result, none)  # of the former, the sign is left


ARITHMETIC: dict[str, Converter] = {
    "BitShift": shift_of_any_length,
    "Cast": cast_of_floats,
    "Div": quotient,
    "Mod": remainder,
    "Pow": power,
}
