"""What becomes part of a linear, what does not, and that a model computes the same with it and without."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mhsa_compile as mhsa
from mhsa_compile.compiler import lower

D, F = 24, 40


class Layer(nn.Module):
    """Linears D -> F and F -> D, and what `forward` does with them and with x (B, L, D)."""

    def __init__(self, forward: Callable[[Layer, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.gate, self.narrow = nn.Linear(D, F), nn.Linear(D, F), nn.Linear(F, D)
        self.scale = nn.Parameter(torch.rand(D))
        self._forward = forward
        self.eval().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def compiled(layer: Layer, dtype: torch.dtype = torch.float32) -> mhsa.Artifact:
    x = torch.randn(2, 7, D, dtype=dtype)
    return mhsa.compile(layer, example_inputs=(x,), without_attention="accept", cache=False)


def notes(artifact: mhsa.Artifact) -> list[str]:
    """What follows each linear, then the operators that are left."""
    return [op.note.partition(", then ")[2] if op.op == "linear" else op.op for op in artifact.manifest.ops]


TAKEN = {
    "gelu": (lambda m, x: m.narrow(functional.gelu(m.wide(x))), ["gelu", ""]),
    "gelu by tanh": (lambda m, x: m.narrow(functional.gelu(m.wide(x), approximate="tanh")), ["gelu_tanh", ""]),
    "quick gelu": (lambda m, x: m.narrow((y := m.wide(x)) * torch.sigmoid(1.702 * y)), ["mul, sigmoid, mul", ""]),
    "relu and a residual": (lambda m, x: x + m.narrow(functional.relu(m.wide(x))), ["max", "add"]),
    "swiglu": (lambda m, x: m.narrow(functional.silu(m.gate(x)) * m.wide(x)), ["sigmoid, mul, mul", "", ""]),
    "what reads x again": (lambda m, x: m.narrow(m.wide(x)) * x - x, ["", "mul, sub"]),
    "a scale of each feature, between others": (
        lambda m, x: x + functional.relu(m.narrow(m.wide(x))) * m.scale - m.scale,
        ["", "max, mul, add, sub"],
    ),
    "a square of a sum": (lambda m, x: m.narrow((m.wide(x) + m.gate(x)) ** 2), ["add, square", "", ""]),
}


@pytest.mark.thorough_but("swiglu")
@pytest.mark.parametrize("case", TAKEN)
def test_what_is_taken(case: str) -> None:
    """As PyTorch computes it, at lengths that were not compiled for."""
    forward, expected = TAKEN[case]
    layer = Layer(forward)
    artifact = compiled(layer)
    assert sorted(notes(artifact)) == sorted(expected)
    attention = mhsa.load(artifact)
    for B, L in ((1, 1), (2, 7), (1, 197), (3, 64)):
        x = torch.randn(B, L, D)
        with torch.no_grad():
            torch.testing.assert_close(attention(x), layer(x), rtol=1e-5, atol=1e-6)


LEFT: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "a linear that others read": lambda m, x: (y := m.narrow(m.wide(x))).softmax(-1) * y,
    "a scale of each row": lambda m, x: m.narrow(m.wide(x)) * x[..., :1],
    "a sum with all rows": lambda m, x: m.narrow(m.wide(x))[:, :1] + x,
    "what follows something else": lambda m, x: m.narrow(m.wide(x)).softmax(-1) + x,
}


@pytest.mark.thorough_but("a linear that others read")
@pytest.mark.parametrize("case", LEFT)
def test_what_is_left(case: str) -> None:
    layer = Layer(LEFT[case])
    artifact = compiled(layer)
    assert not any("then" in op.note for op in artifact.manifest.ops)
    x = torch.randn(3, 11, D)
    with torch.no_grad():
        torch.testing.assert_close(mhsa.load(artifact)(x), layer(x), rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_only_the_last_value_is_read_by_others() -> None:
    """What follows a sum that a norm reads, too, is left."""
    layer = Layer(lambda m, x: (y := x + m.narrow(m.wide(x))) * functional.layer_norm(y, (D,)))
    artifact = compiled(layer)
    assert sorted(notes(artifact))[:2] == ["", "add"]
    x = torch.randn(3, 11, D)
    with torch.no_grad():
        torch.testing.assert_close(mhsa.load(artifact)(x), layer(x), rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_other_dtypes_are_left() -> None:
    """bfloat16 is rounded behind each operator."""
    artifact = compiled(Layer(TAKEN["gelu"][0], torch.bfloat16), torch.bfloat16)
    assert not any("then" in op.note for op in artifact.manifest.ops)


@pytest.mark.thorough
def test_gpus_are_left() -> None:
    layer = Layer(TAKEN["gelu"][0])
    artifact = mhsa.compile(
        layer, "cuda-sm80", example_inputs=(torch.randn(2, 7, D),), without_attention="accept", cache=False
    )
    assert not any("then" in op.note for op in artifact.manifest.ops)


@pytest.mark.thorough
def test_a_model_computes_the_same_without(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(lambda m, x: x + m.narrow(functional.gelu(m.wide(x)) * torch.tanh(m.gate(x))))
    x = torch.randn(5, 61, D)
    results = [mhsa.load(compiled(layer))(x)]
    monkeypatch.setattr(lower, "with_epilogues", lambda imported, takes: imported)
    plain = compiled(layer)
    assert not any("then" in op.note for op in plain.manifest.ops)
    results.append(mhsa.load(plain)(x))
    torch.testing.assert_close(*results, rtol=0, atol=4 * np.finfo(np.float32).eps)


@pytest.mark.thorough
def test_equal_masks_of_layers_are_made_once() -> None:
    """What each layer of a model computes anew from the same inputs is computed for the first."""

    class Model(nn.Module):
        def forward(self, q: Tensor, mask: Tensor) -> Tensor:
            for _ in range(3):
                bias = torch.where(mask, 0.0, -1e4)[:, None, None]
                q = functional.scaled_dot_product_attention(q, q, q, attn_mask=bias)
            return q

    artifact = mhsa.compile(Model(), example_inputs=(torch.randn(2, 3, 7, 8), torch.ones(2, 7) > 0), cache=False)
    assert [op.op for op in artifact.manifest.ops].count("where") == 1
