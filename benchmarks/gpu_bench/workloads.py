"""What is timed on a GPU, and how much work it is.

Lengths and heads fill a large chip: 16,384 tokens of 2,048 columns in the forward cases, as FlashAttention's papers
time them (Dao, 2023; Shah et al., 2024). Notation: B batch, L query length, S key length, D embed, H heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mhsa_compile.bench.workloads import Workload
from mhsa_compile.errors import InputError
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.mask_patterns import BigBird, Longformer

DTYPE = "bfloat16"
TOKENS, COLUMNS = 16_384, 2_048  # B x L, and H x E, of the forward cases
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class CallWork:
    """What one call takes: FLOPs of the pairs that are seen, 2 per multiply-add; bytes of inputs, weights and outputs,
    each once.

    Biases are left out: they are a few thousandths of the weights.
    """

    flops: int
    bytes: int


def work(workload: Workload) -> CallWork:
    spec, (B, L, S) = workload.spec, (workload.B, workload.L, workload.S)
    H, G, E, F, D = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim, spec.embed_dim
    flops = spec.attention_flops(B, L, S)
    if workload.kind == "core":
        elements = B * (L * H * (E + F) + S * G * (E + F))
    else:
        flops += spec.projection_flops(B, L, S)
        widths = dict(zip(spec.sources, (spec.source_dim, spec.v_source_dim), strict=True))
        source = B * S * sum(widths.values()) if spec.is_cross else 0
        weights = D * H * (E + F) + (spec.source_dim * E + spec.v_source_dim * F) * G
        elements = 2 * B * L * D + source + weights
    return CallWork(flops, elements * _BYTES[spec.dtype])


def _core(name: str, group: str, B: int, L: int, S: int, H: int, E: int, **fields: Any) -> Workload:
    return Workload(name, "core", group, AttentionSpec(embed_dim=H * E, num_heads=H, dtype=DTYPE, **fields), B, L, S)


def _block(name: str, B: int, L: int, D: int, H: int, **fields: Any) -> Workload:
    return Workload(name, "block", "blocks", AttentionSpec(embed_dim=D, num_heads=H, dtype=DTYPE, **fields), B, L, L)


def _forward(E: int, lengths: Iterable[int]) -> Iterator[Workload]:
    for L in lengths:
        for causal in (False, True):
            name = f"e{E}-{_thousands(L)}{'-causal' if causal else ''}"
            fields: dict[str, Any] = {"causal": True} if causal else {}
            yield _core(name, f"e{E}", TOKENS // L, L, L, COLUMNS // E, E, **fields)


def _thousands(length: int) -> str:
    return str(length) if length % 1024 else f"{length // 1024}k"


_LONGFORMER = Longformer(window=1024, global_tokens=64)
_BIGBIRD = BigBird(block=128, window_blocks=3, global_blocks=1, random_blocks=3)

WORKLOADS: tuple[Workload, ...] = (
    *_forward(128, (1024, 2048, 4096, 8192, 16_384)),
    *_forward(64, (1024, 4096, 8192, 16_384)),
    *_forward(96, (8064,)),  # 16,128 tokens: its 21 heads make 2,016 columns
    *_forward(256, (8192,)),
    _core("gqa-8k-causal", "grouped", 2, 8192, 8192, 32, 128, num_kv_heads=8, causal=True),
    _core("mqa-4k-causal", "grouped", 4, 4096, 4096, 32, 128, num_kv_heads=1, causal=True),
    _core("tail-4093", "tails", 4, 4093, 4093, 16, 128),
    _core("tail-1023-causal", "tails", 16, 1023, 1023, 16, 128, causal=True),
    _block("bert-large", 32, 512, 1024, 16),
    _block("vit-large", 64, 197, 1024, 16),
    _block("gpt-2k-causal", 8, 2048, 2048, 16, causal=True),
    _block("llama-8b-4k", 4, 4096, 4096, 32, num_kv_heads=8, causal=True, bias=False),
    *(
        _core(f"decode{B}x{_thousands(S)}", "decode", B, 1, S, 32, 128, num_kv_heads=8)
        for B in (1, 16)
        for S in (8192, 16_384, 32_768)
    ),
    *(
        _core(f"window{left}-16k", "windows", 1, 16_384, 16_384, 16, 128, causal=True, window=(left, 0))
        for left in (256, 1024, 4096)
    ),
    _core("longformer-8k", "sparse", 2, 8192, 8192, 16, 128, static_mask=_LONGFORMER),
    _core("bigbird-8k", "sparse", 2, 8192, 8192, 16, 128, static_mask=_BIGBIRD),
)
GROUPS = tuple(dict.fromkeys(workload.group for workload in WORKLOADS))


def choose(words: Iterable[str]) -> tuple[Workload, ...]:
    """The workloads of these names, groups, or "all", in the order of the list. Raises InputError for another word."""
    choices, names = set(words), {workload.name for workload in WORKLOADS}
    if unknown := sorted(choices - {"all", *GROUPS, *names}):
        expected = f"all, a group ({', '.join(GROUPS)}) or one of {', '.join(w.name for w in WORKLOADS)}"
        raise InputError("workload", expected, repr(unknown[0]))
    return tuple(w for w in WORKLOADS if {"all", w.group, w.name} & choices)
