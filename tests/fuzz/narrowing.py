"""Cases of one dtype or kind, or for one machine: what is drawn, changed to that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fuzz.cases import AttentionCase, Case, InsideCase, LinearCase

TILE = 32
"""Widths of heads that kernels on tiles take are multiples of it."""


@dataclass(frozen=True)
class Narrowing:
    """A dtype, a name of `cases.MACHINES` and a kind of `strategies.KERNEL_SHARES`, or None for any. Whole compilations
    are for `native`, whatever the machine. On tiles widths of heads are such that tiles take them."""

    dtype: str | None = None
    machine: str | None = None
    kind: str | None = None

    def __call__(self, case: Case) -> Case:
        if isinstance(case, InsideCase):
            return replace(case, attention=self(case.attention))
        if isinstance(case, AttentionCase | LinearCase):
            case = replace(case, dtype=self.dtype or case.dtype, machine=self.machine or case.machine)
            if isinstance(case, LinearCase):
                return case
            E, F = case.widths
            return replace(case, widths=(self._width(E), self._width(F)))
        changed = replace(case, spec=self._spec(case.spec))
        return replace(changed, target="native") if self.machine else changed

    def _width(self, width: int) -> int:
        return -(-width // TILE) * TILE if (self.machine or "").startswith("tiles") else width

    def _spec(self, spec: dict[str, Any]) -> dict[str, Any]:
        widths = {name: self._width(spec[name]) for name in ("head_dim", "v_head_dim") if name in spec}
        return {**spec, **widths, **({"dtype": self.dtype} if self.dtype else {})}


ANY = Narrowing()
