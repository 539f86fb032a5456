"""PyTorch's own attention layers, compiled from modules that hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.canonicalize.canonicalize import canonicalize
from mhsa_compile.frontend.export.export import export
from mhsa_compile.frontend.export.torch_layers import slow_path
from mhsa_compile.verification.error_budget import budget, max_error

D, H = 32, 4


class Attending(nn.Module):
    """Self-attention by `nn.MultiheadAttention`, maybe with a mask of its own."""

    def __init__(self, mask: Tensor | None = None, *, call: dict[str, Any] | None = None, **layer: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.call = nn.MultiheadAttention(D, H, batch_first=True, **layer).eval(), call or {}
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Any:
        L = x.shape[1]
        mask = None if self.mask is None else self.mask[:L, :L]
        return self.layer(x, x, x, key_padding_mask=key_padding_mask, attn_mask=mask, **self.call)


def triangle(*, added: bool) -> Tensor:
    hidden = torch.triu(torch.ones(256, 256, dtype=torch.bool), 1)
    return torch.zeros(256, 256).masked_fill(hidden, -torch.inf) if added else hidden


def examples(*, padding: bool = False) -> dict[str, Tensor]:
    given = {"x": torch.zeros(2, 7, D)}
    return given | ({"key_padding_mask": torch.zeros(2, 7, dtype=torch.bool)} if padding else {})


def results(module: nn.Module, inputs: dict[str, np.ndarray], dtype: torch.dtype) -> list[np.ndarray]:
    """What the module gives, computed in the words of an encoder layer's slow path."""
    given = {name: torch.from_numpy(array) for name, array in inputs.items()}
    given = {name: value.to(dtype) if value.is_floating_point() else value for name, value in given.items()}
    with slow_path(), torch.no_grad():
        made = module.to(dtype)(**given)
    module.float()
    return [value.numpy() for value in (made if isinstance(made, tuple) else (made,)) if value is not None]


def holds(module: nn.Module, artifact: mhsa.Artifact, sizes: dict[str, int]) -> None:
    """Asserts that several calls of two threads, at sizes that the export has not seen, are within the module's own
    budget."""
    rng, inputs = np.random.default_rng(3), {}
    for info in artifact.manifest.inputs:
        shape = [sizes.get(dim, dim) for dim in info.dims]
        inputs[info.name] = rng.standard_normal(shape).astype("f4") if info.dtype != "bool" else np.zeros(shape, bool)
        if info.dtype == "bool":
            inputs[info.name][:, shape[1] - shape[1] // 3 :] = True
    exact, yardsticks = results(module, inputs, torch.float64), results(module, inputs, torch.float32)
    compiled = mhsa.load(artifact)
    for _ in range(3):
        made = compiled(**inputs)
        pairs = zip(made if isinstance(made, tuple) else (made,), exact, yardsticks, strict=True)
        for claim, truth, yardstick in pairs:
            assert max_error(truth, claim) <= budget(truth, yardstick, "float32")


LAYERS = {
    "weights": (Attending(), False),
    "weights of each head": (Attending(call={"average_attn_weights": False}), False),
    "no weights": (Attending(call={"need_weights": False}), False),
    "padding": (Attending(), True),
    "padding and a mask": (Attending(triangle(added=False)), True),
    "an added mask": (Attending(triangle(added=True)), False),
    "a causal mask": (Attending(triangle(added=False), call={"need_weights": False, "is_causal": True}), False),
    "rows of its own": (Attending(add_bias_kv=True, add_zero_attn=True), True),
    "no bias": (Attending(bias=False), False),
}


@pytest.mark.thorough_but("no weights")
@pytest.mark.parametrize(("module", "padding"), LAYERS.values(), ids=LAYERS.keys())
def test_layers_become_one_attention(module: Attending, padding: bool) -> None:
    """The export itself is held against the module at two lengths, in float64."""
    model = export(module, example_inputs=examples(padding=padding))
    (block,) = canonicalize(model).blocks
    assert block.fused
    assert "forward" not in vars(module.layer)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["weights", "padding and a mask", "rows of its own"])
def test_compiled_layers_are_right(kind: str) -> None:
    module, padding = LAYERS[kind]
    artifact = mhsa.compile(module, example_inputs=examples(padding=padding))
    rows = {(row.op, row.source == "fallback") for row in artifact.manifest.ops}
    assert {("attention", False), ("weights", False), ("linear", False)} <= rows
    assert ("matmul", True) not in rows
    holds(module, artifact, {"B": 3, "L": 150})


@pytest.mark.thorough
def test_a_bare_layer_with_examples_has_its_own_inputs_and_outputs() -> None:
    layer = nn.MultiheadAttention(D, H, kdim=24, vdim=40).eval()
    given = (torch.zeros(7, 2, D), torch.zeros(9, 2, 24), torch.zeros(9, 2, 40))
    model = export(layer, example_inputs=given)
    assert [value.name for value in model.graph.input] == ["query", "key", "value"]
    assert len(model.graph.output) == 2
    assert [block.fused for block in canonicalize(model).blocks] == [True]


class OfThree(nn.Module):
    """Queries, keys and values of three tensors of one width, as DETR has them, too: there the first two are one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer = nn.MultiheadAttention(D, H, batch_first=True).eval()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor) -> Tensor:
        return self.layer(q, k, v, key_padding_mask=key_padding_mask, need_weights=False)[0]


@pytest.mark.thorough
def test_values_of_the_keys_width_are_not_taken_for_keys() -> None:
    padding = torch.zeros(2, 9, dtype=torch.bool)
    given = (torch.zeros(2, 7, D), torch.zeros(2, 9, D), torch.zeros(2, 9, D), padding)
    artifact = mhsa.compile(OfThree(), example_inputs=given)
    assert [block.fused for block in artifact.manifest.attention] == [True]
    holds(OfThree(), artifact, {"B": 3, "L": 31, "S": 53})


@pytest.mark.thorough
def test_encoders_and_decoders_export_without_the_fast_path() -> None:
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(D, H, 48, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    given = {"src": torch.zeros(2, 7, D), "src_key_padding_mask": torch.zeros(2, 7, dtype=torch.bool)}
    artifact = mhsa.compile(encoder, example_inputs=given)
    assert [block.fused for block in artifact.manifest.attention] == [True]
    holds(encoder, artifact, {"B": 2, "L": 33})
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, 48, batch_first=True), 1).eval()
    model = export(decoder, example_inputs=(torch.zeros(2, 7, D), torch.zeros(2, 11, D)))
    assert [block.fused for block in canonicalize(model).blocks] == [True, True]
    assert torch.backends.mha.get_fastpath_enabled()


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        assert not torch.backends.mha.get_fastpath_enabled()
        if x.sum() > 0:  # which no export can follow
            return x
        return self.layer(x, x, x)[0]


def test_all_is_as_it_was_after_an_export_that_fails() -> None:
    module = Failing()
    with pytest.raises(ModelError):
        export(module, example_inputs=(torch.zeros(2, 7, D),))
    assert torch.backends.mha.get_fastpath_enabled()
    assert "forward" not in vars(module.layer)
