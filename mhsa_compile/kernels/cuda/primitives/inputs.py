"""The operands of an attention on a GPU: where they lie, how many keys there are, the mask that a call brings."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.attention_args import AttentionArguments
from mhsa_compile.kernels.cuda.primitives import simt
from mhsa_compile.kernels.cuda.primitives.simt import load_pair, materialize, registers, set_register, unpack
from mhsa_compile.kernels.cuda.primitives.smem_pipeline import Element
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


_BITS = {"bool": 8, "bfloat16": 16, "float16": 16, "float32": 32}


class MaskReader:
    """Reads the mask of one head of (mB, mH, mL, mS). Clamping each index makes an axis of 1 broadcast.

    Pairs of neighbours are read at once, and all of a row's before the first is looked at: a load in plain words, whose
    element only decides a select, nvcc puts behind a branch, and waits for each.
    """

    def __init__(self, mask: Expr, b: Expr, h: Expr) -> None:
        self._mask, self.dtype = mask, str(mask.dtype)
        last = [size - 1 for size in mask.shape]
        self._entry, self._head = materialize(T.min(b, last[0]), "int64"), materialize(T.min(h, last[1]), "int64")
        self._last_row, self._last_key = (materialize(T.cast(size, "int32")) for size in last[2:])
        count = functools.reduce(operator.mul, mask.shape)
        # Of one axis, so that neighbours differ by a constant.
        self._flat = T.decl_buffer((count,), mask.dtype, data=mask.data)

    def __call__(self, query: Expr, key: Expr) -> Expr:
        """The element of a query row and a key, int32, as it is."""
        row, column = T.min(query, self._last_row), T.min(key, self._last_key)
        return self._mask[self._entry, self._head, T.cast(row, "int64"), T.cast(column, "int64")]

    @property
    def pair_words(self) -> int:
        """Registers of 32 bits that a pair takes."""
        return 2 if self.dtype == "float32" else 1

    def has_pairs(self, end: Expr) -> Expr:
        """Whether all keys before `end` have elements of their own, and those from an even one on can be read in pairs:
        each lies at a multiple of its size. A mask begins at a multiple of 16 bytes."""
        return T.And(end <= self._last_key + 1, T.truncmod(self._last_key, T.int32(2)) == 1)

    def read_pairs(self, words: Expr, first: int, query: Expr, key: Expr, offsets: Sequence[int]) -> None:
        """Reads into words[first ..] the elements of the keys `key` + offset and the next, for each offset. To be
        called where `has_pairs`."""
        start = materialize(self._row(query) + T.cast(key, "int64"), "int64")
        for i, offset in enumerate(offsets):
            load_pair(words, first + i * self.pair_words, T.address_of(self._flat[start + offset]), self.dtype)

    def read_each(self, words: Expr, first: int, query: Expr, key: Expr, offsets: Sequence[int]) -> None:
        """Reads the elements one by one, of keys that may have no elements of their own."""
        start, elements = materialize(self._row(query), "int64"), registers(2, "uint32")
        for i, offset in enumerate(offsets):
            for e in range(2):
                column = T.cast(T.min(key + (offset + e), self._last_key), "int64")
                simt.load_element(elements, e, T.address_of(self._flat[start + column]), self.dtype)
            at = first + i * self.pair_words
            if self.pair_words == 2:
                set_register(words, at, elements[0])
                set_register(words, at + 1, elements[1])
            else:
                set_register(words, at, elements[0] | elements[1] << T.uint32(_BITS[self.dtype]))

    def element(self, words: Expr, at: int, e: int) -> Expr:
        """One of the pair that begins in words[at]: whether it takes part, or what it adds, as float32."""
        if self.dtype == "bool":
            return (words[at] & T.uint32(0xFF << 8 * e)) != T.uint32(0)
        if self.dtype == "float32":
            return T.reinterpret("float32", words[at + e])
        return unpack(words[at], self.dtype)[e]

    def _row(self, query: Expr) -> Expr:
        """The index of a query's row in the flat mask."""
        _, heads, rows, keys = self._mask.shape
        return ((self._entry * heads + self._head) * rows + T.cast(T.min(query, self._last_row), "int64")) * keys
