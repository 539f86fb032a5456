"""Tiles of rows in shared memory, and the ring of them that copies run ahead through.

Rows are padded to an odd number of 16-byte chunks, so the eight rows that ldmatrix reads at once lie in different
banks. Heads are padded with zeros to whole steps of a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.primitives.simt import DEPTH, materialize

CHUNK = 8  # elements of 16 bits in the 16 bytes that one copy moves
ELEMENT = 2  # bytes
_AT_ONCE = 8
"""Threads whose 16 bytes shared memory moves in one cycle."""
Element = Callable[[Expr, Expr], Expr]
"""(row, column) -> that element of global memory."""


def padded(width: int) -> int:
    """A head dim in whole steps of a product."""
    return -(-width // DEPTH) * DEPTH


def pitch(width: int) -> int:
    """Elements from one row of a tile to the next."""
    return padded(width) + CHUNK


def tile_bytes(rows: int, width: int) -> int:
    return rows * pitch(width) * ELEMENT


@dataclass(frozen=True)
class RowFormat:
    """Rows of `width` elements of `size` bytes, padded with zeros to `columns`, each `pitch` behind the one before."""

    width: int
    size: int
    columns: int
    pitch: int

    @property
    def chunk(self) -> int:
        """Elements that one copy moves."""
        return CHUNK * ELEMENT // self.size

    def bytes(self, rows: int) -> int:
        return rows * self.pitch * self.size


def halves(width: int) -> RowFormat:
    """Rows of 16-bit elements, for ldmatrix."""
    return RowFormat(width, ELEMENT, padded(width), pitch(width))


def words(width: int) -> RowFormat:
    """Rows of float32, one behind the other."""
    return RowFormat(width, 4, width, width)


class SharedTiles:
    """`slots` tiles of `rows` rows of a form, from byte `first` of a block's shared memory on."""

    def __init__(self, pool: Expr, first: int, slots: int, rows: int, form: RowFormat) -> None:
        self.form, self.rows, self.width, self.chunks = form, rows, form.width, form.columns // form.chunk
        self.end = first + slots * form.bytes(rows)
        shape, offset = (slots, rows, form.pitch), T.int32(first // form.size)
        tiles = T.decl_buffer(shape, pool.dtype, data=pool.data, elem_offset=offset, scope="shared.dyn")
        self._begin = T.Bind(T.cuda.cvta_generic_to_shared(T.address_of(tiles[0, 0, 0])))

    def address(self, slot: Expr, row: Expr, column: Expr) -> Expr:
        """An address of 32 bits, as instructions take it: of pointers not every compiler sees that they differ by
        constants."""
        element = (slot * self.rows + row) * self.form.pitch + column
        return self._begin + T.cast(element * self.form.size, "uint32")

    def copy(self, slot: Expr, source: Element, first: Expr, end: Expr, thread: Expr, threads: int) -> None:
        """Starts copying rows first .. first + `rows` of a matrix that has `end` rows; beyond them there will be zeros,
        and beyond the width too: of what is not there nothing is read, so its address need not be one."""
        row, column = self._origin(thread, threads)
        start = materialize(first + row)
        count = materialize(end - start)
        copy = T.ptx["cp.async.cg.shared.global.L2::128B"]

        def chunk(down: int, right: int) -> None:
            is_there = T.int32(down) < count
            if right + math.gcd(self.chunks, threads) * self.form.chunk > self.width:
                is_there = T.And(is_there, column + right < self.width)
            # Of 0 bytes nothing is read, and 16 zeros are written.
            size = T.Select(is_there, T.uint32(16), T.uint32(0))
            element = T.address_of(source(start + down, column + right))
            T.evaluate(copy(self.address(slot, row + down, column + right), element, 16, size))

        self._each(row, threads, chunk)

    def each_chunk(
        self, thread: Expr, threads: int, body: Callable[[Expr, Expr], None], rows: int | None = None
    ) -> None:
        """body(row, column) for the chunks of a tile that are this thread's, the same at every call; or those of its
        first `rows`."""
        row, column = self._origin(thread, threads)
        self._each(row, threads, lambda down, right: body(row + down, column + right), rows)

    def _origin(self, thread: Expr, threads: int) -> tuple[Expr, Expr]:
        """A thread's first chunk; the others are so many rows and columns away as for every thread, which leaves one
        address to compute.

        Shared memory serves eight threads at once. Where they have two or four chunks of each of several rows, these
        rows are as far apart as there are chunks: rows begin an odd number of chunks after each other, so eight chunks
        are in different banks.
        """
        # So many threads side by side divide a row, and all threads: a thread's chunks are constants apart.
        across = math.gcd(self.chunks, threads)
        row = materialize(T.truncdiv(thread, T.int32(across)))
        column = materialize(T.truncmod(thread, T.int32(across)) * self.form.chunk)
        is_odd = self.form.pitch // self.form.chunk % 2 == 1
        if across in (2, 4) and is_odd and threads // across % _AT_ONCE == 0:
            several, of_eight = T.int32(_AT_ONCE // across), T.truncmod(row, T.int32(_AT_ONCE))
            row = materialize(row - of_eight + T.truncmod(of_eight, several) * across + T.truncdiv(of_eight, several))
        return row, column

    def _each(self, row: Expr, threads: int, body: Callable[[int, int], None], rows: int | None = None) -> None:
        """body(rows down, elements to the right) of a thread's first chunk, which is in `row`."""
        across, rows = math.gcd(self.chunks, threads), rows or self.rows
        for down in range(0, rows, threads // across):
            for right in range(0, self.chunks * self.form.chunk, across * self.form.chunk):
                if down + threads // across <= rows:
                    body(down, right)
                else:
                    with T.If(row + down < rows), T.Then():
                        body(down, right)


def commit() -> None:
    """Ends a group of copies; an empty one counts too."""
    T.evaluate(T.ptx["cp.async.commit_group"]())


def wait(pending: int) -> None:
    """Waits until all of this thread's own groups but the last `pending` have arrived."""
    T.evaluate(T.ptx["cp.async.wait_group"](pending))
