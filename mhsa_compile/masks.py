"""Masks as NumPy arrays. True takes part, always. They AND together: `causal(L, S, "top_left") & padding[:, None]`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mhsa_compile.errors import InputError
from mhsa_compile.spec import ALIGNMENTS

BoolArray = NDArray[np.bool_]


def causal(L: int, S: int, alignment: str) -> BoolArray:
    """(L, S): query i sees key j iff j <= i ("top_left") or j <= i + S - L ("bottom_right").

    With "bottom_right" and L > S the first L - S queries see nothing, and their attention is zero.
    Raises InputError for another alignment.
    """
    if alignment not in ALIGNMENTS:
        raise InputError("alignment", '"top_left" or "bottom_right"', repr(alignment))
    offset = S - L if alignment == "bottom_right" else 0
    return np.tri(L, S, offset, dtype=np.bool_)


def key_padding(lengths: Sequence[int] | NDArray[np.integer], S: int) -> BoolArray:
    """(B, S): the first lengths[b] keys of batch entry b take part, the rest is padding.

    Raises InputError unless `lengths` holds B integers from 0 to S.
    """
    valid = np.asarray(lengths)
    if valid.ndim != 1 or not np.issubdtype(valid.dtype, np.integer):
        raise InputError("lengths", "one integer per batch entry", f"{valid.dtype} of shape {valid.shape}")
    if valid.size and (valid.min() < 0 or valid.max() > S):
        raise InputError("lengths", f"integers from 0 to S = {S}", f"{valid.min()} to {valid.max()}")
    return np.arange(S) < valid[:, np.newaxis]
