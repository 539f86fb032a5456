"""Products of tiles whose factors are terms of numbers, for all columns of queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mhsa_compile.kernels.cpu.units import tiles
from mhsa_compile.kernels.cpu.units.tiles import Tiles


class HeldTiles:
    """What registers hold in a straight piece of code, by number."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, ...]] = {}

    def has(self, tile: int, what: tuple[int, ...]) -> bool:
        return self._held.get(tile) == what

    def load(self, tile: int, what: tuple[int, ...], load: Callable[[], None]) -> None:
        """Loads it, unless it is there."""
        if not self.has(tile, what):
            load()
        self._held[tile] = what


@dataclass(frozen=True)
class ProductsOfTerms:
    """Sums of `columns` tiles, by these pairs of terms of the left and of the right factor."""

    unit: Tiles
    pairs: tuple[tuple[int, int], ...]
    columns: int

    def add(
        self,
        held: HeldTiles,
        pair: int,
        left: Callable[[int], None],
        right: Callable[[int, int], None],
        place: tuple[int, ...],
    ) -> None:
        """Sums of all columns += products of a pair of terms, of factors at a place."""
        i, j = self.pairs[pair]
        held.load(tiles.LEFT, (*place, i), partial(left, i))
        columns = list(range(self.columns))
        if held.has(tiles.RIGHT, (*place, j, columns[-1])):
            columns.reverse()
        for c in columns:
            held.load(tiles.RIGHT, (*place, j, c), partial(right, j, c))
            self.unit.product(c, tiles.LEFT, tiles.RIGHT)
