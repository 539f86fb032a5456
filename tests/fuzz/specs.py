"""How hypothesis draws the cases of `fuzz.cases` that are specs, through the whole flow.

Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, C capacity of a cache.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from fuzz.cases import DecodeCase, FlowCase
from fuzz.strategies import LENGTHS, patterns, weights_words

SCALED = ({}, *({"scaling": kind, "factor": 5.0, "original_max_length": 64} for kind in ("llama3", "yarn")))
"""What a rope may have beside the rest."""


def flow_cases() -> st.SearchStrategy[FlowCase | DecodeCase]:
    """Cases of the whole flow, of which one in six decodes."""
    return st.integers(0, 5).flatmap(lambda turn: decode_cases() if turn == 5 else verified_cases())


@st.composite
def verified_cases(draw: st.DrawFn) -> FlowCase:
    """A spec, the dims it is compiled for, and calls: everything that `compile` and `verify` take."""
    spec = draw(specs())
    module = draw(st.sampled_from(["MultiHeadAttention", "MultiHeadAttention", "ScaledDotProductAttention"]))
    if spec.keys() & {"kv_cache", "rope"} or "heads" in spec.get("outputs", ()):
        module = "MultiHeadAttention"
    lengths_apart = "kv_embed_dim" in spec or module == "ScaledDotProductAttention"
    if module == "ScaledDotProductAttention":
        spec.pop("kv_embed_dim", None)
        spec.pop("v_embed_dim", None)
    if lengths_apart and spec.get("causal") is True:
        spec["causal"] = "bottom_right"
    if "kv_cache" in spec:
        formats = ["int8"] if "dtype" in spec else ["int8", "int8", "bfloat16", "float16"]
        spec["kv_cache"] = draw(st.sampled_from([True, *({"dtype": name} for name in formats)]))
    sized = cached_sizes() if "kv_cache" in spec else call_sizes(spec, "BLS" if lengths_apart else "BL")
    dims, calls = draw(sized)
    int8 = module == "MultiHeadAttention" and draw(st.integers(0, 5)) == 0
    return FlowCase(
        seed=draw(st.integers(0, 9999)),
        module=module,
        spec=spec,
        target=draw(targets),
        dims=dims,
        weights="int8" if int8 else None,
        calls=calls,
    )


targets = st.sampled_from(["native", "native", "x86-64-v3"])
Sizes = tuple[dict[str, int], tuple[dict[str, int], ...]]
"""The dims that are fixed, and of each call the others."""


@st.composite
def call_sizes(draw: st.DrawFn, spec: dict[str, Any], axes: str) -> Sizes:
    dims: dict[str, int] = {}
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
    return dims, tuple(calls)


@st.composite
def cached_sizes(draw: st.DrawFn) -> Sizes:
    """Sizes of calls with a cache, which has room for more than the call, or for nothing else. Every other time the
    calls are of a fixed number of positions, a few."""
    sizes = {"B": st.sampled_from([1, 2, 3]), "L": st.sampled_from(LENGTHS[:17]), "C": st.sampled_from(LENGTHS[:19])}
    dims = {"L": draw(st.integers(1, 8))} if draw(st.booleans()) else {}
    dims |= {axis: draw(sizes[axis]) for axis in "BC" if draw(st.integers(0, 4)) == 0}
    dims |= {"C": max(dims["C"], dims.get("L", 1))} if "C" in dims else {}
    calls = []
    for _ in range(draw(st.integers(1, 3))):
        call = {axis: draw(size) for axis, size in sizes.items()} | dims
        call["L"] = min(call["L"], call["C"]) if "C" in dims else call["L"]
        call["C"] = max(call["C"], call["L"])
        calls.append({axis: size for axis, size in call.items() if axis not in dims})
    return dims, tuple(calls)


@st.composite
def decode_cases(draw: st.DrawFn) -> DecodeCase:
    """A spec that can have a cache, and a look at all but the weights: those have the length of the cache."""
    spec = draw(specs(cached=st.just(True)))
    spec = {name: value for name, value in spec.items() if name not in ("kv_cache", "causal")}
    if "outputs" in spec:
        kept = [word for word in spec["outputs"] if not word.startswith(("y", "weights"))]
        spec["outputs"] = ("y", *kept)
    return DecodeCase(
        seed=draw(st.integers(0, 9999)),
        spec=spec,
        target=draw(targets),
        prompts=tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))),
        steps=tuple(draw(st.lists(st.sampled_from([1, 1, 1, 2, 7]), min_size=1, max_size=6))),
        spare=draw(st.sampled_from([0, 0, 1, 100])),
    )


@st.composite
def mask_sizes(draw: st.DrawFn, heads: int, sizes: dict[str, int], dims: dict[str, int], turn: int) -> dict[str, int]:
    """The sizes of the axes of a mask that broadcasts: full or 1, but for the keys, which are always full."""
    chosen = {"mask_B": draw(st.sampled_from([1, sizes["B"]])), "mask_L": draw(st.sampled_from([1, sizes["L"]]))}
    if heads > 1:
        chosen["mask_H"] = draw(st.sampled_from([1, heads]))
    for axis in "BL":  # fixed at 1 there is nothing to choose
        if dims.get(axis) == 1:
            chosen.pop(f"mask_{axis}")
    return chosen


maybe_cached = st.integers(0, 5).map(lambda turn: turn == 5)


@st.composite
def specs(draw: st.DrawFn, cached: st.SearchStrategy[bool] = maybe_cached) -> dict[str, Any]:
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
        "v_embed_dim": st.sampled_from([11, 33]),
        "bias": st.just(False),
        "dtype": st.sampled_from(["bfloat16", "float16"]),
        "causal": st.sampled_from([True, "top_left", "bottom_right"]),
        "window": st.tuples(*[st.sampled_from([-1, 0, 2, 13, 64])] * 2),
        "mask": st.sampled_from(["bool", "additive", "key_padding"]),
        "scale": st.sampled_from([0.01, 0.3, 1.0]),
        "softcap": st.sampled_from([3.0, 30.0]),
        "softclamp": st.sampled_from([2.0, 30.0]),
        "rope": st.builds(dict, st.sampled_from(SCALED), interleaved=st.booleans(), max_length=st.just(1024)),
        "alibi": st.just(True),
        "sinks": st.just(True),
        "static_mask": patterns().map(_fields),
        "outputs": outputs(H),
    }
    spec |= {name: draw(values) for name, values in optional.items() if draw(st.integers(0, 3)) == 3}
    if "kv_embed_dim" not in spec:
        spec.pop("v_embed_dim", None)
    if "static_mask" in spec:
        spec.pop("mask", None)
    if "rope" in spec and ("kv_embed_dim" in spec or E % 2):
        spec.pop("rope")
    if "kv_embed_dim" in spec and spec.get("causal") is True:
        spec["causal"] = "top_left"
    if draw(cached):
        without = ("kv_embed_dim", "v_embed_dim", "mask", "static_mask")
        spec = {name: value for name, value in spec.items() if name not in without}
        spec |= {"kv_cache": True, "causal": True}
    return spec


@st.composite
def outputs(draw: st.DrawFn, heads: int) -> tuple[str, ...]:
    """Outputs of an attention, y among them, in any order."""
    words = ("y", "heads", "lse", "entropy", draw(st.sampled_from(["top_k:1", "top_k:4", "top_k:70"])))
    words = (*words, draw(weights_words(heads, (3, 40))))
    chosen = draw(st.lists(st.sampled_from(words[1:]), min_size=1, unique=True))
    return tuple(draw(st.permutations(["y", *chosen])))


def _fields(text: str) -> dict[str, Any]:
    """A pattern as the plain values that a spec takes."""
    kind, _, rest = text.partition(":")
    return {"kind": kind, **{name: int(value) for name, _, value in (part.partition("=") for part in rest.split(","))}}
