"""Linears that another tool quantised stay as they are, bit for bit, and the report names the tool."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mhsa_compile as mhsa
from mhsa_compile.integrations.quantised_layers import quantiser_of

X = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
CLASSES = {
    "auto_gptq.nn_modules.qlinear.qlinear_cuda_old.QuantLinear": "AutoGPTQ (QuantLinear)",
    "awq.modules.linear.gemm.WQLinear_GEMM": "AutoAWQ (WQLinear_GEMM)",
    "bitsandbytes.nn.modules.Linear4bit": "bitsandbytes (Linear4bit)",
    "bitsandbytes.nn.modules.Linear8bitLt": "bitsandbytes (Linear8bitLt)",
    "gptqmodel.nn_modules.qlinear.torch.TorchLinear": "GPTQModel (TorchLinear)",
    "hqq.core.quantize.HQQLinear": "HQQ (HQQLinear)",
    "optimum.quanto.nn.qlinear.QLinear": "Quanto (QLinear)",
    "transformers.integrations.gguf.utils.GgufLinear": "transformers' gguf (GgufLinear)",
    "transformers.integrations.finegrained_fp8.FP8Linear": "transformers' finegrained_fp8 (FP8Linear)",
}


def stand_in(place: str, base: type[nn.Module]) -> nn.Module:
    """A layer with a class of this name, whose result is told from a linear's."""
    module, _, name = place.rpartition(".")

    def forward(self: Any, x: Tensor) -> Tensor:
        return 2 * nn.functional.linear(x, self.qweight)

    layer: Any = type(name, (base,), {"__module__": module, "forward": forward})(*(256, 256) * (base is nn.Linear))
    layer.register_buffer("qweight", torch.randn(256, 256, generator=torch.Generator().manual_seed(1)))
    return layer


@pytest.mark.parametrize("linears", [False, True], ids=["attention alone", "linears"])
@pytest.mark.parametrize("base", [nn.Module, nn.Linear], ids=["Module", "Linear"])
@pytest.mark.parametrize("place", CLASSES)
def test_it_is_kept_and_named(place: str, base: type[nn.Module], linears: bool) -> None:
    model = nn.Sequential(stand_in(place, base)).eval()
    with torch.no_grad():
        own = model(X)
        report = mhsa.accelerate(model, linears=linears)
        assert torch.equal(model(X), own) and "forward" not in vars(model[0])
    reason = f"quantised by {CLASSES[place]}, which computes it"
    assert [row.why_kept for row in report.linears] == [reason]
    assert f"1 kept: {reason}" in repr(report)
    mhsa.restore(model)


def test_a_weight_of_a_tools_type_is_one() -> None:
    """torchao leaves the layer an nn.Linear; compressed-tensors its weight a tensor, too."""
    kind: Any = type("Int8Tensor", (Tensor,), {"__module__": "torchao.quantization"})
    layer = nn.Linear(256, 256, bias=False)
    layer.weight = nn.Parameter(torch.randn(256, 256).as_subclass(kind))
    assert quantiser_of(layer) == "torchao (Int8Tensor)"
    other: Any = nn.Linear(256, 256)
    other.quantization_scheme = object()
    assert quantiser_of(other) == "compressed-tensors (Linear)"


def test_others_are_none() -> None:
    """Controls: PyTorch's own, a class of ours with such a name, a layer of such a tool that is no linear."""
    assert quantiser_of(nn.Linear(4, 4)) == quantiser_of(nn.LayerNorm(4)) == ""
    assert quantiser_of(stand_in("mine.layers.QuantLinear", nn.Linear)) == ""
    assert quantiser_of(stand_in("bitsandbytes.nn.modules.Embedding4bit", nn.Module)) == ""
    report = mhsa.accelerate(nn.Sequential(nn.Linear(256, 256)).eval())
    assert report.linears == []


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
def test_layers_that_pytorch_quantised() -> None:
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(256, 256)), {nn.Linear}).eval()
    own = model(X)
    report = mhsa.accelerate(model, linears=True)
    assert report.linears[0].why_kept == "quantised by PyTorch (Linear), which computes it"
    assert torch.equal(model(X), own)


def test_layers_of_bitsandbytes_itself() -> None:
    tool = pytest.importorskip("bitsandbytes")
    model = nn.Sequential(tool.nn.Linear4bit(256, 256), tool.nn.Linear8bitLt(256, 256, has_fp16_weights=False))
    check("bitsandbytes", model.eval().to("cpu"), ["bitsandbytes (Linear4bit)", "bitsandbytes (Linear8bitLt)"])


def test_layers_of_torchao_itself() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tool = pytest.importorskip("torchao.quantization")
        model = nn.Sequential(nn.Linear(256, 256)).eval()
        tool.quantize_(model, tool.Int8WeightOnlyConfig())
    check("torchao", model, [f"torchao ({type(model[0].weight).__name__})"])


def check(tool: str, model: nn.Module, kinds: list[str]) -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = model(X)
        report = mhsa.accelerate(model, linears=True)
        assert torch.equal(model(X), own)
    assert [row.why_kept for row in report.linears] == [f"quantised by {kind}, which computes it" for kind in kinds]
