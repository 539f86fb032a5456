"""Random attentions and projections for fuzzing: what a case is, and how hypothesis draws one.

A case is a plain value whose repr is Python, so that a failing one can be printed as a program. It holds everything
that a run needs: the operation, the machine, the sizes of a few calls, and the seed of the numbers.
Notation: B batch, L query length, S key length, D embed, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from mhsa_compile import host

MACHINES = {  # vector bits, registers, LLVM's CPU, features that it needs
    "native": None,
    "avx2": (256, 16, "x86-64-v3", ()),
    "avx512": (512, 32, "x86-64-v4", ()),
    "neon": (128, 32, "x86-64-v3", ()),
    "scalar": (64, 8, "x86-64-v3", ()),
    "dots512": (512, 32, "znver4", ("avx512_bf16", "avx512_vnni")),
    "dots256": (256, 16, "alderlake", ("avx_vnni",)),
}
"""`native` is this one; the others are made up, and any x86-64-v3 machine runs those without features."""
EXTRAS = ("lengths", "sinks", "slopes")
DTYPES = ("float32", "bfloat16", "float16")
WIDTHS = (1, 2, 3, 5, 7, 8, 15, 16, 17, 24, 31, 32, 40, 47, 48, 64, 80, 96, 128)
"""Of a head: powers of two, their neighbours, and some that fill no vector."""
LENGTHS = (1, 2, 3, 5, 7, 13, 16, 17, 31, 33, 47, 61, 64, 67, 97, 128, 131, 197, 257, 389, 521)
MOST_TERMS = 2_000_000
SCALED = ({}, *({"scaling": kind, "factor": 5.0, "original_max_length": 64} for kind in ("llama3", "yarn")))
"""Products of a weight and a value in one call: what a reference computes in some ten milliseconds."""


@dataclass(frozen=True)
class AttentionCase:
    """One attention kernel and some calls of it.

    machine     a name of MACHINES; `cores` decides how the work is cut
    heads       (H, G); `widths` are (E, F)
    layout      of Q, K and V: "heads", "rows", or "fused", three projections side by side in one buffer (then L = S)
    fixed       which of "B", "L" and "S" are sizes that the kernel is made for; they are those of the first call
    band        (left, right, alignment) or None; left and right may be None
    mask        (dtype, axes) or None: each axis 1, or full ("B", "H", "L", "S"), or of a size that the kernel reads
                ("mask_B", ...: 1 in every other call)
    static      a constant mask: (heads that differ, a pattern's text or the share that is visible), or None
    calls       (B, L, S) of each
    magnitude   of the scores: 1 is what random numbers give, 30 leaves one key, 0 makes all alike
    poison      NaN and Inf in keys and values that nobody sees
    extras      what else the operation has, of "lengths", "sinks", "slopes"; and `softcap`, 0 where it has none
    """

    seed: int
    machine: str
    cores: int
    dtype: str
    heads: tuple[int, int]
    widths: tuple[int, int]
    scale: float | None
    layout: str
    output: str
    fixed: str
    band: tuple[int | None, int | None, str] | None
    mask: tuple[str, tuple[Any, ...]] | None
    static: tuple[bool, str | float] | None
    magnitude: float
    poison: bool
    extras: tuple[str, ...]
    softcap: float
    calls: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class LinearCase:
    """One linear kernel, projections side by side, and some calls of it: (B, L) of each."""

    seed: int
    machine: str
    cores: int
    dtype: str
    int8: bool
    in_features: int
    widths: tuple[int, ...]
    biased: tuple[bool, ...]
    transposed: tuple[bool, ...]
    padding: int
    fixed: bool
    calls: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class FlowCase:
    """One spec through the whole flow: `spec` are the fields of AttentionSpec, `calls` are cases of `verify`."""

    seed: int
    module: str
    spec: dict[str, Any]
    target: str
    dims: dict[str, int]
    weights: str | None
    calls: tuple[dict[str, int], ...]


seeds = st.integers(0, 2**31 - 1)
machines = st.sampled_from(
    # Twice as often as any other: the machine that a user's artifact would be made for.
    ["native", *(name for name, facts in MACHINES.items() if set(facts[3] if facts else ()) <= host.cpu_features())]
)
cores = st.sampled_from([1, 1, 2, 3, 7])
dtypes = st.sampled_from(["float32", *DTYPES])


def maybe(strategy: st.SearchStrategy[Any], share: int = 2) -> st.SearchStrategy[Any]:
    """None, or in one of `share` cases something."""
    return st.integers(1, share).flatmap(lambda turn: strategy if turn == share else st.none())


@st.composite
def lengths(draw: st.DrawFn, terms: int, same: bool = False, count: int = 3) -> tuple[tuple[int, int, int], ...]:
    """(B, L, S) of some calls; `terms` is H * F, which says how long they may be."""
    calls = []
    for _ in range(draw(st.integers(1, count))):
        B, L = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from(LENGTHS))
        S = L if same else draw(st.sampled_from(LENGTHS))
        while B * L * S * terms > MOST_TERMS:
            B, L, S = 1, (L + 1) // 2, (S + 1) // 2
            L = S if same else L
        calls.append((B, L, S))
    return tuple(calls)


@st.composite
def bands(draw: st.DrawFn) -> tuple[int | None, int | None, str]:
    side = st.one_of(st.none(), st.sampled_from([0, 1, 3, 16, 30, 64, 100, 4096]))
    left, right = draw(st.one_of(st.just((None, 0)), st.tuples(side, side)))
    alignment = draw(st.sampled_from(["top_left", "bottom_right"]))
    return (None, 0, alignment) if left is right is None else (left, right, alignment)


@st.composite
def patterns(draw: st.DrawFn) -> str:
    """A pattern of `masks` as its text."""
    return draw(
        st.one_of(
            st.builds(
                "longformer:window={},global_tokens={}".format,
                st.sampled_from([0, 2, 30, 64]),
                st.sampled_from([0, 1, 3]),
            ),
            st.builds("strided:stride={}".format, st.sampled_from([1, 3, 8, 32])),
            st.builds("blockdiagonal:block={}".format, st.sampled_from([1, 7, 16, 48])),
            st.builds(
                "bigbird:block={},window_blocks={},global_blocks={},random_blocks={},seed={}".format,
                st.sampled_from([1, 5, 16]),
                st.sampled_from([1, 3]),
                st.integers(0, 3),
                st.integers(0, 3),
                st.integers(0, 9),
            ),
        )
    )


@st.composite
def mask_axes(draw: st.DrawFn, keys: str) -> tuple[Any, ...]:
    return (*(draw(st.sampled_from([1, axis, f"mask_{axis}"])) for axis in "BHL"), keys)


@st.composite
def attention_cases(draw: st.DrawFn, *, few_queries: bool = False) -> AttentionCase:
    """`few_queries`: a fixed small L, as the decode kernel wants it."""
    G = draw(st.sampled_from([1, 1, 2, 3]))
    heads = (G * draw(st.sampled_from([1, 1, 2, 3, 4])), G)
    E = draw(st.sampled_from(WIDTHS))
    F = draw(st.one_of(st.just(E), st.sampled_from(WIDTHS)))
    layout = draw(st.sampled_from(["heads", "rows"] if few_queries else ["heads", "rows", "fused"]))
    calls = draw(lengths(heads[0] * F, same=layout == "fused"))
    if few_queries:
        L = draw(st.integers(1, 8))
        calls = tuple((B, L, S) for B, _, S in calls)
    static = None
    if not few_queries:
        what = st.one_of(patterns(), st.sampled_from([0.03, 0.5, 0.97]))
        static = draw(maybe(st.tuples(st.booleans(), what), 4))
    if static is not None and isinstance(static[1], str):
        static = (False, static[1])
    mask = draw(maybe(mask_strategy("L" if layout == "fused" else "S"))) if static is None else None
    fixed = "".join(draw(st.lists(st.sampled_from("BLS"), unique=True, max_size=3)))
    if layout == "fused":
        fixed = fixed.replace("S", "")
    if static is not None or few_queries:
        fixed = "".join(sorted({*fixed, *("L" if few_queries or layout == "fused" else "LS")}))
    return AttentionCase(
        seed=draw(seeds),
        machine=draw(machines),
        cores=draw(cores),
        dtype=draw(dtypes),
        heads=heads,
        widths=(E, F),
        scale=draw(st.sampled_from([None, None, 1.0, 0.01])),
        layout=layout,
        output=draw(st.sampled_from(["rows", "heads"])),
        fixed=fixed,
        band=draw(maybe(bands())),
        mask=mask,
        static=static,
        magnitude=draw(st.sampled_from([1.0, 1.0, 0.0, 8.0, 30.0])),
        poison=draw(st.booleans()),
        extras=tuple(name for name in EXTRAS if draw(st.integers(0, 3)) == 3),
        softcap=draw(st.sampled_from([0.0, 0.0, 0.0, 5.0, 30.0])),
        calls=_where_fixed(calls, fixed, same=layout == "fused"),
    )


def mask_strategy(keys: str) -> st.SearchStrategy[tuple[str, tuple[Any, ...]]]:
    return st.tuples(st.sampled_from(["bool", "additive"]), mask_axes(keys))


def _where_fixed(calls: tuple[tuple[int, int, int], ...], fixed: str, same: bool) -> tuple[tuple[int, int, int], ...]:
    """Every call has the sizes of the first one where the kernel is made for them."""
    first = dict(zip("BLS", calls[0], strict=True))
    axes = fixed + ("S" if same and "L" in fixed else "")
    result = (tuple(first[a] if a in axes else n for a, n in zip("BLS", call, strict=True)) for call in calls)
    return tuple(dict.fromkeys(result))  # type: ignore[arg-type]


@st.composite
def linear_cases(draw: st.DrawFn) -> LinearCase:
    sizes = st.sampled_from([1, 3, 7, 16, 31, 40, 64, 70, 96, 128, 197, 256, 320])
    count = draw(st.sampled_from([1, 1, 2, 3]))
    flags = st.tuples(*[st.booleans()] * count)
    fixed = draw(st.booleans())
    rows = st.tuples(st.sampled_from([1, 1, 2, 3]), st.sampled_from(LENGTHS[:16]))
    calls = draw(st.lists(rows, min_size=1, max_size=3, unique=True))
    return LinearCase(
        seed=draw(seeds),
        machine=draw(machines),
        cores=draw(cores),
        dtype=draw(dtypes),
        int8=draw(st.sampled_from([False, False, True])),
        in_features=draw(sizes),
        widths=draw(st.tuples(*[sizes] * count)),
        biased=draw(flags),
        transposed=draw(flags),
        padding=draw(st.sampled_from([0, 0, 3, 16])),
        fixed=fixed,
        calls=tuple(calls[:1] if fixed else calls),
    )


KERNEL_SHARES = (("attention", 9), ("decode", 6), ("linear", 5))
"""Of twenty kernels."""


def kernel_cases() -> st.SearchStrategy[AttentionCase | LinearCase]:
    of_kind = {
        "attention": attention_cases(),
        "decode": attention_cases(few_queries=True),
        "linear": linear_cases(),
    }
    turns = [kind for kind, share in KERNEL_SHARES for _ in range(share)]
    return st.sampled_from(turns).flatmap(of_kind.__getitem__)


@st.composite
def flow_cases(draw: st.DrawFn) -> FlowCase:
    """A spec, the dims it is compiled for, and calls: everything that `compile` and `verify` take."""
    module = draw(st.sampled_from(["MultiHeadAttention", "MultiHeadAttention", "ScaledDotProductAttention"]))
    spec = draw(specs())
    lengths_apart = "kv_embed_dim" in spec or module == "ScaledDotProductAttention"
    if module == "ScaledDotProductAttention":
        spec.pop("kv_embed_dim", None)
    if lengths_apart and spec.get("causal") is True:
        spec["causal"] = "bottom_right"
    dims: dict[str, int] = {}
    axes = "BLS" if lengths_apart else "BL"
    for axis in axes:
        if draw(st.integers(0, 4)) == 0 or (axis != "B" and "static_mask" in spec):
            dims[axis] = draw(st.sampled_from([1, 2, 3] if axis == "B" else LENGTHS[:17]))
    calls = []
    for i in range(draw(st.integers(1, 3))):
        call = {axis: draw(st.sampled_from([1, 2, 3] if axis == "B" else LENGTHS[:17])) for axis in axes}
        call = {axis: size for axis, size in call.items() if axis not in dims}
        if spec.get("mask") in ("bool", "additive"):
            call |= draw(mask_sizes(spec["num_heads"], {**call, **dims}, dims, i))
        calls.append(call)
    int8 = module == "MultiHeadAttention" and draw(st.integers(0, 5)) == 0
    return FlowCase(
        seed=draw(st.integers(0, 9999)),
        module=module,
        spec=spec,
        target=draw(st.sampled_from(["native", "native", "x86-64-v3"])),
        dims=dims,
        weights="int8" if int8 else None,
        calls=tuple(calls),
    )


@st.composite
def mask_sizes(draw: st.DrawFn, heads: int, sizes: dict[str, int], dims: dict[str, int], turn: int) -> dict[str, int]:
    """Of the axes of a mask that broadcasts: full or 1, but for the keys, which are always full."""
    chosen = {"mask_B": draw(st.sampled_from([1, sizes["B"]])), "mask_L": draw(st.sampled_from([1, sizes["L"]]))}
    if heads > 1:
        chosen["mask_H"] = draw(st.sampled_from([1, heads]))
    for axis in "BL":  # fixed at 1 there is nothing to choose
        if dims.get(axis) == 1:
            chosen.pop(f"mask_{axis}")
    return chosen


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """The fields of an AttentionSpec that differ from their defaults."""
    G = draw(st.sampled_from([1, 1, 2, 3]))
    H = G * draw(st.sampled_from([1, 1, 2, 4]))
    E = draw(st.sampled_from([1, 5, 8, 16, 24, 32, 40, 64]))
    spec: dict[str, Any] = {"embed_dim": draw(st.sampled_from([H * E, 24, 61])), "num_heads": H, "head_dim": E}
    if G != H:
        spec["num_kv_heads"] = G
    optional: dict[str, st.SearchStrategy[Any]] = {
        "v_head_dim": st.sampled_from([3, 16, 48]),
        "kv_embed_dim": st.sampled_from([16, 33]),
        "bias": st.just(False),
        "dtype": st.sampled_from(["bfloat16", "float16"]),
        "causal": st.sampled_from([True, "top_left", "bottom_right"]),
        "window": st.tuples(*[st.sampled_from([-1, 0, 2, 13, 64])] * 2),
        "mask": st.sampled_from(["bool", "additive", "key_padding"]),
        "scale": st.sampled_from([0.01, 0.3, 1.0]),
        "softcap": st.sampled_from([3.0, 30.0]),
        "rope": st.builds(dict, st.sampled_from(SCALED), interleaved=st.booleans(), max_length=st.just(1024)),
        "alibi": st.just(True),
        "sinks": st.just(True),
        "static_mask": patterns().map(_fields),
    }
    spec |= {name: draw(values) for name, values in optional.items() if draw(st.integers(0, 3)) == 3}
    if "static_mask" in spec:
        spec.pop("mask", None)
    if "rope" in spec and ("kv_embed_dim" in spec or E % 2):
        spec.pop("rope")
    if "kv_embed_dim" in spec and spec.get("causal") is True:
        spec["causal"] = "top_left"
    return spec


def _fields(text: str) -> dict[str, Any]:
    """A pattern as the plain values that a spec takes."""
    kind, _, rest = text.partition(":")
    return {"kind": kind, **{name: int(value) for name, _, value in (part.partition("=") for part in rest.split(","))}}
