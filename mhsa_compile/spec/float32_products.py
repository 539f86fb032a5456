"""How float32 numbers are multiplied in sums of products: the words of `float32_products`.

word     a product of two factors is                                                  its error, by the factors', about
ieee     one of float32 numbers, added as IEEE has it                                 2^-24
bf16x6   six of three bfloat16 terms of each: 00 01 10 11 02 20                       2^-24
bf16x3   three of two terms: 00 01 10                                                 2^-16
bf16     one of the first terms, which are the factors rounded to bfloat16            2^-8
auto     bf16x6 where a target's kernels make it, known to stay inside float32's error budget and to take no longer

Terms are x = x0 + x1 + x2, each a bfloat16 rounded to nearest even from what those before it leave. Sums are float32.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

from mhsa_compile.errors import InputError, did_you_mean

Float32Products = Literal["ieee", "bf16x6", "bf16x3", "bf16"]
"""What an operation does."""
Float32Request = Literal["auto", "ieee", "bf16x6", "bf16x3", "bf16"]
"""What can be asked for."""

_SIX = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))
TERM_PRODUCTS: dict[Float32Products, tuple[tuple[int, int], ...]] = {
    "bf16x6": _SIX,
    "bf16x3": _SIX[:3],
    "bf16": _SIX[:1],
}
"""Of each word that has terms, which term of the left factor meets which of the right one."""
FACTOR_BITS: dict[Float32Products, int] = {"ieee": 23, "bf16x6": 23, "bf16x3": 15, "bf16": 7}
"""Those that a factor keeps."""


def is_coarse(word: Float32Products) -> bool:
    """Whether products are less exact than float32's, so that they have an error budget of their own."""
    return FACTOR_BITS[word] < FACTOR_BITS["ieee"]


def coarsest(*words: Float32Products) -> Float32Products:
    """The least exact of some words; of none, "ieee"."""
    return min(words, key=lambda word: FACTOR_BITS[word], default="ieee")


def float32_request(word: object) -> Float32Request:
    """The word as one of `Float32Request`. Raises InputError for one that is none."""
    words = get_args(Float32Request)
    if word not in words:
        *others, last = (f'"{one}"' for one in words)
        expected = f"{', '.join(others)} or {last}"
        hint = did_you_mean(str(word), words, 'Leave it out: "auto" is as exact as float32.')
        raise InputError("float32_products", expected, repr(word), hint)
    return cast(Float32Request, word)
