"""One entry of the batch of a product: its place, and where an operand's elements of it lie."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.simd.vectors import materialize
from mhsa_compile.kernels.interface.ops import ProductOperand


def place_of(number: Expr, batch: Sequence[Expr]) -> list[Expr]:
    """Along each axis of the batch the place of an entry, of which the last axis counts the neighbours."""
    place: list[Expr] = []
    for extent in reversed(batch):
        place.insert(0, materialize(T.truncmod(number, extent)))
        number = materialize(T.truncdiv(number, extent))
    return place


def indices(operand: ProductOperand, place: Sequence[Expr], row: Expr, column: Expr) -> list[Expr]:
    """The indices of an operand's element, as it is stored."""
    index: list[Expr] = [T.int64(0)] * len(operand.dims)
    for axis, number in zip(operand.batch, place, strict=True):
        if axis is not None:
            index[axis] = number
    index[operand.rows], index[operand.columns] = row, column
    return index
