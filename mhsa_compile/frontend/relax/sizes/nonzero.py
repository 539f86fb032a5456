"""NonZero: a call counts its elements, and the places of each are written where the count has come to. TVM's is a
function in Python."""

from __future__ import annotations

from typing import Any

from tvm import relax, te, tirx

from mhsa_compile.frontend.relax.sizes.broadcasting import dims_of
from mhsa_compile.frontend.relax.sizes.size_values import SizeNames, as_tensor, emitted, literal, product


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
