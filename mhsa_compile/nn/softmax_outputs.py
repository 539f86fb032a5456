"""What `outputs` asks of a softmax's rows, in PyTorch: the eager meaning, and the yardstick of the error budget.

Notation: B batch, L query length, S key length, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhsa_compile.spec.outputs import SoftmaxOutputs


def softmax_outputs_of_rows(scores: Tensor, no_key: Tensor | None, outputs: SoftmaxOutputs) -> dict[str, Tensor]:
    """The arrays `outputs.names` of scores (B, H, L, S), -inf where hidden, as the softmax takes them; `no_key`
    (H,) are scores of no key.

    Statistics are float32 at least, like the largest weights; the weights themselves are of the scores' dtype.
    """
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    everything = wide
    if no_key is not None:
        everything = torch.cat((wide, no_key.to(wide.dtype).view(-1, 1, 1).expand(*wide.shape[:-1], 1)), dim=-1)
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
