"""Which heads a layer can do without, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

import numpy as np

from mhsa_analysis.output_fit import OutputFit, SplitMoments, fitted, relative
from mhsa_compile.errors import InputError

_EXACT = 16
"""Heads, or groups of them, of which all sets are tried: at most 12,870 of one size."""


class HeadSet(tuple[int, ...]):
    """Heads to remove, in order, and the fit of what is left, of a plan."""

    plan: PruningPlan | None = None


@dataclass(frozen=True, eq=False)
class PruningPlan:
    """Heads that a layer can do without, and what that costs.

    heads             to be removed; what `pruned` takes
    kept              the others
    relative_error    |y' - y| / |y|, y' of the layer without these heads, their means in its bias, over the tokens that
                      the heads were chosen and their means were taken on: three of four sequences, all of fewer than
                      four. A compiled one differs by what it rounds

    >>> import mhsa_compile as mhsa, torch
    >>> spec = mhsa.AttentionSpec(embed_dim=16, num_heads=4, outputs=("y", "heads", "weights"))
    >>> layer, x = mhsa.MultiHeadAttention(spec), torch.randn(8, 20, 16)
    >>> plan = mhsa.analysis.HeadStatistics(layer).add(x, layer(x)).report().without([1, 2])
    >>> plan.heads, plan.kept, plan.relative_error > 0
    ((1, 2), (0, 3), True)
    """

    heads: HeadSet
    kept: tuple[int, ...]
    relative_error: float
    split: SplitMoments = field(repr=False)

    @cached_property
    def unseen_error(self) -> float:
        """`relative_error` over the fourth sequences, which nothing was fitted on. Raises InputError: none there."""
        unseen = self.split.unseen_or_refuse("unseen_error")
        lost = self.split.fitted.out.copy()
        lost[self.split.fitted.columns(self.kept)] = 0.0
        return relative(unseen, unseen.missed(lost, self.split.fitted.mean))

    @cached_property
    def fit(self) -> OutputFit:
        """What is kept, with W_O fitted anew by a ridge. Raises InputError: too few tokens or sequences."""
        return fitted(self.split, self.kept)

    @property
    def refit_error(self) -> float:
        """The relative error with W_O fitted anew, over the tokens of the fit. Raises InputError as `fit` does."""
        return self.fit.training_error

    @property
    def unseen_refit_error(self) -> float:
        """The same over the fourth sequences, which no fit saw. Raises InputError as `fit` does."""
        return self.fit.unseen_error


def plan_for(split: SplitMoments, k: int) -> PruningPlan:
    """The set of k heads with the least 1_P^T G 1_P. Raises InputError."""
    moments = split.fitted
    spec = moments.layer.spec
    group = spec.num_heads // spec.num_kv_heads
    if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k < spec.num_heads or k % group:
        most = spec.num_heads - group
        expected = f"a number of heads from 0 to {most}" if group == 1 else f"a multiple of {group} from 0 to {most}"
        hint = "" if group == 1 else f"{group} heads share one key/value head, and go together."
        raise InputError("k", expected, repr(k), hint)
    units = moments.cost.reshape(spec.num_kv_heads, group, spec.num_kv_heads, group).sum(axis=(1, 3))
    best = (_best if len(units) <= _EXACT else _greedy)(units, k // group)
    return plan_of(split, [unit * group + i for unit in best for i in range(group)])


def plan_of(split: SplitMoments, heads: Sequence[int]) -> PruningPlan:
    """The plan that removes `heads`. Raises InputError."""
    moments = split.fitted
    removal = HeadSet(checked_heads(heads, moments.heads, moments.layer.spec.num_kv_heads))
    rest = tuple(head for head in range(moments.heads) if head not in removal)
    cost = float(moments.cost[np.ix_(removal, removal)].sum())
    removal.plan = PruningPlan(removal, rest, relative(moments, cost), split)
    return removal.plan


def checked_heads(heads: Sequence[int], H: int, G: int) -> tuple[int, ...]:
    """`heads` in order. Raises InputError: not there, twice, all, a part of a group."""
    order = sorted(heads) if all(isinstance(head, int | np.integer) for head in heads) else []
    if len(order) != len(heads) or any(not 0 <= head < H for head in order) or len(set(order)) < len(order):
        raise InputError("heads", f"heads from 0 to {H - 1}, each once", repr(list(heads)))
    if len(order) == H:
        raise InputError("heads", "some heads to be kept", f"all {H} of them", "A layer has at least one head.")
    group = H // G
    for first in range(0, H, group):
        inside = [head for head in order if first <= head < first + group]
        if 0 < len(inside) < group:
            expected = f"whole groups of {group} heads, which share one key/value head"
            raise InputError("heads", expected, f"{inside} of {list(range(first, first + group))}")
    return tuple(map(int, order))


def _best(cost: np.ndarray, k: int) -> tuple[int, ...]:
    """The cheapest of all sets of k."""
    sets = np.array(list(combinations(range(len(cost)), k)), int).reshape(-1, k)
    rows = np.zeros((len(sets), len(cost)))
    np.put_along_axis(rows, sets, 1.0, axis=1)
    costs = np.einsum("si,ij,sj->s", rows, cost, rows, optimize=True)
    return tuple(sets[costs.argmin()])


def _greedy(cost: np.ndarray, k: int) -> tuple[int, ...]:
    """One after the other, each the cheapest beside those before; then swapped as long as that is cheaper."""
    units: list[int] = []
    while len(units) < k:
        rest = [i for i in range(len(cost)) if i not in units]
        units.append(min(rest, key=lambda i: cost[i, i] + 2 * cost[i, units].sum()))
    while True:
        best, better = _sum(cost, units), None
        for place in range(len(units)):
            for other in set(range(len(cost))) - set(units):
                swap = [*units[:place], other, *units[place + 1 :]]
                if (cost_of_swap := _sum(cost, swap)) < best * (1 - 1e-12):
                    best, better = cost_of_swap, swap
        if better is None:
            return tuple(units)
        units = better


def _sum(cost: np.ndarray, heads: Sequence[int]) -> float:
    return float(cost[np.ix_(heads, heads)].sum())
