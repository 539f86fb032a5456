"""Einsum of two tensors as a product of matrices: axes of a kind are put together, and apart again behind it.

bqc,bchw->bqhw    matmul(a (b, q, c), b (b, c, h * w)), then (b, q, h, w)
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import relax, tirx


def contraction(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """An Einsum of two operands; None where a letter stands twice in one, or in one alone without being kept."""
    equation = attributes["equation"]
    equation = (equation.decode() if isinstance(equation, bytes) else equation).replace(" ", "")
    terms, arrow, output = equation.partition("->")
    operands = terms.split(",")
    if not arrow or len(operands) != 2 or len(inputs) != 2 or "." in equation:
        return None
    left, right = operands
    once = all(len(set(term)) == len(term) for term in (left, right, output))
    fits_ranks = all(len(term) == value.ty.ndim for term, value in zip(operands, inputs, strict=True))
    if not once or not fits_ranks or not all(isinstance(value.ty.shape, relax.ShapeExpr) for value in inputs):
        return None
    free = [letter for letter in output if (letter in left) != (letter in right)]
    if free and free[-1] in left:  # the axis that comes last is of the columns
        (left, right), inputs = (right, left), inputs[::-1]
        operands = [left, right]
    batch = "".join(c for c in output if c in left and c in right)
    inner = "".join(c for c in left if c in right and c not in output)
    rows = "".join(c for c in output if c in left and c not in right)
    columns = "".join(c for c in output if c in right and c not in left)
    if not inner or {*left} != {*batch, *inner, *rows} or {*right} != {*batch, *inner, *columns}:
        return None
    sizes: dict[str, Any] = {}
    for term, value in zip(operands, inputs, strict=True):
        for letter, size in zip(term, value.ty.shape.values, strict=True):
            stated = sizes.setdefault(letter, size)
            if letter not in rows + columns and not tvm.sym.Analyzer().can_prove_equal(stated, size):
                return None  # one of them may be 1, and broadcast
    a = _as_matrix(bb, inputs[0], left, (batch, rows, inner), sizes)
    b = _as_matrix(bb, inputs[1], right, (batch, inner, columns), sizes)
    product = bb.emit(relax.op.matmul(a, b))
    order = batch + rows + columns
    if len(rows) != 1 or len(columns) != 1:
        product = bb.emit(relax.op.reshape(product, relax.ShapeExpr([sizes[letter] for letter in order])))
    if order == output:
        return product
    return bb.normalize(relax.op.permute_dims(product, [order.index(letter) for letter in output]))


def _as_matrix(bb: Any, value: Any, term: str, groups: tuple[str, str, str], sizes: dict[str, Any]) -> Any:
    """The operand as (batch, a group as one axis, another as one axis)."""
    batch, *matrix = groups
    order = "".join(groups)
    if order != term:
        value = bb.emit(relax.op.permute_dims(value, [term.index(letter) for letter in order]))
    if all(len(group) == 1 for group in matrix):
        return value
    axes = [math.prod((sizes[letter] for letter in group), start=tirx.const(1, "int64")) for group in matrix]
    return bb.emit(relax.op.reshape(value, relax.ShapeExpr([*(sizes[letter] for letter in batch), *axes])))
