"""Pow of any two kinds of numbers: computed, and given, in the base's, as ONNX has it."""

from __future__ import annotations

from typing import Any

from tvm import relax

_MOST = 63
"""A larger exponent leaves 64 bits, or is told from this by no more than whether it is odd."""


def power(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    base, exponent = inputs
    if any(not isinstance(value.ty, relax.TensorType) for value in inputs):
        return None
    kind, other = (str(value.ty.dtype) for value in inputs)
    if _is_float(kind):
        if kind == other:
            return None
        return bb.normalize(relax.op.power(base, bb.normalize(relax.op.astype(exponent, kind))))
    if _is_float(other):
        wide = [bb.normalize(relax.op.astype(value, "float64")) for value in inputs]
        return bb.normalize(relax.op.astype(bb.normalize(relax.op.power(*wide)), kind))
    return _of_whole_numbers(bb, base, exponent, kind)


def _is_float(kind: str) -> bool:
    return kind.startswith(("float", "bfloat"))


def _of_whole_numbers(bb: Any, base: Any, exponent: Any, kind: str) -> Any:
    """By squares, which wrap: of unsigned numbers, as LLVM knows no meaning of a signed one that overflows. Below 0 the
    exponent leaves what is of a number of size 1, and 0 of others."""

    def emit(value: Any) -> Any:
        return bb.normalize(value)

    def whole(number: int) -> Any:
        return relax.const(number, "int64")

    e, square = emit(relax.op.astype(exponent, "int64")), emit(relax.op.astype(base, "uint64"))
    one = relax.const(1, "uint64")
    minus_one = emit(relax.op.subtract(relax.const(0, "uint64"), one))
    odd = emit(relax.op.equal(emit(relax.op.bitwise_and(e, whole(1))), whole(1)))
    parity = emit(relax.op.where(odd, minus_one, one))
    is_one, is_minus_one = (emit(relax.op.equal(square, value)) for value in (one, minus_one))
    inverse = emit(relax.op.where(is_minus_one, parity, emit(relax.op.astype(is_one, "uint64"))))
    many = emit(relax.op.add(emit(relax.op.bitwise_and(e, whole(1))), whole(_MOST + 1)))
    bits = emit(relax.op.where(emit(relax.op.greater(e, whole(_MOST))), many, e))
    product = one
    for bit in range((_MOST + 2).bit_length()):
        is_set = emit(relax.op.bitwise_and(emit(relax.op.right_shift(bits, whole(bit))), whole(1)))
        factor = emit(relax.op.where(emit(relax.op.equal(is_set, whole(1))), square, one))
        product, square = emit(relax.op.multiply(product, factor)), emit(relax.op.multiply(square, square))
    product = emit(relax.op.where(emit(relax.op.less(e, whole(0))), inverse, product))
    return emit(relax.op.astype(product, kind))
