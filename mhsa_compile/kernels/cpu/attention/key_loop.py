"""The way of one task over its keys: which blocks of them it visits, and which groups of a block hide something.

What no row of the task's tile sees is never visited; what every row sees takes a path without masks; at the right edge
of a window, columns of queries that see nothing of a group may be left out. What becomes of a group of keys is the
visitor's: attention makes probs of it (`kernel`), and `softmax_outputs` looks at its scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.cpu.attention.masking import Bits, TileMask
from mhsa_compile.kernels.cpu.simd.vectors import Chunk, materialize
from mhsa_compile.kernels.interface.kernel import Config


@dataclass(frozen=True)
class Runs:
    """The runs of keys that a static mask leaves to the task: rows first .. end of `runs`, as `block_sparsity` says."""

    first: Expr
    end: Expr
    runs: Expr
    bits: Expr


@dataclass(frozen=True)
class KeyGroup:
    """`key_tile` keys, from number `base` of their block on, for some columns of queries."""

    base: Expr
    first_key: Expr
    rows: list[Expr]  # of K: `first_key` and those behind it; beyond the last key the last one again
    columns: list[Chunk]
    hides: bool  # whether some of it may be hidden


@dataclass(frozen=True)
class VisitedBlock:
    """Keys first_key .. first_key + count, in so many groups."""

    first_key: Expr
    count: Expr
    groups: Expr
    hides: Expr | None  # whether any key was hidden from any row; None where that can not be


class KeyVisitor(Protocol):
    """What is done with the keys of a task: for each block `begin_block`, then its groups in their order."""

    def begin_block(self) -> None: ...

    def add_group(self, group: KeyGroup) -> None: ...

    def end_block(self, block: VisitedBlock) -> None: ...


@dataclass(frozen=True)
class Route:
    """The pieces and the order in which a visitor wants its keys."""

    equal_blocks: bool = False
    """Whether blocks are as few as the scratch allows, all of one size; else there are full ones, and what is left."""
    backwards: bool = False
    """Whether blocks come from the last to the first."""
    drops_columns: bool = False
    """Whether columns of queries that see nothing of a group are left out of it."""
    begins_early: bool = False
    """Whether `begin_block` comes before it is known what the block hides: so it is emitted once, where a run may be
    whole or not."""


@dataclass(frozen=True)
class _Run:
    """A run of a static mask; `row` is that of its first key's bits, negative where every row sees all of it."""

    first_key: Expr
    count: Expr
    row: Expr


class KeyLoop:
    """Emits one way over the keys that `visibility` leaves, or over `runs` of them."""

    def __init__(
        self, visitor: KeyVisitor, visibility: TileMask, config: Config, route: Route, runs: Runs | None
    ) -> None:
        self.visitor, self.visibility, self.route, self.runs = visitor, visibility, route, runs
        self.keys, self.key_tile, self.query_columns = config["keys"], config["key_tile"], visibility.columns

    def emit(self) -> None:
        if self.runs is None:
            self._visit_visible()
        else:
            self._visit_runs(self.runs)

    def _visit_visible(self) -> None:
        """Visits all keys between the first and the last that any row sees."""
        first, end = self.visibility.visible_to_any()
        size, blocks = self._blocks(first, end)
        with T.serial(blocks) as turn:
            first_key = materialize(first + self._in_order(turn, T.int64(0), blocks) * size)
            self._visit(first_key, materialize(T.min(size, end - first_key)))

    def _blocks(self, first: Expr, end: Expr) -> tuple[Expr, Expr]:
        """(keys of a block, a multiple of `key_tile` of them; how many blocks)."""
        if not self.route.equal_blocks:
            return T.int64(self.keys), materialize(ceil_div(end - first, self.keys))
        length = materialize(end - first)
        fewest = materialize(T.max(T.int64(1), ceil_div(length, self.keys)))
        size = materialize(ceil_div(ceil_div(length, fewest), self.key_tile) * self.key_tile)
        # Without keys the size is 0, which nothing is to be divided by.
        return size, materialize(ceil_div(length, T.max(T.int64(1), size)))

    def _in_order(self, turn: Expr, first: Expr, end: Expr) -> Expr:
        return first + end - 1 - turn if self.route.backwards else turn

    def _visit(self, first_key: Expr, count: Expr) -> None:
        """Visits one block, by all but the bits of a static mask."""
        # A way over the same keys before this one may have left bits.
        self.visibility.bits = None
        if (visible := self.visibility.look(first_key, count)) is None:
            return self._visit_block(first_key, count)
        with T.If(visible), T.Then():
            self._visit_block(first_key, count)

    def _visit_block(self, first_key: Expr, count: Expr) -> None:
        """Visits one block of which something is seen, as far as the steps of scores tell."""
        self.visibility.read_block(first_key, count)
        groups = self._groups(count)
        if self.route.begins_early:
            self.visitor.begin_block()
        lead, whole = self._bounds(first_key, groups)
        if not self.route.begins_early:
            self.visitor.begin_block()
        if not self.visibility.blind:
            if self.visibility.leftmost is not None:
                self._cut_groups(T.int64(0), lead, first_key, self.query_columns)
            self._whole_groups(lead, whole, first_key)
        self._trailing(whole, groups, first_key)
        hides = T.Or(lead > 0, whole < groups) if self.visibility.hides else None
        hides = T.bool(True) if self.visibility.score_hides else hides
        self.visitor.end_block(VisitedBlock(first_key, count, groups, hides))

    def _groups(self, count: Expr) -> Expr:
        return materialize(ceil_div(count, self.key_tile))

    def _bounds(self, first_key: Expr, groups: Expr) -> tuple[Expr, Expr]:
        """(first, end): every row sees all of the groups between them."""
        # Both rounded inwards: a group of which some is hidden takes the masks.
        from_key, to_key = self.visibility.visible_to_all()
        first = materialize(T.max(T.int64(0), T.min(groups, ceil_div(from_key - first_key, self.key_tile))))
        return first, materialize(T.max(first, T.min(groups, T.truncdiv(to_key - first_key, T.int64(self.key_tile)))))

    # Runs of a static mask.

    def _visit_runs(self, runs: Runs) -> None:
        with T.serial(runs.first, runs.end) as turn:
            number = self._in_order(turn, runs.first, runs.end)
            run = _Run(*(materialize(T.cast(runs.runs[number, i], "int64")) for i in range(3)))
            # The plan does not know how many keys a call's entries have, nor a window that is counted from their end.
            if self.visibility.op.any_step("counts_keys"):
                self._visit_cut(runs, run)
            else:
                self._visit_run(runs, run)

    def _visit_run(self, runs: Runs, run: _Run) -> None:
        """Visits all of a run."""
        groups = None
        if self.route.begins_early:
            groups = self._groups(run.count)
            self.visitor.begin_block()
        with T.If(run.row < 0):
            with T.Then():
                self._visit_whole(run, groups)
            with T.Else():
                self._visit_partial(runs, run, groups)

    def _visit_cut(self, runs: Runs, run: _Run) -> None:
        """Visits what the keys of the batch entry, and a window counted from their end, leave of a run."""
        first, end = self.visibility.visible_to_any()
        run = _Run(run.first_key, materialize(T.min(run.count, end - run.first_key)), run.row)
        with T.If(T.And(run.count > 0, run.first_key + run.count > first)), T.Then(), T.If(run.row < 0):
            with T.Then():
                self._visit(run.first_key, run.count)
            with T.Else():
                self._visit_partial(runs, run, None)

    def _visit_whole(self, run: _Run, groups: Expr | None) -> None:
        """Visits a run that every row sees. `groups` are its groups, where the visitor has begun."""
        groups = self._begin(run) if groups is None else groups
        self._whole_groups(T.int64(0), groups, run.first_key)
        hides = T.bool(True) if self.visibility.score_hides else None
        self.visitor.end_block(VisitedBlock(run.first_key, run.count, groups, hides))

    def _visit_partial(self, runs: Runs, run: _Run, groups: Expr | None) -> None:
        """Visits a run with a bit for each pair."""
        self.visibility.bits = Bits(runs.bits, run.row, self.visibility.lanes)
        groups = self._begin(run) if groups is None else groups
        self._cut_groups(T.int64(0), groups, run.first_key, self.query_columns)
        self.visitor.end_block(VisitedBlock(run.first_key, run.count, groups, T.bool(True)))

    def _begin(self, run: _Run) -> Expr:
        self.visitor.begin_block()
        return self._groups(run.count)

    # Groups first .. end of a block.

    def _whole_groups(self, first: Expr, end: Expr, first_key: Expr) -> None:
        """Visits groups of which every row sees all."""
        with T.serial(first, end) as group:
            base = materialize(group * self.key_tile)
            rows = [first_key + base + r for r in range(self.key_tile)]
            self.visitor.add_group(KeyGroup(base, first_key + base, rows, self.query_columns, hides=False))

    def _trailing(self, first: Expr, end: Expr, first_key: Expr) -> None:
        """Visits groups of which some is hidden. Towards the right edge fewer and fewer columns of queries see
        anything."""
        if self.visibility.rightmost is None or not self.route.drops_columns:
            return self._cut_groups(first, end, first_key, self.query_columns)
        for c in range(len(self.query_columns)):
            stop = end
            if c + 1 < len(self.query_columns):
                # From this key on, the column sees nothing: its last lane sees up to rightmost + its number.
                beyond = self.visibility.rightmost + self.query_columns[c + 1][0] - first_key
                stop = materialize(T.max(first, T.min(end, ceil_div(beyond, self.key_tile))))
            self._cut_groups(first, stop, first_key, self.query_columns[c:])
            first = stop

    def _cut_groups(self, first: Expr, end: Expr, first_key: Expr, columns: list[Chunk]) -> None:
        """Visits groups of which some is hidden, for these columns of queries."""
        with T.serial(first, end) as group:
            base = materialize(group * self.key_tile)
            # Beyond the last key the last one is read again; what it gives is hidden.
            last = self.visibility.kv_length - 1
            rows = [materialize(T.min(first_key + (base + r), last)) for r in range(self.key_tile)]
            self.visitor.add_group(KeyGroup(base, first_key + base, rows, columns, hides=True))
