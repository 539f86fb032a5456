"""How torch.onnx.export writes `x[..., start:end] = src`, of which PyTorch makes a copy of x: as a concatenation.

PyTorch's own translation scatters src to places that are counted in the call, which has no code here at a free length.
"""

from __future__ import annotations

from onnxscript import opset23 as op
from onnxscript.function_libs.torch_lib.ops.core import aten_slice_scatter

from mhsa_compile.frontend.export.sdpa_translation import GraphValue

_LAST = 2**63 - 1
"""Where a slice ends that has no end."""


def slice_scatter(
    self: GraphValue,
    src: GraphValue,
    dim: int = 0,
    start: int | GraphValue | None = None,
    end: int | GraphValue | None = None,
    step: int | GraphValue = 1,
) -> GraphValue:
    """What lies before the slice, src, and what lies behind. As PyTorch translates it where the ends of the slice are
    not known to lie in order."""
    start, end = 0 if start is None else start, _LAST if end is None else end
    if step != 1 or not isinstance(start, int) or not isinstance(end, int) or not 0 <= start <= end:
        return aten_slice_scatter(self, src, dim, start, end, step)
    parts = [src]
    if start > 0:
        parts.insert(0, _between(self, dim, 0, start))
    if end < _LAST:
        parts.append(_between(self, dim, end, _LAST))
    return op.Concat(*parts, axis=dim) if len(parts) > 1 else op.Identity(src)


def _between(x: GraphValue, dim: int, start: int, end: int) -> GraphValue:
    starts, ends, axes = (op.Constant(value_ints=[number]) for number in (start, end, dim))
    return op.Slice(x, starts, ends, axes)
