"""Where a query and a key stand, as values that a spec can hold: rotary embeddings, and the slopes of ALiBi.

Notation: H heads.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from mhsa_compile.errors import SpecError
from mhsa_compile.spec_checks import check_flag, check_positive_int, checked_positive_float

if TYPE_CHECKING:  # what only reads a spec does not load NumPy
    import numpy as np
    from numpy.typing import NDArray

    Table = NDArray[np.float64]

TABLES = ("rope_cos", "rope_sin", "alibi_slopes")
"""Tensors of a model that follow from its spec: nobody has to bring them as weights."""


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864) of queries and keys.

    Pair i of a head, at position p, is turned by the angle p / factor * theta ** (-2 i / rotary_dim).

    theta         the base of the angles
    rotary_dim    how many of a head's first dims turn, even; None is all of them
    interleaved   whether a pair is (2 i, 2 i + 1), as in the paper, or (i, i + rotary_dim / 2), as in Llama
    factor        positions are divided by it (linear scaling: Chen et al., 2023, https://arxiv.org/abs/2306.15595)
    max_length    positions that the tables hold; longer sequences are refused
    """

    theta: float = 10000.0
    rotary_dim: int | None = None
    interleaved: bool = False
    factor: float = 1.0
    max_length: int = 4096

    def __post_init__(self) -> None:
        for name in ("theta", "factor"):
            msgspec.structs.force_setattr(self, name, checked_positive_float(f"rope.{name}", getattr(self, name)))
        check_flag("rope.interleaved", self.interleaved)
        check_positive_int("rope.max_length", self.max_length)
        if self.rotary_dim is not None:
            check_positive_int("rope.rotary_dim", self.rotary_dim)

    def resolved(self, head_dim: int) -> Rope:
        """The same with the dims that turn stated, for heads of `head_dim`. Raises SpecError."""
        dims = head_dim if self.rotary_dim is None else self.rotary_dim
        if dims % 2 or dims > head_dim:
            expected = f"an even number of dims, at most head_dim = {head_dim}"
            raise SpecError("rope.rotary_dim", expected, str(dims), "Dims turn in pairs.")
        return msgspec.structs.replace(self, rotary_dim=dims)

    def tables(self) -> tuple[Table, Table]:
        """(cosines, sines) of the angles, float64, each (max_length, rotary_dim / 2); of a resolved value."""
        import numpy as np

        assert self.rotary_dim is not None
        frequencies = self.theta ** (-np.arange(0, self.rotary_dim, 2) / self.rotary_dim)
        angles = np.arange(self.max_length)[:, np.newaxis] / self.factor * frequencies
        return np.cos(angles), np.sin(angles)


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
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else ""
                raise SpecError("rope", f"fields among {', '.join(known)}", f"the unknown {name!r}", hint)
        return Rope(**value)
    if not isinstance(value, Rope):
        raise SpecError("rope", "a Rope, or true for its defaults", repr(value))
    return value


def parse_rope(text: str) -> Rope:
    """A Rope as a command line states it: "theta=500000,max_length=8192", or "default". Raises SpecError."""
    fields: dict[str, Any] = {}
    for assignment in () if text == "default" else text.split(","):
        name, separator, value = assignment.partition("=")
        try:
            fields[name] = value == "true" if value in ("true", "false") else _number(value)
        except ValueError:
            separator = ""
        if not separator:
            raise SpecError("rope", 'FIELD=VALUE,..., such as theta=10000, or "default"', repr(text))
    rope = checked_rope(fields)
    assert rope is not None
    return rope


def _number(text: str) -> int | float:
    return int(text) if text.isdecimal() else float(text)


def alibi_slopes(num_heads: int) -> list[float]:
    """One slope a head (Press et al., 2021, https://arxiv.org/abs/2108.12409, section 3).

    For H a power of two, 2 ** (-8 h / H) for h = 1 .. H. For another H those of the next lower power of two, then every
    other one of the next higher, as the authors' code has it.
    """
    lower = 1 << num_heads.bit_length() - 1

    def geometric(count: int) -> list[float]:
        return [math.pow(2.0, -8.0 * h / count) for h in range(1, count + 1)]

    return geometric(lower) + geometric(2 * lower)[0::2][: num_heads - lower]
