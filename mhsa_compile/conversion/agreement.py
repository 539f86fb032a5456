"""Whether two ways to compute the same agree, by the error budget."""

from __future__ import annotations

from torch import Tensor

from mhsa_compile.verification.error_budget import budget, max_error


def agrees(expected: Tensor, own: Tensor, actual: Tensor) -> bool:
    """Whether `actual` is as close to `expected`, in float64, as twice the error of `own` and a rounding step of its
    dtype allow: `own` is what PyTorch's eager operators compute at that dtype."""
    exact = expected.detach().double().numpy()
    allowed = budget(exact, own.detach().double().numpy(), str(own.dtype).removeprefix("torch."))
    return max_error(exact, actual.detach().double().numpy()) <= allowed
