"""Layers of encoders: PyTorch's one operator for small calls, their parts around compiled attention for all others."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError
from mhsa_compile.integrations.layers import encoder

D, H, L = 24, 4, 7
WHY = "a layer of an encoder on so little that PyTorch's one operator is as fast"


def encoder_layer_of(**fields: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(D, H, 40, **{"batch_first": True, **fields}).eval()


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> int:
    """The multiply-adds of a call of L tokens, which become the bound: L are ours, fewer are PyTorch's."""
    products = L * (4 * D * D + 2 * D * 40 + 2 * L * D)
    monkeypatch.setattr(encoder, "SMALL", products)
    return products


@torch.no_grad()
def off(model: nn.Module, plain: nn.Module, x: Tensor, **masks: Any) -> float:
    return float((model(x, **masks) - plain(x, **masks)).abs().max())


@pytest.mark.thorough_but("True")
@pytest.mark.parametrize("norm_first", [False, True])
def test_calls_below_the_bound_are_pytorchs_operators(bound: int, norm_first: bool) -> None:
    plain = encoder_layer_of(norm_first=norm_first)
    model = copy.deepcopy(plain)
    report = mhsa.accelerate(model, layers="parts")
    for length, left in ((L - 1, 1), (L, 1), (L + 3, 1)):
        assert off(model, plain, torch.randn(1, length, D)) < 1e-5
        assert report.calls.get(WHY, 0) == left
    causal = nn.Transformer.generate_square_subsequent_mask(L - 1)
    before = report.calls[WHY]
    assert off(model, plain, torch.randn(1, L - 1, D), src_mask=causal) < 1e-5
    assert report.calls[WHY] == before, "calls with a mask are ours"
    assert "so little that PyTorch's one operator" in repr(report)
    mhsa.restore(model)
    assert "forward" not in vars(model) and "forward" not in vars(model.self_attn)


def test_a_small_call_that_wants_gradients_is_refused_as_a_large_one_is(bound: int) -> None:
    model = encoder_layer_of()
    mhsa.accelerate(model)
    for length in (L - 1, L):
        with pytest.raises(InputError, match="gradient"):
            model(torch.randn(1, length, D))


def test_edits_of_the_layer_are_seen_on_both_sides_of_the_bound(bound: int) -> None:
    plain = encoder_layer_of()
    model = copy.deepcopy(plain)
    mhsa.accelerate(model, layers="parts")
    xs = torch.randn(1, L - 1, D), torch.randn(1, L, D)
    for part in (plain, model):
        part.linear1 = nn.Linear(D, 40, bias=True).eval()
        part.linear1.load_state_dict({"weight": torch.ones(40, D) / D, "bias": torch.ones(40)})
        part.activation = torch.sigmoid
        part.activation_relu_or_gelu = 0
    assert all(off(model, plain, x) < 1e-5 for x in xs)
    calls: list[int] = []
    for part in (plain, model):
        part.linear2.register_forward_hook(lambda module, inputs, output: calls.append(1))
    assert all(off(model, plain, x) < 1e-5 for x in xs) and len(calls) == 4
    plain.norm_first = model.norm_first = True
    assert all(off(model, plain, x) < 1e-5 for x in xs)


@pytest.mark.thorough
def test_copies_threads_and_forwards_of_others() -> None:
    plain = nn.TransformerEncoder(encoder_layer_of(), 2, enable_nested_tensor=False).eval()
    model = copy.deepcopy(plain)
    mhsa.accelerate(model)
    copies = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]

    def error(number: int) -> float:
        return max(off(copies[number % 3], plain, torch.randn(1, 3 + i % 9, D)) for i in range(100))

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(error, range(8))) < 1e-5

    class Scaled(nn.TransformerEncoderLayer):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return 2 * super().forward(*args, **kwargs)

    theirs = Scaled(D, H, 40, batch_first=True).eval()
    ours = copy.deepcopy(theirs)
    report = mhsa.accelerate(ours)
    assert [row.why_parts for row in report.layers] == ["it has a forward of its own"]
    assert off(ours, theirs, torch.randn(1, L, D)) < 1e-5
    assert report.checked == 1, "its attention was called, not PyTorch's operator for the whole layer"


def test_a_layer_whose_linear_is_something_else_is_computed_by_its_parts(bound: int) -> None:
    plain = encoder_layer_of(activation=torch.sigmoid)
    plain.linear1 = nn.Sequential(plain.linear1).eval()  # type: ignore[assignment]
    model = copy.deepcopy(plain)
    mhsa.accelerate(model)
    assert off(model, plain, torch.randn(1, L - 1, D)) < 1e-5
