"""How far an output may be from the oracle's: the budget that follows from PyTorch's own error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mhsa_compile.spec.float32_products import FACTOR_BITS, Float32Products

if TYPE_CHECKING:
    from torch import Tensor

FRACTION_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}


def budget(expected: np.ndarray, eager_output: np.ndarray, dtype: str) -> float:
    """Largest error allowed: twice that of PyTorch's eager attention, plus one rounding step of the largest output.

    The one place that decides. `expected` is the oracle's, `eager_output` has dtype `dtype`, of products that are made
    as the code's in question: float32's by bfloat16 terms err by what these lose (`products_by_terms`).
    Non-finite values are left to `max_error`. Whole numbers are exact, unless the oracle left them unrounded, as it
    does a cache of int8: then a step is half of one.
    """
    if dtype not in FRACTION_BITS and expected.dtype.kind in "biu":
        return 0.0
    finite = np.isfinite(expected) & np.isfinite(eager_output)
    values = expected[finite]
    if not values.size:
        return 0.0
    eager_error = np.abs(eager_output[finite].astype(np.float64) - values).max()
    if dtype not in FRACTION_BITS:
        return float(2 * eager_error + 0.5)
    _, exponent = np.frexp(np.abs(values).max())  # the largest value is in [2**(exponent - 1), 2**exponent)
    return float(2 * eager_error + np.ldexp(1.0, int(exponent) - 1 - FRACTION_BITS[dtype]))


def fraction_bits(dtype: str, products: Float32Products) -> int:
    """Those of a dtype of floats, or fewer, where factors of products of float32 keep fewer."""
    return min(FRACTION_BITS[dtype], FACTOR_BITS[products]) if dtype == "float32" else FRACTION_BITS[dtype]


def coarse_budget(expected: np.ndarray, dtype: str, products: Float32Products = "ieee") -> float:
    """How near two evaluations are that mean the same, where none is known to be exact: half of the dtype's digits of
    the largest output, or of those of `products`. It tells rounding from another meaning, and no more."""
    if dtype not in FRACTION_BITS:
        return 0.0
    values = np.abs(expected[np.isfinite(expected)])
    return float(values.max(initial=0.0) * 2.0 ** -(fraction_bits(dtype, products) // 2))


def share_of_budget(error: float, allowed: float) -> float:
    """An error by what is allowed: above 1 is wrong."""
    return error / allowed if allowed else (0.0 if error == 0 else np.inf)


def in_float64(array: np.ndarray) -> np.ndarray:
    """Floats as float64; flags and whole numbers stay what they are."""
    return array if array.dtype.kind in "biu" else array.astype(np.float64)


def max_error(expected: np.ndarray, actual: np.ndarray) -> float:
    """Largest absolute error; infinite where shapes differ or one side alone is NaN or infinite."""
    if expected.shape != actual.shape:
        return np.inf
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(actual)):
        return np.inf
    return float(np.abs(actual[finite].astype(np.float64) - expected[finite]).max(initial=0.0))


def agrees(expected: Tensor, own: Tensor, actual: Tensor) -> bool:
    """Whether `actual` is as close to `expected`, in float64, as twice the error of `own` and a rounding step of its
    dtype allow: `own` is what PyTorch's eager operators compute at that dtype."""
    exact = expected.detach().double().numpy()
    most = budget(exact, own.detach().double().numpy(), str(own.dtype).removeprefix("torch."))
    return max_error(exact, actual.detach().double().numpy()) <= most
