"""How hypothesis draws the cases of `fuzz.cases` that are one kernel.

Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from hypothesis import strategies as st
from support import this_cpu
from support.kernel_runs import vector_machine
from support.product_ops import ORDERS

from fuzz.cases import MACHINES, AttentionCase, BytesCase, InsideCase, LinearCase, ProductCase
from fuzz.numbers import CLASSES
from mhsa_compile.hardware import host
from mhsa_compile.spec.float32_products import Float32Request

EXTRAS = ("lengths", "sinks", "slopes")
DTYPES = ("float32", "bfloat16", "float16")
WIDTHS = (1, 2, 3, 5, 7, 8, 15, 16, 17, 24, 31, 32, 40, 47, 48, 64, 80, 96, 128, 256)
"""Widths of a head: powers of two, their neighbours, and some that fill no vector."""
LENGTHS = (1, 2, 3, 5, 7, 13, 16, 17, 31, 33, 47, 61, 64, 67, 97, 128, 131, 197, 257, 389, 521)
MOST_TERMS = 2_000_000
"""Products of a weight and a value in one call: what a reference computes in some ten milliseconds."""


def drawn(root: Path = host.ROOT) -> list[str]:
    """The names of MACHINES whose code this CPU runs; `split512` only where it is no `avx512`, whose place it takes."""
    runs = {
        name: facts is None or this_cpu.lacking(vector_machine(*facts).tvm_config(), root) is None
        for name, facts in MACHINES.items()
    }
    runs["split512"] &= not runs["avx512"]
    # Twice as often as any other: the machine that a user's artifact would be made for.
    return ["native", *(name for name, here in runs.items() if here)]


seeds = st.integers(0, 2**31 - 1)
machines = st.sampled_from(drawn())
cores = st.sampled_from([1, 1, 2, 3, 7])
dtypes = st.sampled_from(["float32", *DTYPES])
products = st.sampled_from(get_args(Float32Request))
inputs = st.lists(st.sampled_from(CLASSES), min_size=1, max_size=3, unique=True).map(tuple)


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
        products=draw(products),
        inputs=draw(inputs),
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
        products=draw(products),
        inputs=draw(inputs),
        weights=draw(st.sampled_from([*CLASSES[:-1], "normal", "normal"])),
    )


@st.composite
def product_cases(draw: st.DrawFn) -> ProductCase:
    sizes = (1, 2, 3, 5, 16, 17, 31, 32, 33, 40, 64, 70, 96, 128, 197, 256, 385)
    small, size = st.sampled_from([1, 1, 2, 3]), st.sampled_from(sizes)
    fixed = "".join(draw(st.lists(st.sampled_from("bhmkn"), unique=True)))
    first, *others = draw(st.lists(st.tuples(small, small, size, size, size), min_size=1, max_size=3))
    at = [axis in fixed for axis in "bhmkn"]
    others = [tuple(a if is_fixed else b for a, b, is_fixed in zip(first, call, at, strict=True)) for call in others]
    dtype = draw(dtypes)
    return ProductCase(
        seed=draw(seeds), machine=draw(machines), cores=draw(cores), dtype=dtype,
        result=draw(st.sampled_from([dtype, dtype, "float32"])), order=draw(st.sampled_from([*ORDERS])), fixed=fixed,
        calls=tuple(dict.fromkeys((first, *others))), products=draw(products), inputs=draw(inputs),
    )  # fmt: skip


@st.composite
def byte_cases(draw: st.DrawFn) -> BytesCase:
    given = draw(linear_cases())
    kinds = st.sampled_from(["int8", "uint8"])
    return BytesCase(
        given.seed, given.machine, given.cores, draw(kinds), draw(st.tuples(*[kinds] * len(given.widths))),
        given.in_features, given.widths, draw(st.booleans()), given.padding, given.fixed, given.calls,
    )  # fmt: skip


@st.composite
def inside_cases(draw: st.DrawFn) -> InsideCase:
    given = draw(attention_cases())
    if draw(st.booleans()):
        return InsideCase(given, (draw(weights_words(given.heads[0], WIDTHS)),))
    words = ("lse", "entropy", f"top_k:{draw(st.sampled_from([1, 2, 3, 5, 8, 17, 40]))}")
    chosen = draw(st.lists(st.sampled_from(words), min_size=1, unique=True))
    return InsideCase(given, tuple(chosen))


@st.composite
def weights_words(draw: st.DrawFn, heads: int, rows: tuple[int, ...]) -> str:
    """Some of the heads and of these rows, from the start or from the end; or all of either."""
    chosen = {}
    if draw(st.booleans()):
        chosen["heads"] = draw(st.lists(st.integers(0, heads - 1), min_size=1, unique=True))
    if draw(st.booleans()):
        both = [0, -1, *rows, *(-row for row in rows if row > 1)]
        chosen["rows"] = draw(st.lists(st.sampled_from(both), min_size=1, max_size=5, unique=True))
    said = ",".join(f"{axis}={','.join(map(str, numbers))}" for axis, numbers in chosen.items())
    return f"weights:{said}" if said else "weights"


KERNEL_SHARES = (("attention", 7), ("decode", 5), ("linear", 4), ("inside", 4), ("product", 2), ("bytes", 1))
"""How many of 23 kernels are of each kind."""
TILE_SHARES = (("attention", 6), ("linear", 11), ("product", 8), ("bytes", 5))
"""The same for a machine with tiles: decoding and what looks into a softmax have none of them."""


def kernel_cases(
    kind: str | None = None, shares: tuple[tuple[str, int], ...] = KERNEL_SHARES
) -> st.SearchStrategy[Any]:
    """Of one kind of KERNEL_SHARES, or of all that `shares` has."""
    of_kind = {
        "attention": attention_cases(),
        "decode": attention_cases(few_queries=True),
        "linear": linear_cases(),
        "inside": inside_cases(),
        "product": product_cases(),
        "bytes": byte_cases(),
    }
    if kind is not None:
        return of_kind[kind]
    turns = [kind for kind, share in shares for _ in range(share)]
    return st.sampled_from(turns).flatmap(of_kind.__getitem__)
