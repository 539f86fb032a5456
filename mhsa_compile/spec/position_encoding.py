"""Where a query and a key stand, as values that a spec can hold: rotary embeddings.

Notation: H heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from mhsa_compile.errors import SpecError, did_you_mean
from mhsa_compile.spec.checks import check_choice, check_positive_int, checked_flag, checked_positive_float, value_text

if TYPE_CHECKING:  # what only reads a spec does not load NumPy
    import numpy as np
    from numpy.typing import NDArray

    Table = NDArray[np.float64]

SCALINGS: dict[str, dict[str, float | bool | None]] = {
    "linear": {},
    "llama3": {"original_max_length": None, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {
        "original_max_length": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "attention_factor": None,
    },
}
"""What each scaling of a Rope reads beside `factor`, with its defaults; None is stated, or follows from the rest."""


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864) of queries and keys.

    Pair i of a head, at position p, is turned by the angle p * f(i), and f(i) is theta ** (-2 i / rotary_dim), scaled.

    theta         the base of the angles
    rotary_dim    how many of a head's first dims turn, even; None is all of them
    interleaved   whether a pair is (2 i, 2 i + 1), as in the paper, or (i, i + rotary_dim / 2), as in Llama
    max_length    positions that the tables hold; longer sequences are refused
    factor        how many times longer sequences are than those that the model was first trained with
    scaling       what becomes of f because of that:
                  "linear": f / factor (Chen et al., 2023, https://arxiv.org/abs/2306.15595);
                  "llama3": pairs that turn fewer than low_freq_factor (1) times within original_max_length have
                  f / factor, those that turn more than high_freq_factor (4) times keep f, between them both are mixed
                  (as Llama 3.1 has it);
                  "yarn": the same between beta_slow (1) and beta_fast (32) turns, mixed evenly over the pairs between,
                  whose bounds are whole numbers if `truncate` (the default); cosines and sines are multiplied by
                  attention_factor, 0.1 ln(factor) + 1 if not given (Peng et al., 2023, https://arxiv.org/abs/2309.00071)

    Raises SpecError, among others for a field that the scaling does not read.
    """

    theta: float = 10000.0
    rotary_dim: int | None = None
    interleaved: bool = False
    factor: float = 1.0
    max_length: int = 4096
    scaling: str = "linear"
    original_max_length: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("theta", "factor"):
            msgspec.structs.force_setattr(self, name, checked_positive_float(f"rope.{name}", getattr(self, name)))
        checked_flag("rope.interleaved", self.interleaved)
        check_positive_int("rope.max_length", self.max_length)
        if self.rotary_dim is not None:
            check_positive_int("rope.rotary_dim", self.rotary_dim)
        self._resolve_scaling()

    def in_words(self) -> str:
        pairs = "neighbours" if self.interleaved else "halves"
        words = [f"rotary, {self.rotary_dim} dims in {pairs}, theta {self.theta:g}", f"up to {self.max_length}"]
        if self.scaling != "linear" or self.factor != 1:
            words.append(f"scaled: {self.scaling}, factor {self.factor:g}")
        return "; ".join(words)

    def _resolve_scaling(self) -> None:
        if self.scaling is None:
            raise SpecError("rope.scaling", f"one of {', '.join(SCALINGS)}", "None")
        check_choice("rope.scaling", self.scaling, tuple(SCALINGS))
        fields = SCALINGS[self.scaling]
        for name in sorted({name for known in SCALINGS.values() for name in known} - set(fields)):
            if getattr(self, name) is not None:
                readers = " or ".join(f'"{kind}"' for kind, known in SCALINGS.items() if name in known)
                got = f'{getattr(self, name)!r} beside scaling="{self.scaling}"'
                raise SpecError(f"rope.{name}", f"a scaling that reads it, {readers}", got)
        for name, default in fields.items():
            value = default if getattr(self, name) is None else getattr(self, name)
            if name == "original_max_length":
                check_positive_int(f"rope.{name}", value)
            elif name == "truncate":
                checked_flag(f"rope.{name}", value)
            else:
                value = checked_positive_float(f"rope.{name}", self._own_factor() if value is None else value)
            msgspec.structs.force_setattr(self, name, value)
        for less, more in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if less in fields and not getattr(self, less) < getattr(self, more):
                raise SpecError(f"rope.{more}", f"more than {less} = {getattr(self, less)}", f"{getattr(self, more)}")
        if self.scaling == "yarn" and self.theta <= 1:
            raise SpecError("rope.theta", 'more than 1 with scaling="yarn"', str(self.theta))

    def _own_factor(self) -> float:
        """The attention_factor of YaRN's authors."""
        return 0.1 * math.log(max(self.factor, 1.0)) + 1.0

    def resolved(self, head_dim: int) -> Rope:
        """This embedding with the dims that turn stated, for heads of `head_dim`. Raises SpecError."""
        dims = head_dim if self.rotary_dim is None else self.rotary_dim
        if dims % 2 or dims > head_dim:
            expected = f"an even number of dims, at most head_dim = {head_dim}"
            raise SpecError("rope.rotary_dim", expected, str(dims), "Dims turn in pairs.")
        return msgspec.structs.replace(self, rotary_dim=dims)

    def tables(self) -> tuple[Table, Table]:
        """(cosines, sines) of the angles, float64, each (max_length, rotary_dim / 2); of a resolved value."""
        import numpy as np

        assert self.rotary_dim is not None
        angles = np.arange(self.max_length)[:, np.newaxis] * self._frequencies(self.rotary_dim)
        size = self.attention_factor or 1.0
        return size * np.cos(angles), size * np.sin(angles)

    def _frequencies(self, rotary_dim: int) -> Table:
        """The angle between two neighbours in place, for each pair, (rotary_dim / 2,)."""
        import numpy as np

        as_trained = self.theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
        if self.scaling == "linear":
            return as_trained / self.factor
        share = self._share_llama3(as_trained) if self.scaling == "llama3" else self._share_yarn(rotary_dim)
        return (1 - share) * as_trained / self.factor + share * as_trained

    def _share_llama3(self, as_trained: Table) -> Table:
        """The share of each frequency that stays, by the turns it makes within the length of the training."""
        assert self.original_max_length and self.low_freq_factor and self.high_freq_factor
        turns = self.original_max_length * as_trained / (2 * math.pi)
        return ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clip(0, 1)

    def _share_yarn(self, rotary_dim: int) -> Table:
        """What is kept of each pair's frequency, falling evenly from the pair that makes beta_fast turns to the one
        that makes beta_slow."""
        import numpy as np

        assert self.original_max_length and self.beta_fast and self.beta_slow
        wavelengths = (self.original_max_length / (2 * math.pi * turns) for turns in (self.beta_fast, self.beta_slow))
        first, last = (rotary_dim * math.log(length) / (2 * math.log(self.theta)) for length in wavelengths)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_dim - 1)  # so, and not of the pairs, in the authors' code
        if first == last:
            last += 0.001
        return 1 - ((np.arange(rotary_dim // 2) - first) / (last - first)).clip(0, 1)


def checked_rope(value: object) -> Rope | None:
    """A Rope from itself, from plain values, or from True: all defaults. Raises SpecError."""
    if value is None or value is False:
        return None
    if value is True:
        return Rope()
    if isinstance(value, Mapping):
        known = Rope.__struct_fields__
        for name in value:
            if name not in known:
                hint = did_you_mean(str(name), known)
                raise SpecError("rope", f"fields among {', '.join(known)}", f"the unknown {name!r}", hint)
        return Rope(**value)
    if not isinstance(value, Rope):
        raise SpecError("rope", "a Rope, or true for its defaults", value_text(value))
    return value


def parse_rope(text: str) -> Rope:
    """A Rope as a command line states it: "theta=500000,max_length=8192", or "default". Raises SpecError."""
    fields: dict[str, Any] = {}
    for assignment in () if text == "default" else text.split(","):
        name, separator, value = assignment.partition("=")
        try:
            fields[name] = _word(value) if name == "scaling" or value in ("true", "false") else _number(value)
        except ValueError:
            separator = ""
        if not separator:
            raise SpecError("rope", 'FIELD=VALUE,..., such as theta=10000, or "default"', repr(text))
    rope = checked_rope(fields)
    assert rope is not None
    return rope


def _word(text: str) -> str | bool:
    return text == "true" if text in ("true", "false") else text


def _number(text: str) -> int | float:
    return int(text) if text.isdecimal() else float(text)
