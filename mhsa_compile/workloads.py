"""The blocks that people run, with the sizes at which they are timed: one list for benchmarks, tests and tuning.

Notation: B batch, L query length, S key length, D embed, H heads, G key/value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mhsa_compile.spec import AttentionSpec


@dataclass(frozen=True)
class Workload:
    """One block (projections, attention, output projection) and its sizes; S is L in self-attention."""

    name: str
    spec: AttentionSpec
    B: int
    L: int
    S: int

    @property
    def dims(self) -> dict[str, int]:
        """The sizes by symbol, as `compile` and `bench` take them."""
        return {"B": self.B, "L": self.L, "S": self.S}


def _spec(D: int, H: int, **fields: Any) -> AttentionSpec:
    return AttentionSpec(embed_dim=D, num_heads=H, **fields)


WORKLOADS = (
    Workload("tiny", _spec(256, 4), 1, 16, 16),
    Workload("base128", _spec(512, 8), 1, 128, 128),
    Workload("bert384", _spec(768, 12), 1, 384, 384),
    Workload("bert8x128", _spec(768, 12), 8, 128, 128),
    Workload("vit197", _spec(768, 12), 1, 197, 197),
    Workload("gpt1024c", _spec(768, 12, causal=True), 1, 1024, 1024),
    Workload("cross64x512", _spec(512, 8, kv_embed_dim=512), 1, 64, 512),
    Workload("gqa2048c", _spec(1024, 16, num_kv_heads=4, causal=True), 1, 2048, 2048),
)
