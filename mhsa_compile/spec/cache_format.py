"""How keys and values are stored in a cache, where that is in another dtype than activations have."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from mhsa_compile.errors import SpecError, did_you_mean
from mhsa_compile.spec.checks import DTYPES, value_text

CACHE_DTYPES = (*DTYPES, "int8")
_NARROWER = {"float32": ("bfloat16", "float16", "int8"), "bfloat16": ("int8",), "float16": ("int8",)}
"""What a cache may store, by the dtype of activations, beside that itself."""


class CacheFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a cache stores keys and values.

    dtype   "float32", "bfloat16" and "float16" round them to the nearest; "int8" stores each row of a head in 127 steps
            on either side of 0, and the step beside it, float32

    Raises SpecError.
    """

    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in CACHE_DTYPES:
            text, expected = value_text(self.dtype), ", ".join(f'"{name}"' for name in CACHE_DTYPES)
            raise SpecError("kv_cache.dtype", f"one of {expected}", text, did_you_mean(text.strip("'"), CACHE_DTYPES))


def checked_kv_cache(name: str, value: object) -> bool | CacheFormat:
    """What a spec keeps of its `kv_cache`. Raises SpecError."""
    if isinstance(value, bool | CacheFormat):
        return value
    if not isinstance(value, Mapping):
        hint = f'kv_cache={{"dtype": "{value}"}}.' if value in CACHE_DTYPES else ""
        raise SpecError(name, 'true, false or a format such as {"dtype": "int8"}', value_text(value), hint)
    if set(value) != {"dtype"}:
        got = ", ".join(map(str, value)) or "no field"
        raise SpecError(name, "the field dtype alone", got, 'Such as kv_cache={"dtype": "int8"}.')
    return CacheFormat(dtype=value["dtype"])


def resolved_kv_cache(cache: bool | CacheFormat, dtype: str) -> bool | CacheFormat:
    """True for a cache of what activations are, of `dtype`. Raises SpecError for one that would not be smaller."""
    if isinstance(cache, bool) or cache.dtype == dtype:
        return bool(cache)
    if cache.dtype not in _NARROWER[dtype]:
        expected = f'"{dtype}", as activations are, or fewer bits: {", ".join(_NARROWER[dtype])}'
        raise SpecError("kv_cache.dtype", expected, repr(cache.dtype), "A cache keeps no more than is computed.")
    return cache
