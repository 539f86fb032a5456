"""Where the operands of an attention lie on a GPU, and what it takes besides Q, K and V."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.operands import LARGEST, LOG2_E
from mhsa_compile.kernels.cpu.vectors import argument
from mhsa_compile.kernels.cuda.ring import Element
from mhsa_compile.kernels.cuda.warp import Expr, settle
from mhsa_compile.kernels.operations import AttentionOp, Placement

MaskReader = Callable[[Expr, Expr], Expr]
"""(query row, key), int32 -> the mask's element as it is."""


WIDEST = 256
"""Heads of queries, keys and values, of all attentions here."""


def unfit_widths(op: AttentionOp) -> str | None:
    """Why copies of 16 bytes, from addresses that are multiples of so many, do not fit, or None."""
    chunk = 4 if op.dtype == "float32" else 8
    widths = (op.head_dim, op.v_head_dim)
    if any(width % chunk or width > WIDEST for width in widths):
        return f"heads of a multiple of {chunk} up to {WIDEST}, not {widths}"
    for place in (op.query, op.key, op.value, op.output):
        if place.layout == "rows" and (place.width % chunk or place.offset % chunk):
            return f"rows and offsets in multiples of {chunk}, not {place.width} and {place.offset}"
    return None


def wide(element: Expr) -> Expr:
    """An element of 16 or 32 bits as float32."""
    return element if element.ty.dtype == "float32" else T.cast(element, "float32")


def mask_reader(mask: Expr, b: Expr, h: Expr) -> MaskReader:
    """Reads the mask of one head. Clamping each index makes an axis of 1 broadcast."""
    last = [size - 1 for size in mask.shape]
    entry, head = settle(T.min(b, last[0]), "int64"), settle(T.min(h, last[1]), "int64")
    rows, keys = (settle(T.cast(size, "int32")) for size in last[2:])

    def read(query: Expr, key: Expr) -> Expr:
        return mask[entry, head, T.cast(T.min(query, rows), "int64"), T.cast(T.min(key, keys), "int64")]

    return read


@dataclass(frozen=True)
class Extras:
    """The inputs of an attention after its mask, None where it has none: lengths (B,), sinks and slopes (H,)."""

    lengths: Expr | None
    sinks: Expr | None
    slopes: Expr | None

    def keys(self, b: Expr, kv_length: Expr) -> Expr:
        """How many keys batch entry b has, int32; what a call brings is held to 0 .. `kv_length`."""
        if self.lengths is None:
            return settle(T.cast(kv_length, "int32"))
        return settle(T.cast(T.max(T.int64(0), T.min(kv_length, self.lengths[b])), "int32"))

    def sink(self, head: Expr) -> Expr | None:
        """The sink of a head, in units of log2. An infinite one is held to the largest number: what is infinitely below
        its row's maximum has a weight of 0, but the maximum itself must be one that can be subtracted from."""
        if self.sinks is None:
            return None
        sink, largest = _in_log2(self.sinks, head), T.float32(LARGEST)
        return settle(T.Select(sink > largest, largest, sink), "float32")

    def slope(self, head: Expr) -> Expr | None:
        """What a head adds to a score for each key that lies further on, in units of log2."""
        return None if self.slopes is None else _in_log2(self.slopes, head)


def _in_log2(buffer: Expr, head: Expr) -> Expr:
    return settle(wide(buffer[head]) * T.float32(LOG2_E), "float32")


def extra_arguments(op: AttentionOp, batch: Expr) -> Extras:
    """The arguments that stand between the mask and the constants."""
    heads = T.int64(op.num_heads)
    return Extras(
        argument("lengths", [batch], "int64") if op.lengths else None,
        argument("sinks", [heads], op.dtype) if op.sinks else None,
        argument("slopes", [heads], op.dtype) if op.slopes else None,
    )


def elements(buffer: Expr, place: Placement, head_dim: int, b: Expr, head: Expr) -> Element:
    """Elements of one head by row and column, int32: of one axis from the head's first element on, so that rows which
    are a fixed number apart are so by a fixed number of elements."""
    if place.layout == "rows":
        first, pitch = b * (buffer.shape[1] * place.width) + head * head_dim + place.offset, place.width
    else:
        first, pitch = (b * buffer.shape[1] + head) * (buffer.shape[2] * head_dim), head_dim
    start, count = settle(first, "int64"), functools.reduce(operator.mul, buffer.shape)
    flat = T.decl_buffer((count,), buffer.dtype, data=buffer.data)
    return lambda row, column: flat[start + T.cast(row, "int64") * pitch + column]
