"""What torch.onnx.export is to write in ways of ours: PyTorch's operation -> the function that writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mhsa_compile.frontend.export.index_put_translation import index_put
from mhsa_compile.frontend.export.sdpa_translation import scaled_dot_product_attention
from mhsa_compile.frontend.export.slice_translation import slice_scatter

TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
    torch.ops.aten.index_put.default: index_put,
    torch.ops.aten.slice_scatter.default: slice_scatter,
}
