"""Where the operands of an attention lie on a GPU, and how many keys there are."""

from __future__ import annotations

import functools
import operator

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.attention_args import AttentionArguments
from mhsa_compile.kernels.cuda.primitives.smem_pipeline import Element
from mhsa_compile.kernels.cuda.primitives.warp import materialize
from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout

WIDEST = 256
"""The widest heads of queries, keys and values, of all attentions here."""


def why_not_widths(op: AttentionOp) -> str | None:
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


def keys_of(arguments: AttentionArguments, b: Expr) -> Expr:
    """How many keys batch entry b has, int32."""
    return materialize(T.cast(arguments.keys(b), "int32"))


def elements(buffer: Expr, place: HeadLayout, head_dim: int, b: Expr, head: Expr) -> Element:
    """Elements of one head by row and column, int32: of one axis from the head's first element on, so that rows which
    are a fixed number apart are so by a fixed number of elements."""
    if place.layout == "rows":
        first, pitch = b * (buffer.shape[1] * place.width) + head * head_dim + place.offset, place.width
    else:
        first, pitch = (b * buffer.shape[1] + head) * (buffer.shape[2] * head_dim), head_dim
    start, count = materialize(first, "int64"), functools.reduce(operator.mul, buffer.shape)
    flat = T.decl_buffer((count,), buffer.dtype, data=buffer.data)
    return lambda row, column: flat[start + T.cast(row, "int64") * pitch + column]
