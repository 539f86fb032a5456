"""What people run, with the sizes at which it is timed: one list for benchmarks, tests and tuning.

Notation: B batch, L query length, S key length, D embed, H heads, G key/value heads, E head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mhsa_compile.errors import InputError
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.float32_products import Float32Request
from mhsa_compile.spec.mask_patterns import BigBird, Longformer

if TYPE_CHECKING:
    from torch import nn

    from mhsa_compile.runtime.artifact.artifact import Artifact


@dataclass(frozen=True)
class Workload:
    """One computation and its sizes; S is L in self-attention.

    kind   "block": projections, attention, output projection; "core": attention of given q, k and v
    group  what it shows, and the word that chooses it together with its likes
    """

    name: str
    kind: str
    group: str
    spec: AttentionSpec
    B: int
    L: int
    S: int

    @property
    def dims(self) -> dict[str, int]:
        """The sizes by symbol, as `compile` and `bench` take them."""
        return {"B": self.B, "L": self.L, "S": self.S}

    def at(self, dtype: str) -> Workload:
        """This workload at another dtype, which its name then says. Raises SpecError for an unknown one."""
        if dtype == self.spec.dtype:
            return self
        spec = AttentionSpec.from_dict(self.spec.to_dict() | {"dtype": dtype})
        return replace(self, name=f"{self.name}-{dtype}", spec=spec)


def _block(name: str, B: int, L: int, S: int, D: int, H: int, **fields: Any) -> Workload:
    return Workload(name, "block", "blocks", AttentionSpec(embed_dim=D, num_heads=H, **fields), B, L, S)


def _core(name: str, group: str, B: int, L: int, S: int, H: int, E: int, **fields: Any) -> Workload:
    return Workload(name, "core", group, AttentionSpec(embed_dim=H * E, num_heads=H, **fields), B, L, S)


_LONGFORMER = Longformer(window=512, global_tokens=16)
_BIGBIRD = BigBird(block=64, window_blocks=3, global_blocks=1, random_blocks=2)
"""10.7 % of the pairs at L = 4096: the block and the window of the paper, with as many other blocks as fit that."""

WORKLOADS = (
    _block("tiny", 1, 16, 16, 256, 4),
    _block("base128", 1, 128, 128, 512, 8),
    _block("bert384", 1, 384, 384, 768, 12),
    _block("bert8x128", 8, 128, 128, 768, 12),
    _block("vit197", 1, 197, 197, 768, 12),
    _block("gpt1024c", 1, 1024, 1024, 768, 12, causal=True),
    _block("cross64x512", 1, 64, 512, 512, 8, kv_embed_dim=512),
    _block("gqa2048c", 1, 2048, 2048, 1024, 16, num_kv_heads=4, causal=True),
    replace(_block("vit192", 1, 192, 192, 768, 12), group="tails"),
    _core("core384", "cores", 1, 384, 384, 12, 64),
    _core("core512", "cores", 1, 512, 512, 12, 64),
    _core("core512c", "cores", 1, 512, 512, 12, 64, causal=True),
    _core("core1024", "cores", 1, 1024, 1024, 12, 64),
    _core("core1024c", "cores", 1, 1024, 1024, 12, 64, causal=True),
    _core("core2048gqa", "cores", 1, 2048, 2048, 16, 64, num_kv_heads=4, causal=True),
    _core("core4096", "cores", 1, 4096, 4096, 12, 64),
    _core("core4096c", "cores", 1, 4096, 4096, 12, 64, causal=True),
    _core("decode512", "decode", 1, 1, 512, 16, 128, num_kv_heads=4),
    _core("decode2048", "decode", 1, 1, 2048, 16, 128, num_kv_heads=4),
    _core("decode8192", "decode", 1, 1, 8192, 16, 128, num_kv_heads=4),
    _core("decode8x512", "decode", 8, 1, 512, 16, 128, num_kv_heads=4),
    _core("decode8x2048", "decode", 8, 1, 2048, 16, 128, num_kv_heads=4),
    _core("decode8x8192", "decode", 8, 1, 8192, 16, 128, num_kv_heads=4),
    _core("longformer4096", "sparse", 1, 4096, 4096, 12, 64, static_mask=_LONGFORMER),
    _core("bigbird4096", "sparse", 1, 4096, 4096, 12, 64, static_mask=_BIGBIRD),
    _core("dense2048", "growth", 1, 2048, 2048, 12, 64),
    _core("dense8192", "growth", 1, 8192, 8192, 12, 64),
    _core("window2048", "windows", 1, 2048, 2048, 12, 64, causal=True, window=(512, 0)),
    _core("window4096", "windows", 1, 4096, 4096, 12, 64, causal=True, window=(512, 0)),
    _core("window8192", "windows", 1, 8192, 8192, 12, 64, causal=True, window=(512, 0)),
    _core("window16384", "windows", 1, 16384, 16384, 12, 64, causal=True, window=(512, 0)),
)
"""vit192 stands beside vit197: a length of whole tiles beside one with a tail. The dense cores and those of the group
growth are one series, with 12 heads of 64, from L = 512 to 8192."""

GROUPS = tuple(dict.fromkeys(workload.group for workload in WORKLOADS))


def choose(words: list[str]) -> tuple[Workload, ...]:
    """The workloads of these names, groups, or "all", in the order of the list. Raises InputError for another word."""
    names = {workload.name for workload in WORKLOADS}
    if unknown := [word for word in words if word not in {"all", *GROUPS, *names}]:
        expected = f"all, a group ({', '.join(GROUPS)}) or one of {', '.join(w.name for w in WORKLOADS)}"
        raise InputError("workload", expected, repr(unknown[0]))
    return tuple(w for w in WORKLOADS if {"all", w.group, w.name} & set(words))


def compile_workload(
    workload: Workload, *, symbolic: bool = False, float32_products: Float32Request = "auto"
) -> Artifact:
    """A workload's block or core, compiled for this machine at the workload's sizes, or for any; weights are random."""
    from mhsa_compile.compiler.pipeline import compile

    dims = None if symbolic else workload.dims
    return compile(module_of(workload), dims=dims, float32_products=float32_products, cache=False)


def module_of(workload: Workload) -> nn.Module:
    """A workload's block or core in PyTorch; weights are random."""
    from mhsa_compile.nn.modules import MultiHeadAttention, ScaledDotProductAttention

    module = MultiHeadAttention if workload.kind == "block" else ScaledDotProductAttention
    return module(workload.spec).eval()
