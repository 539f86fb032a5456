"""Masks as Relax values, in the one form that kernels read: four axes that are 1 or full.

Notation: B batch, L query length, S key length, P past length, H heads.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from tvm import relax, te, tirx

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.fusion.attention_node import MASK
from mhsa_compile.frontend.relax.values import RelaxValue, SizeExpr, difference, dims
from mhsa_compile.kernels.interface.ops import WindowSpec

UNKNOWN: Literal["unknown"] = "unknown"


def four_axes(builder: relax.BlockBuilder, mask: RelaxValue, key_mask: bool, node: str) -> RelaxValue:
    """The mask as a view of four axes, of 1 where it had none. A key mask is (B, S). Raises ModelError."""
    if mask.ty.shape is None:
        raise ModelError(node, f"an {MASK} whose dims can be inferred", "a computed one whose dims cannot")
    shape = dims(mask)
    if key_mask:
        shape = [shape[0], 1, 1, shape[1]]
    elif len(shape) < 4:
        shape = [*[1] * (4 - len(shape)), *shape]
    else:
        return mask
    return builder.emit(relax.op.reshape(mask, relax.ShapeExpr(shape)))


def padded(builder: relax.BlockBuilder, mask: RelaxValue, length: SizeExpr) -> RelaxValue:
    """The mask over `length` keys: those that it does not reach are hidden."""

    def longer(mask: te.Tensor) -> te.Tensor:
        fill = _fill(mask.dtype)
        shape = (*mask.shape[:3], length)
        return te.compute(
            shape, lambda b, h, i, j: tirx.if_then_else(j < mask.shape[3], mask[b, h, i, j], fill), "padded"
        )

    return builder.emit_te(longer, mask, primfunc_name_hint="padded_mask")


def checked(builder: relax.BlockBuilder, node: str, mask: RelaxValue, full: list[SizeExpr]) -> RelaxValue:
    """A computed mask, each of whose axes is 1 or full: shown now, or taken to be full, which every call checks.

    Raises ModelError.
    """
    sizes = dims(mask)
    target = [size if _is_one(size) else whole for size, whole in zip(sizes, full, strict=True)]
    apart = [difference(size, want) for size, want in zip(sizes, target, strict=True)]
    if any(isinstance(by, int) and by for by in apart):
        raise ModelError(node, f"an {MASK} with axes of 1 or of {_text(full)}", _text(sizes))
    if all(isinstance(by, int) for by in apart):
        return mask
    return builder.match_cast(mask, relax.TensorType(target, mask.ty.dtype))


def window_of(
    left: int, right: int, alignment: str, *, past: SizeExpr | None, queries: SizeExpr, keys: SizeExpr
) -> WindowSpec | Literal["unknown"] | None:
    """The band of a window (-1: unbounded), causality in it: query i stands at i + P, or as `alignment` says.

    UNKNOWN where no Band can say it: there are more or fewer new keys than queries, by a number that calls decide.
    """
    if left == right == -1:
        return None
    shift = 0
    if past is not None:
        alignment, shift = "bottom_right", difference(past, keys - queries)
        if not isinstance(shift, int):
            alignment, shift = "top_left", difference(past, 0)
        if not isinstance(shift, int):
            return UNKNOWN
    bounds = (None if left < 0 else left - shift, None if right < 0 else right + shift)
    return WindowSpec(*bounds, alignment)  # type: ignore[arg-type]


def banded(
    builder: relax.BlockBuilder,
    mask: RelaxValue | None,
    left: int,
    right: int,
    *,
    past: SizeExpr,
    queries: SizeExpr,
    keys: SizeExpr,
) -> RelaxValue:
    """A mask (mB, mH, L, S) that hides what `mask` hides, and what lies outside the window of query i at i + P."""

    def inside(*masks: te.Tensor) -> te.Tensor:
        one = tirx.const(1, "int64")
        batch, heads = masks[0].shape[:2] if masks else (one, one)

        def element(b: Any, h: Any, i: Any, j: Any) -> Any:
            visible = tirx.const(True, "bool")
            if left >= 0:
                visible = tirx.all(visible, j >= i + past - left)
            if right >= 0:
                visible = tirx.all(visible, j <= i + past + right)
            if not masks:
                return visible
            return tirx.Select(visible, masks[0][masked_element(masks[0], b, h, i, j)], _fill(masks[0].dtype))

        return te.compute((batch, heads, queries, keys), element, "banded")

    return builder.emit_te(inside, *([] if mask is None else [mask]), primfunc_name_hint="banded_mask")


def masked_element(mask: te.Tensor, *at: Any) -> tuple[Any, ...]:
    """The indices of the mask's element at (b, h, i, j): an axis of 1 broadcasts."""
    return tuple(tirx.min(index, size - 1) for index, size in zip(at, mask.shape, strict=True))


def _fill(dtype: str) -> Any:
    return tirx.const(False, "bool") if dtype == "bool" else tirx.const(-math.inf, dtype)


def _is_one(size: SizeExpr) -> bool:
    return isinstance(size, int | tirx.IntImm) and int(size) == 1


def _text(sizes: list[SizeExpr]) -> str:
    return f"({', '.join(map(str, sizes))})"
