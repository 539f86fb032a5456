"""Pictures of one layer: what they hold is what the layer computed, in NumPy's float64, and no other head's."""

from __future__ import annotations

import html
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support import svg

import mhsa_compile as mhsa
from mhsa_analysis.block_flow import BlockFlow, flow_of
from mhsa_analysis.layer_weights import principal_angles, weights_of
from mhsa_compile.errors import InputError

pytest.importorskip("matplotlib")
from mhsa_analysis import head_pictures
from mhsa_bench.plots.figure import OURS

TOKENS = tuple("abcdefg")
L, D, H, G = len(TOKENS), 24, 6, 3
PHONE = 328
"""Pixels of a page that is 360 wide, between its margins."""


def layer_of(**fields: object) -> mhsa.MultiHeadAttention:
    torch.manual_seed(0)
    words = ("y", "heads", "lse", "weights")
    return mhsa.MultiHeadAttention(mhsa.AttentionSpec(embed_dim=D, num_heads=H, outputs=words, **fields)).eval()


def run(layer: mhsa.MultiHeadAttention) -> tuple[torch.Tensor, BlockFlow]:
    x = 3 * torch.randn(1, L, D, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        outputs = dict(zip(("y", "heads", "lse", "weights"), layer(x), strict=True))
    return x, flow_of(layer, x, outputs, TOKENS)


@pytest.fixture(scope="module")
def layer() -> mhsa.MultiHeadAttention:
    return layer_of(num_kv_heads=G, causal="top_left")


@pytest.fixture(scope="module")
def flow(layer: mhsa.MultiHeadAttention) -> BlockFlow:
    return run(layer)[1]


def test_the_steps_are_those_of_attention(layer: mhsa.MultiHeadAttention) -> None:
    x, flow = run(layer)
    arrays, states = weights_of(layer).arrays, x[0].double().numpy()
    q, k, v = (
        (states @ arrays[f"{part}_proj.weight"].T + arrays[f"{part}_proj.bias"]).reshape(L, -1, D // H).swapaxes(0, 1)
        for part in "qkv"
    )
    scores = q @ k.repeat(H // G, axis=0).swapaxes(1, 2) / np.sqrt(D // H)
    before = np.tril(np.ones((L, L), bool))
    np.testing.assert_allclose(flow.scores[:, before], scores[:, before], atol=1e-5)
    assert (flow.scores[:, ~before] == -np.inf).all() and (flow.weights[:, ~before] == 0).all()
    for name, expected in (("queries", q), ("keys", k), ("values", v)):
        np.testing.assert_allclose(getattr(flow, name), expected, atol=1e-12)
    for head in range(H):
        np.testing.assert_allclose(flow.weights[head] @ flow.values_of(head), flow.heads[head], atol=1e-5)
        other = flow.values[(head // 2 + 1) % G]
        assert not np.allclose(flow.weights[head] @ other, flow.heads[head], atol=1e-2)


def percents(weights: np.ndarray) -> list[str]:
    return [f"{100 * weight:.1f} %" for weight in weights]


@pytest.mark.thorough
def test_a_head_step_by_step_shows_its_own_numbers(flow: BlockFlow, tmp_path: Path) -> None:
    head, query = 4, 5
    head_pictures.draw_steps(tmp_path / "steps.svg", flow, head, query)
    words = svg.words(tmp_path / "steps.svg")
    shown = [word for word in words if word.endswith("%")]
    assert shown == percents(flow.weights[head, query]) and "Query “f”, head 4" in words
    assert shown != percents(flow.weights[head - 1, query])
    scores = [f"{score:.2f}".replace("-", "\N{MINUS SIGN}") for score in flow.scores[head, query, : query + 1]]
    assert words.count("\N{MINUS SIGN}∞") == L - query - 1 and set(scores) <= set(words)
    (cells,) = svg.images(tmp_path / "steps.svg")
    np.testing.assert_array_equal(cells[L, :, 3], 0)  # between what is added and the sum
    assert cells.shape[:2] == (L + 2, D // H) and (cells[query + 1 : L, :, :3] >= 254).all()  # hidden keys add nothing


def test_tokens_are_drawn_as_they_are(flow: BlockFlow, tmp_path: Path) -> None:
    tokens = ("$", "a$b", "猫", "<s>", "_", "Ġit", "f")
    odd = replace(flow, tokens=tokens)
    head_pictures.draw_steps(tmp_path / "steps.svg", odd, 4, 1)
    head_pictures.draw_maps(tmp_path / "maps.svg", {"head 4": odd.weights[4]}, tokens)
    words = [html.unescape(word) for word in svg.words(tmp_path / "steps.svg")]
    assert set(tokens) <= set(words) and "Query “a$b”, head 4" in words
    together = " ".join(html.unescape(word) for word in svg.words(tmp_path / "maps.svg"))
    assert all(f"{i}\N{NO-BREAK SPACE}{token}" in together for i, token in enumerate(tokens))


def painted(weights: np.ndarray, largest: float) -> np.ndarray:
    """The bytes (L, L, 3) of weights between white and blue."""
    blue = np.array([int(OURS[i : i + 2], 16) for i in (1, 3, 5)])
    return 255 + (blue - 255) * (weights / largest)[..., np.newaxis]


def test_maps_show_each_head_at_its_place(flow: BlockFlow, tmp_path: Path) -> None:
    names = [f"head {i}" for i in range(H)]
    head_pictures.draw_maps(tmp_path / "heads.svg", dict(zip(names, flow.weights, strict=True)), TOKENS)
    maps, largest = svg.images(tmp_path / "heads.svg"), float(flow.weights.max())
    assert len(maps) == H and [word for word in svg.words(tmp_path / "heads.svg") if word in names] == names
    off = np.zeros((H, H))
    for i, cells in enumerate(maps):
        for j, weights in enumerate(flow.weights):
            visible = weights > 0
            off[i, j] = np.abs(cells[..., :3][visible] - painted(weights, largest)[visible]).max()
        assert (cells[..., 3] == 255 * (flow.weights[i] > 0)).all()  # what is hidden shows the grey behind it
    assert off.diagonal().max() <= 2 and off[~np.eye(H, dtype=bool)].min() > 10


def test_subspaces_show_the_nearest_pair(tmp_path: Path) -> None:
    layer = layer_of()
    with torch.no_grad():  # heads 1 and 4 read the same
        layer.v_proj.weight[16:20] = layer.v_proj.weight[4:8].flip(0)
    head_pictures.draw_subspaces(tmp_path / "subspaces.svg", layer, "v")
    words = svg.words(tmp_path / "subspaces.svg")
    assert "heads 1 and 4" in words and "head; blue is 1.00, by chance 0.17" in words
    block = weights_of(layer).blocks("v")
    assert principal_angles(block[1].T, block[4].T).max() < 1e-6 < principal_angles(block[1].T, block[3].T).max()


@pytest.mark.thorough
def test_all_pictures_of_a_layer_fit_a_phone_and_are_the_same_each_time(flow: BlockFlow, tmp_path: Path) -> None:
    paths = head_pictures.draw_layer(tmp_path, "layer", flow)
    kinds = ("steps", "heads", "subspaces", "mask", "flow")
    assert [path.name for path in paths] == [f"layer-{kind}.svg" for kind in kinds]
    (tmp_path / "again").mkdir()
    for path, again in zip(paths, head_pictures.draw_layer(tmp_path / "again", "layer", flow), strict=True):
        assert path.read_bytes() == again.read_bytes()
        assert svg.smallest_text(path, PHONE) > 9.5, path.name
        assert 'style="fill: #ffffff"' in path.read_text(encoding="utf-8")[:2000]  # the card that dark pages need
    assert not svg.same(paths[0], paths[1], within=0.1)
    head_pictures.draw_steps(tmp_path / "other.svg", flow, *((flow.clearest[0] + 1) % H, flow.clearest[1]))
    assert not svg.same(paths[0], tmp_path / "other.svg", within=0.1)
    assert "all 6 heads, side by side, 7 x 24" in svg.words(paths[4])


def test_a_flow_needs_what_is_drawn(layer: mhsa.MultiHeadAttention) -> None:
    x, flow = run(layer)
    with pytest.raises(InputError, match="none named lse"):
        flow_of(layer, x, {"y": flow.y, "heads": flow.heads, "weights": flow.weights}, TOKENS)
    with torch.no_grad():
        outputs = dict(zip(("y", "heads", "lse", "weights"), layer(x), strict=True))
    with pytest.raises(InputError, match="a word for each of 7 places"):
        flow_of(layer, x, outputs, TOKENS[:-1])
