"""What `outputs` asks of a softmax's rows, in NumPy at float64: the oracle. It shares no code with nn's.

Evaluations go block by block of queries, and of the keys those that a block may see: `Collected` puts them together.
Notation: B batch, L query length, S key length, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from mhsa_compile.spec.outputs import SoftmaxOutputs

Look = Callable[[slice, SoftmaxOutputs], tuple[Mapping[str, np.ndarray], int]]
"""(query rows, what is wanted of them) -> (arrays over the keys that they may see, the first of these keys)."""


def softmax_outputs_of_rows(
    scores: np.ndarray, no_key: np.ndarray | None, request: SoftmaxOutputs
) -> dict[str, np.ndarray]:
    """The arrays `request.names` of scores (B, H, rows, keys), -inf where hidden, as the softmax takes them; `no_key`
    (H,) are scores of no key.

    `request.rows` is None: whoever wants a single row asks for it alone.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        top = scores.max(axis=-1, keepdims=True)
        beside = np.full((1, 1, 1), -np.inf) if no_key is None else no_key.reshape(-1, 1, 1)
        top = np.maximum(top, beside)
        top = np.where(np.isneginf(top), 0, top)
        exponents, exponent_beside = np.exp(scores - top), np.exp(beside - top)
        total = exponents.sum(axis=-1, keepdims=True) + exponent_beside
        lse = top + np.log(total)
        divisor = np.where(total == 0, 1, total)
        weights = np.where(np.isneginf(scores), 0, exponents / divisor)
        share = exponent_beside / divisor
        terms = np.where(weights == 0, 0, weights * np.log(weights)).sum(axis=-1)
        terms = terms + np.where(share == 0, 0, share * np.log(share))[..., 0]
    order = np.argsort(-scores, axis=-1, kind="stable")[..., : request.top_k]
    order = np.pad(order, [(0, 0)] * 3 + [(0, request.top_k - order.shape[-1])])
    no_keys = np.isneginf(np.take_along_axis(scores, order, axis=-1))
    no_keys[..., scores.shape[-1] :] = True
    arrays = {
        "lse": lse[..., 0],
        "entropy": 0.0 - terms,
        "top_k_weights": np.where(no_keys, 0 / divisor, np.take_along_axis(weights, order, axis=-1)),
        "top_k_keys": np.where(no_keys, -1, order),
        "weights": weights if request.heads is None else weights[:, list(request.heads)],
    }
    return {name: arrays[name] for name in request.names}


def collect(look: Look, blocks: list[slice], L: int, S: int, request: SoftmaxOutputs) -> dict[str, np.ndarray]:
    """The arrays of all L queries and S keys."""
    together = request if request.rows is None else SoftmaxOutputs(request.lse, request.entropy, request.top_k)
    parts = [_among_all_keys(*look(rows, together), S) for rows in blocks] if together.names else []
    arrays = {name: np.concatenate([part[name] for part in parts], axis=2) for name in together.names}
    if request.rows is not None:
        arrays["weights"] = _single_rows(look, L, S, request)
    return arrays


def probe(look: Look, blocks: list[slice], S: int, keys: np.ndarray) -> np.ndarray:
    """The weights of these keys, (B, H, L, n); 0 for the key -1, and NaN for one that is no key."""
    parts = []
    for rows in blocks:
        weights = _among_all_keys(*look(rows, SoftmaxOutputs(weights=True)), S)["weights"]
        own_keys = keys[:, :, rows]
        values = np.take_along_axis(weights, np.clip(own_keys, 0, S - 1), axis=-1)
        parts.append(np.where(own_keys == -1, 0, np.where((own_keys >= 0) & (own_keys < S), values, np.nan)))
    return np.concatenate(parts, axis=2)


def _single_rows(look: Look, L: int, S: int, request: SoftmaxOutputs) -> np.ndarray:
    alone = SoftmaxOutputs(weights=True, heads=request.heads)
    none = np.zeros_like(_among_all_keys(*look(slice(0, 1), alone), S)["weights"])
    rows = [row % L if -L <= row < L else None for row in request.rows or ()]
    parts = [none if row is None else _among_all_keys(*look(slice(row, row + 1), alone), S)["weights"] for row in rows]
    return np.concatenate(parts, axis=2)


def _among_all_keys(arrays: Mapping[str, np.ndarray], first: int, S: int) -> dict[str, np.ndarray]:
    """The arrays of some keys, from `first` on, among all S."""
    whole = dict(arrays)
    if "top_k_keys" in arrays:
        keys = arrays["top_k_keys"]
        whole["top_k_keys"] = np.where(keys < 0, -1, keys + first)
    if "weights" in arrays:
        weights = arrays["weights"]
        whole["weights"] = np.pad(weights, [(0, 0)] * 3 + [(first, S - first - weights.shape[3])])
    return whole
