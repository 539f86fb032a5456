"""Products of float32 by bfloat16 terms, in NumPy: what kernels by terms are held against, and what factors keep.

A term that would be Inf though x is finite is the largest bfloat16; of Inf and NaN the lower terms are 0, and products
of lower terms take 0 in the place of Inf and NaN: so these stand in sums as float32 has them.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from mhsa_compile.spec.float32_products import TERM_PRODUCTS, Float32Products

_LARGEST = np.float32(float.fromhex("0x1.fep127"))  # bfloat16


def split_terms(x: np.ndarray, count: int) -> list[np.ndarray]:
    """The first terms of x, float32, each rounded to nearest even from what those before it leave."""
    rest = np.asarray(x, np.float32)
    finite, terms = np.isfinite(rest), list[np.ndarray]()
    with np.errstate(invalid="ignore", over="ignore"):
        for _ in range(count):
            term = rest.astype(ml_dtypes.bfloat16).astype(np.float32)
            term = np.where(finite, np.clip(term, -_LARGEST, _LARGEST), 0 if terms else rest)
            terms.append(term)
            rest = rest - term
    return terms


def term_factors(a: np.ndarray, b: np.ndarray, word: Float32Products) -> list[tuple[np.ndarray, np.ndarray]]:
    """The factors, by terms, of the products whose sum is that of a and b; that of the first terms comes first."""
    left, right = (split_terms(x, term_count(word)) for x in (a, b))
    numbers = [np.where(np.isfinite(terms[0]), terms[0], 0) for terms in (left, right)]
    lower = [(left[i] if i else numbers[0], right[j] if j else numbers[1]) for i, j in TERM_PRODUCTS[word][1:]]
    return [(left[0], right[0]), *lower]


def term_count(word: Float32Products) -> int:
    """Into how many terms a factor is split."""
    return 1 + max(max(pair) for pair in TERM_PRODUCTS[word])


def factor_of_terms(x: np.ndarray, word: Float32Products) -> np.ndarray:
    """What a factor keeps: the sum of its terms, of float32; as it is where it is not."""
    if word == "ieee" or x.dtype != np.float32:
        return x
    return np.asarray(sum(split_terms(x, term_count(word))), np.float32)
