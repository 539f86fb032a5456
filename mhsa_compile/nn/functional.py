"""The core of attention in PyTorch: where queries and keys stand, what each query sees, and what it gets.

Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from mhsa_compile.errors import InputError
from mhsa_compile.nn import softmax_outputs
from mhsa_compile.nn.score_functions import Functions
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.mask_patterns import Pattern
from mhsa_compile.spec.outputs import SoftmaxOutputs, inside_of

ScoreMod = Callable[[Tensor], Tensor]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    score_mod: ScoreMod | None = None,
) -> Tensor:
    """softmax(mod(cap(q k^T * scale)) + bias) v over the visible keys.

    q (B, H, L, E), k (B, G, S, E), v (B, G, S, F) -> (B, H, L, F)
    visible     bool, broadcastable to (B, H, L, S), or None: all are
    bias        of q's dtype, broadcastable to (B, H, L, S), or None; -inf masks
    softcap     cap(s) = softcap * tanh(s / softcap), where it is not 0
    sinks       (H,) or None: for each head one more score of the softmax, of no value
    dropout     the probability with which a weight becomes 0; the others grow by 1 / (1 - dropout)
    score_mod   what becomes of scores (B, H, L, S), or None; one of -inf hides its key

    The textbook form ("Attention Is All You Need", eq. 1; https://arxiv.org/abs/1706.03762), as PyTorch's eager one.
    """
    v = _for_each_query_head(v, q)
    scores, visible = _scores(q, k, visible, bias, scale, softcap, score_mod)
    if visible is None:
        return _dropped(_softmax(scores, sinks), dropout) @ v
    blind = ~visible.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~visible, -torch.inf).masked_fill(blind, 0.0)  # 0: a softmax of -inf alone is NaN
    weights = _dropped(_softmax(scores, sinks), dropout).masked_fill(~visible, 0.0)
    return _weighted_sum(weights, v, visible)


def softmax_outputs_of(
    q: Tensor,
    k: Tensor,
    visible: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    wanted: SoftmaxOutputs,
    score_mod: ScoreMod | None = None,
) -> dict[str, Tensor]:
    """What the rows of `attend`'s softmax are like: the arrays `wanted.names`, as `outputs` says."""
    scores, visible = _scores(q, k, visible, bias, scale, softcap, score_mod)
    return softmax_outputs.softmax_outputs_of_rows(
        scores if visible is None else scores.masked_fill(~visible, -torch.inf), sinks, wanted
    )


def _for_each_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values (B, G, S, ...) as (B, H, S, ...): query head h reads key/value head h // group."""
    group = q.shape[1] // x.shape[1]
    return x.repeat_interleave(group, dim=1) if group > 1 else x


def _scores(
    q: Tensor,
    k: Tensor,
    visible: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    score_mod: ScoreMod | None,
) -> tuple[Tensor, Tensor | None]:
    """(capped and biased scores, what is visible once the bias has masked as well)."""
    scores = (q * scale) @ _for_each_query_head(k, q).transpose(-1, -2)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if score_mod is not None:
        scores = score_mod(scores)
        seen = scores != -torch.inf
        visible = seen if visible is None else visible & seen
    if bias is None:
        return scores, visible
    seen = bias != -torch.inf
    return scores + bias, seen if visible is None else visible & seen


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return scores.softmax(dim=-1)
    extra = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, extra), dim=-1).softmax(dim=-1)[..., :-1]


def _dropped(weights: Tensor, probability: float) -> Tensor:
    return torch.nn.functional.dropout(weights, probability) if probability else weights


def _weighted_sum(weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """weights v over the visible pairs only: 0 * NaN is NaN, so keys with a non-finite value are added one by one."""
    broken = ~v.isfinite().all(dim=-1).flatten(0, 1).all(dim=0)  # (S,)
    if not broken.any():
        return weights @ v
    visible = visible.expand_as(weights)
    result = weights @ v.masked_fill(broken[:, None], 0.0)
    for key in broken.nonzero().flatten().tolist():
        term = weights[..., key, None] * v[..., key, None, :]
        result = result + torch.where(visible[..., key, None], term, 0.0)
    return result


def attention(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    lengths: Tensor | None = None,
    dropout: float = 0.0,
    functions: Functions | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The eager core: what each query sees is resolved, then `attend`; and what `spec.outputs` wants of the softmax.

    sinks, slopes   (H,), of a spec with `sinks` and `alibi`
    lengths         int64 (B,): how many of the S keys are valid; the queries are the last of them
    dropout         of the weights that meet the values; what `spec.outputs` wants is of those before it
    functions       the spec's mask_mod and score_mod, traced
    """
    B, H, L, S = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    mask = checked_mask(spec, mask)
    if mask is not None:
        _check_broadcast(spec, mask, (B, H, L, S))
    visible = None if spec.mask == "additive" else mask
    bias = mask if spec.mask == "additive" else None
    stated = [] if visible is None else [visible]
    distance = _distance(spec, L, S, lengths, q.device)
    if spec.band is not None:
        stated.append(_within(distance, *spec.band[:2]))
    if lengths is not None:
        stated.append(torch.arange(S, device=q.device) < lengths.view(-1, 1, 1, 1))
    if spec.static_mask is not None:
        stated.append(_static_mask(spec.static_mask, L, S).to(q.device))
    if slopes is not None:  # the product has more bits than a place in 16-bit floats
        wide = slopes.to(torch.promote_types(slopes.dtype, torch.float32))
        alibi = (wide.view(-1, 1, 1) * distance).to(q.dtype)
        bias = alibi if bias is None else bias + alibi
    score_mod = None
    if functions is not None:
        places = _places(distance, B, H, S)
        stated += functions.visible(places)
        score_mod = functions.score_function(places)
    visible = functools.reduce(torch.logical_and, stated) if stated else None
    scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
    seen, softcap = (visible, bias, scale), spec.softcap or 0.0
    wanted = inside_of(spec.outputs)
    extra = softmax_outputs_of(q, k, *seen, softcap, sinks, wanted, score_mod) if wanted.names else {}
    return attend(q, k, v, *seen, softcap, sinks, dropout, score_mod), extra


def _places(distance: Tensor, B: int, H: int, S: int) -> dict[str, Tensor]:
    """What functions are told of a pair, each broadcastable to (B, H, L, S); `distance` is that of `_distance`."""
    device = distance.device
    keys = torch.arange(S, device=device)
    return {
        "b": torch.arange(B, device=device).view(-1, 1, 1, 1),
        "h": torch.arange(H, device=device).view(-1, 1, 1),
        "q_idx": (keys - distance)[..., :1] if S else distance,
        "kv_idx": keys,
    }


def _distance(spec: AttentionSpec, L: int, S: int, lengths: Tensor | None, device: torch.device) -> Tensor:
    """(1 or B, 1, L, S): how far each key stands behind each query's place; see AttentionSpec."""
    i, j = torch.arange(L, device=device).view(1, 1, L, 1), torch.arange(S, device=device)
    if lengths is not None:
        return j - (i + lengths.view(-1, 1, 1, 1) - L)
    return j - (i + S - L) if spec.causal == "bottom_right" else j - i


def _within(distance: Tensor, left: int, right: int) -> Tensor:
    """What a window lets a query see; -1 is unbounded."""
    visible = torch.ones_like(distance, dtype=torch.bool)
    if right >= 0:
        visible = distance <= right
    return visible & (-distance <= left) if left >= 0 else visible


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (B, heads, L, E) turned by the angles of (1 or B, 1, L, n): its first 2 n dims, in pairs; see Rope."""
    turning, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    one, other = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
    pair = one * cos - other * sin, one * sin + other * cos
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned, rest), dim=-1)


def written(cache: Tensor, rows: Tensor, first: Tensor) -> Tensor:
    """A copy of `cache` (B, G, C, E) that holds rows (B, G, L, E) from position first[b] on; first int64 (B,).

    Raises InputError where they do not fit.
    """
    L, capacity = rows.shape[2], cache.shape[2]
    if bool((first < 0).any()) or bool((first + L > capacity).any()):
        expected = f"0 to {capacity - L}, which leaves room for {L} more positions of {capacity}"
        raise InputError("length", expected, str(first.tolist()), "Make the caches larger.")
    place = first.view(-1, 1, 1, 1) + torch.arange(L, device=rows.device).view(1, 1, L, 1)
    return cache.scatter(2, place.expand_as(rows), rows)


def _static_mask(pattern: Pattern, L: int, S: int) -> Tensor:
    return torch.from_numpy(pattern.array(L, S))


# Or torch.compile would trace NumPy code. As torch.compiler.assume_constant_result does, which loads Dynamo: a second.
_static_mask._dynamo_marked_constant = True  # type: ignore[attr-defined]


def checked_mask(spec: AttentionSpec, mask: Tensor | None) -> Tensor | None:
    """The mask, broadcastable to (B, H, L, S), after the checks that need no sizes."""
    if spec.mask is None:
        if mask is not None:
            raise InputError("mask", "None", "a tensor", 'Set mask="bool", "additive" or "key_padding" in the spec.')
        return None
    if mask is None:
        raise InputError("mask", f'a tensor: the spec has mask="{spec.mask}"', "None")
    if spec.mask == "additive" and not mask.is_floating_point():
        raise InputError("mask", "floating point: it is additive", str(mask.dtype), 'Or set mask="bool" in the spec.')
    if spec.mask != "additive" and mask.dtype != torch.bool:
        mask = _truths(mask)
    if spec.mask != "key_padding":
        return mask
    if mask.ndim != 2:
        raise InputError("mask", "shape (B, S): it is key_padding", str(tuple(mask.shape)))
    return mask.unsqueeze(1).unsqueeze(1)  # as an index it would export as a dozen operators


def _truths(mask: Tensor) -> Tensor:
    """A mask of integers 0 and 1, as tokenizers give it, as bool."""
    expected = "bool, True takes part, or integers 0 and 1"
    if mask.is_floating_point() or mask.is_complex():
        raise InputError("mask", expected, str(mask.dtype))
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError("mask", expected, f"integers from {int(mask.min())} to {int(mask.max())}")
    return mask != 0


def _check_broadcast(spec: AttentionSpec, mask: Tensor, full: tuple[int, int, int, int]) -> None:
    exact = spec.mask == "key_padding" and mask.shape != (full[0], 1, 1, full[3])
    pairs = zip(reversed(mask.shape), reversed(full), strict=False)
    if exact or mask.ndim > 4 or any(size not in (1, whole) for size, whole in pairs):
        wanted = f"(B, S) = {(full[0], full[3])}" if spec.mask == "key_padding" else f"broadcastable to {full}"
        shape = (mask.shape[0], mask.shape[3]) if spec.mask == "key_padding" else tuple(mask.shape)
        raise InputError("mask", wanted, str(shape))


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The values as a NumPy array; bfloat16 is the one of `ml_dtypes`, which PyTorch does not know."""
    plain = tensor.detach().cpu().resolve_neg()
    return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if plain.dtype == torch.bfloat16 else plain.numpy()


def to_torch(array: np.ndarray) -> Tensor:
    """The inverse of `to_numpy`; a copy."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.tensor(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    return torch.tensor(array)
