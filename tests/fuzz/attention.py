"""An AttentionCase as an operation and its inputs, and what it must give.

Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import torch
from support.attention_ops import attention_of, changed, features
from support.kernel_runs import attention, masked_scores

from fuzz.cases import AttentionCase
from fuzz.numbers import OF_SCORES, numbers
from mhsa_compile import masks
from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.kernels.scores.static_mask import StaticMask
from mhsa_compile.spec.float32_products import Float32Products, is_coarse
from mhsa_compile.spec.window import WindowSpec

NUMPY = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "int64": np.int64,
    "int32": np.int32,
    "int8": np.int8,
}


def attention_op(case: AttentionCase) -> AttentionOp:
    (H, G), (E, F) = case.heads, case.widths
    first = dict(zip("BLS", case.calls[0], strict=True))
    batch, q_length, kv_length = (first[a] if a in case.fixed else a for a in "BLS")
    if case.layout == "fused":
        kv_length = q_length
    if case.layout == "fused":
        width = H * E + G * (E + F) + 5  # the padding that rows of a fused projection may have
        offsets = (0, H * E, H * E + G * E)
        places = [HeadLayout(0, "rows", width, offset) for offset in offsets]
    else:
        widths = (H * E, G * E, G * F)
        places = [HeadLayout(i, case.layout, width) for i, width in enumerate(widths)]  # type: ignore[arg-type]
    mask = None
    if case.mask is not None:
        kind, axes = case.mask
        full = {"B": batch, "H": H, "L": q_length, "S": kv_length}
        dims = tuple(full.get(axis, axis) for axis in axes)
        mask = CallMask("bool" if kind == "bool" else case.dtype, dims)  # type: ignore[arg-type]
    return attention_of(
        batch, q_length, kv_length, H, G, E, F,
        scale=E**-0.5 if case.scale is None else case.scale,
        band=None if case.band is None else WindowSpec(*case.band),  # type: ignore[arg-type]
        mask=mask, query=places[0], key=places[1], value=places[2],
        output=HeadLayout(0, case.output, H * F),  # type: ignore[arg-type]
        dtype=case.dtype,  # type: ignore[arg-type]
        static_mask=None if case.static is None else StaticMask(_static(case)),
        softcap=case.softcap, **dict.fromkeys(case.extras, True),
    )  # fmt: skip


def _static(case: AttentionCase) -> np.ndarray:
    assert case.static is not None
    per_head, what = case.static
    _, L, S = case.calls[0]
    if isinstance(what, str):
        return masks.parse_pattern(what).array(L, S)[np.newaxis]
    return np.random.default_rng(case.seed).random((case.heads[0] if per_head else 1, L, S)) < what


@dataclass
class Operands:
    """The inputs of one call, heads first; what the operation does not have is None."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray | None
    lengths: np.ndarray | None
    sinks: np.ndarray | None
    slopes: np.ndarray | None


def draw_operands(
    rng: np.random.Generator,
    op: AttentionOp,
    sizes: tuple[int, int, int],
    magnitude: float,
    turn: int,
    kind: str = "normal",
) -> Operands:
    """`kind`: the class of V's numbers, and of those of Q and K where it leaves scores as large as they are."""
    (B, L, S), H, G = sizes, op.num_heads, op.num_kv_heads
    shapes = ((B, H, L, op.head_dim), (B, G, S, op.head_dim), (B, G, S, op.v_head_dim))
    narrow, of_scores = NUMPY[op.dtype], kind if kind in OF_SCORES else "normal"
    q, k = (numbers(rng, shape, of_scores, np.float32) for shape in shapes[:2])
    return Operands(
        (q * np.float32(magnitude)).astype(narrow),
        k.astype(narrow),
        numbers(rng, shapes[2], kind, narrow),
        mask=_mask(rng, op, sizes, turn),
        lengths=rng.integers(0, S + 1, B) if features(op).lengths else None,
        sinks=rng.standard_normal(H, np.float32).astype(narrow) if features(op).sinks else None,
        slopes=rng.random(H, np.float32).astype(narrow) if features(op).slopes else None,
    )


def _mask(rng: np.random.Generator, op: AttentionOp, sizes: tuple[int, int, int], turn: int) -> np.ndarray | None:
    """The mask of a call, None where the operation has none. An axis that may be 1 is that in every other call. One row
    in seven hides everything."""
    if features(op).mask is None:
        return None
    full = dict(zip("BLS", sizes, strict=True)) | {"H": op.num_heads}
    shape = []
    for axis, dim in zip("BHLS", features(op).mask.dims, strict=True):
        loose = isinstance(dim, str) and dim.startswith("mask_")
        shape.append(dim if isinstance(dim, int) else 1 if loose and turn % 2 else full[axis])
    visible = rng.random(shape) < 0.7
    visible.reshape(-1, shape[-1])[3::7] = False
    if features(op).mask.dtype == "bool":
        return visible
    return np.where(visible, rng.standard_normal(shape), -np.inf).astype(NUMPY[features(op).mask.dtype])


def evaluated(op: AttentionOp, given: Operands, dtype: torch.dtype) -> np.ndarray:
    return attention(op, given.q, given.k, given.v, given.mask, given.lengths, given.sinks, given.slopes, dtype)


def scores_of(op: AttentionOp, given: Operands, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return masked_scores(op, given.q, given.k, given.mask, given.lengths, given.slopes, dtype)


def reordered(given: Operands, order: int, products: Float32Products = "ieee") -> Operands:
    """The operands with the head dim in another order, which only changes how sums are rounded; 0 is as it is.

    Factors that are cut into terms lose the same in every order. So what multiplies Q divides K then: the terms are
    others, and what float32 rounds is far below what they lose.
    """
    if not order:
        return given
    rng = np.random.default_rng(order)
    places = rng.permutation(given.q.shape[-1])
    q, k = given.q[..., places], given.k[..., places]
    if is_coarse(products):
        factor = np.float32(rng.uniform(1, 2))
        q, k = q * factor, k / factor
    return replace(given, q=q, k=k)


def misread(given: Operands) -> dict[str, Operands]:
    """What a kernel that is wrong would have multiplied: a budget must tell it from the operands."""
    without = given.q.copy()
    without[..., -1] = 0
    return {
        "scores without their last term": replace(given, q=without),
        "scores larger by an eighth": replace(given, q=(given.q.astype(np.float64) * 1.125).astype(np.float32)),
        "values of the next key": replace(given, v=np.roll(given.v, -1, axis=2)),
    }


def farthest(truth: np.ndarray, found: Sequence[np.ndarray]) -> np.ndarray:
    """At each place the one of several results that is farthest from the truth."""
    every = np.stack(found)
    with np.errstate(invalid="ignore"):
        error = np.nan_to_num(np.abs(every.astype(np.float64) - truth), nan=0.0)
    return np.take_along_axis(every, error.argmax(axis=0)[np.newaxis], axis=0)[0]


def poison(op: AttentionOp, given: Operands) -> None:
    """NaN and Inf in the keys and values that no query of their batch entry sees: found by what they can change.

    In entries of odd number only the last column of the values has any.
    """
    B, S = given.k.shape[0], given.k.shape[2]
    ones = np.eye(S)
    flat = changed(op, num_kv_heads=1, head_dim=1, v_head_dim=S, softcap=0.0, slopes=False, sinks=False)
    mask = given.mask if given.mask is None or given.mask.dtype == np.bool_ else ~np.isneginf(given.mask)
    q = np.zeros((B, op.num_heads, given.q.shape[2], 1))
    weights = attention(flat, q, np.zeros((B, 1, S, 1)), np.broadcast_to(ones, (B, 1, S, S)), mask, given.lengths)
    seen = weights.reshape(B, -1, S).any(axis=1)
    for b in range(B):
        given.k[b, :, ~seen[b]] = np.nan
        given.v[b, :, ~seen[b], -1 if b % 2 else 0 :] = np.inf
        given.v[b, :, ~seen[b], -1 if b % 2 else 0 :: 2] = np.nan


def placed(op: AttentionOp, given: Operands) -> list[np.ndarray]:
    """The inputs of the kernel, in its order: one for each buffer, then the others."""
    heads = (given.q, given.k, given.v)
    others = [array for array in (given.mask, given.lengths, given.sinks, given.slopes) if array is not None]
    if op.query.layout == "heads":
        return [*heads, *others]
    rows = [np.ascontiguousarray(x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)) for x in heads]
    if op.key.buffer != op.query.buffer:
        return [*rows, *others]
    rest = op.query.width - sum(x.shape[2] for x in rows)
    return [np.concatenate([*rows, np.full((*rows[0].shape[:2], rest), np.nan, rows[0].dtype)], axis=2), *others]


def output_shape(op: AttentionOp, sizes: tuple[int, int, int]) -> tuple[int, ...]:
    B, L, _ = sizes
    return (B, L, op.output.width) if op.output.layout == "rows" else (B, op.num_heads, L, op.v_head_dim)


def output_rows(y: np.ndarray, place: HeadLayout) -> np.ndarray:
    return y if place.layout == "rows" else y.transpose(0, 2, 1, 3).reshape(y.shape[0], y.shape[2], -1)
