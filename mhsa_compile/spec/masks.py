"""Masks as NumPy arrays, and as patterns that a spec can hold. True takes part, always.

Arrays AND together: `causal(L, S, "top_left") & padding[:, None]`. A pattern becomes one by its `array(L, S)`.
Notation: B batch, L query length, S key length.

>>> (causal(3, 3, "top_left") & key_padding([3, 1], S=3)[:, None]).astype(int)[1]
array([[1, 0, 0],
       [1, 0, 0],
       [1, 0, 0]])
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mhsa_compile.errors import InputError
from mhsa_compile.spec.checks import ALIGNMENTS
from mhsa_compile.spec.mask_patterns import (
    ArrayMask,
    BigBird,
    BlockDiagonal,
    Documents,
    Longformer,
    Pattern,
    Strided,
    parse_pattern,
    pattern,
)
from mhsa_compile.spec.window import window_of

__all__ = [
    "HIDES",
    "ArrayMask",
    "BigBird",
    "BlockDiagonal",
    "Documents",
    "Longformer",
    "Pattern",
    "Strided",
    "causal",
    "key_padding",
    "parse_pattern",
    "pattern",
    "window",
]

BoolArray = NDArray[np.bool_]
HIDES = -2.3e38
"""What is added to a score and is below this hides the key: in units of log2, in which kernels add, it is -inf."""


def causal(L: int, S: int, alignment: str) -> BoolArray:
    """(L, S): query i sees key j iff j <= i ("top_left") or j <= i + S - L ("bottom_right").

    With "bottom_right" and L > S the first L - S queries see nothing, and their attention is zero.
    Raises InputError for another alignment.

    >>> causal(2, 4, "bottom_right").astype(int)
    array([[1, 1, 1, 0],
           [1, 1, 1, 1]])
    """
    return window(L, S, -1, 0, alignment)


def window(L: int, S: int, left: int, right: int, alignment: str = "top_left") -> BoolArray:
    """(L, S): the query at place p sees the keys p - left to p + right; -1 is unbounded.

    Query i stands at p = i ("top_left") or at p = i + S - L ("bottom_right"). Raises InputError.

    >>> window(3, 3, left=1, right=0).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """
    if alignment not in ALIGNMENTS:
        raise InputError("alignment", '"top_left" or "bottom_right"', repr(alignment))
    for name, size in (("left", left), ("right", right)):
        if size < -1:
            raise InputError(name, "a number of keys, or -1 for unbounded", str(size))
    band = window_of(left, right, alignment)
    return np.ones((L, S), np.bool_) if band is None else band.visible(range(L), L, S)


def key_padding(lengths: Sequence[int] | NDArray[np.integer], S: int) -> BoolArray:
    """(B, S): the first lengths[b] keys of batch entry b take part, the rest is padding.

    Raises InputError unless `lengths` holds B integers from 0 to S.

    >>> key_padding([3, 1], S=4).astype(int)
    array([[1, 1, 1, 0],
           [1, 0, 0, 0]])
    """
    valid = np.asarray(lengths)
    if valid.ndim != 1 or not np.issubdtype(valid.dtype, np.integer):
        raise InputError("lengths", "one integer per batch entry", f"{valid.dtype} of shape {valid.shape}")
    if valid.size and (valid.min() < 0 or valid.max() > S):
        raise InputError("lengths", f"integers from 0 to S = {S}", f"{valid.min()} to {valid.max()}")
    return np.arange(S) < valid[:, np.newaxis]
