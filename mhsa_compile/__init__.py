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

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from mhsa_compile import errors
from mhsa_compile.version import __version__

if TYPE_CHECKING:
    from mhsa_compile.compiler.pipeline import compile
    from mhsa_compile.nn.convert import from_bert, from_llama, from_torch
    from mhsa_compile.nn.modules import MultiHeadAttention, ScaledDotProductAttention
    from mhsa_compile.runtime.artifact.artifact import Artifact
    from mhsa_compile.runtime.compiled_attention import load
    from mhsa_compile.spec import masks
    from mhsa_compile.spec.attention_spec import AttentionSpec
    from mhsa_compile.target.profile import TargetProfile
    from mhsa_compile.verification.verify import verify

__all__ = [
    "Artifact",
    "AttentionSpec",
    "MultiHeadAttention",
    "ScaledDotProductAttention",
    "TargetProfile",
    "__version__",
    "compile",
    "errors",
    "from_bert",
    "from_llama",
    "from_torch",
    "load",
    "masks",
    "verify",
]

_ROOMS = {
    "Artifact": "mhsa_compile.runtime.artifact.artifact",
    "AttentionSpec": "mhsa_compile.spec.attention_spec",
    "MultiHeadAttention": "mhsa_compile.nn.modules",
    "ScaledDotProductAttention": "mhsa_compile.nn.modules",
    "TargetProfile": "mhsa_compile.target.profile",
    "compile": "mhsa_compile.compiler.pipeline",
    "from_bert": "mhsa_compile.nn.convert",
    "from_llama": "mhsa_compile.nn.convert",
    "from_torch": "mhsa_compile.nn.convert",
    "load": "mhsa_compile.runtime.compiled_attention",
    "verify": "mhsa_compile.verification.verify",
}
"""Where each public name is."""
_PUBLIC_ROOMS = {"masks": "mhsa_compile.masks"}
"""Rooms that are public themselves."""


class _Package(ModuleType):
    """Keeps `mhsa_compile.verification.verify` the function: importing the room of that name would bind the module over it."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _ROOMS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name in _PUBLIC_ROOMS:
        return import_module(_PUBLIC_ROOMS[name])
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ROOMS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
