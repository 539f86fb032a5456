"""What `outputs` asks of a softmax's rows, in NumPy at float64: the oracle. It shares no code with nn's.

Evaluations go block by block of queries, and of the keys those that a block may see: `Collected` puts them together.
Notation: B batch, L query length, S key length, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from mhsa_compile.spec.outputs import SoftmaxOutputs

Array = np.ndarray
Look = Callable[[slice, SoftmaxOutputs], tuple[Mapping[str, Array], int]]
"""(query rows, what is wanted of them) -> (arrays over the keys that they may see, the first of these keys)."""


def softmax_outputs_of_rows(scores: Array, no_key: Array | None, wanted: SoftmaxOutputs) -> dict[str, Array]:
    """The arrays `wanted.names` of scores (B, H, rows, keys), -inf where hidden, as the softmax takes them; `no_key`
    (H,) are scores of no key.

    `wanted.rows` is None: whoever wants a single row asks for it alone.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        top = scores.max(axis=-1, keepdims=True)
        sink = np.full((1, 1, 1), -np.inf) if no_key is None else no_key.reshape(-1, 1, 1)
        top = np.maximum(top, sink)
        top = np.where(np.isneginf(top), 0, top)
        exponents, sink_exponent = np.exp(scores - top), np.exp(sink - top)
        total = exponents.sum(axis=-1, keepdims=True) + sink_exponent
        lse = top + np.log(total)
        divisor = np.where(total == 0, 1, total)
        weights = np.where(np.isneginf(scores), 0, exponents / divisor)
        share = sink_exponent / divisor
        terms = np.where(weights == 0, 0, weights * np.log(weights)).sum(axis=-1)
        terms = terms + np.where(share == 0, 0, share * np.log(share))[..., 0]
    order = np.argsort(-scores, axis=-1, kind="stable")[..., : wanted.top_k]
    order = np.pad(order, [(0, 0)] * 3 + [(0, wanted.top_k - order.shape[-1])])
    gone = np.isneginf(np.take_along_axis(scores, order, axis=-1))
    gone[..., scores.shape[-1] :] = True
    found = {
        "lse": lse[..., 0],
        "entropy": 0.0 - terms,
        "top_k_weights": np.where(gone, 0 / divisor, np.take_along_axis(weights, order, axis=-1)),
        "top_k_keys": np.where(gone, -1, order),
        "weights": weights if wanted.heads is None else weights[:, list(wanted.heads)],
    }
    return {name: found[name] for name in wanted.names}


def collected(look: Look, blocks: list[slice], L: int, S: int, wanted: SoftmaxOutputs) -> dict[str, Array]:
    """The arrays of all L queries and S keys."""
    together = wanted if wanted.rows is None else SoftmaxOutputs(wanted.lse, wanted.entropy, wanted.top_k)
    parts = [_placed(*look(rows, together), S) for rows in blocks] if together.names else []
    found = {name: np.concatenate([part[name] for part in parts], axis=2) for name in together.names}
    if wanted.rows is not None:
        found["weights"] = _single_rows(look, L, S, wanted)
    return found


def probed(look: Look, blocks: list[slice], S: int, keys: Array) -> Array:
    """The weights of these keys, (B, H, L, n); 0 for the key -1, and NaN for one that is no key."""
    parts = []
    for rows in blocks:
        weights = _placed(*look(rows, SoftmaxOutputs(weights=True)), S)["weights"]
        wanted = keys[:, :, rows]
        found = np.take_along_axis(weights, np.clip(wanted, 0, S - 1), axis=-1)
        parts.append(np.where(wanted == -1, 0, np.where((wanted >= 0) & (wanted < S), found, np.nan)))
    return np.concatenate(parts, axis=2)


def _single_rows(look: Look, L: int, S: int, wanted: SoftmaxOutputs) -> Array:
    alone = SoftmaxOutputs(weights=True, heads=wanted.heads)
    none = np.zeros_like(_placed(*look(slice(0, 1), alone), S)["weights"])
    rows = [row % L if -L <= row < L else None for row in wanted.rows or ()]
    found = [none if row is None else _placed(*look(slice(row, row + 1), alone), S)["weights"] for row in rows]
    return np.concatenate(found, axis=2)


def _placed(found: Mapping[str, Array], first: int, S: int) -> dict[str, Array]:
    """The arrays of some keys, from `first` on, among all S."""
    placed = dict(found)
    if "top_k_keys" in found:
        keys = found["top_k_keys"]
        placed["top_k_keys"] = np.where(keys < 0, -1, keys + first)
    if "weights" in found:
        weights = found["weights"]
        placed["weights"] = np.pad(weights, [(0, 0)] * 3 + [(first, S - first - weights.shape[3])])
    return placed
