"""ALiBi: less for keys further away, slope * (key - place of the query).

The softmax does not mind what is added to all scores of a row, so a distance may be counted from any key: from the
origin of its row. Numbers are small, so exact, where the probs are not, if the origin lies where the scores are
largest. That depends on all that hides keys, and on the products; so on a CPU a row's origin begins at its place, and
whenever its reference is raised it moves to the keys that raised it. On a GPU it is the last key that the row's window,
length and constant mask leave it, or the first one if the slope is negative.
Source: Press et al. 2021 (arXiv:2108.12409).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.plain_parts import EXACT, Pair, PlainMath, PlainPart
from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.score_parts import CpuMath, FadingPart, TilePart, TileTask, place_of
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import Chunk, RegisterTile, constant, let, load, scratch, splat, store
from mhsa_compile.kernels.cpu.simd.vectors import materialize as cpu_materialize
from mhsa_compile.kernels.cuda.attention.thread_scores import CellScore, CudaMath, ThreadPart, ThreadScores
from mhsa_compile.kernels.cuda.primitives.simt import materialize, of_row
from mhsa_compile.kernels.interface.ops import AttentionOp, TensorInput
from mhsa_compile.kernels.interface.score_step import NodeScores, RowMeaning, ScoreMath, ScoreStep, SomeRows


class _SlopesPlain(PlainPart):
    def score(self, score: Expr, pair: Pair) -> Expr:
        distance = pair.j - self.task.place(pair.b, pair.i)
        return score + self.step.tilt(PlainMath(), self.task.own, pair.h) * tirx.Cast(EXACT, distance)


class _SlopesTile(TilePart):
    def __init__(self, step: Slopes, task: TileTask) -> None:
        super().__init__(step, task)
        self._head_slope = step.tilt(CpuMath(), task.own, task.h)

    def begin(self, mask: TileMask, keys: int) -> None:
        self.mask = mask

    def listen(self, key_tile: int) -> None:
        queries = self.mask.queries
        self.origins = scratch((queries,))  # of the distances, a key for each query
        self.unbiased = scratch((key_tile, queries))  # the tile before its bias

    def prepare(self, columns: list[Chunk]) -> None:
        for column in columns:
            store(self.origins, [T.int64(column[0])], self._places(column), column[1])

    def add_bias(self, tile: RegisterTile, first_key: Expr) -> None:
        for r in range(tile.rows):
            for c, (first, lanes) in enumerate(tile.columns):
                # Kept, since the bias depends on origins that these very scores may move.
                store(self.unbiased, [T.int64(r), T.int64(first)], tile.get(r, c), lanes)
        self.renew_bias(tile, first_key)

    def renew_bias(self, tile: RegisterTile, first_key: Expr) -> None:
        # A key's number is exact in float32 up to 2^24.
        numbers = [cpu_materialize(T.cast(first_key + r, "float32"), "float32") for r in range(tile.rows)]

        def biased(r: int, c: int) -> Expr:
            first, lanes = tile.columns[c]
            distance = splat(numbers[r], lanes) - load(self.origins, [T.int64(first)], lanes)
            return load(self.unbiased, [T.int64(r), T.int64(first)], lanes) + self._slope(tile.columns[c]) * distance

        tile.each(biased)

    def move(self, column: Chunk, whether: Expr, key: Expr) -> Expr:
        first, lanes = column
        old = cpu_materialize(load(self.origins, [T.int64(first)], lanes), "float32", lanes)
        new = splat(cpu_materialize(T.cast(key, "float32"), "float32"), lanes)
        new = cpu_materialize(T.Select(whether, new, old), "float32", lanes)
        store(self.origins, [T.int64(first)], new, lanes)
        return cpu_materialize(self._slope(column) * (new - old), "float32", lanes)

    def lack(self, column: Chunk) -> Expr:
        first, lanes = column
        return self._slope(column) * (load(self.origins, [T.int64(first)], lanes) - self._places(column))

    def _slope(self, column: Chunk) -> Expr:
        return splat(self._head_slope, column[1])

    def _places(self, column: Chunk) -> Expr:
        first, lanes = column
        lane = T.Ramp(T.int32(first), T.int32(1), lanes) if lanes > 1 else T.int32(first)
        places = splat(let(T.cast(self.mask.place, "int32")), lanes) + lane
        return T.cast(places, vectors.vector_type("float32", lanes))


class _SlopesRows(FadingPart):
    def allocate(self, keys: int) -> None:
        self.layout, self.lanes = self.task.layout, self.task.layout.lanes
        size = self.layout.padded_rows * self.layout.keys_per_vector  # the lanes of a key, or of a vector of keys
        # distance = first key of the vector + offset; and the distance of the largest score of a block in each lane
        self.slopes, self.offsets, self.largest = (T.alloc_buffer((size,), "float32") for _ in range(3))

    def prepare(self) -> None:
        op, task = self.task.op, self.task
        for first in range(0, int(self.slopes.shape[0]), self.lanes):
            for buffer in (self.slopes, self.offsets):  # rows of padding have none
                store(buffer, [T.int64(first)], constant(0.0, self.lanes), self.lanes)
        assert isinstance(op.q_length, int)
        first_place = T.cast(place_of(op, T.int64(0), op.q_length, task.kv_length), "int32")
        with T.serial(T.int64(self.layout.rows)) as row:
            place = cpu_materialize(first_place + T.cast(T.truncdiv(row, T.int64(task.ratio)), "int32"), "int32")
            head = task.first_head + cpu_materialize(T.truncmod(row, T.int64(task.ratio)))
            slope = self.step.tilt(CpuMath(), task.own, head)
            # The distance of a vector's lanes differs by their own key's place in it.
            for key in range(self.layout.keys_per_vector):
                at = [row + key * self.layout.padded_rows]
                T.buffer_store(self.slopes, slope, at)
                T.buffer_store(self.offsets, T.cast(key - place, "float32"), at)

    def score(self, score: Expr, key: Expr, vector: int) -> Expr:
        return let(score)

    def distances(self) -> RegisterTile:
        distances = RegisterTile(self.layout.row_vectors, [(0, self.lanes)])
        distances.fill(0.0)
        return distances

    def keep_larger(self, largest: RegisterTile, distances: RegisterTile, score: Expr, key: Expr, vector: int) -> None:
        distance, so_far = let(self._distance(key, vector)), let(largest.get(vector, 0))
        score = let(score + self._slope(vector) * distance)
        distances.set(vector, 0, T.Select(score > so_far, distance, distances.get(vector, 0)))
        largest.set(vector, 0, T.max(so_far, score))

    def keep_distances(self, distances: RegisterTile) -> None:
        for vector in range(self.layout.row_vectors):
            store(self.largest, self._at(vector), distances.get(vector, 0), self.lanes)

    def move(self, old: Expr, in_lanes: Expr, top: Expr, vector: int) -> Expr:
        at, lanes = self._at(vector), self.lanes
        distance = T.Select(in_lanes == top, load(self.largest, at, lanes), constant(-math.inf, lanes))
        distance = self.layout.over_keys(cpu_materialize(distance, "float32", lanes), T.max)
        distance = cpu_materialize(T.Select(top > old, distance, constant(0.0, lanes)), "float32", lanes)
        store(self.offsets, at, load(self.offsets, at, lanes) - distance, lanes)
        return cpu_materialize(self._slope(vector) * distance, "float32", lanes)

    def biased(self, score: Expr, key: Expr, vector: int) -> Expr:
        return score + self._slope(vector) * self._distance(key, vector)

    def origin(self, row: Expr) -> Expr:
        return T.float32(0) - self.offsets[row]

    def _at(self, vector: int) -> list[Expr]:
        return [T.int64(vector * self.lanes)]

    def _slope(self, vector: int) -> Expr:
        return load(self.slopes, self._at(vector), self.lanes)

    def _distance(self, key: Expr, vector: int) -> Expr:
        number = splat(cpu_materialize(T.cast(key, "float32"), "float32"), self.lanes)
        return number + load(self.offsets, self._at(vector), self.lanes)


class _SlopesThread(ThreadPart):
    def read(self) -> None:
        self._slopes = self.of_heads(self._of)

    def _of(self, head: Expr) -> Expr:
        return self.step.tilt(CudaMath(), self.task.own, head)

    def begin(self, mask: ThreadScores) -> None:
        self.mask = mask
        self._origins = [self._origin(row) for row in range(len(mask.numbers))]

    def _origin(self, row: int) -> Expr:
        """The key that the distances of a row are counted from."""
        keys, number = self.mask.key_range, self.mask.numbers[row]
        last = materialize(keys.end_of(number) - 1)
        first = T.int32(0) if keys.left is None else T.max(T.int32(0), number + keys.shift - keys.left)
        if keys.visits is not None:
            # A row beyond the last is of no account.
            first_visible, last_visible = keys.visits.span(T.min(number, keys.q_length - 1))
            first, last = T.max(first, first_visible), T.min(last, last_visible)
        return materialize(T.Select(of_row(self._slopes, row) >= T.float32(0), last, first))

    def of_row(self, row: int, first_key: Expr) -> CellScore:
        bias = materialize(T.cast(first_key + self.mask.cells.first - self._origins[row], "float32"), "float32")
        slope = of_row(self._slopes, row)
        return lambda score, offset: score + slope * (bias + T.float32(offset))

    def lack(self, row: int) -> Expr:
        place = self.mask.numbers[row] + self.mask.key_range.shift
        return of_row(self._slopes, row) * T.cast(self._origins[row] - place, "float32")

    def tilt(self) -> Expr:
        return self._slopes


@dataclass(frozen=True)
class Slopes(ScoreStep):
    """An input (H,) of the attention's dtype holds for each head what is added to a score for each key further on."""

    from_places = True
    fades = True
    role = "slopes"
    extra = "slopes"
    bends = True
    plain = _SlopesPlain
    cpu_tile = _SlopesTile
    cpu_rows = _SlopesRows
    cuda_rows = _SlopesThread

    @classmethod
    def mistake(cls, node: NodeScores) -> tuple[str, ...] | None:
        if cls.role in node.inputs and "past_key" in node.beside:
            return "slopes without a past", "both", "Keep the cache outside: TensorScatter, nonpad_kv_seqlen."
        return node.mistake_of_heads(cls.role)

    def arguments(self, op: AttentionOp) -> tuple[tuple[str, TensorInput], ...]:
        return (("slopes", TensorInput(op.dtype, (op.num_heads,))),)

    def random_inputs(self, rng: np.random.Generator, kinds: Sequence[tuple[str, tuple[int, ...]]]) -> list[np.ndarray]:
        """A power of two for each head, as in the paper."""
        ((dtype, (count,)),) = kinds
        return [(2.0 ** (-8 * np.arange(1, count + 1) / count)).astype(np.dtype(dtype))]

    def meaning(self, own: Sequence[np.ndarray], rows: SomeRows) -> RowMeaning:
        return RowMeaning(bias=own[0].astype(np.float64)[None, :, None, None] * rows.distance)

    def summary(self) -> str:
        return "ALiBi"

    def semantics(self) -> dict[str, Any]:
        return {"alibi": True}

    def tilt(self, math: ScoreMath, own: Sequence[Expr], head: Expr) -> Expr:
        return math.element(own[0], [head])
