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
    from mhsa_compile.artifact import Artifact
    from mhsa_compile.model import MultiHeadAttention, ScaledDotProductAttention
    from mhsa_compile.pipeline import compile
    from mhsa_compile.profile import TargetProfile
    from mhsa_compile.runtime import load
    from mhsa_compile.spec import AttentionSpec
    from mhsa_compile.verify import verify

__all__ = [
    "Artifact",
    "AttentionSpec",
    "MultiHeadAttention",
    "ScaledDotProductAttention",
    "TargetProfile",
    "__version__",
    "compile",
    "errors",
    "load",
    "verify",
]

_ROOMS = {
    "Artifact": "artifact",
    "AttentionSpec": "spec",
    "MultiHeadAttention": "model",
    "ScaledDotProductAttention": "model",
    "TargetProfile": "profile",
    "compile": "pipeline",
    "load": "runtime",
    "verify": "verify",
}


class _Package(ModuleType):
    """Keeps `mhsa_compile.verify` the function: importing the room of that name would bind the module over it."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _ROOMS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
