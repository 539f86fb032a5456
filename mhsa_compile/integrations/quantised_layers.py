"""Linears that another tool quantised: whose they are, by their class or by that of their weights. None is imported."""

from __future__ import annotations

from itertools import chain

from torch import nn

_TOOLS = {
    "aqlm": "AQLM", "auto_gptq": "AutoGPTQ", "auto_round": "AutoRound", "auto_round_extension": "AutoRound",
    "awq": "AutoAWQ", "bitsandbytes": "bitsandbytes", "compressed_tensors": "compressed-tensors", "eetq": "EETQ",
    "gptqmodel": "GPTQModel", "hqq": "HQQ", "optimum": "Quanto", "quark": "Quark", "spqr_quant": "SpQR",
    "torchao": "torchao", "vptq": "VPTQ",
}  # fmt: skip
"""Package -> the tool whose it is."""
_OF_TRANSFORMERS, _OF_PYTORCH = (
    "transformers.integrations.",
    ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized"),
)


def quantiser_of(layer: nn.Module) -> str:
    """The tool that quantised a linear, and the class by which it is known; "" for other layers.

    >>> quantiser_of(nn.Linear(2, 2))
    ''
    """
    kind = type(layer)
    if "linear" in kind.__name__.lower() and (tool := _tool(kind.__module__)):
        return f"{tool} ({kind.__name__})"
    if not isinstance(layer, nn.Linear):
        return ""
    if hasattr(layer, "quantization_scheme"):  # compressed-tensors leaves the class as it is
        return f"{_TOOLS['compressed_tensors']} ({kind.__name__})"
    values = chain(layer.parameters(recurse=False), layer.buffers(recurse=False))
    tools = (f"{tool} ({type(value).__name__})" for value in values if (tool := _tool(type(value).__module__)))
    return next(tools, "")


def _tool(module: str) -> str:
    if module.startswith(_OF_PYTORCH):
        return "PyTorch"
    if module.startswith(_OF_TRANSFORMERS):
        return f"transformers' {module.removeprefix(_OF_TRANSFORMERS).partition('.')[0]}"
    return _TOOLS.get(module.partition(".")[0], "")
