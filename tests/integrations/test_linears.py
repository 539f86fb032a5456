"""accelerate(model, linears=True): the numbers of PyTorch's linears, whatever the shape; reasons for what is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.interface_models import TOKENS, built, generated, prompts
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError
from mhsa_compile.integrations import torch_linear
from mhsa_compile.nn.weight_blocks import in_blocks, rounded
from mhsa_compile.spec.weight_words import BlockForm
from mhsa_compile.verification.error_budget import budget, max_error

INPUTS, OUTPUTS = 263, 307
SHAPES = [(INPUTS,), (1, INPUTS), (3, 7, INPUTS), (2, 1, 67, INPUTS), (0, INPUTS), (2, 0, INPUTS)]


def linear(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(INPUTS, OUTPUTS, bias).eval()


def conv1d() -> Conv1D:
    torch.manual_seed(0)
    return Conv1D(OUTPUTS, INPUTS).eval()


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.thorough_but("no bias")
@pytest.mark.parametrize("make", [linear, lambda: linear(False), conv1d], ids=["linear", "no bias", "Conv1D"])
def test_a_linear(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(make()).eval()
    inputs = [drawn(*shape) for shape in SHAPES]
    inputs.append(drawn(5, 9, INPUTS)[:, 0])  # rows apart, as a pooler takes them
    inputs.append(drawn(INPUTS, 11).T)
    with torch.no_grad():
        own, exact = [model(x) for x in inputs], [copy.deepcopy(model).double()(x.double()) for x in inputs]
        report = mhsa.accelerate(model, linears=True)
        found = [[model(x) for x in inputs] for _ in range(3)]
        mhsa.restore(model)
        after = [model(x) for x in inputs]
    assert [row.replaced for row in report.linears] == [True]
    assert report.calls == {}
    for results in found:
        for truth, yardstick, one in zip(exact, own, results, strict=True):
            assert one.shape == truth.shape
            if one.numel():
                assert max_error(truth.numpy(), one.numpy()) <= budget(truth.numpy(), yardstick.numpy(), "float32")
    assert all(map(torch.equal, own, after))
    assert "forward" not in vars(model[0])


FORMS = {"int4": BlockForm(), "int4:block=64,zeros,activations=float": BlockForm(4, 64, "bytes", rounds_x=False)}


@pytest.mark.thorough_but("int4:block=64,zeros,activations=float-Conv1D")
@pytest.mark.parametrize("make", [linear, conv1d], ids=["linear", "Conv1D"])
@pytest.mark.parametrize("word", FORMS)
def test_a_linear_of_four_bits(word: str, make: Callable[[], nn.Module]) -> None:
    """What four bits of the weights and eight of the inputs give; after an edit, and in a copy, too."""
    model, x, form = nn.Sequential(make()).eval(), drawn(3, 7, INPUTS), FORMS[word]

    def expected() -> Tensor:
        weight = model[0].weight.detach()
        rows = weight if isinstance(model[0], nn.Linear) else weight.T
        stored = in_blocks(rows.contiguous(), form).floats(INPUTS)
        return nn.functional.linear(rounded(x, form.block) if form.rounds_x else x, stored, model[0].bias)

    with torch.no_grad():
        report = mhsa.accelerate(model, linears=word)
        for edit in (lambda: None, lambda: model[0].weight.mul_(2)):
            edit()
            for one in (model, copy.deepcopy(model)):
                torch.testing.assert_close(one(x), expected(), atol=2e-4, rtol=0)
        assert [row.replaced for row in report.linears] == [True] and report.calls == {}
        mhsa.restore(model)
        assert float((model(x) - expected()).abs().max()) > 1e-2  # a control: four bits are not the weights


def test_a_linear_of_four_bits_that_computes_something_else_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(linear()).eval(), drawn(5, INPUTS)
    with torch.no_grad():
        own = model(x)
        mhsa.accelerate(model, linears="int4")
        monkeypatch.setattr(torch_linear, "rounded", lambda x, block: 1.1 * x)
        with pytest.warns(UserWarning, match="a result is off by"):
            torch.testing.assert_close(model(x), own)


@pytest.mark.parametrize("word", ["int8", "int2", "int4:block=7", 4, None])
def test_other_words_for_linears_are_refused(word: Any) -> None:
    model = nn.Sequential(linear()).eval()
    with pytest.raises(InputError):
        mhsa.accelerate(model, linears=word)
    assert "forward" not in vars(model[0])


def test_edited_weights_are_noticed() -> None:
    model, x = nn.Sequential(linear()).eval(), drawn(9, INPUTS)
    report = mhsa.accelerate(model, linears=True)

    def error() -> float:
        with torch.no_grad():
            return float((model(x) - nn.functional.linear(x, model[0].weight, model[0].bias)).abs().max())

    assert error() < 1e-4
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    assert error() < 1e-4
    model[0].bias = nn.Parameter(torch.ones(OUTPUTS))
    assert error() < 1e-4
    model[0].bias = None
    assert error() < 1e-4
    model[0].weight.data.mul_(2)  # which PyTorch does not count
    assert error() < 1e-4
    model[0].weight.data[0, 1] = 3  # of one number alone a sample does not tell
    report.refresh()
    assert error() < 1e-4


def test_several_threads_get_what_one_gets() -> None:
    model, inputs = (
        nn.Sequential(linear(), nn.ReLU(), nn.Linear(OUTPUTS, 256)).eval(),
        [drawn(n, 263) for n in (1, 37, 256)],
    )
    mhsa.accelerate(model, linears=True)
    with torch.no_grad():
        expected = [model(x).clone() for x in inputs]

    def call(number: int) -> None:
        with torch.no_grad():
            for place in (i % 3 for i in range(number, number + 60)):
                assert torch.equal(model(inputs[place]), expected[place])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def patched() -> nn.Linear:
    made = linear()
    vars(made)["forward"] = lambda x: x
    return made


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Scaled(INPUTS, OUTPUTS), "a Scaled, which may compute something else"),
        (patched, "a forward of its own"),
        (lambda: linear().bfloat16(), r"weight is of torch.bfloat16"),
        (lambda: linear().to("meta"), "weight is on meta"),
        (lambda: nn.Linear(64, 64), "fewer than 65536 weights"),
        (lambda: nn.utils.parametrizations.weight_norm(linear()), "ParametrizedLinear"),
    ],
    ids=["subclass", "forward", "dtype", "meta", "small", "parametrised"],
)
def test_what_is_kept_says_why(make: Callable[[], nn.Module], why: str) -> None:
    report = mhsa.accelerate(nn.Sequential(make().eval()).eval(), linears=True)
    (row,) = report.linears
    assert why in row.why_kept
    assert "0 of 1 linears replaced" in repr(report)
    assert f"1 kept: {row.why_kept}" in repr(report)


@pytest.mark.thorough
def test_attention_keeps_its_own_linears() -> None:
    model = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True).eval()
    report = mhsa.accelerate(model, linears=True)
    assert [row.name for row in report.linears] == ["linear1", "linear2"]
    assert "2 of 2 linears replaced" in repr(report)
    x = drawn(2, 9, 256)
    with torch.no_grad():
        found = model(x)
        mhsa.restore(model)
        assert torch.allclose(found, model(x), atol=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_calls_that_are_pytorchs() -> None:
    model, x = nn.Sequential(linear()).eval(), drawn(5, INPUTS)
    report = mhsa.accelerate(model, linears=True)
    with torch.no_grad():
        expected = nn.functional.linear(x, model[0].weight, model[0].bias)
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="dtype"):
            model(x.double())
        with pytest.raises(RuntimeError, match="shape"):
            model(x[:, 1:])
        assert sum(report.calls.values()) == 3
        traced: Any = torch.jit.trace(model, x)
        assert torch.equal(traced(2 * x), nn.functional.linear(2 * x, model[0].weight, model[0].bias))
        assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)
    with pytest.raises(InputError, match="requires grad"):
        model(x)
    model.train()
    with torch.no_grad(), pytest.raises(InputError, match="training mode"):
        model(x)


@pytest.mark.thorough
def test_a_decoder_of_transformers_says_the_same() -> None:
    model = built("GPT2", "GPT2LMHeadModel", {**TOKENS, "n_embd": 256, "n_head": 4, "n_layer": 2, "n_positions": 64})
    inputs = prompts(2, 11, hidden=3)
    expected = generated(model, inputs, "eager")
    report = mhsa.accelerate(model, linears=True)
    assert [row.name.rpartition(".")[2] for row in report.linears if row.replaced] == [
        name for _ in range(2) for name in ("c_attn", "c_proj", "c_fc", "c_proj")
    ]
    with torch.no_grad():
        assert torch.equal(model.generate(**inputs, max_new_tokens=10, min_new_tokens=10, do_sample=False), expected)
