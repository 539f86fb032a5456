"""Makes the checkpoints beside this file with the tools themselves: AutoGPTQ 0.7.1, GPTQModel 7.7.0, AutoAWQ 0.2.9.

None of them installs beside this project's PyTorch. Each was unpacked (`pip install --no-deps --target`), with the few
packages that their modules import, on PYTHONPATH. `expected.npy` is what the tool's own layer multiplies, (N, K).
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

HERE, K, N = Path(__file__).parent, 64, 32


def module_of(package: str, file: str) -> Any:
    """A file of a package without the package's own imports."""
    folder = next(Path(place) / package for place in sys.path if (Path(place) / package).is_dir())
    spec = importlib.util.spec_from_file_location(f"{package}_{Path(file).stem}", folder / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(groups: int, bits: int, lowest: int) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """(a linear whose weights are numbers of its groups, its scales (G, N), its zeros (G, N))"""
    generator = torch.Generator().manual_seed(bits + groups + lowest)
    top = 2**bits
    numbers = torch.randint(0, top, (N, K), generator=generator)
    zeros = torch.randint(lowest, top, (groups, N), generator=generator).float()
    scales = (torch.rand(groups, N, generator=generator) * 0.05 + 0.01).half().float()
    each = K // groups
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = (numbers - zeros.repeat_interleave(each, 0).T) * scales.repeat_interleave(each, 0).T
    return linear, scales, zeros


def write(name: str, config: dict[str, Any], layer: Any, expected: torch.Tensor) -> None:
    """A folder as the tool's users have it."""
    (HERE / name).mkdir(exist_ok=True)
    tensors = {f"layers.0.{part}": value.contiguous() for part, value in layer.state_dict().items()}
    save_file(tensors | {"norm.weight": torch.ones(K).half()}, HERE / name / "model.safetensors")
    (HERE / name / "config.json").write_text(json.dumps({"quantization_config": config}, indent=1) + "\n")
    np.save(HERE / name / "expected.npy", expected.float().numpy())


def auto_gptq(name: str, bits: int, groups: int) -> None:
    tool = module_of("auto_gptq", "nn_modules/qlinear/qlinear_cuda_old.py")
    group = -1 if groups == 1 else K // groups
    linear, scales, zeros = drawn(groups, bits, lowest=1)
    layer = tool.QuantLinear(bits, group, K, N, bias=False)
    linear.weight.data = linear.weight.data.half()
    layer.pack(linear, scales.T.clone(), zeros.T.clone(), None)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": False}
    stored = {part: value.clone() for part, value in layer.state_dict().items()}
    layer.scales = layer.scales.float()
    with torch.no_grad():
        expected = layer(torch.eye(K)).T
    layer.load_state_dict(stored)
    layer.scales = stored["scales"]
    write(name, config, layer, expected)


def gptqmodel(name: str, bits: int, *, by_words: bool = False, desc_act: bool = False) -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    linear, scales, zeros = drawn(2, bits, lowest=0)
    layer = TorchLinear(bits, K // 2, desc_act=desc_act, sym=False, in_features=K, out_features=N, bias=False)
    places = torch.arange(K, dtype=torch.int32) // (K // 2)
    if desc_act:
        places = places[torch.randperm(K, generator=torch.Generator().manual_seed(0))]
    layer.pack_original(linear, scales.T.clone(), zeros.T.clone(), places)
    layer.post_init()
    halves = layer.scales
    layer.scales = halves.float()
    expected = layer.dequantize_weight().T
    layer.scales = halves
    if by_words:
        convert_gptq_v2_to_v1_format_module(layer, QuantizeConfig(bits=bits, group_size=K // 2))
    config = {"quant_method": "gptq", "bits": bits, "group_size": K // 2, "desc_act": desc_act, "sym": False}
    kind = {"checkpoint_format": "gptq" if by_words else "gptq_v2", "meta": {"quantizer": ["gptqmodel:7.7.0"]}}
    write(name, config | kind, layer, expected)


def awq(name: str) -> None:
    for package in ("awq", "awq.modules", "awq.modules.linear", "awq.utils"):
        folder = next(place for place in sys.path if (Path(place) / "awq").is_dir())
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(Path(folder, *package.split(".")))]
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    linear, scales, zeros = drawn(2, 4, lowest=0)
    layer = WQLinear_GEMM.from_linear(linear, 4, K // 2, scales=scales, zeros=zeros)
    expected = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, K // 2).T
    config = {"quant_method": "awq", "zero_point": True, "group_size": K // 2, "bits": 4, "version": "gemm"}
    write(name, config, layer, expected)


if __name__ == "__main__":
    auto_gptq("autogptq-4", 4, 2)
    auto_gptq("autogptq-8-column", 8, 1)
    gptqmodel("gptqmodel-4-v2", 4)
    gptqmodel("gptqmodel-8-v2", 8)
    gptqmodel("gptqmodel-4-v1", 4, by_words=True)
    gptqmodel("gptqmodel-act-order", 4, desc_act=True)
    awq("awq-4")
