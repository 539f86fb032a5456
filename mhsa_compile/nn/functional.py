"""The core of attention in PyTorch: what each query gets of the values.

Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from mhsa_compile.errors import InputError
from mhsa_compile.nn.score_features import FORMULAS, EagerCall, EagerScoring, FeatureTensors, scoring_of
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.outputs import SoftmaxOutputs, inside_of


def attend(q: Tensor, k: Tensor, v: Tensor, scoring: EagerScoring, scale: float, dropout: float = 0.0) -> Tensor:
    """softmax(scores) v over the visible keys, scores being q k^T * scale after all that `scoring` does to them.

    q (B, H, L, E), k (B, G, S, E), v (B, G, S, F) -> (B, H, L, F); `dropout` is the probability with which a weight
    becomes 0; the others grow by 1 / (1 - dropout).

    The textbook form ("Attention Is All You Need", eq. 1; https://arxiv.org/abs/1706.03762), as PyTorch's eager one.
    """
    v = _for_each_query_head(v, q)
    scores, visible = _scores(q, k, scoring, scale)
    if visible is None:
        return _dropout(_softmax(scores, scoring.no_key), dropout) @ v
    blind = ~visible.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~visible, -torch.inf).masked_fill(blind, 0.0)  # 0: a softmax of -inf alone is NaN
    weights = _dropout(_softmax(scores, scoring.no_key), dropout).masked_fill(~visible, 0.0)
    return _weighted_sum(weights, v, visible)


def softmax_outputs_of(
    q: Tensor, k: Tensor, scoring: EagerScoring, scale: float, outputs: SoftmaxOutputs
) -> dict[str, Tensor]:
    """What the rows of `attend`'s softmax are like: the arrays `outputs.names`."""
    scores, visible = _scores(q, k, scoring, scale)
    masked = scores if visible is None else scores.masked_fill(~visible, -torch.inf)
    return softmax_outputs_of_rows(masked, scoring.no_key, outputs)


def softmax_outputs_of_rows(scores: Tensor, no_key: Tensor | None, outputs: SoftmaxOutputs) -> dict[str, Tensor]:
    """The arrays `outputs.names` of scores (B, H, L, S), -inf where hidden, as the softmax takes them; `no_key`
    (H,) are scores of no key.

    Statistics are float32 at least, like the largest weights; the weights themselves are of the scores' dtype.
    """
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    everything = wide if no_key is None else _with_no_key(wide, no_key)
    lse = everything.logsumexp(dim=-1, keepdim=True)
    level = lse.masked_fill(lse == -torch.inf, 0.0)
    weights = (wide - level).exp().masked_fill(wide == -torch.inf, 0.0)  # hidden is 0, also in a row with NaN
    largest, keys = _largest(wide, outputs.top_k)
    arrays = {
        "lse": lse.squeeze(-1),
        "entropy": torch.special.entr((everything - level).exp()).sum(dim=-1),
        "top_k_weights": (largest - level).exp(),
        "top_k_keys": keys,
        "weights": _selection(weights, outputs).to(scores.dtype),
    }
    return {name: arrays[name] for name in outputs.names}


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores and their keys; -inf and -1 beyond those that are seen. Of equals the first stays first."""
    ordered, keys = torch.nn.functional.pad(scores, (0, k), value=-torch.inf).sort(dim=-1, descending=True, stable=True)
    ordered, keys = ordered[..., :k], keys[..., :k]
    return ordered, keys.masked_fill(ordered == -torch.inf, -1)


def _selection(weights: Tensor, outputs: SoftmaxOutputs) -> Tensor:
    """(B, heads, rows, S); rows that are not there are zeros."""
    if outputs.heads is not None:
        weights = weights[:, list(outputs.heads)]
    if outputs.rows is None:
        return weights
    L = weights.shape[2]
    none = torch.zeros_like(weights[:, :, :1])
    rows = [weights[:, :, row % L, None] if -L <= row < L else none for row in outputs.rows]
    return torch.cat(rows, dim=2)


def _for_each_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values (B, G, S, ...) as (B, H, S, ...): query head h reads key/value head h // group."""
    group = q.shape[1] // x.shape[1]
    return x.repeat_interleave(group, dim=1) if group > 1 else x


def _scores(q: Tensor, k: Tensor, scoring: EagerScoring, scale: float) -> tuple[Tensor, Tensor | None]:
    """(scores as the softmax takes them, what is visible once the bias has masked as well)."""
    scores = (q * scale) @ _for_each_query_head(k, q).transpose(-1, -2)
    visible, bias = scoring.visible, scoring.bias
    for name, formula in FORMULAS.items():
        if name in scoring.limits:
            scores = formula(torch, scores, scoring.limits[name])
    if scoring.score_function is not None:
        scores = scoring.score_function(scores)
        is_visible = scores != -torch.inf
        visible = is_visible if visible is None else visible & is_visible
    if bias is None:
        return scores, visible
    is_visible = bias != -torch.inf
    return scores + bias, is_visible if visible is None else visible & is_visible


def _softmax(scores: Tensor, no_key: Tensor | None) -> Tensor:
    return scores.softmax(dim=-1) if no_key is None else _with_no_key(scores, no_key).softmax(dim=-1)[..., :-1]


def _with_no_key(scores: Tensor, no_key: Tensor) -> Tensor:
    """Scores (B, H, L, S) with those of no key (H,) behind them."""
    return torch.cat((scores, no_key.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)), dim=-1)


def _dropout(weights: Tensor, probability: float) -> Tensor:
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
    tensors: FeatureTensors,
    *,
    lengths: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The eager core: what features do to scores is resolved, then `attend`; and what `spec.outputs` wants of the
    softmax.

    tensors         what the module holds for its features
    lengths         int64 (B,): how many of the S keys are valid; the queries are the last of them
    dropout         of the weights that meet the values; what `spec.outputs` wants is of those before it
    """
    sizes = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    scoring = scoring_of(EagerCall(spec, sizes, q.dtype, q.device, tensors, mask, lengths))
    scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
    outputs = inside_of(spec.outputs)
    extra = softmax_outputs_of(q, k, scoring, scale, outputs) if outputs.names else {}
    return attend(q, k, v, scoring, scale, dropout), extra


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (B, heads, L, E) turned by the angles of (1 or B, 1, L, n): its first 2 n dims, in pairs; see Rope."""
    turning, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    one, other = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
    pair = one * cos - other * sin, one * sin + other * cos
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned, rest), dim=-1)


def written(cache: Tensor, rows: Tensor, first: Tensor) -> Tensor:
    """A copy of `cache` (B, G, C, E) that holds rows (B, G, L, E), in its dtype, from position first[b] on; first int64
    (B,). Rows of float64, in which what is meant is computed, stay what they are.

    Raises InputError where they do not fit.
    """
    L, capacity = rows.shape[2], cache.shape[2]
    if bool((first < 0).any()) or bool((first + L > capacity).any()):
        expected = f"0 to {capacity - L}, which leaves room for {L} more positions of {capacity}"
        raise InputError("length", expected, str(first.tolist()), "Make the caches larger.")
    cache = cache.to(rows.dtype) if rows.dtype == torch.float64 else cache
    place = first.view(-1, 1, 1, 1) + torch.arange(L, device=rows.device).view(1, 1, L, 1)
    return cache.scatter(2, place.expand_as(rows), rows.to(cache.dtype))


SMALLEST_ROW = 2.0**-119
"""Rows of int8 that are smaller everywhere count as zero: their step would be less than a normal float32."""


def quantised_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(the last axis of `rows` in int8, 127 steps its largest magnitude; the steps, float32). In float64, in which what
    is meant is computed, nothing is rounded."""
    wide = rows if rows.dtype == torch.float64 else rows.float()
    largest = wide.abs().amax(-1)
    factor = torch.where(largest < SMALLEST_ROW, 0.0, 127 / largest)
    numbers = wide * factor.unsqueeze(-1)
    return numbers if rows.dtype == torch.float64 else torch.round(numbers).to(torch.int8), largest / 127


def dequantised_rows(q: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows that `quantised_rows` stored."""
    return (q.to(steps.dtype) * steps.unsqueeze(-1)).to(dtype)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The values as a NumPy array; bfloat16 is the one of `ml_dtypes`, which PyTorch does not know."""
    plain = tensor.detach().cpu().resolve_neg()
    return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if plain.dtype == torch.bfloat16 else plain.numpy()


def to_torch(array: np.ndarray) -> Tensor:
    """The inverse of `to_numpy`; a copy."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.tensor(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    return torch.tensor(array)
