"""A term for a task's loss that keeps the heads of a layer from doing the same.

Notation: B batch, L query length, H heads, F value head dim.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from mhsa_compile.errors import InputError, SpecError

_KINDS = ("information", "cosine")


class HeadDiversity(nn.Module):
    """weight * how much the heads of a layer have in common, differentiable; in the mean over pairs of heads.

    kind          "information": the mutual information of their outputs in nats, as of Gaussians with their second
                  moments, so the part of it that is linear; see `gaussian_information`. "cosine": the square of the
                  cosine of their outputs, token by token, as textbooks have it; it depends on each head's basis
    weight        what the term counts beside the task's loss
    shrinkage     of "information": so much of each head's mean variance is added to all of its directions, that few
                  tokens do not make it infinite. It hides a little information, and chance adds some: about F^2 / 2n
                  nats of n tokens, whatever the heads do

    Called with what the module put out as "heads" (B, H, L, F), and `valid` (B, L) bool where there is padding; gives a
    scalar, float32 at least. The cosine of outputs as a penalty: Li et al., "Multi-head attention with disagreement
    regularization" (2018).

    Raises SpecError, and InputError for fewer valid tokens than 2 F.

    >>> import mhsa_compile as mhsa
    >>> layer = mhsa.MultiHeadAttention(mhsa.AttentionSpec(embed_dim=32, num_heads=4, outputs=("y", "heads")))
    >>> y, heads = layer(torch.randn(8, 16, 32))
    >>> loss = y.square().mean() + HeadDiversity("information", weight=0.1)(heads)
    >>> loss.backward()
    """

    def __init__(
        self, kind: Literal["information", "cosine"] = "information", weight: float = 1.0, *, shrinkage: float = 1e-3
    ) -> None:
        super().__init__()
        if kind not in _KINDS:
            raise SpecError("kind", " or ".join(map(repr, _KINDS)), repr(kind))
        for name, value in (("weight", weight), ("shrinkage", shrinkage)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise SpecError(name, "a number of at least 0", repr(value))
        self.kind, self.weight, self.shrinkage = kind, weight, shrinkage

    def forward(self, heads: Tensor, valid: Tensor | None = None) -> Tensor:
        """heads (B, H, L, F), valid (B, L) -> ()."""
        rows = _rows(heads, valid)
        if rows.shape[1] == 1:
            return rows.sum() * 0.0
        common = _information(rows, self.shrinkage) if self.kind == "information" else _cosine(rows)
        return self.weight * common

    def extra_repr(self) -> str:
        return f"{self.kind!r}, weight={self.weight}"


def _rows(heads: Tensor, valid: Tensor | None) -> Tensor:
    """(n, H, F) of the valid tokens. Raises InputError."""
    if heads.ndim != 4:
        raise InputError("heads", 'shape (B, H, L, F), a module\'s output "heads"', str(tuple(heads.shape)))
    shape = (heads.shape[0], heads.shape[2])
    if valid is not None and (tuple(valid.shape) != shape or valid.dtype != torch.bool):
        raise InputError("valid", f"bool of shape (B, L) = {shape}", f"{valid.dtype} of shape {tuple(valid.shape)}")
    rows = heads.transpose(1, 2)
    rows = rows.flatten(0, 1) if valid is None else rows[valid]
    least = 2 * heads.shape[3]
    if len(rows) < least:
        raise InputError("heads", f"at least {least} valid tokens, twice the value head dim", str(len(rows)))
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _information(rows: Tensor, shrinkage: float) -> Tensor:
    """The mean over pairs of heads of -1/2 ln det(I - K K^T), K the covariance of both once each is white within."""
    n, H, F = rows.shape
    centred = (rows - rows.mean(dim=0)).transpose(0, 1)  # (H, n, F)
    own = centred.transpose(1, 2) @ centred / n
    unit = torch.eye(F, dtype=rows.dtype, device=rows.device)
    size = own.diagonal(dim1=1, dim2=2).mean(dim=1) + torch.finfo(rows.dtype).tiny
    root = torch.linalg.cholesky(own / size.view(H, 1, 1) + shrinkage * unit)
    white = torch.linalg.solve_triangular(root, (centred / size.sqrt().view(H, 1, 1)).transpose(1, 2), upper=False)
    first, second = torch.triu_indices(H, H, 1, device=rows.device)
    cross = white[first] @ white[second].transpose(1, 2) / n
    return -0.5 * torch.logdet(unit - cross @ cross.transpose(1, 2)).mean()


def _cosine(rows: Tensor) -> Tensor:
    direction = nn.functional.normalize(rows, dim=-1)
    first, second = torch.triu_indices(rows.shape[1], rows.shape[1], 1, device=rows.device)
    return (direction[:, first] * direction[:, second]).sum(dim=-1).square().mean()
