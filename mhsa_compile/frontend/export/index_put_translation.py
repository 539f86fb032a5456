"""How torch.onnx.export writes `x[mask] = value`, of which PyTorch makes an index_put: as a selection.

PyTorch's own translation scatters the value to the places where the mask is true, whose number only a call knows.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx_ir import DataType
from onnxscript import opset23 as op
from onnxscript.function_libs.torch_lib.ops.core import aten_index_put

from mhsa_compile.frontend.export.sdpa_translation import GraphValue


def index_put(
    self: GraphValue, indices: Sequence[GraphValue | None], values: GraphValue, accumulate: bool = False
) -> GraphValue:
    """The value where the mask is true, x elsewhere. As PyTorch translates it where there is no mask, or several, or
    not one value for all its places."""
    masks = [index for index in indices if index is not None]
    if accumulate or len(masks) != 1 or masks[0].dtype != DataType.BOOL:
        return aten_index_put(self, indices, values, accumulate)
    (mask,) = masks
    first = indices.index(mask)
    behind = range(first + len(mask.shape), len(self.shape))
    is_one = len(values.shape) <= len(behind) or (len(values.shape) == len(behind) + 1 and values.shape[0] == 1)
    if not is_one:
        return aten_index_put(self, indices, values, accumulate)
    axes = [axis - first for axis in behind]
    return op.Where(op.Unsqueeze(mask, op.Constant(value_ints=axes)) if axes else mask, values, self)
