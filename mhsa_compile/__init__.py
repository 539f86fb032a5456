"""Multi-head attention: defined once in PyTorch, compiled for a target, loaded by a small runtime.

    import mhsa_compile as mhsa

    spec = mhsa.AttentionSpec(embed_dim=512, num_heads=8)
    artifact = mhsa.compile(mhsa.MultiHeadAttention(spec), target="native")
    artifact.save("attention.mhsa")
    attention = mhsa.load("attention.mhsa")  # no PyTorch, no ONNX, no compiler
    y = attention(x)

Names are imported on first use, so importing this package loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mhsa_compile import errors
from mhsa_compile.version import __version__

if TYPE_CHECKING:
    from mhsa_compile import analysis
    from mhsa_compile.compiler.pipeline import compile
    from mhsa_compile.conversion.checkpoints.read import read_checkpoint
    from mhsa_compile.conversion.from_torch import from_torch
    from mhsa_compile.conversion.from_transformers import from_bert, from_llama, from_transformers
    from mhsa_compile.hardware.profile import TargetProfile
    from mhsa_compile.integrations.accelerate import accelerate, restore
    from mhsa_compile.nn.modules import MultiHeadAttention, ScaledDotProductAttention, weights
    from mhsa_compile.runtime.artifact.artifact import Artifact
    from mhsa_compile.runtime.compiled_attention import load
    from mhsa_compile.spec import masks
    from mhsa_compile.spec.attention_spec import AttentionSpec
    from mhsa_compile.verification.verify import verify

__all__ = [
    "Artifact",
    "AttentionSpec",
    "MultiHeadAttention",
    "ScaledDotProductAttention",
    "TargetProfile",
    "__version__",
    "accelerate",
    "analysis",
    "compile",
    "errors",
    "from_bert",
    "from_llama",
    "from_torch",
    "from_transformers",
    "load",
    "masks",
    "read_checkpoint",
    "restore",
    "verify",
    "weights",
]

_PLACES = {
    "Artifact": "runtime.artifact.artifact:Artifact",
    "AttentionSpec": "spec.attention_spec:AttentionSpec",
    "MultiHeadAttention": "nn.modules:MultiHeadAttention",
    "ScaledDotProductAttention": "nn.modules:ScaledDotProductAttention",
    "TargetProfile": "hardware.profile:TargetProfile",
    "accelerate": "integrations.accelerate:accelerate",
    "analysis": "analysis",
    "compile": "compiler.pipeline:compile",
    "from_bert": "conversion.from_transformers:from_bert",
    "from_llama": "conversion.from_transformers:from_llama",
    "from_torch": "conversion.from_torch:from_torch",
    "from_transformers": "conversion.from_transformers:from_transformers",
    "load": "runtime.compiled_attention:load",
    "masks": "spec.masks",
    "read_checkpoint": "conversion.checkpoints.read:read_checkpoint",
    "restore": "integrations.accelerate:restore",
    "verify": "verification.verify:verify",
    "weights": "nn.modules:weights",
}
"""The place that defines each public name, module:name; `analysis` and `masks` are modules."""


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, defined = _PLACES[name].partition(":")
    try:
        value = import_module(f"{__name__}.{module}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(f"{__name__}."):
            raise
        expected, hint = "mhsa-compile, which has it", "Run: pip install 'mhsa-compile[compile]'"
        raise errors.InstallationError(f"mhsa_compile.{name}", expected, "mhsa-runtime alone", hint) from error
    return getattr(value, defined) if defined else value


def __dir__() -> list[str]:
    return sorted(__all__)
