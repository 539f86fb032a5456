"""benchmarks/accuracy.py: what it computes of vectors and of logits, who its candidates are, and its tables."""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import accuracy
from accuracy import Candidate, Cost, Divergence, Figures


class Small(nn.Module):
    """input_ids (1, 24) -> logits (1, 24, 32): attention and a linear, which tiles could make of bfloat16 terms."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.linear = nn.Embedding(32, 128), nn.Linear(128, 128)

    def forward(self, input_ids: Tensor) -> Tensor:
        heads = self.words(input_ids).unflatten(-1, (2, 64)).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return self.linear(attended.transpose(1, 2).flatten(2)) @ self.words.weight.T


def vectors(seed: int, count: int = 40) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((count, 16))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def test_the_same_vectors_cost_nothing_and_others_what_they_differ() -> None:
    exact = vectors(0)
    candidate = Candidate("one", lambda: None, 2_500_000, "what it says")
    same = accuracy.cost(candidate, (3 * exact).astype(np.float32), exact)
    assert (same.name, same.nearest, same.ten, same.megabytes, same.outcome) == ("one", 1, 1, 2.5, "what it says")
    assert same.mean == pytest.approx(1, abs=1e-12) and same.least == pytest.approx(1, abs=1e-12)
    turned = exact.copy()
    turned[7] = -exact[7]
    other = accuracy.cost(candidate, turned, exact)
    assert other.least == pytest.approx(-1) and other.mean == pytest.approx(1 - 2 / 40)
    assert other.ten < 1 and other.nearest < 1
    strangers = accuracy.cost(candidate, vectors(1), exact)
    assert abs(strangers.mean) < 0.2 and strangers.ten < 0.5


def test_divergence_is_kullback_s() -> None:
    rng, ids = np.random.default_rng(2), np.array([[[0, 2, 1]], [[1, 1, 0]]])
    exact, other = rng.standard_normal((2, 2, 1, 3, 3))
    expected = [accuracy.log_probs(logits) for logits in exact]
    shifted = iter(exact + 5.0)
    same = accuracy.divergence(Candidate("same", lambda _: next(shifted), 0), ids, expected)
    assert same.mean == pytest.approx(0, abs=1e-15) and same.same == 1
    answers = iter(other.astype(np.float32))
    row = accuracy.divergence(Candidate("other", lambda _: next(answers), 0, "how"), ids, expected)
    p, q = (np.exp(one[:, 0]) / np.exp(one[:, 0]).sum(-1, keepdims=True) for one in (exact, other))
    nats = (p * np.log(p / q)).sum(-1)
    assert row.mean == pytest.approx(nats.mean(), rel=1e-5) and row.most == pytest.approx(nats.max(), rel=1e-5)
    assert row.same == (p.argmax(-1) == q.argmax(-1)).mean() and row.outcome == "how"
    next_ones = [q[i, t, ids[i, 0, t + 1]] for i in range(2) for t in range(2)]
    assert row.perplexity == pytest.approx(np.exp(-np.log(next_ones).mean()), rel=1e-5)


def test_passages_are_from_all_over_the_text() -> None:
    passages = accuracy.spread(np.arange(100), 4, 10)
    assert passages.shape == (4, 1, 10)
    assert passages[0, 0, 0] == 0 and passages[-1, 0, -1] == 99
    assert (np.diff(passages[:, 0, 0]) == 30).all() and (np.diff(passages) == 1).all()


@pytest.mark.thorough
def test_every_way_to_multiply_is_a_candidate(tmp_path: Path) -> None:
    """On any CPU; a candidate that asked for terms either makes them or says why not."""
    pytest.importorskip("openvino")
    from whole_models import export

    torch.manual_seed(0)
    module, ids = Small().eval(), np.arange(24)[None]
    export(module, {"input_ids": ids}, tmp_path / "small.onnx")
    exact = module.double()(torch.from_numpy(ids)).detach().numpy()
    before = torch.get_float32_matmul_precision()
    rows = {one.name: one for one in accuracy.by_products(tmp_path / "small.onnx", module.float(), tmp_path)}
    assert list(rows) == [
        *(f"ours, {word}" for word in ("ieee", "auto", "bf16x6", "bf16x3", "bf16")),
        "OpenVINO, default",
        "OpenVINO, held to float32",
        "PyTorch, float32",
        'PyTorch, matmul precision "medium"',
        "PyTorch, model in bfloat16",
    ]
    off = {name: np.abs(np.array(one.call(ids)) - exact).max() / np.abs(exact).max() for name, one in rows.items()}
    held = {"ours, ieee", "ours, auto", "ours, bf16x6", "OpenVINO, held to float32", "PyTorch, float32"}
    assert max(off[name] for name in held) < 2e-6
    assert off["ours, bf16x3"] < 1e-4 and max(off.values()) < 0.05
    assert off["PyTorch, model in bfloat16"] > 1e-4
    assert torch.get_float32_matmul_precision() == before
    assert rows["OpenVINO, held to float32"].outcome == "INFERENCE_PRECISION_HINT is f32"
    assert all(f"asked {word}, got " in rows[f"ours, {word}"].outcome for word in ("bf16x6", "bf16x3", "bf16"))
    assert rows["PyTorch, float32"].stored == 2 * rows["PyTorch, model in bfloat16"].stored > 0


def test_tables_have_both_sections_and_what_is_missing() -> None:
    figures = Figures("a CPU", {"torch": "2"}, date(2026, 11, 26), 1125)
    figures.encoder = [Cost("ours, bf16", 0.9999871, 0.99995, 0.996, 0.9871, 90.3, "asked bf16, got bf16")]
    figures.missing = {"decoder": "not installed: gguf"}
    assert len(accuracy.tables(figures)) == 1
    figures.decoder, figures.tokens = [Divergence("OpenVINO, default", 7.1e-4, 1.5e-2, 0.9807, 30.25)], 4096
    again = msgspec.json.decode(msgspec.json.encode(figures), type=Figures)
    console = Console(width=200)
    with console.capture() as text:
        for table in accuracy.tables(again):
            console.print(table)
    for words in ("1125 sentences", "0.999987", "99.6%", "98.7%", "4096 tokens", "7.1e-04", "98.07%", "30.25"):
        assert words in text.get()
    assert accuracy.notes(again) == {
        "encoder, ours, bf16": "asked bf16, got bf16",
        "decoder": "not installed: gguf",
    }


def test_a_decoder_that_is_not_installed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "DECODER", "a_package_that_is_not_there")
    figures = Figures("a CPU", {}, date(2026, 11, 26), 1)
    accuracy.measure(figures, ["A sentence."], ["decoder"])
    assert figures.decoder == [] and figures.tokens == 0
    assert "not installed: a_package_that_is_not_there" in figures.missing["decoder"]
