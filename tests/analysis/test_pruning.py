"""Layers without some of their heads: the error that was predicted is the one that is measured."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

import mhsa_compile as mhsa
from mhsa_analysis import pruning
from mhsa_analysis.head_report import HeadReport
from mhsa_analysis.pruning import PruningPlan
from mhsa_compile import analysis
from mhsa_compile.errors import InputError, ModelError, SpecError
from mhsa_compile.nn.modules import MultiHeadAttention
from mhsa_compile.spec.attention_spec import AttentionSpec

ROUNDS = 1e-6  # of float32, on relative errors
FITTED, UNSEEN = slice(0, 3), slice(3, 4)
"""Of the four sequences of `made`."""


def made(**fields: object) -> tuple[MultiHeadAttention, torch.Tensor, HeadReport]:
    torch.manual_seed(0)
    layer = MultiHeadAttention(AttentionSpec(**{"embed_dim": 24, "num_heads": 6} | fields)).eval()
    x = torch.randn(4, 30, 24).cumsum(dim=1) / 3 + 1  # tokens that have to do with each other, and means that are not 0
    return layer, x, reported(layer, x)


def opened(layer: MultiHeadAttention) -> MultiHeadAttention:
    return layer.with_outputs("y", "heads", "weights")


@torch.no_grad()
def reported(layer: MultiHeadAttention, x: torch.Tensor) -> HeadReport:
    return analysis.HeadStatistics(opened(layer)).add(x, opened(layer)(x)).report()


@torch.no_grad()
def measured(layer: MultiHeadAttention, small: torch.nn.Module, x: torch.Tensor) -> float:
    y = layer(x).double()
    return float((small(x).double() - y).norm() / y.norm())


KINDS = ({}, {"bias": False}, {"v_head_dim": 3, "head_dim": 5, "causal": True, "rope": False}, {"sinks": True})


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_error_is_the_one_that_was_predicted(kind: dict[str, object]) -> None:
    layer, x, report = made(**kind)
    for plan in report.pruning_curve():
        small = analysis.pruned(layer, plan.heads)
        assert small.spec.num_heads == 6 - len(plan.heads) == len(plan.kept)
        assert (small.spec.head_dim, small.spec.v_head_dim) == (layer.spec.head_dim, layer.spec.v_head_dim)
        assert measured(layer, small, x[FITTED]) == pytest.approx(plan.relative_error, abs=ROUNDS)
        assert measured(layer, small, x[UNSEEN]) == pytest.approx(plan.unseen_error, abs=ROUNDS)
    errors = [plan.relative_error for plan in report.pruning_curve()]
    assert len(errors) == 5 and 0 < errors[0] < errors[-1]


def test_a_refit_is_nearer_and_as_predicted_on_both_sides() -> None:
    layer, x, report = made()
    for k in (1, 3):
        plan = report.prune(k)
        small = analysis.pruned(layer, plan.heads, refit=True)
        assert measured(layer, small, x[FITTED]) == pytest.approx(plan.refit_error, abs=ROUNDS)
        assert measured(layer, small, x[UNSEEN]) == pytest.approx(plan.unseen_refit_error, abs=ROUNDS)
        assert plan.refit_error < plan.relative_error
        assert (plan.fit.tokens, plan.fit.unseen_tokens) == (90, 30)


def least_squares(layer: MultiHeadAttention, x: torch.Tensor, kept: tuple[int, ...], ridge: float) -> np.ndarray:
    """W (D, K + 1) of what makes up for the other heads, by numpy.linalg.lstsq with rows of the ridge."""
    with torch.no_grad():
        heads = opened(layer)(x)[1].double().transpose(1, 2).flatten(0, 1).numpy()  # (n, H, F)
    out = layer.out_proj.weight.detach().double().numpy().T.reshape(6, 4, 24)
    lost = sum(heads[:, head] @ out[head] for head in range(6) if head not in kept)
    columns = heads[:, list(kept)].reshape(len(heads), -1)
    columns, lost = columns - columns.mean(axis=0), lost - lost.mean(axis=0)
    rows = np.r_[columns, np.sqrt(ridge * len(columns)) * np.eye(columns.shape[1])]
    return np.linalg.lstsq(rows, np.r_[lost, np.zeros((columns.shape[1], 24))], rcond=None)[0]


@pytest.mark.thorough
def test_the_fit_is_a_ridge_chosen_by_parts_that_are_held_out() -> None:
    """By other means: least squares on rows of all tokens, each ridge tried on each of three sequences held out."""
    layer, x, report = made()
    kept = report.prune(2).kept
    fit = report.prune(2).fit
    own = report.split.fitted.covariance[np.ix_(*[report.split.fitted.columns(kept)] * 2)]
    ridges = np.linalg.eigvalsh(own)[-1] * 2.0 ** np.arange(-34, 7)

    def missed(train: torch.Tensor, test: torch.Tensor, ridge: float) -> float:
        weights = least_squares(layer, train, kept, ridge)
        with torch.no_grad():
            ours, theirs = (
                opened(layer)(part)[1].double().transpose(1, 2).flatten(0, 1).numpy() for part in (test, train)
            )
        out = layer.out_proj.weight.detach().double().numpy().T.reshape(6, 4, 24)
        centred = ours - theirs.mean(axis=0)
        lost = sum(centred[:, head] @ out[head] for head in range(6) if head not in kept)
        return float(((lost - centred[:, list(kept)].reshape(len(ours), -1) @ weights) ** 2).sum())

    tried = [
        sum(missed(x[[i for i in range(3) if i != held]], x[[held]], ridge) for held in range(3)) for ridge in ridges
    ]
    best = ridges[int(np.argmin(tried))]
    expected = layer.out_proj.weight.detach().double().numpy().T[report.split.fitted.columns(kept)]
    np.testing.assert_allclose(fit.out, expected + least_squares(layer, x[FITTED], kept, best), atol=1e-5)
    assert 0 < fit.freedom < len(fit.out)


def test_a_fit_on_few_tokens_is_said_not_to_carry_over() -> None:
    def fit_on(sequences: int) -> PruningPlan:
        torch.manual_seed(0)
        layer = MultiHeadAttention(AttentionSpec(embed_dim=24, num_heads=6)).eval()
        return reported(layer, torch.randn(sequences, 30, 24).cumsum(dim=1) / 3 + 1).prune(1)

    few, many = fit_on(8), fit_on(400)
    assert few.fit.tokens == 180 and not few.fit.carries_over
    assert few.unseen_refit_error > 2 * few.refit_error
    assert many.unseen_refit_error < 1.2 * many.refit_error and many.fit.carries_over
    assert many.unseen_refit_error < many.unseen_error  # where there is text enough, a fit is worth it


def test_the_best_set_is_the_best() -> None:
    layer, x, report = made()
    for k in (1, 2, 3):
        errors = {heads: measured(layer, analysis.pruned(layer, report.without(heads).heads), x[FITTED])
                  for heads in combinations(range(6), k)}  # fmt: skip
        assert report.prune(k).heads == min(errors, key=errors.__getitem__)


def test_many_heads_are_chosen_one_by_one() -> None:
    random = np.random.default_rng(0)
    near = 0
    for _ in range(20):
        parts = random.standard_normal((10, 14))
        cost = parts @ parts.T
        best, greedy = pruning._best(cost, 4), pruning._greedy(cost, 4)
        assert len(set(greedy)) == 4
        assert pruning._sum(cost, greedy) >= pruning._sum(cost, best) - 1e-9
        near += pruning._sum(cost, greedy) <= 1.1 * pruning._sum(cost, best)
    assert near >= 15
    _, _, report = made(num_heads=17, head_dim=2)
    assert len(report.prune(9).heads) == 9


def test_a_twin_costs_nothing_once_w_o_is_fitted_anew() -> None:
    layer, x, _ = made()
    with torch.no_grad():
        for part in (layer.q_proj, layer.k_proj, layer.v_proj):
            part.weight[20:24], part.bias[20:24] = part.weight[4:8], part.bias[4:8]
    report = reported(layer, x)
    plan = report.without([5])
    assert plan.relative_error > 0.05 and plan.refit_error < 1e-4 and plan.unseen_refit_error < 1e-4
    assert measured(layer, analysis.pruned(layer, plan.heads, refit=True), x) < 1e-4


@pytest.mark.parametrize("group", [2, 3])
def test_grouped_heads_go_together(group: int) -> None:
    layer, x, report = made(num_kv_heads=6 // group)
    plan = report.prune(group)
    assert len({head // group for head in plan.heads}) == 1
    small = analysis.pruned(layer, plan.heads)
    assert (small.spec.num_heads, small.spec.num_kv_heads) == (6 - group, 6 // group - 1)
    assert measured(layer, small, x[FITTED]) == pytest.approx(plan.relative_error, abs=ROUNDS)
    assert [len(plan.heads) for plan in report.pruning_curve()] == list(range(group, 6, group))
    with pytest.raises(InputError, match=f"k: expected a multiple of {group} from 0 to {6 - group}, got 1"):
        report.prune(1)
    for heads in ([0], [0, *range(group, 2 * group)]):
        with pytest.raises(InputError, match=f"heads: expected whole groups of {group} heads"):
            report.without(heads)
        with pytest.raises(InputError, match=f"heads: expected whole groups of {group} heads"):
            analysis.pruned(layer, heads)


def test_plain_numbers_are_removed_and_nothing_else() -> None:
    layer, x, _ = made()
    small = analysis.pruned(layer, (0, 4))
    with torch.no_grad():
        heads = opened(layer)(x)[1]
        heads[:, [0, 4]] = 0
        expected = layer.out_proj(heads.transpose(1, 2).flatten(2))
        torch.testing.assert_close(small(x), expected, rtol=0, atol=1e-5)
    assert analysis.pruned(layer, ())(x).equal(layer(x))


@pytest.mark.thorough
def test_the_compiled_layer_has_the_predicted_error() -> None:
    layer, x, report = made()
    plan = report.prune(2)
    small = analysis.pruned(layer, plan.heads, refit=True)
    attention = mhsa.load(mhsa.compile(small), threads=1)
    for part, error in ((FITTED, plan.refit_error), (UNSEEN, plan.unseen_refit_error)):
        found = measured(layer, lambda x: torch.from_numpy(attention(x.numpy())), x[part])
        assert found == pytest.approx(error, abs=1e-4)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([6], r"heads: expected heads from 0 to 5, each once, got \[6\]"),
        ([-1], "heads: expected heads from 0 to 5"),
        ([1, 1], "heads: expected heads from 0 to 5, each once"),
        ([0.5], "heads: expected heads from 0 to 5"),
        (range(6), "heads: expected some heads to be kept, got all 6 of them"),
    ],
    ids=str,
)
def test_heads_that_are_refused(heads: list[int], message: str) -> None:
    layer, _, report = made()
    for refused in (lambda: report.without(heads), lambda: analysis.pruned(layer, heads)):
        with pytest.raises(InputError, match=message):
            refused()


@pytest.mark.parametrize("k", [6, -1, True, 1.0])
def test_numbers_of_heads_that_are_refused(k: object) -> None:
    with pytest.raises(InputError, match="k: expected a number of heads from 0 to 5"):
        made()[2].prune(k)


def test_layers_and_refits_that_are_refused() -> None:
    layer, x, report = made()
    with pytest.raises(InputError, match=r"refit: expected heads of a plan.*Pass report\.without"):
        analysis.pruned(layer, [1], refit=True)
    with pytest.raises(InputError, match="heads: expected a plan for this layer"):
        analysis.pruned(MultiHeadAttention(layer.spec), report.prune(1).heads)
    with pytest.raises(ModelError, match="layer: expected a MultiHeadAttention, got Linear"):
        analysis.pruned(torch.nn.Linear(2, 2), [1])
    with pytest.raises(SpecError, match="ALiBi"):
        analysis.pruned(MultiHeadAttention(AttentionSpec(embed_dim=8, num_heads=2, alibi=True)), [1])
    few = reported(layer, x[:3]).prune(1)
    assert few.relative_error > 0  # of all three, as none is left to measure on
    expected = "expected statistics of at least 4 sequences: each 4th is measured on and not fitted on, got 3"
    with pytest.raises(InputError, match=f"unseen_error: {expected}"):
        _ = few.unseen_error
    with pytest.raises(InputError, match=f"refit: {expected}"):
        analysis.pruned(layer, few.heads, refit=True)


def test_fewer_tokens_than_determine_a_fit_are_refused() -> None:
    """p columns and a bias pass through any p + 1 tokens: there the training error is 0, and tells nothing."""
    layer, x, _ = made()
    short, enough = (reported(layer, x[:, :length]).prune(1) for length in (7, 8))  # 21 and 24 tokens, for 20 columns
    expected = (
        r"refit: expected at least 22 tokens to fit 20 columns of W_O and a bias on, which pass through any 21 .*"
    )
    with pytest.raises(InputError, match=expected + r"got 21, without every 4th sequence\. Add more sequences"):
        _ = short.refit_error
    with pytest.raises(InputError, match="refit: expected at least 22 tokens"):
        analysis.pruned(layer, short.heads, refit=True)
    assert enough.refit_error > 0
    with torch.no_grad():
        heads = opened(layer)(x[FITTED, :7])[1]
    columns = heads.transpose(1, 2).flatten(0, 1)[:, list(short.kept)].reshape(21, -1).double().numpy()
    columns, nonsense = np.c_[columns, np.ones(21)], np.random.default_rng(0).standard_normal((21, 24))
    assert np.abs(columns @ np.linalg.lstsq(columns, nonsense, rcond=None)[0] - nonsense).max() < 1e-3
