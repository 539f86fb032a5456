"""The parity matrix. Data only: nothing here imports a framework. What is timed: mhsa_compile/workloads.py.

Notation: B batch, L query length, S key length, D embed, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mhsa_compile.spec import AttentionSpec


@dataclass(frozen=True)
class ParityCase:
    """One spec and the sizes to try it at. The name is the test's id."""

    name: str
    spec: AttentionSpec
    shapes: tuple[tuple[int, int, int], ...]
    """(B, L, S); S is L in self-attention."""


def _spec(D: int, H: int, **fields: Any) -> AttentionSpec:
    return AttentionSpec(embed_dim=D, num_heads=H, **fields)


# Lengths are one, primes and ragged tails. Long ones go with few heads, many heads with short ones: the whole matrix
# stays a matter of seconds for each implementation.
SELF = tuple((B, L, L) for B, L in ((1, 1), (3, 1), (1, 7), (3, 7), (1, 197)))
SELF_SHORT = tuple((B, L, L) for B, L in ((1, 1), (3, 1), (1, 7), (3, 7), (1, 31)))
SELF_LONG = (*SELF, (3, 197, 197), (1, 1023, 1023))
CROSS = ((1, 1, 7), (3, 7, 1), (3, 7, 197), (1, 197, 7), (1, 1, 1), (3, 7, 7))
CROSS_LONG = (*CROSS, (1, 7, 1023), (1, 1023, 7), (1, 197, 1023))


def _parity() -> tuple[ParityCase, ...]:
    cases = []

    def add(name: str, shapes: tuple[tuple[int, int, int], ...], D: int, H: int, **fields: Any) -> None:
        cases.append(ParityCase(name, _spec(D, H, **fields), shapes))

    # Head dims and head counts, D = H * E and not.
    add("h1-e16", SELF_LONG, 16, 1)
    add("h1-e40", SELF, 40, 1)
    add("h1-e128", SELF_LONG, 128, 1)
    add("h5-e16", SELF, 80, 5)
    add("h5-e64", SELF, 320, 5)
    add("h12-e40", SELF, 480, 12)
    add("h12-e64", SELF, 768, 12)
    add("h96-e16", SELF_SHORT, 1536, 96)
    add("h96-e40-d24", SELF_SHORT, 24, 96, head_dim=40)
    add("h5-e80-d64", SELF, 64, 5, head_dim=80)
    add("h1-e7-d11", SELF, 11, 1, head_dim=7)
    # Value heads of another width, groups, no bias, scale.
    add("f24", SELF, 80, 5, v_head_dim=24)
    add("e128-f40", SELF, 64, 5, head_dim=128, v_head_dim=40)
    add("gqa-h12-g4", SELF, 192, 12, num_kv_heads=4)
    add("gqa-h96-g12-e16", SELF_SHORT, 64, 96, num_kv_heads=12, head_dim=16)
    add("mqa-h5", SELF, 320, 5, num_kv_heads=1)
    add("mqa-h12-f24", SELF, 192, 12, num_kv_heads=1, v_head_dim=24)
    add("no-bias", SELF, 80, 5, bias=False)
    add("scale-1", SELF, 80, 5, scale=1.0)
    add("scale-small", SELF, 80, 5, scale=0.01, bias=False)
    # Masks, alone and with causality.
    for mask in ("bool", "additive", "key_padding"):
        add(f"{mask}-h1", SELF_LONG, 64, 1, mask=mask)
        add(f"{mask}-h5", SELF, 80, 5, mask=mask)
        add(f"{mask}-causal", SELF, 80, 5, mask=mask, causal=True)
        add(f"{mask}-cross", CROSS, 80, 5, mask=mask, kv_embed_dim=48)
        add(f"{mask}-bottom-right", CROSS, 80, 5, mask=mask, kv_embed_dim=48, causal="bottom_right")
    # Causality. "bottom_right" with L > S leaves queries that see no key.
    add("causal-h1", SELF_LONG, 64, 1, causal=True)
    add("causal-h12", SELF, 480, 12, causal=True)
    add("causal-h96", SELF_SHORT, 1536, 96, causal="bottom_right")
    add("causal-gqa", SELF, 192, 12, num_kv_heads=4, causal=True)
    add("top-left-cross", CROSS_LONG, 64, 1, kv_embed_dim=40, causal="top_left")
    add("bottom-right-cross", CROSS_LONG, 64, 1, kv_embed_dim=40, causal="bottom_right")
    add("bottom-right-gqa", CROSS, 192, 12, num_kv_heads=4, kv_embed_dim=40, causal="bottom_right")
    # Cross-attention.
    add("cross-h1-e128", CROSS_LONG, 128, 1, kv_embed_dim=40)
    add("cross-h5", CROSS, 80, 5, kv_embed_dim=80)
    add("cross-h12-f24", CROSS, 192, 12, kv_embed_dim=56, v_head_dim=24)
    add("cross-mqa-no-bias", CROSS, 80, 5, num_kv_heads=1, kv_embed_dim=16, bias=False)
    return tuple(cases)


PARITY = _parity()
