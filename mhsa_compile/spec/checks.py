"""The checks of single fields of a spec. Each raises SpecError."""

from __future__ import annotations

import math

from mhsa_compile.errors import SpecError, did_you_mean, did_you_mean_value

DTYPES = ("float32", "bfloat16", "float16")
LARGEST = 2**31 - 1
"""The largest size allowed: one more would not be a 32-bit number, in which ONNX Runtime and C programs keep some."""
LONGEST = 2**30
"""No length is larger: places are numbers of 32 bits, and so are their differences. A window of as many keys or more
has no end."""
SMALLEST_FLOAT, LARGEST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Between these, numbers are whole in float32, in which kernels compute: none becomes 0 or infinite."""
_LONGEST_TEXT = 200
ALIGNMENTS = ("top_left", "bottom_right")
_FLAG_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
"""Texts in place of True and False."""


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
    _check_causal(causal)
    return str(causal)


def resolve_cached_causal(causal: object) -> str:
    """Causality over a cache: "bottom_right", as the queries are the last of the keys. Raises SpecError."""
    _check_causal(None if causal in (True, False) else causal)
    if causal is True or causal == "bottom_right":
        return "bottom_right"
    hint = "What the cache holds behind its length is hidden by causality alone, and queries stand at its end."
    raise SpecError("causal", 'True or "bottom_right" with kv_cache (--causal true)', value_text(causal), hint)


def _check_causal(causal: object) -> None:
    if causal is not None and causal not in ALIGNMENTS:
        words = {**_FLAG_WORDS, "causal": True, "none": None, **{name: name for name in ALIGNMENTS}}
        text = value_text(causal)
        expected = 'None, True where L = S, "top_left" or "bottom_right"'
        raise SpecError("causal", expected, text, did_you_mean_value(text.strip("'").lower(), words))


def check_positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(name, "a positive integer", value_text(value))
    if value > LARGEST:
        raise SpecError(name, f"at most {LARGEST}", value_text(value))


def checked_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        text = value_text(value)
        raise SpecError(name, "true or false", text, did_you_mean_value(text.strip("'").lower(), _FLAG_WORDS))
    return value


def check_choice(name: str, value: object, choices: tuple[str, ...], otherwise: str = "") -> None:
    """Raises SpecError for what is neither None nor a choice; `otherwise` is its next step where none is near."""
    if value is None or value in choices:
        return
    expected = ", ".join(f'"{choice}"' for choice in choices)
    text = value_text(value)
    raise SpecError(name, f"None, {expected}", text, did_you_mean(text.strip("'"), choices, otherwise))


def check_dtype(dtype: object) -> None:
    if dtype not in DTYPES:
        text = value_text(dtype)
        expected = " or ".join(f'"{name}"' for name in DTYPES)
        raise SpecError("dtype", expected, text, did_you_mean(text.strip("'"), DTYPES))


def checked_window(window: object) -> tuple[int, int] | None:
    """(left, right); None where both sides are unbounded."""
    if window is None:
        return None
    sizes = tuple(window) if isinstance(window, list | tuple) else ()
    if len(sizes) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or not -1 <= n <= LARGEST for n in sizes):
        expected = "(left, right): numbers of keys on each side of a query, -1 for unbounded"
        raise SpecError("window", expected, value_text(window), "(256, 0) sees itself and 256 keys before it.")
    return None if sizes == (-1, -1) else (sizes[0], sizes[1])


def parse_causal(text: str) -> str | bool:
    """`causal` as a command line states it."""
    return True if text == "true" else text


def parse_window(text: str) -> list[int]:
    """`window` as a command line states it: "256,0"."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise SpecError("--window", "LEFT,RIGHT, such as 256,0", repr(text)) from None


def checked_positive_float(name: str, value: object, otherwise: str = "") -> float:
    """The value as a float, if it is above 0 and neither 0 nor infinite in float32. Raises SpecError, which says
    by `otherwise` what None would mean, where it may stand."""
    or_none = otherwise and f", or None for {otherwise}"
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise SpecError(name, f"a positive finite number{or_none}", value_text(value))
    if not SMALLEST_FLOAT <= value <= LARGEST_FLOAT:
        expected = f"a positive number that float32 holds, from {SMALLEST_FLOAT:.3g} to {LARGEST_FLOAT:.3g}{or_none}"
        raise SpecError(name, expected, value_text(value))
    return float(value)


def value_text(value: object) -> str:
    """A value of anybody's, in so many words as a message has room for: Python writes no number of 5,000 digits."""
    try:
        text = repr(value)
    except Exception as error:  # whatever it does when it is asked
        return f"a {type(value).__name__} that cannot be written ({type(error).__name__})"
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
