"""Cases of one dtype or kind, or for one machine: what is drawn, changed to that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fuzz.cases import AttentionCase, BytesCase, Case, DecodeCase, FlowCase, InsideCase, LinearCase, ProductCase
from fuzz.strategies import KERNEL_SHARES, TILE_SHARES
from mhsa_compile.spec.float32_products import TERM_PRODUCTS

TILE = 32
"""Widths of heads that kernels on tiles take are multiples of it."""
WORDS = tuple(TERM_PRODUCTS)


@dataclass(frozen=True)
class Narrowing:
    """A dtype, a name of `cases.MACHINES`, a kind of `strategies.KERNEL_SHARES` and a word for products of float32, or
    None for any. Whole compilations are for `native`, whatever the machine.

    For a machine with tiles cases are such that tiles take them: widths of heads, words of products, features.
    Elsewhere numbers are normal ones."""

    dtype: str | None = None
    machine: str | None = None
    kind: str | None = None
    products: str | None = None

    @property
    def on_tiles(self) -> bool:
        return (self.machine or "").startswith("tiles")

    @property
    def shares(self) -> tuple[tuple[str, int], ...]:
        return TILE_SHARES if self.on_tiles else KERNEL_SHARES

    def __call__(self, case: Case) -> Case:
        if isinstance(case, InsideCase):
            return replace(case, attention=self(case.attention))
        if isinstance(case, FlowCase | DecodeCase):
            changed = replace(case, spec=self._spec(case.spec))
            return replace(changed, target="native") if self.machine else changed
        case = replace(case, machine=self.machine or case.machine)
        if isinstance(case, BytesCase):
            return case
        case = replace(case, dtype=self.dtype or case.dtype, products=self.products or case.products)
        return self._for_tiles(case) if self.on_tiles else _of_normal_numbers(case)

    def _for_tiles(self, case: AttentionCase | LinearCase | ProductCase) -> Case:
        if case.products in ("auto", "ieee") and self.products is None:
            case = replace(case, products=WORDS[case.seed % len(WORDS)])
        if case.dtype == "float16" and not isinstance(case, LinearCase) and self.machine == "tiles":
            case = replace(case, dtype="bfloat16")
        if isinstance(case, ProductCase):
            return replace(case, result=case.dtype if case.result == "float16" else case.result)
        if isinstance(case, LinearCase):
            return case
        extras = tuple(name for name in case.extras if name != "slopes")
        E, F = case.widths
        return replace(case, widths=(self._width(E), self._width(F)), extras=extras)

    def _width(self, width: int) -> int:
        return -(-width // TILE) * TILE if self.on_tiles else width

    def _spec(self, spec: dict[str, Any]) -> dict[str, Any]:
        widths = {name: self._width(spec[name]) for name in ("head_dim", "v_head_dim") if name in spec}
        return {**spec, **widths, **({"dtype": self.dtype} if self.dtype else {})}


def _of_normal_numbers(case: AttentionCase | LinearCase | ProductCase) -> Case:
    case = replace(case, inputs=("normal",))
    return replace(case, weights="normal") if isinstance(case, LinearCase) else case


ANY = Narrowing()
