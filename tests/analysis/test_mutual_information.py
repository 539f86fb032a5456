"""Information between Gaussians, and angles between subspaces, where the answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from mhsa_compile import analysis
from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.nn.modules import MultiHeadAttention
from mhsa_compile.spec.attention_spec import AttentionSpec


def correlated(n: int, r: float, dims: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draws (a, b), each (n, dims): each column of a is correlated with that of b by r."""
    random = np.random.default_rng(seed)
    a, noise = random.standard_normal((2, n, dims))
    return a, r * a + np.sqrt(1 - r * r) * noise


def test_gaussians_of_known_information() -> None:
    assert analysis.gaussian_information(*correlated(50_000, 0.8, 1)) == pytest.approx(0.511, abs=0.02)
    a, b = correlated(50_000, 0.8, 3)
    mixed = np.random.default_rng(1).standard_normal((3, 3))
    assert analysis.gaussian_information(5 + a @ mixed, b - 3) == pytest.approx(3 * 0.511, abs=0.02)
    assert analysis.gaussian_information(b - 3, 5 + a @ mixed) == pytest.approx(3 * 0.511, abs=0.02)


def test_chance_is_taken_off() -> None:
    """Of 200 rows, two times 16 dims that have nothing to do with each other show 0.7 nats."""
    found = [analysis.gaussian_information(*correlated(200, 0.0, 16, seed)) for seed in range(10)]
    assert np.mean(found) < 0.1
    assert analysis.gaussian_information(*correlated(200, 0.8, 16)) == pytest.approx(16 * 0.511, rel=0.2)


def test_a_copy_tells_more_than_float32_can() -> None:
    a, _ = correlated(500, 0.0, 4)
    assert analysis.gaussian_information(a, a @ np.linalg.qr(np.random.default_rng(0).random((4, 4)))[0]) > 50


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (np.zeros(9), np.zeros((9, 1)), r"a: expected shape \(rows, dims\)"),
        (np.zeros((9, 1)), np.zeros((8, 1)), "b: expected 9 rows, as a has, got 8"),
        (np.zeros((9, 2)), np.zeros((9, 3)), "a: expected at least 10 rows, twice the dims of a and b together, got 9"),
        (np.full((9, 1), np.nan), np.zeros((9, 1)), "a: expected finite numbers, got NaN"),
    ],
)
def test_samples_that_are_refused(a: np.ndarray, b: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        analysis.gaussian_information(a, b)


def test_angles() -> None:
    for small in (0.3, 1e-9):
        turned = np.array([[1, 0], [0, np.cos(small)], [0, np.sin(small)], [0, 0]])
        found = analysis.principal_angles(turned @ [[2, 1], [0, 3]], np.eye(4)[:, :2])
        np.testing.assert_allclose(found, [0, small], rtol=1e-6, atol=1e-15)
        np.testing.assert_allclose(analysis.principal_angles(turned, np.eye(4)[:, :3]), [0, 0], atol=1e-15)
    assert analysis.principal_angles(np.eye(4)[:, :1], np.eye(4)[:, 2:]) == pytest.approx(np.pi / 2)


def test_subspaces_of_heads() -> None:
    layer = MultiHeadAttention(AttentionSpec(embed_dim=24, num_heads=4, num_kv_heads=2))
    layer.q_proj.weight.data[6:12] = 3 * layer.q_proj.weight.data[:6].flip(0)  # head 1 reads what head 0 reads
    overlap = analysis.subspace_overlap(layer, "q")
    assert overlap.shape == (4, 4) and overlap[0, 1] == pytest.approx(1) and overlap[0, 2] < 0.9
    assert analysis.subspace_overlap(layer, "k").shape == (2, 2)
    one, other = (layer.out_proj.weight.detach().numpy()[:, 6 * head : 6 * head + 6] for head in (1, 3))
    cosines = np.cos(analysis.principal_angles(one, other))
    assert analysis.subspace_overlap(layer, "out")[1, 3] == pytest.approx((cosines**2).mean())
    with pytest.raises(InputError, match="projection: expected one of q, k, v, out, got 'o'"):
        analysis.subspace_overlap(layer, "o")
    with pytest.raises(ModelError, match="layer: expected a MultiHeadAttention"):
        analysis.subspace_overlap(object(), "q")
