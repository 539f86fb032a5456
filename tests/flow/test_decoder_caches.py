"""Decoders of transformers compiled with the caches that they take and give."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.model_families import FAMILIES, VOCABULARY, ids
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

import mhsa_compile as mhsa
from mhsa_compile.frontend.export.module_calls import TensorModule
from mhsa_compile.frontend.export.nested_values import taken_apart
from mhsa_compile.verification.error_budget import budget, max_error


def decoder(family: str) -> nn.Module:
    one = FAMILIES[family]
    return replace(one, fields={**one.fields, "use_cache": True}).build("sdpa")


@torch.no_grad()
def step(model: nn.Module, batch: int, past: int, length: int) -> dict[str, Any]:
    """The arguments of a call with so many new tokens, behind a call with so many."""
    torch.manual_seed(past)
    tokens = torch.randint(0, VOCABULARY, (batch, past + length))
    if not hasattr(model, "encoder"):
        mask = torch.ones(batch, past + length, dtype=torch.int64)
        mask[-1, : past // 2] = 0
        cache = model(tokens[:, :past], attention_mask=mask[:, :past], past_key_values=DynamicCache()).past_key_values
        return {"input_ids": tokens[:, past:], "attention_mask": mask, "past_key_values": cache}
    text = ids(batch, 9)
    before = model(**text, decoder_input_ids=tokens[:, :past])
    return {
        "encoder_outputs": BaseModelOutput(before.encoder_last_hidden_state), "attention_mask": text["attention_mask"],
        "decoder_input_ids": tokens[:, past:], "past_key_values": before.past_key_values,
    }  # fmt: skip


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_step_behind_a_cache(family: str) -> None:
    """At numbers of texts, places in use and new tokens that the export never saw, one of each among them."""
    model = decoder(family)
    artifact = mhsa.compile(model, example_inputs=step(model, 2, 7, 3))
    assert all(block.fused for block in artifact.manifest.attention)
    compiled, wide = mhsa.load(artifact, threads=1), copy.deepcopy(model).double()
    dims = {info.name: info.dims for info in (*compiled.inputs, *compiled.outputs)}
    kind = "self_" if family == "t5" else ""
    assert dims[f"past_0_{kind}key"][2] == "P" and dims[f"present_0_{kind}key"][2] in ("P + L", "L + P")
    for sizes in ((3, 11, 1), (1, 1, 5), (1, 1, 1)):
        inputs, nested = taken_apart(model, step(model, *sizes))
        assert isinstance(inputs, dict)
        in_float64 = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
        with torch.no_grad():
            exact, own = TensorModule(wide, nested)(in_float64), TensorModule(model, nested)(inputs)
        results = compiled(**{name: value.numpy() for name, value in inputs.items()})
        for name, truth, yardstick, result in zip(compiled.outputs, exact, own, results, strict=True):
            assert max_error(truth.numpy(), result) <= budget(truth.numpy(), yardstick.numpy(), "float32"), name
