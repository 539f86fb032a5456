"""Rows of global memory in pieces of up to 16 bytes: a thread moves one, and its neighbour the next.

Buffers begin at multiples of 16 bytes at least, so a piece is as large as what divides its rows, offsets and parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import DTYPE_BYTES, ceil_div
from mhsa_compile.kernels.cuda.primitives.inputs import wide
from mhsa_compile.kernels.cuda.primitives.simt import launch, load, materialize, pack, registers, set_register, store
from mhsa_compile.kernels.interface.ops import HeadLayout

THREADS = 256  # of a block: eight of them fill a multiprocessor
_BYTES, _WORD = 16, 4
_NAN = {"float32": 0x7FC00000, "bfloat16": 0x7FFF7FFF, "float16": 0x7FFF7FFF}  # words of nothing else


def piece_of(dtype: str, *multiples: int) -> int:
    """Elements of a piece: a power of two that divides all of `multiples`, and one where not even a word does."""
    size, count = DTYPE_BYTES[dtype], _BYTES // DTYPE_BYTES[dtype]
    while any(multiple % count for multiple in multiples):
        count //= 2
    # Less than a word is moved element by element.
    return count if count * size >= _WORD else 1


def row_steps(place: HeadLayout) -> tuple[int, ...]:
    """What divides where the rows of a placement begin, beside the size of a head."""
    return (place.width, place.offset) if place.layout == "rows" else ()


def each_thread(total: Expr, body: Callable[[Expr], None]) -> None:
    """Launches body(number) for the numbers 0 .. `total`, int64."""
    blocks = ceil_div(total, THREADS)
    with launch(blocks, THREADS) as (block, thread):
        number = materialize(T.cast(block, "int64") * T.int64(THREADS) + T.cast(thread, "int64"), "int64")
        with T.If(number < total), T.Then():
            body(number)


def coordinates(number: Expr, *sizes: Expr) -> list[Expr]:
    """A flat number as one on each axis; `sizes` are those of all axes but the first."""
    indices: list[Expr] = []
    for size in reversed(sizes):
        indices.insert(0, materialize(T.truncmod(number, size), "int64"))
        number = materialize(T.truncdiv(number, size), "int64")
    return [number, *indices]


def copy_piece(to: Expr, to_at: Sequence[Expr], source: Expr, at: Sequence[Expr], count: int) -> None:
    """Copies `count` neighbours of the last axis, whatever their bits mean."""
    words = count * DTYPE_BYTES[str(source.dtype)] // _WORD
    if not words:
        T.buffer_store(to, source[tuple(at)], list(to_at))
        return
    buffer = registers(words, "uint32")
    load(buffer, 0, words, T.address_of(source[tuple(at)]), "global")
    store(T.address_of(to[tuple(to_at)]), [buffer[i] for i in range(words)], "global")


class Piece:
    """`count` neighbours of a float32, bfloat16 or float16 buffer in registers, as float32 to whoever asks."""

    def __init__(self, count: int, dtype: str) -> None:
        self.count, self.dtype = count, dtype
        self._words = count * DTYPE_BYTES[dtype] // _WORD
        self._registers = registers(self._words, "uint32") if self._words else registers(1)

    def load(self, buffer: Expr, at: Sequence[Expr]) -> None:
        if self._words:
            load(self._registers, 0, self._words, T.address_of(buffer[tuple(at)]), "global")
        else:
            set_register(self._registers, 0, wide(buffer[tuple(at)]))

    def fill_with_nan(self) -> None:
        for i in range(max(self._words, 1)):
            nan = materialize(T.uint32(_NAN[self.dtype if self._words else "float32"]), "uint32")
            set_register(self._registers, i, nan if self._words else T.reinterpret("float32", nan))

    def __getitem__(self, i: int) -> Expr:
        """Element i, float32."""
        if not self._words:
            return self._registers[0]
        if self.dtype == "float32":
            return T.reinterpret("float32", self._registers[i])
        word, upper = self._registers[i // 2], i % 2
        if self.dtype == "bfloat16":  # the upper half of a float32
            return T.reinterpret("float32", word & T.uint32(0xFFFF0000) if upper else word << T.uint32(16))
        half = T.cast(word >> T.uint32(16) if upper else word & T.uint32(0xFFFF), "uint16")
        return T.cast(T.reinterpret("float16", half), "float32")

    def set(self, values: Sequence[Expr]) -> None:
        """Fills the piece from float32 values, each rounded once."""
        if not self._words:
            set_register(self._registers, 0, values[0])
        elif self.dtype == "float32":
            for i, value in enumerate(values):
                set_register(self._registers, i, T.reinterpret("uint32", value))
        else:
            for i in range(self._words):
                pack(self._registers, i, values[2 * i], values[2 * i + 1], self.dtype)

    def store(self, buffer: Expr, at: Sequence[Expr]) -> None:
        if self._words:
            store(T.address_of(buffer[tuple(at)]), [self._registers[i] for i in range(self._words)], "global")
        else:
            T.buffer_store(buffer, narrow(self._registers[0], self.dtype), list(at))


def narrow(value: Expr, dtype: str) -> Expr:
    """A float32 rounded to `dtype`; NaN stays NaN."""
    if dtype == "float32":
        return value
    word = registers(1, "uint32")
    pack(word, 0, value, T.float32(0), dtype)
    return T.reinterpret(dtype, T.cast(word[0] & T.uint32(0xFFFF), "uint16"))
