"""The heads of a trained sentence encoder, all-MiniLM-L6-v2: listed, and pruned as was predicted."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.examples import loaded, needs_the_model

import mhsa_compile as mhsa
from mhsa_analysis.head_report import HeadReport
from mhsa_analysis.pruning import PruningPlan
from mhsa_compile import analysis
from mhsa_compile.nn.modules import MultiHeadAttention
from mhsa_compile.runtime.compiled_attention import CompiledAttention

pytestmark = [pytest.mark.slow, needs_the_model]

HEADS, LAYERS, PRUNED = 12, 6, 4  # a layer: 24 of 72 heads in all
RANDOM_SETS = 20


class Model(NamedTuple):
    """The encoder, and for each layer its attention, what it was called with, and what its heads do."""

    example: ModuleType
    encoder: torch.nn.Module
    batches: list
    layers: list[MultiHeadAttention]
    calls: list[list[tuple[torch.Tensor, torch.Tensor]]]
    reports: list[HeadReport]


@pytest.fixture(scope="module")
def model() -> Model:
    example = loaded("sentence_embeddings.py")
    folder = example.model_folder()
    encoder = example.load_reference(folder)
    tokenizer = example.Tokenizer.from_file(str(folder / "tokenizer.json"))
    batches = example.padded_batches(tokenizer, example.SENTENCES.read_text(encoding="utf-8").splitlines())
    layers = [mhsa.from_bert(layer.attention) for layer in encoder.encoder.layer]
    artifact = mhsa.compile(layers[0].with_outputs("y", "heads", "entropy", "weights"))
    calls, reports = [], []
    inputs = recorded(example, encoder, batches)
    for layer, seen in zip(layers, inputs, strict=True):
        attention = mhsa.load(artifact, weights=mhsa.weights(layer))
        stats = analysis.HeadStatistics(layer)
        for x, valid in seen:
            stats.add(x, attention(x, mask=valid), valid)
        calls.append(seen)
        reports.append(stats.report())
    return Model(example, encoder, batches, layers, calls, reports)


def recorded(example: ModuleType, encoder: torch.nn.Module, batches: list) -> list[list]:
    """x (B, L, D) and valid (B, L) of every layer's attention, for each batch."""
    seen: list[list] = [[] for _ in encoder.encoder.layer]
    hooks = []
    for layer, calls in zip(encoder.encoder.layer, seen, strict=True):
        hooks.append(layer.attention.register_forward_pre_hook(lambda _, args, calls=calls: calls.append(args[0])))
    example.embed(encoder, batches)
    for hook in hooks:
        hook.remove()
    return [[(x, batch.valid) for x, batch in zip(calls, batches, strict=True)] for calls in seen]


def test_72_heads_are_listed(model: Model) -> None:
    roles = [role for report in model.reports for role in report.roles]
    assert len(roles) == HEADS * LAYERS
    assert {"next", "mixed"} <= set(roles)
    for report in model.reports:
        assert len(repr(report).splitlines()) == 2 + HEADS
        off = ~np.eye(HEADS, dtype=bool)
        assert (report.entropy_share >= 0).all() and (report.entropy_share <= 1).all()
        assert (report.js[off] > 0.01).all() and (report.cka[off] < 0.99).all()  # no two heads are the same
        assert np.isfinite(report.information[off]).all()


@pytest.mark.parametrize("refit", [False, True])
def test_the_error_that_was_predicted_is_the_one_of_the_compiled_layer(model: Model, refit: bool) -> None:
    plans = [report.prune(PRUNED) for report in model.reports]
    small = [analysis.pruned(*of, refit=refit) for of in zip(model.layers, (p.heads for p in plans), strict=True)]
    artifact = mhsa.compile(small[0])
    for layer, cut, plan, calls in zip(model.layers, small, plans, model.calls, strict=True):
        attention = mhsa.load(artifact, weights=mhsa.weights(cut))
        fitted, unseen = dealt(calls)
        of_fit = plan.refit_error if refit else plan.relative_error
        of_rest = plan.unseen_refit_error if refit else plan.unseen_error
        assert 0.01 < of_fit < of_rest * 1.1 < 0.9
        assert measured(layer, attention, fitted) == pytest.approx(of_fit, abs=1e-4)
        assert measured(layer, attention, unseen) == pytest.approx(of_rest, abs=1e-4)


def dealt(calls: list) -> tuple[list, list]:
    """The calls with the sequences that pruning was fitted on, and with every fourth, valid tokens of them alone."""
    first, both = 0, ([], [])
    for x, valid in calls:
        fourth = torch.arange(first, first + len(x)) % 4 == 3
        for part, rows in zip(both, (~fourth, fourth), strict=True):
            part.append((x, valid, valid & rows[:, None]))
        first += len(x)
    return both


@torch.no_grad()
def measured(layer: MultiHeadAttention, attention: CompiledAttention, calls: list) -> float:
    pairs = [(layer(x, mask=valid)[of].double(), attention(x, mask=valid)[of].double()) for x, valid, of in calls]
    missed, size = (sum(float(part.square().sum()) for part in parts)
                    for parts in ([cut - y for y, cut in pairs], [y for y, _ in pairs]))  # fmt: skip
    return (missed / size) ** 0.5


def test_heads_that_were_chosen_beat_heads_at_random(model: Model) -> None:
    """24 of 72 heads, 4 a layer, whose means move into the bias; cosine of each sentence with the whole model's."""
    expected = model.example.embed(model.encoder, model.batches)

    def cosine(plans: list[PruningPlan]) -> float:
        small = [analysis.pruned(layer, plan.heads) for layer, plan in zip(model.layers, plans, strict=True)]
        return float((model.example.embed(with_attention(model, small), model.batches) * expected).sum(dim=1).mean())

    chosen = cosine([report.prune(PRUNED) for report in model.reports])
    random = np.random.default_rng(0)
    others = [
        cosine([report.without(random.choice(HEADS, PRUNED, replace=False).tolist()) for report in model.reports])
        for _ in range(RANDOM_SETS)
    ]
    print(f"chosen {chosen:.4f}, at random {min(others):.4f} to {max(others):.4f}")
    assert chosen > max(others)


def with_attention(model: Model, small: list[MultiHeadAttention]) -> torch.nn.Module:
    encoder = copy.deepcopy(model.encoder)
    for layer, cut in zip(encoder.encoder.layer, small, strict=True):
        layer.attention = model.example.CompiledBertAttention(cut, layer.attention.output.LayerNorm)
    return encoder
