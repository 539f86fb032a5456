"""What the heads of a trained layer do: how alike they are, what they look at, and which of them it can do without.

>>> import torch
>>> import mhsa_compile as mhsa
>>> spec = mhsa.AttentionSpec(embed_dim=16, num_heads=4, outputs=("y", "heads", "weights"))
>>> layer = mhsa.MultiHeadAttention(spec)
>>> stats = mhsa.analysis.HeadStatistics(layer)
>>> for x in torch.randn(8, 4, 20, 16):
...     _ = stats.add(x, layer(x))
>>> plan = stats.report().prune(1)
>>> mhsa.analysis.pruned(layer, plan.heads, refit=True).spec.num_heads
3

The code is a package of its own, `mhsa_analysis`, which this library does without. Names are imported on first use:
statistics need NumPy only, the rest PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mhsa_analysis.head_diversity import HeadDiversity
    from mhsa_analysis.head_report import HeadReport
    from mhsa_analysis.head_statistics import HeadStatistics
    from mhsa_analysis.layer_weights import principal_angles, subspace_overlap
    from mhsa_analysis.model_layers import TrainedLayer, trained_layers
    from mhsa_analysis.moments import gaussian_information
    from mhsa_analysis.pruned_layer import pruned
    from mhsa_analysis.pruning import PruningPlan

__all__ = [
    "HeadDiversity",
    "HeadReport",
    "HeadStatistics",
    "PruningPlan",
    "TrainedLayer",
    "gaussian_information",
    "principal_angles",
    "pruned",
    "subspace_overlap",
    "trained_layers",
]

_PLACES = {
    "HeadDiversity": "head_diversity",
    "HeadReport": "head_report",
    "HeadStatistics": "head_statistics",
    "PruningPlan": "pruning",
    "TrainedLayer": "model_layers",
    "gaussian_information": "moments",
    "principal_angles": "layer_weights",
    "pruned": "pruned_layer",
    "subspace_overlap": "layer_weights",
    "trained_layers": "model_layers",
}
"""The file that defines each public name."""


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"mhsa_analysis.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
