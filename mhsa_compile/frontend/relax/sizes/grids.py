"""OneHot and AffineGrid of sizes that a call states: each element is written from its place. NonZero: a call counts its
elements, and the places of each are written where the count has come to; TVM's is a function in Python."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, te, tirx

from mhsa_compile.frontend.relax.sizes.broadcasting import dims_of
from mhsa_compile.frontend.relax.sizes.size_values import (
    SizeNames,
    as_tensor,
    emitted,
    entries_of,
    equals,
    literal,
    number,
    product,
)


def one_hot(bb: Any, names: SizeNames, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """OneHot whose depth, or values, come by the call; None where both are constants."""
    indices, depth, values = (as_tensor(bb, value) for value in inputs)
    dims = dims_of(indices)
    if all(isinstance(value, tvm.ir.GenericConst) for value in (depth, values)) or dims is None:
        return None
    entries = entries_of(inputs[1])
    size = names.of_tensor(depth, 1)[0] if entries is None else entries.entries.reshape(-1)[0].astype("int64")
    if not names.at_least(size, 0):
        names.checks.hold(size >= 0, "a depth of 0 or more", inputs[1])
    axis = attributes.get("axis", -1) % (len(dims) + 1)
    shape = names.shape([*dims[:axis], size, *dims[axis:]])

    def marks(indices: Any, values: Any, shape: list[Any]) -> Any:
        def element(*at: Any) -> Any:
            place = indices(*at[:axis], *at[axis + 1 :]).astype("int64")
            place = tirx.Select(place < 0, place + shape[axis], place)
            return tirx.Select(place == at[axis], values(literal(1)), values(literal(0)))

        return te.compute(tuple(shape), element, "one_hot")

    return emitted(bb, marks, indices, values, shape, name="one_hot")


def affine_grid(bb: Any, names: SizeNames, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """AffineGrid whose size comes by the call; None where it is a constant. theta (N, 2, 3) -> (N, H, W, 2), or
    (N, 3, 4) -> (N, D, H, W, 3)."""
    theta, target = (as_tensor(bb, value) for value in inputs)
    dims, count = dims_of(theta), dims_of(target)
    if isinstance(target, tvm.ir.GenericConst) or dims is None:
        return None
    axes = None if count is None else number(count[0])
    if axes not in (4, 5) or number(dims[1]) != axes - 2:
        raise names.checks.unknown("a size of 4 or 5 axes, and a theta for as many")
    entries = entries_of(inputs[1])
    sizes = names.of_tensor(target, int(axes)) if entries is None else list(entries.entries.reshape(-1))
    fits = [equals(sizes[0], dims[0]), *[size >= 1 for size in sizes]]
    names.checks.hold(tirx.all(*fits), "a size of 1 or more, of the batch of theta", inputs[1])
    kind, aligned = str(theta.ty.dtype), bool(attributes.get("align_corners", 0))
    shape = names.shape([dims[0], *sizes[2:], literal(axes - 2)])

    def grid(theta: Any, shape: list[Any]) -> Any:
        def coordinate(i: Any, size: Any) -> Any:
            x, whole, one = i.astype(kind), size.astype(kind), tirx.const(1, kind)
            if aligned:  # a single pixel lies at -1
                return x * tirx.const(2, kind) / tirx.max(whole - one, one) - one
            return (x * tirx.const(2, kind) + one) / whole - one

        def element(*at: Any) -> Any:
            batch, *places, row = at
            total = theta(batch, row, literal(len(places)))
            for column, (i, size) in enumerate(zip(reversed(places), reversed(shape[1:-1]), strict=True)):
                total = total + theta(batch, row, literal(column)) * coordinate(i, size)
            return total

        return te.compute(tuple(shape), element, "grid")

    return emitted(bb, grid, theta, shape, name="affine_grid")


def nonzero(bb: Any, names: SizeNames, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """The places of what is not 0, or false, in their order: (rank, how many)."""
    x = as_tensor(bb, inputs[0])
    if (dims := dims_of(x)) is None:
        return None
    if not dims:
        x, dims = bb.emit(relax.op.reshape(x, [1])), [literal(1)]
    whole = names.shape([product(dims)])
    flags = emitted(bb, _flags, x, name="flags")
    counts = bb.emit(relax.op.cumsum(bb.emit(relax.op.reshape(flags, whole)), 0))
    (total,) = names.of_tensor(emitted(bb, _last, counts, name="total"), 1)
    counts = bb.emit(relax.op.reshape(counts, names.shape(dims)))
    return emitted(bb, _places, flags, counts, total, name="nonzero")


def _flags(x: Any) -> Any:
    """1 where a number is not 0, or is none: TVM's "not equal" is false for NaN."""
    one, none = literal(1), literal(0)

    def flag(*at: Any) -> Any:
        value = x(*at)
        return value.astype("int64") if x.dtype == "bool" else tirx.Select(value == tirx.const(0, x.dtype), none, one)

    return te.compute(x.shape, flag, "flags")


def _last(counts: Any) -> Any:
    size = counts.shape[0]
    none = literal(0)
    return te.compute((1,), lambda _: tirx.if_then_else(size > 0, counts[tirx.max(size - 1, none)], none), "total")


def _places(flags: Any, counts: Any, total: Any) -> Any:
    axes = [tirx.Var(f"i{axis}", "int64") for axis in range(len(flags.shape))]

    def body(arrays: list[Any], results: list[Any]) -> Any:
        (flags, counts), (places,) = arrays, results
        count = tirx.BufferLoad(counts, axes) - 1
        stores = [tirx.BufferStore(places, axis, [literal(row), count]) for row, axis in enumerate(axes)]
        is_set = tirx.BufferLoad(flags, axes) > 0
        loops = tirx.IfThenElse(is_set, tirx.SeqStmt(stores) if stores[1:] else stores[0], None)
        for axis, size in zip(reversed(axes), reversed(flags.shape), strict=True):
            loops = tirx.For(axis, literal(0), size, tirx.ForKind.SERIAL, loops)
        return loops

    return te.extern([(len(axes), total)], [flags, counts], body, dtype="int64", name="nonzero")
