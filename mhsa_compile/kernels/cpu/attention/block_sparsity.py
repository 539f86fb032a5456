"""A static mask, analysed while compiling: for each tile of queries the runs of keys that it visits.

A run is whole, where every row of the tile sees all of it, or partial, with one bit for each pair. What no row of a
tile sees is in no run, so neither time nor memory goes to it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mhsa_compile.spec.window import WindowSpec

HIDDEN, PARTIAL, WHOLE = 0, 1, 2
SHORT = 4
"""Groups of keys below which a whole run next to a partial one joins it: a run of its own costs more than its masks."""


@dataclass(frozen=True)
class CpuBlockSparsity:
    """What the kernel reads. Heads are 1 where the mask is the same for all; columns are vectors of queries in a tile.

    order  (heads, tiles)      the order of the tiles: long and short ones in turn, so equal shares are equal work
    index  (heads * tiles + 1) the runs of tile t of head h are those from index[h * tiles + t] to the next entry
    runs   (runs, 3)           first key, number of keys, row of `bits` for the first key, or -1 for a whole run
    bits   (rows, columns)     bit i: lane i of that column of queries sees that key
    """

    order: NDArray[np.int32]
    index: NDArray[np.int32]
    runs: NDArray[np.int32]
    bits: NDArray[np.uint16]


def plan(
    pairs: NDArray[np.bool_], window: WindowSpec | None, *, queries: int, lanes: int, key_tile: int, keys: int
) -> CpuBlockSparsity:
    """Tiles of `queries` rows, vectors of `lanes` of them; runs of up to `keys` keys, in groups of `key_tile`."""
    heads, L, S = pairs.shape
    tiles = -(-L // queries)
    order = np.empty((heads, tiles), np.int32)
    index, runs = [0], list[tuple[int, int, int]]()
    bits, rows = list[NDArray[np.uint16]](), 0
    for head in range(heads):
        for tile in range(tiles):
            of_tile = range(tile * queries, min(L, (tile + 1) * queries))
            block = pairs[head, of_tile.start : of_tile.stop]
            block = block if window is None else block & window.visible(of_tile, L, S)
            for kind, begin, end in _runs(_kinds(block, key_tile), keys // key_tile):
                keys_of_run = slice(begin * key_tile, min(S, end * key_tile))
                row = -1
                if kind == PARTIAL:
                    row = rows
                    bits.append(_bits(block[:, keys_of_run], queries, lanes, (end - begin) * key_tile))
                    rows += len(bits[-1])
                runs.append((keys_of_run.start, keys_of_run.stop - keys_of_run.start, row))
            index.append(len(runs))
        costs = [sum(run[1] for run in runs[a:b]) for a, b in itertools.pairwise(index[-tiles - 1 :])]
        order[head] = _in_turn(np.argsort(costs, kind="stable"))
    empty = np.zeros((1, queries // lanes), np.uint16)  # a buffer has at least one element
    return CpuBlockSparsity(
        order,
        np.array(index, np.int32),
        np.array(runs or [(0, 0, -1)], np.int32),
        np.concatenate(bits) if bits else empty,
    )


def _kinds(block: NDArray[np.bool_], key_tile: int) -> NDArray[np.int8]:
    """What each group of keys is: HIDDEN from every row of the block, WHOLE or PARTIAL; one that S cuts is not
    whole."""
    rows, S = block.shape
    groups = -(-S // key_tile)
    padded = np.zeros((rows, groups * key_tile), np.bool_)
    padded[:, :S] = block
    cells = padded.reshape(rows, groups, key_tile)
    partial, whole = cells.any(axis=(0, 2)), cells.all(axis=(0, 2))
    return np.where(whole, WHOLE, np.where(partial, PARTIAL, HIDDEN)).astype(np.int8)


def _runs(kinds: NDArray[np.int8], longest: int) -> list[tuple[int, int, int]]:
    """(kind, first group, end) of the runs to visit, none longer than `longest` groups."""
    kinds = kinds.copy()
    for kind, begin, end in _stretches(kinds):
        beside = {int(kinds[i]) for i in (begin - 1, end) if 0 <= i < len(kinds)}
        if kind == WHOLE and end - begin < SHORT and PARTIAL in beside:
            kinds[begin:end] = PARTIAL
    return [
        (kind, first, min(end, first + longest))
        for kind, begin, end in _stretches(kinds)
        if kind != HIDDEN
        for first in range(begin, end, longest)
    ]


def _stretches(kinds: NDArray[np.int8]) -> list[tuple[int, int, int]]:
    """(kind, first group, end) of every stretch of one kind."""
    borders = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
    return [(int(kinds[a]), a, b) for a, b in itertools.pairwise(borders)]


def _bits(block: NDArray[np.bool_], queries: int, lanes: int, keys: int) -> NDArray[np.uint16]:
    """(keys, columns): the visible pairs of a run; rows that the last tile lacks, and keys beyond S, show nothing."""
    rows, count = block.shape
    padded = np.zeros((queries, keys), np.uint16)
    padded[:rows, :count] = block
    weights = (1 << np.arange(lanes)).astype(np.uint16)
    words = np.einsum("clk,l->kc", padded.reshape(queries // lanes, lanes, keys), weights)
    return np.asarray(words, np.uint16)


def _in_turn(tiles: NDArray[np.intp]) -> NDArray[np.intp]:
    """The first, the last, the second, the last but one, ..."""
    half = -(-len(tiles) // 2)
    result = np.empty_like(tiles)
    result[0::2], result[1::2] = tiles[:half], tiles[half:][::-1]
    return result
