"""What kernels for vector CPUs ask the steps of scores: their parts of a task, which are the identity where a step does
not say otherwise. Scores are in units of log2, so that 2^x makes probs of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.attention_args import AttentionArguments
from mhsa_compile.kernels.common.score_scale import LOG2_E
from mhsa_compile.kernels.cpu.formats.choice import load_wide
from mhsa_compile.kernels.cpu.simd import vector_math
from mhsa_compile.kernels.cpu.simd.vectors import Chunk, RegisterTile, constant, materialize
from mhsa_compile.kernels.interface.ops import AttentionOp
from mhsa_compile.kernels.interface.score_step import ScoreStep

if TYPE_CHECKING:
    from tvm.ir import Expr

    from mhsa_compile.kernels.cpu.attention.masking import TileMask
    from mhsa_compile.kernels.cpu.decode.query_key import ScoreLayout


@dataclass(frozen=True)
class CpuMath:
    """Arithmetic on scores in vectors of so many lanes."""

    lanes: int = 1
    unit: ClassVar[float] = LOG2_E

    def constant(self, value: float) -> Expr:
        return constant(value, self.lanes)

    def tanh(self, x: Expr) -> Expr:
        return vector_math.tanh(x, self.lanes)

    def element(self, buffer: Expr, at: Sequence[Expr]) -> Expr:
        return materialize(load_wide(buffer, at, 1) * constant(self.unit, 1), "float32")


def place_of(op: AttentionOp, query: Expr, q_length: Expr | int, kv_length: Expr) -> Expr:
    """The place of a query among the keys: what windows, and the distance to a key, are counted from."""
    return materialize(query + kv_length - q_length) if op.from_end else query


def with_bias(score: Expr, bias: Expr, lanes: int) -> Expr:
    """A score with its bias. Not the sum alone: NaN - infinity would be NaN, where the score is hidden."""
    minus_infinity = constant(-math.inf, lanes)
    return T.Select(bias == minus_infinity, minus_infinity, score + bias)


@dataclass(frozen=True)
class TileTask:
    """A task of tiles: one head of one batch entry, and the step's own inputs. `place` is that of a chosen row among
    those that are asked for, where rows are chosen."""

    op: AttentionOp
    own: Sequence[Expr]
    b: Expr
    h: Expr
    place: Expr = None


class TilePart:
    """What a step does in one task of tiles: query rows along the lanes. Constructed once a task, `begin` is called
    for each width of tile."""

    blind = False
    """Whether no group of keys is known to be seen by all rows."""
    looks = False
    """Whether `look` tells of blocks that no row sees."""
    score_hides = False
    """Whether scores that were not hidden may become -inf."""

    def __init__(self, step: ScoreStep, task: TileTask) -> None:
        self.step, self.task = step, task

    def begin(self, mask: TileMask, keys: int) -> None:
        """Allocates scratch for blocks of up to so many keys, and computes what depends on the rows alone."""

    def listen(self, key_tile: int) -> None:
        """Allocates scratch for what goes with the reference of the softmax."""

    def prepare(self, columns: list[Chunk]) -> None:
        """Begins a way over the keys."""

    def look(self, first_key: Expr, count: Expr) -> Expr | None:
        """Looks at a block: whether any row sees any key of it; None: it does not tell."""
        return None

    def read_block(self, first_key: Expr, count: Expr) -> None:
        """Reads what the step needs of a block of which something is seen."""

    def whole_end(self, end: Expr) -> Expr:
        """The first key of the block, not behind `end`, that some row may not see."""
        return end

    def score(self, tile: RegisterTile, keys: list[Expr], base: Expr) -> None:
        """Changes scores; row r is of keys[r], number base + r of its block."""
        if self.step.elementwise:
            tile.each(lambda r, c: self.step.score(CpuMath(tile.columns[c][1]), tile.get(r, c)))

    def hide(self, score: Expr, row: Expr, key: Expr, column: Chunk) -> Expr:
        """The scores of a column of queries for `key`, number `row` of its block; -inf where it is hidden."""
        return score

    def sees(self, lane: Expr, row: Expr, key: Expr) -> Expr | None:
        """Whether query `lane` sees a key: a single pair, where speed does not matter; None: it does."""
        return None

    # Bias that is counted from an origin, which moves with the reference of the softmax.

    def add_bias(self, tile: RegisterTile, first_key: Expr) -> None:
        """Adds a bias to scores, hidden or not; row r is of key first_key + r."""

    def renew_bias(self, tile: RegisterTile, first_key: Expr) -> None:
        """Makes the same tile again after origins have moved."""

    def move(self, column: Chunk, whether: Expr, key: Expr) -> Expr | None:
        """Moves the origins of some lanes to `key`; what each lane's scores lose by it, None where nothing moves."""
        return None

    def lack(self, column: Chunk) -> Expr | None:
        """What the scores of each query lack, since they are counted from its origin."""
        return None

    def no_key(self, column: Chunk) -> Expr | None:
        """A score of no key for a column of queries, while origins are where they begin; None where there is none."""
        return None


def tile_parts(arguments: AttentionArguments, b: Expr, h: Expr, place: Expr = None) -> list[TilePart]:
    """The parts of all steps, in their order."""
    tasks = [(step, TileTask(arguments.op, own, b, h, place)) for step, own in arguments.steps()]
    return [(step.cpu_tile or TilePart)(step, task) for step, task in tasks]


def keys_of(arguments: AttentionArguments, b: Expr) -> Expr:
    """How many keys batch entry b has."""
    return materialize(arguments.keys(b)) if arguments.op.any_step("counts_keys") else arguments.kv_length


@dataclass(frozen=True)
class RowTask:
    """A task of few queries: the heads from `first_head` on of batch entry `b`, that share a key head."""

    op: AttentionOp
    own: Sequence[Expr]
    b: Expr
    first_head: Expr
    layout: ScoreLayout
    kv_length: Expr

    @property
    def ratio(self) -> int:
        """Query heads of a key head. Row r is of query r / ratio and head r % ratio."""
        return self.op.num_heads // self.op.num_kv_heads


class RowPart:
    """What a step does in one task of few queries: rows and keys share the lanes, as `ScoreLayout` says."""

    masked = False
    """Whether every block has to be masked."""

    def __init__(self, step: ScoreStep, task: RowTask) -> None:
        self.step, self.task = step, task

    def allocate(self, keys: int) -> None:
        """Allocates scratch for blocks of so many keys."""

    def prepare(self) -> None:
        """Computes what depends on the rows alone."""

    def read_block(self, begin: Expr, count: Expr) -> None:
        """Reads what masks a block."""

    def score(self, score: Expr, key: Expr, vector: int) -> Expr:
        """What becomes of a vector of scores; `key` is its first key among all."""
        return self.step.score(CpuMath(self.task.layout.lanes), score) if self.step.elementwise else score

    def hide(self, score: Expr, begin: Expr, key: Expr, vector: int) -> Expr:
        """The scores, -inf where hidden; `key` is the first key of the vector in the block that begins at `begin`."""
        return score

    def no_keys(self) -> Callable[[Expr], Expr] | None:
        """The score of no key of each query head within the group; None where there is none."""
        return None


class FadingPart(RowPart, ABC):
    """A bias that is counted from an origin of each row, which moves with the row's maximum: to the very key, once a
    block of scores is known. So scores wait without their bias until they are weighed."""

    @abstractmethod
    def distances(self) -> RegisterTile:
        """The distances that `keep_larger` replaces, at the begin of a block."""

    @abstractmethod
    def keep_larger(self, largest: RegisterTile, distances: RegisterTile, score: Expr, key: Expr, vector: int) -> None:
        """largest = max(largest, score with its bias), and `distances` of the keys they belong to. `key` is the first
        key of the vector among all."""

    @abstractmethod
    def keep_distances(self, distances: RegisterTile) -> None:
        """Ends a block."""

    @abstractmethod
    def move(self, old: Expr, in_lanes: Expr, top: Expr, vector: int) -> Expr:
        """Moves the origin of a row to the key of a block's maximum `top`, where the row's maximum `old` is less;
        `in_lanes` are the block's maxima lane by lane. Gives what the scores of each row lose by it."""

    @abstractmethod
    def biased(self, score: Expr, key: Expr, vector: int) -> Expr:
        """A vector of scores with their bias; `key` is its first key among all."""

    @abstractmethod
    def origin(self, row: Expr) -> Expr:
        """The key from which a row's distances are counted."""


def row_parts(
    arguments: AttentionArguments, b: Expr, first_head: Expr, layout: ScoreLayout, kv_length: Expr
) -> list[RowPart]:
    """The parts of all steps, in their order."""
    tasks = [(step, RowTask(arguments.op, own, b, first_head, layout, kv_length)) for step, own in arguments.steps()]
    return [(step.cpu_rows or RowPart)(step, task) for step, task in tasks]
