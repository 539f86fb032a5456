"""The parity matrix. Data only: nothing here imports a framework. What is timed: bench/workloads.py.

Notation: B batch, L query length, S key length, D embed, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mhsa_compile import masks
from mhsa_compile.spec.attention_spec import AttentionSpec


@dataclass(frozen=True)
class ParityCase:
    """One spec and the sizes to try it at. The name is the test's id."""

    name: str
    spec: AttentionSpec
    shapes: tuple[tuple[int, int, int], ...]
    """(B, L, S); S is L in self-attention, and the capacity of a cache."""
    weights: str | None = None
    """What `compile` takes as its `weights`."""

    @property
    def builds(self) -> tuple[tuple[dict[str, int], tuple[dict[str, int], ...]], ...]:
        """(dims that are fixed, cases) of each compilation: one for all, or one for each length of a constant mask."""
        axes = "BLC" if self.spec.kv_cache else "BLS"
        cases = tuple(dict(zip(axes, shape, strict=True)) for shape in self.shapes)
        if self.spec.static_mask is None:
            return (({}, cases),)
        lengths = "LS" if self.spec.is_cross else "L"
        return tuple(({axis: case[axis] for axis in lengths}, (case,)) for case in cases)


def _spec(D: int, H: int, **fields: Any) -> AttentionSpec:
    return AttentionSpec(embed_dim=D, num_heads=H, **fields)


# Lengths are one, primes and ragged tails. Long ones go with few heads, many heads with short ones: the whole matrix
# stays a matter of seconds for each implementation.
SELF = tuple((B, L, L) for B, L in ((1, 1), (3, 1), (1, 7), (3, 7), (1, 197)))
SELF_SHORT = tuple((B, L, L) for B, L in ((1, 1), (3, 1), (1, 7), (3, 7), (1, 31)))
SELF_LONG = (*SELF, (3, 197, 197), (1, 1023, 1023))
CROSS = ((1, 1, 7), (3, 7, 1), (3, 7, 197), (1, 197, 7), (1, 1, 1), (3, 7, 7))
# Lengths that are fixed, of which each is a compilation of its own: a short one beside it for a few patterns only.
STATIC = ((2, 197, 197),)
STATIC_SHORT = ((3, 7, 7), *STATIC)
STATIC_CROSS = ((3, 7, 197), (1, 197, 67))
CACHED = ((1, 1, 1), (1, 1, 31), (3, 1, 197), (3, 7, 7), (2, 29, 67), (1, 197, 211))
CROSS_LONG = (*CROSS, (1, 7, 1023), (1, 1023, 7), (1, 197, 1023))


def _parity() -> tuple[ParityCase, ...]:
    cases = []

    def add(
        name: str, shapes: tuple[tuple[int, int, int], ...], D: int, H: int, weights: str | None = None, **fields: Any
    ) -> None:
        cases.append(ParityCase(name, _spec(D, H, **fields), shapes, weights))

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
    add("causal-h12", SELF, 64, 12, head_dim=40, causal=True)
    add("causal-h96", SELF_SHORT, 64, 96, head_dim=16, causal="bottom_right")
    add("causal-gqa", SELF, 192, 12, num_kv_heads=4, causal=True)
    add("top-left-cross", CROSS_LONG, 64, 1, kv_embed_dim=40, causal="top_left")
    add("bottom-right-cross", CROSS_LONG, 64, 1, kv_embed_dim=40, causal="bottom_right")
    add("bottom-right-gqa", CROSS, 192, 12, num_kv_heads=4, kv_embed_dim=40, causal="bottom_right")
    # Cross-attention.
    add("cross-h1-e128", CROSS_LONG, 128, 1, kv_embed_dim=40)
    add("cross-h5", CROSS, 80, 5, kv_embed_dim=80)
    add("cross-h12-f24", CROSS, 192, 12, kv_embed_dim=56, v_head_dim=24)
    add("cross-mqa-no-bias", CROSS, 80, 5, num_kv_heads=1, kv_embed_dim=16, bias=False)
    # Keys and values of two inputs.
    add("values-apart", CROSS_LONG, 59, 1, kv_embed_dim=13, v_embed_dim=31)
    add("values-apart-same-width", CROSS, 80, 5, kv_embed_dim=80, v_embed_dim=80, mask="key_padding")
    add("values-apart-gqa-f24", CROSS, 192, 12, num_kv_heads=4, kv_embed_dim=37, v_embed_dim=53, v_head_dim=24)
    add("values-apart-bool", CROSS, 83, 5, head_dim=17, kv_embed_dim=7, v_embed_dim=101, mask="bool", bias=False)
    add("values-apart-bottom-right", CROSS, 80, 5, kv_embed_dim=41, v_embed_dim=3, causal="bottom_right", softcap=20.0)
    add("values-apart-window", CROSS, 80, 5, kv_embed_dim=40, v_embed_dim=19, mask="additive", window=(13, 5))
    # Windows, on either side or both, alone and with causality and masks.
    add("window-left", SELF_LONG, 64, 1, window=(31, 0))
    add("window-both", SELF, 80, 5, window=(5, 11))
    add("window-open-left", SELF, 80, 5, window=(-1, 3))
    add("window-open-right", SELF, 80, 5, window=(2, -1))
    add("window-own-key", SELF_SHORT, 80, 5, window=(0, 0))
    add("window-wider-than-all", SELF_SHORT, 80, 5, window=(4096, 4096))
    add("window-causal-gqa", SELF, 192, 12, num_kv_heads=4, causal=True, window=(64, 7))
    add("window-cross", CROSS_LONG, 64, 1, kv_embed_dim=40, window=(13, 5))
    add("window-top-left", CROSS, 80, 5, kv_embed_dim=40, causal="top_left", window=(13, -1))
    add("window-bottom-right", CROSS_LONG, 64, 1, kv_embed_dim=40, causal="bottom_right", window=(13, -1))
    add(
        "window-bottom-right-gqa", CROSS, 192, 12, num_kv_heads=4, kv_embed_dim=40, causal="bottom_right", window=(2, 0)
    )
    add("window-bool", SELF, 80, 5, mask="bool", window=(31, 31))
    add(
        "window-additive-bottom-right",
        CROSS,
        80,
        5,
        mask="additive",
        kv_embed_dim=40,
        causal="bottom_right",
        window=(9, 0),
    )
    add("window-key-padding", SELF, 80, 5, mask="key_padding", window=(31, 0))
    # Constant masks, compiled for each length.
    stride_8 = masks.Strided(stride=8)
    add("longformer", STATIC_SHORT, 80, 5, static_mask=masks.Longformer(window=30, global_tokens=2))
    add("longformer-causal-gqa", STATIC, 96, 6, num_kv_heads=2, causal=True, static_mask=masks.Longformer(window=64))
    add("bigbird", STATIC, 64, 2, static_mask=masks.BigBird(block=13, random_blocks=2, seed=3))
    add("strided-causal", STATIC_SHORT, 64, 2, causal=True, static_mask=masks.Strided(stride=14))
    add("block-diagonal", STATIC, 64, 2, static_mask=masks.BlockDiagonal(block=48))
    add("documents", ((2, 197, 197),), 64, 2, static_mask=masks.Documents(lengths=(1, 100, 89)))
    add(
        "bigbird-window",
        ((1, 389, 389),),
        64,
        2,
        window=(100, 50),
        static_mask=masks.BigBird(block=32, random_blocks=1),
    )
    add(
        "longformer-cross",
        STATIC_CROSS,
        64,
        2,
        kv_embed_dim=40,
        static_mask=masks.Longformer(window=16, global_tokens=1),
    )
    add("strided-bottom-right", STATIC_CROSS[1:], 64, 2, kv_embed_dim=40, causal="bottom_right", static_mask=stride_8)
    # Softcap, positions, sinks, caches; each by itself, and together.
    add("softclamp-gqa", SELF, 96, 6, num_kv_heads=2, softclamp=0.5, causal=True)
    add("softcap-gqa", SELF, 96, 6, num_kv_heads=2, softcap=0.5, causal=True)
    pairs = {"interleaved": True, "rotary_dim": 6, "factor": 4.0}
    add("rope-pairs-gqa", SELF, 96, 6, num_kv_heads=2, causal=True, rope=pairs)
    add("alibi-both-sides-additive", SELF, 72, 6, num_kv_heads=2, alibi=True, mask="additive", window=(31, 11))
    bottom_right = {"kv_embed_dim": 40, "causal": "bottom_right"}
    add("sinks-key-padding-bottom-right", CROSS, 80, 5, sinks=True, alibi=True, mask="key_padding", **bottom_right)
    longformer = masks.Longformer(window=30)
    add("sinks-longformer", STATIC, 80, 5, sinks=True, alibi=True, static_mask=longformer)
    add("cache-rope-gqa", CACHED, 96, 6, num_kv_heads=2, kv_cache=True, causal=True, rope=True, bias=False)
    add("cache-window-alibi-sinks", CACHED, 80, 5, kv_cache=True, causal=True, window=(17, 0), alibi=True, sinks=True)
    everything = {"kv_cache": True, "causal": True, "rope": True, "alibi": True, "sinks": True, "softcap": 5.0}
    add("bf16-cache-everything", CACHED, 96, 6, num_kv_heads=2, dtype="bfloat16", **everything)
    # Sixteen bits: a dozen of the above.
    for dtype in ("bfloat16", "float16"):
        short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
        add(f"{short}-h1-e128", SELF_LONG, 128, 1, dtype=dtype)
        add(f"{short}-h12-e64", SELF, 96, 12, head_dim=64, dtype=dtype)
        add(f"{short}-h1-e7-d11", SELF, 11, 1, head_dim=7, dtype=dtype)
        add(f"{short}-e128-f40", SELF, 64, 5, head_dim=128, v_head_dim=40, dtype=dtype)
        add(f"{short}-gqa-no-bias", SELF, 192, 12, num_kv_heads=4, bias=False, dtype=dtype)
        add(f"{short}-scale-1", SELF_SHORT, 80, 5, scale=1.0, dtype=dtype)
        add(f"{short}-causal", SELF_LONG, 64, 1, causal=True, dtype=dtype)
        add(f"{short}-bool", SELF, 80, 5, mask="bool", dtype=dtype)
        add(f"{short}-additive-causal", SELF, 80, 5, mask="additive", causal=True, dtype=dtype)
        add(f"{short}-key-padding-cross", CROSS, 80, 5, mask="key_padding", kv_embed_dim=48, dtype=dtype)
        add(f"{short}-bottom-right-cross", CROSS_LONG, 64, 1, kv_embed_dim=40, causal="bottom_right", dtype=dtype)
        add(f"{short}-window", SELF, 80, 5, causal=True, window=(31, -1), dtype=dtype)
        add(f"{short}-longformer", STATIC, 80, 5, static_mask=masks.Longformer(window=30, global_tokens=2), dtype=dtype)
    # Linears in eight bits.
    add("int8-h12-e64", SELF, 768, 12, weights="int8")
    add("int8-values-apart", CROSS, 80, 5, kv_embed_dim=48, v_embed_dim=29, weights="int8")
    add("bf16-values-apart", CROSS, 80, 5, kv_embed_dim=48, v_embed_dim=29, mask="key_padding", dtype="bfloat16")
    add("int8-cross-no-bias", CROSS, 80, 5, kv_embed_dim=48, bias=False, weights="int8")
    add("int8-odd", SELF_SHORT, 11, 1, head_dim=7, weights="int8")
    add("int8-bf16-causal-gqa", SELF, 192, 12, num_kv_heads=4, causal=True, dtype="bfloat16", weights="int8")
    return tuple(cases)


PARITY = _parity()
