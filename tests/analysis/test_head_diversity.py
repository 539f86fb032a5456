"""The term of a loss: what it says is what the analysis says, and its gradient takes it down."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mhsa_compile as mhsa
from mhsa_compile import analysis
from mhsa_compile.errors import InputError, SpecError


def heads_with(r: float, n: int = 4000, seed: int = 0) -> torch.Tensor:
    """(1, 3, n, 2): heads 0 and 1 correlated by r in each dim, head 2 apart."""
    generator = torch.Generator().manual_seed(seed)
    a, b, c = torch.randn(3, n, 2, generator=generator, dtype=torch.float64)
    return torch.stack((a, r * a + (1 - r * r) ** 0.5 * b, c))[None]


def test_information_is_that_of_gaussians() -> None:
    found = analysis.HeadDiversity("information", shrinkage=0.0)(heads_with(0.8)).item()
    assert found == pytest.approx(2 * 0.511 / 3, abs=0.02)  # one pair of three
    one, other = heads_with(0.8)[0, :2].numpy()
    assert 3 * found == pytest.approx(analysis.gaussian_information(one, other), abs=0.02)
    assert analysis.HeadDiversity("information", weight=0.25)(heads_with(0.8)).item() == pytest.approx(
        found / 4, rel=0.01
    )


def test_cosine_is_that_of_the_outputs() -> None:
    heads = heads_with(0.8, n=50)
    rows = heads[0].numpy()
    cosine = [(rows[i] * rows[j]).sum(-1) / np.linalg.norm(rows[i], axis=-1) / np.linalg.norm(rows[j], axis=-1)
              for i, j in ((0, 1), (0, 2), (1, 2))]  # fmt: skip
    assert analysis.HeadDiversity("cosine")(heads).item() == pytest.approx((np.array(cosine) ** 2).mean())


def test_information_does_not_depend_on_a_basis_and_cosine_does() -> None:
    heads = heads_with(0.6)
    turned = heads.clone()
    turned[:, 1] = turned[:, 1] @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64) * 3 + 5
    before, after = (analysis.HeadDiversity("information")(one).item() for one in (heads, turned))
    assert after == pytest.approx(before, abs=1e-9)
    assert analysis.HeadDiversity("cosine")(turned) != pytest.approx(analysis.HeadDiversity("cosine")(heads).item())


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [pytest.param("information", marks=pytest.mark.thorough), "cosine"])
def test_gradients_are_those_of_the_term(kind: str) -> None:
    term = analysis.HeadDiversity(kind, weight=0.5)
    heads = heads_with(0.5, n=9).requires_grad_()
    assert torch.autograd.gradcheck(term, (heads,))
    heads = heads_with(0.95, n=200).requires_grad_()
    optimizer = torch.optim.Adam([heads], lr=0.02)
    first = term(heads).item()
    for _ in range(60):
        optimizer.zero_grad()
        term(heads).backward()
        optimizer.step()
    assert term(heads).item() < 0.5 * first


def test_padding_counts_nowhere() -> None:
    heads, valid = heads_with(0.5, n=60), torch.ones(1, 70, dtype=torch.bool)
    valid[:, 60:] = False
    padded = torch.nn.functional.pad(heads, (0, 0, 0, 10), value=torch.nan).requires_grad_()
    for kind in ("information", "cosine"):
        term = analysis.HeadDiversity(kind)
        assert torch.equal(term(padded, valid), term(heads))
    term(padded, valid).backward()
    assert padded.grad is not None and padded.grad[:, :, :60].isfinite().all() and not padded.grad[:, :, 60:].any()


def test_one_head_and_heads_that_are_all_the_same() -> None:
    assert analysis.HeadDiversity()(heads_with(0.5)[:, :1]).item() == 0.0
    same = torch.randn(1, 1, 64, 8).expand(1, 4, 64, 8)
    assert 0 < analysis.HeadDiversity()(same).item() < 100
    assert analysis.HeadDiversity("cosine")(same).item() == pytest.approx(1.0)
    assert torch.isfinite(analysis.HeadDiversity()(torch.zeros(1, 4, 64, 8)))


def test_it_goes_with_a_layer_in_sixteen_bits() -> None:
    layer = mhsa.MultiHeadAttention(
        mhsa.AttentionSpec(embed_dim=16, num_heads=4, dtype="bfloat16", outputs=("y", "heads"))
    )
    _, heads = layer(torch.randn(2, 20, 16, dtype=torch.bfloat16))
    loss = analysis.HeadDiversity()(heads)
    loss.backward()
    assert loss.dtype == torch.float32 and layer.v_proj.weight.grad is not None
    assert layer.v_proj.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "rho"}, "kind: expected 'information' or 'cosine', got 'rho'"),
        ({"weight": -1.0}, "weight: expected a number of at least 0"),
        ({"shrinkage": float("nan")}, "shrinkage: expected a number of at least 0"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        analysis.HeadDiversity(**settings)


def test_calls_that_are_refused() -> None:
    term = analysis.HeadDiversity()
    with pytest.raises(InputError, match=r"heads: expected shape \(B, H, L, F\)"):
        term(torch.zeros(3, 4, 5))
    with pytest.raises(InputError, match="heads: expected at least 16 valid tokens, twice the value head dim, got 15"):
        term(torch.zeros(1, 4, 15, 8))
    with pytest.raises(InputError, match=r"valid: expected bool of shape \(B, L\) = \(1, 60\)"):
        term(heads_with(0.5, n=60), torch.ones(1, 60))
    with pytest.raises(InputError, match=r"at least 4 valid tokens.*got 0"):
        term(heads_with(0.5, n=60), torch.zeros(1, 60, dtype=torch.bool))
