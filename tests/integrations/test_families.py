"""Other people's families on "mhsa": the same tokens as eager attention, with every cache, and errors within budget."""

from __future__ import annotations

import pytest
import torch
from support.interface_models import (
    CACHES,
    DECODERS,
    ENCODERS,
    T5,
    VIT,
    WHISPER,
    built,
    decoder,
    encoder,
    generated,
    prompts,
    share_of_budget,
)

from mhsa_compile.integrations import transformers as mhsa_transformers

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    mhsa_transformers.register()


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str) -> None:
    model = decoder(name)
    for options in CACHES.values():
        for hidden in (0, 4):
            inputs = prompts(2, 11, hidden)
            expected = generated(model, inputs, "eager", **options)
            assert torch.equal(generated(model, inputs, "mhsa", **options), expected)
    for batch, length in ((2, 5), (1, 19)):
        inputs = prompts(batch, length)
        assert share_of_budget(model, lambda given, inputs=inputs: given(**inputs).logits) <= 1


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name: str) -> None:
    model = encoder(name)
    for batch, length, hidden in ((2, 17, 3), (3, 17, 0), (1, 5, 0)):
        inputs = prompts(batch, length, hidden)
        assert share_of_budget(model, lambda given, inputs=inputs: given(**inputs).last_hidden_state) <= 1


def test_vit() -> None:
    pixels = torch.randn(2, 3, 32, 32)
    run = share_of_budget(built("ViT", "ViTModel", VIT), lambda model: model(pixels.to(model.dtype)).last_hidden_state)
    assert run <= 1


@pytest.mark.parametrize("cache", CACHES)
def test_t5(cache: str) -> None:
    model, inputs = built("T5", "T5ForConditionalGeneration", T5), prompts(2, 9)
    inputs["attention_mask"][-1, 6:] = 0
    expected = generated(model, inputs, "eager", **CACHES[cache])
    assert torch.equal(generated(model, inputs, "mhsa", **CACHES[cache]), expected)
    several = prompts(2, 6)["input_ids"]
    assert share_of_budget(model, lambda given: given(**inputs, decoder_input_ids=several).logits) <= 1


@pytest.mark.parametrize("cache", CACHES)
def test_whisper(cache: str) -> None:
    model = built("Whisper", "WhisperForConditionalGeneration", WHISPER)
    sound = {"input_features": torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0))}
    expected = generated(model, sound, "eager", **CACHES[cache])
    assert torch.equal(generated(model, sound, "mhsa", **CACHES[cache]), expected)


def test_a_whole_model_is_exported_and_compiled() -> None:
    llama, ids = decoder("llama"), prompts(2, 11)["input_ids"]
    llama.set_attn_implementation("mhsa")

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(ids, use_cache=False).logits
            return logits

    free = {"ids": {0: torch.export.Dim("B"), 1: torch.export.Dim("L")}}
    with torch.no_grad():
        program = torch.export.export(Logits(), (ids,), dynamic_shapes=free, strict=False)
        assert sum("mhsa.attention" in str(node.target) for node in program.graph.nodes) == 2
        compiled = torch.compile(Logits(), backend="aot_eager", fullgraph=True)
        for batch, length in ((2, 11), (3, 6)):
            ids = prompts(batch, length)["input_ids"]
            expected = llama(ids, use_cache=False).logits
            assert torch.allclose(program.module()(ids), expected, rtol=1e-4, atol=1e-4)
            assert torch.allclose(compiled(ids), expected, rtol=1e-4, atol=1e-4)
