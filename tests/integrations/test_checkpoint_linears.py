"""accelerate(model, linears=read_checkpoint(...)): the file's numbers in the place of the floats they stand for."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from support.gguf_models import TYPES, llama, write_gguf
from torch import Tensor, nn

import mhsa_compile as mhsa
from mhsa_compile.conversion.checkpoints.checkpoint import Checkpoint
from mhsa_compile.errors import InputError
from mhsa_compile.nn.weight_blocks import in_blocks, rounded
from mhsa_compile.spec.weight_words import BlockForm


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def of_four_bits(layers: int = 2) -> tuple[nn.Sequential, Checkpoint]:
    """(layers 256 wide, a checkpoint that stands for the weights of all but the last)"""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(layers)]).eval()
    linears = {str(i): in_blocks(model[i].weight.detach(), BlockForm(4, 64, "bytes")) for i in range(layers - 1)}
    checkpoint = Checkpoint("a checkpoint", "GPTQ", linears)
    model.load_state_dict(checkpoint.state_dict(), strict=False)
    return model, checkpoint


def test_a_layer_gets_the_numbers_of_the_file() -> None:
    model, checkpoint = of_four_bits()
    x = drawn(3, 5, 256)
    with torch.no_grad():
        report = mhsa.accelerate(model, linears=checkpoint)
        first, second = report.linears
        assert first.replaced and first.weights == "int4:block=64,zeros" and second.why_floats
        assert "2 of 2 linears replaced" in repr(report) and "1 of int4:block=64,zeros" in repr(report)
        assert "1 of float32: no few bits of it in the file" in repr(report)
        expected = nn.functional.linear(rounded(x, 64), model[0].weight, model[0].bias)
        for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.testing.assert_close(one[0](x), expected, atol=2e-5, rtol=0)
        assert float((nn.functional.linear(x, model[0].weight, model[0].bias) - expected).abs().max()) > 1e-4
        assert report.calls == {} and report.checked >= 1
        model[0].weight.mul_(2)
        edited = nn.functional.linear(x, model[0].weight, model[0].bias)
        torch.testing.assert_close(model[0](x), edited)
    assert report.calls == {"weights other than the file's, which were bound": 1}


def test_a_checkpoint_of_another_model_is_refused() -> None:
    model, checkpoint = of_four_bits()
    with torch.no_grad():
        model[0].weight[7, 9] += 0.01
    with pytest.raises(InputError, match=r"a model with weights of 'a checkpoint'.*1: weights other than the file's"):
        mhsa.accelerate(model, linears=checkpoint)
    assert "forward" not in vars(model[0])


@pytest.mark.thorough
@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_of_gguf(tied: bool, tmp_path: Path) -> None:
    """Names and orders of llama.cpp: with activations as they are it is the model of floats, to float32's rounding."""
    pytest.importorskip("gguf")
    model = llama(tied)
    write_gguf(model, tmp_path / "a.gguf")
    tokens = torch.randint(0, 320, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(tokens).logits
        for activations, most in (("float", 1e-5), ("int8", 3e-2)):
            checkpoint = mhsa.read_checkpoint(tmp_path / "a.gguf", activations=activations)  # type: ignore[arg-type]
            report = mhsa.accelerate(model, linears=checkpoint)
            words = {row.name.rpartition(".")[2]: row.weights for row in report.linears}
            bits = {part: TYPES[part][1] for part in words}
            assert {part: word[3] for part, word in words.items()} == bits | {"down_proj": "8"}
            off = float((model(tokens).logits - expected).abs().max() / expected.abs().max())
            assert 0 < off < most and report.calls == {} and report.checked > 7
            mhsa.restore(model)
    assert off > 1e-4  # a control: activations of eight bits are others


@pytest.mark.thorough
def test_a_llama_that_transformers_read(tmp_path: Path) -> None:
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package)
    from transformers import AutoModelForCausalLM

    write_gguf(llama(), tmp_path / "a.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32).eval()
    report = mhsa.accelerate(model, linears=mhsa.read_checkpoint(tmp_path / "a.gguf"))
    assert all(row.replaced and row.weights for row in report.linears) and len(report.linears) == 8
