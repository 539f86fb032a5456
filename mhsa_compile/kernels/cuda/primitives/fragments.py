"""Where a thread holds scores: a tile of rows and keys, in registers, each thread its own cells of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from mhsa_compile.kernels.cuda.primitives.warp import COLUMNS, ThreadIndex

if TYPE_CHECKING:
    from tvm.ir import Expr

Held = TypeVar("Held")
OfRows: TypeAlias = Held | tuple[Held, ...] | None
"""What all rows of a thread have, or what each of them has, where they are of several heads; or nothing."""


def of_row(values: OfRows[Held], row: int) -> Held | None:
    return values[row] if isinstance(values, tuple) else values


class Fragment(Protocol):
    """The keys of a thread's cells: of a tile's, those with the numbers `first` + offset.

    leads     whether the thread is the one of those that share its rows which speaks for them
    in_pairs  whether `first` is even, and each even offset followed by the next number
    Bits of a constant mask are found for them where `first` and an offset never add up beyond a multiple of 32.
    """

    first: Expr
    leads: Expr
    in_pairs: bool

    def offsets(self, count: int) -> list[int]:
        """The offsets of a thread's keys in a tile of so many columns, each of the cells' own width."""
        ...

    def at(self, row: int, count: int, number: int) -> int:
        """The index, in an array of all of a thread's scores, of the key at offset `number` in its row number `row`."""
        ...


class QuadFragment:
    """Tiles of 8 keys, as products of mma.sync leave them: a lane has two neighbours of each row."""

    in_pairs = True

    def __init__(self, place: ThreadIndex) -> None:
        self.first, self.leads = 2 * place.q, place.q == 0

    def offsets(self, count: int) -> list[int]:
        return [n * COLUMNS + e for n in range(count) for e in range(2)]

    def at(self, row: int, count: int, number: int) -> int:
        return cell(row, count, number // 2, number % 2)


class StridedCells:
    """Keys `first`, `first` + `stride`, ..; rows one after another."""

    in_pairs = False

    def __init__(self, first: Expr, stride: int, leads: Expr) -> None:
        self.first, self.stride, self.leads = first, stride, leads

    def offsets(self, count: int) -> list[int]:
        return [n * self.stride for n in range(count)]

    def at(self, row: int, count: int, number: int) -> int:
        return row * count + number


def cell(row: int, tiles: int, n: int, e: int) -> int:
    """The index, in a thread's array, of column 2 q + e of tile n of one of its rows; rows have `tiles` tiles."""
    return 4 * (row // 2 * tiles + n) + 2 * (row % 2) + e
