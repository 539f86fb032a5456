"""The checks of single fields of a spec. Each raises SpecError."""

from __future__ import annotations

import difflib
import math

from mhsa_compile.errors import SpecError

DTYPES = ("float32", "bfloat16", "float16")
LARGEST = 2**31 - 1
"""The largest size allowed: one more would not be a 32-bit number, in which ONNX Runtime and C programs keep some."""
ALIGNMENTS = ("top_left", "bottom_right")


def resolve_causal(causal: object, *, same_length: bool) -> str | None:
    """The alignment that `causal` names. True needs `same_length` (L = S): elsewhere libraries disagree on its meaning.

    Raises SpecError.
    """
    if causal is None or causal is False:
        return None
    if causal is True:
        if same_length:
            return "top_left"
        raise SpecError(
            "causal",
            '"top_left" or "bottom_right" where L and S may differ',
            "True",
            'PyTorch means "top_left" (j <= i), FlashAttention "bottom_right" (j <= i + S - L): choose one.',
        )
    check_choice("causal", causal, ALIGNMENTS)
    return str(causal)


def resolve_cached_causal(causal: object) -> str:
    """Causality over a cache: "bottom_right", as the queries are the last of the keys. Raises SpecError."""
    check_choice("causal", None if causal in (True, False) else causal, ALIGNMENTS)
    if causal is True or causal == "bottom_right":
        return "bottom_right"
    hint = "What the cache holds behind its length is hidden by causality alone, and queries stand at its end."
    raise SpecError("causal", 'True or "bottom_right" with kv_cache (--causal true)', repr(causal), hint)


def check_positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(name, "a positive integer", repr(value))
    if value > LARGEST:
        raise SpecError(name, f"at most {LARGEST}", str(value))


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise SpecError(name, "true or false", repr(value))


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value is None or value in choices:
        return
    near = difflib.get_close_matches(str(value), choices, n=1)
    expected = ", ".join(f'"{choice}"' for choice in choices)
    raise SpecError(name, f"None, {expected}", repr(value), f'Did you mean "{near[0]}"?' if near else "")


def check_dtype(dtype: object) -> None:
    if dtype not in DTYPES:
        near = difflib.get_close_matches(str(dtype), DTYPES, n=1)
        hint = f'Did you mean "{near[0]}"?' if near else ""
        raise SpecError("dtype", " or ".join(f'"{name}"' for name in DTYPES), repr(dtype), hint)


def checked_window(window: object) -> tuple[int, int] | None:
    """(left, right); None where both sides are unbounded."""
    if window is None:
        return None
    sizes = tuple(window) if isinstance(window, list | tuple) else ()
    if len(sizes) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or not -1 <= n <= LARGEST for n in sizes):
        expected = "(left, right): numbers of keys on each side of a query, -1 for unbounded"
        raise SpecError("window", expected, repr(window), "(256, 0) sees itself and 256 keys before it.")
    return None if sizes == (-1, -1) else (sizes[0], sizes[1])


def checked_positive_float(name: str, value: object, otherwise: str = "") -> float:
    """The value as a float, if it is finite and above 0. Raises SpecError, which says by `otherwise` what None would
    mean, where it may stand."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and math.isfinite(value) and value > 0:  # type: ignore[arg-type, operator]
        return float(value)  # type: ignore[arg-type]
    raise SpecError(name, f"a positive finite number{otherwise and f', or None for {otherwise}'}", repr(value))
