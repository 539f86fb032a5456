"""Which format an array has: the table of all, and what every kernel reads and writes activations with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.head_layout import HeadView
from mhsa_compile.kernels.cpu.formats.floats import Bfloat16, Float16, Float32
from mhsa_compile.kernels.cpu.formats.format import Format
from mhsa_compile.kernels.cpu.formats.int4_pairs import Int4Pairs
from mhsa_compile.kernels.cpu.formats.int8_rows import Int8Rows
from mhsa_compile.kernels.cpu.simd.vectors import load, prefetch, splat
from mhsa_compile.kernels.interface.kernel import CACHE_LINE
from mhsa_compile.kernels.interface.ops import numbers_in_element

if TYPE_CHECKING:
    from tvm.ir import Expr

FORMATS: dict[str, Format] = {  # by dtype
    "float32": Float32("float32", "float32"),
    "bfloat16": Bfloat16("bfloat16", "bfloat16"),
    "float16": Float16("float16", "float16"),
    "int8": Int8Rows("int8", "int8", is_scaled=True, rounds_x=True),
    "uint8": Int4Pairs("uint8"),
}


def load_wide(buffer: Expr, index: Sequence[Expr], lanes: int) -> Expr:
    """`lanes` neighbours in the last axis of a buffer, as float32."""
    return FORMATS[str(buffer.dtype)].load(buffer, index, lanes)


def load_row(view: HeadView, row: Expr, column: Expr, lanes: int) -> Expr:
    """`lanes` neighbours in a row of a head, as float32, with the scale of the row."""
    wide = load_wide(view.buffer, view.at(row, column), lanes)
    if view.scales is None or view.scale_at is None:
        return wide
    return wide * splat(load(view.scales, view.scale_at(row), 1), lanes)


def prefetch_row(view: HeadView, row: Expr, first: Expr, width: int, *, soon: bool = True, write: bool = False) -> None:
    """Asks for `width` numbers in a row of a head, from column `first` on; or for the right to `write` them."""
    dtype = str(view.buffer.dtype)
    form = FORMATS[dtype]
    for column in range(0, width, CACHE_LINE * numbers_in_element(dtype) // form.bytes):
        prefetch(view.buffer, form.place(view.at(row, first + column)), soon=soon, write=write)


def prefetch_rows(view: HeadView, first: Expr, count: int, width: int, *, write: bool = False) -> None:
    """Asks for `count` rows of a head from `first` on, into the second cache."""
    with T.serial(T.int64(count)) as i:
        prefetch_row(view, first + i, T.int64(0), width, soon=False, write=write)


def store_narrow(buffer: Expr, index: Sequence[Expr], value: Expr, lanes: int) -> None:
    """Stores `lanes` float32, each rounded to the nearest of the buffer's dtype."""
    FORMATS[str(buffer.dtype)].store(buffer, index, value, lanes)
