"""AttentionSpec: defaults, refusals, round trips, FLOPs."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import PARITY

from mhsa_compile import masks
from mhsa_compile.bench.workloads import WORKLOADS
from mhsa_compile.errors import InputError, MhsaError, SpecError
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.checks import resolve_causal
from mhsa_compile.spec.position_encoding import Rope, parse_rope
from mhsa_compile.spec.window import WindowSpec

SPECS = [*(case.spec for case in PARITY), *(workload.spec for workload in WORKLOADS)]
LLAMA3 = {"scaling": "llama3", "factor": 8, "original_max_length": 64}
YARN = {"scaling": "yarn", "factor": 8, "original_max_length": 64}


def test_defaults_are_resolved() -> None:
    spec = AttentionSpec(embed_dim=512, num_heads=8)
    assert (spec.num_kv_heads, spec.head_dim, spec.v_head_dim) == (8, 64, 64)
    assert (spec.kv_embed_dim, spec.is_cross, spec.source_dim) == (None, False, 512)
    assert AttentionSpec(embed_dim=6, num_heads=4, head_dim=5).v_head_dim == 5
    assert AttentionSpec(embed_dim=8, num_heads=2, kv_embed_dim=8).is_cross


def test_what_keys_and_values_are_projected_from() -> None:
    def sources(**fields: int) -> tuple[object, ...]:
        spec = AttentionSpec(embed_dim=8, num_heads=2, **fields)
        return spec.sources, spec.source_dim, spec.v_source_dim

    assert sources() == (("x", "x"), 8, 8)
    assert sources(kv_embed_dim=5) == (("context", "context"), 5, 5)
    assert sources(kv_embed_dim=5, v_embed_dim=3) == (("key", "value"), 5, 3)
    assert sources(kv_embed_dim=8, v_embed_dim=8) == (("key", "value"), 8, 8)
    spec = AttentionSpec(embed_dim=8, num_heads=2, kv_embed_dim=5, v_embed_dim=3, num_kv_heads=1, v_head_dim=7)
    assert spec.projection_flops(2, 11, 13) == 2 * 2 * (11 * 8 * (8 + 2 * 7) + 13 * (5 * 4 + 3 * 7))
    assert AttentionSpec.from_json(spec.to_json()) == spec == AttentionSpec.from_toml(spec.to_toml())
    assert '"v_embed_dim"' not in AttentionSpec(embed_dim=8, num_heads=2, kv_embed_dim=5).to_json()


@pytest.mark.parametrize(
    ("fields", "named", "expected"),
    [
        ({"embed_dim": 0}, "embed_dim", "a positive integer"),
        ({"embed_dim": 6.0}, "embed_dim", "a positive integer"),
        ({"num_heads": True}, "num_heads", "a positive integer"),
        ({"embed_dim": 10}, "embed_dim", "a multiple of num_heads = 4"),
        ({"num_kv_heads": 3}, "num_kv_heads", "a divisor of num_heads = 4"),
        ({"num_kv_heads": 8}, "num_kv_heads", "a divisor of num_heads = 4"),
        ({"head_dim": -1}, "head_dim", "a positive integer"),
        ({"kv_embed_dim": 0}, "kv_embed_dim", "a positive integer"),
        ({"kv_embed_dim": 8, "v_embed_dim": 0}, "v_embed_dim", "a positive integer"),
        ({"v_embed_dim": 64}, "v_embed_dim", "None without kv_embed_dim"),
        ({"rope": True, "kv_embed_dim": 64, "v_embed_dim": 64}, "rope", "self-attention"),
        ({"kv_cache": True, "causal": True, "kv_embed_dim": 64, "v_embed_dim": 64}, "kv_cache", "self-attention"),
        ({"bias": 1}, "bias", "true or false"),
        ({"dtype": "bfloat"}, "dtype", '"bfloat16"'),
        ({"dtype": "float64"}, "dtype", '"float32"'),
        ({"causal": "bottom-right"}, "causal", '"bottom_right"'),
        ({"causal": True, "kv_embed_dim": 8}, "causal", '"top_left" or "bottom_right"'),
        ({"window": 256}, "window", "(left, right)"),
        ({"window": (3,)}, "window", "(left, right)"),
        ({"window": (3, -2)}, "window", "-1 for unbounded"),
        ({"window": (3.0, 0)}, "window", "(left, right)"),
        ({"window": (True, 0)}, "window", "(left, right)"),
        ({"static_mask": "longformer"}, "static_mask", "a pattern of mhsa_compile.masks"),
        ({"static_mask": {"kind": "longformers", "window": 4}}, "static_mask", "longformer, bigbird"),
        ({"static_mask": {"kind": "strided"}}, "strided", "the field 'stride'"),
        ({"static_mask": {"kind": "strided", "strides": 4}}, "strided", "fields among stride"),
        ({"static_mask": masks.Strided(stride=4), "mask": "bool"}, "mask", "one mask"),
        ({"mask": "boolean"}, "mask", '"bool"'),
        ({"scale": float("nan")}, "scale", "a positive finite number"),
        ({"scale": "1"}, "scale", "a positive finite number"),
        ({"softcap": 0}, "softcap", "a positive finite number, or None for no cap"),
        ({"softcap": -3.0}, "softcap", "a positive finite number"),
        ({"scale": 1e39}, "scale", "a positive number that float32 holds"),
        ({"scale": 10**400}, "scale", "a positive number that float32 holds"),
        ({"softcap": 1e-46}, "softcap", "a positive number that float32 holds"),
        ({"softcap": 1e-40}, "softcap", "a positive number that float32 holds"),
        ({"rope": {"theta": 1e39}}, "rope.theta", "a positive number that float32 holds"),
        ({"num_kv_heads": 10**5000}, "num_kv_heads", "at most 2147483647"),
        ({"window": (10**5000, 0)}, "window", "(left, right)"),
        ({"static_mask": {"kind": "strided", "stride": 2**40}}, "strided.stride", "at most 2147483647"),
        ({"alibi": 8}, "alibi", "true or false"),
        ({"sinks": None}, "sinks", "true or false"),
        ({"rope": 10000.0}, "rope", "a Rope"),
        ({"rope": {"base": 10000}}, "rope", "fields among theta, rotary_dim"),
        ({"rope": {"theta": 0}}, "rope.theta", "a positive finite number"),
        ({"rope": {"factor": float("inf")}}, "rope.factor", "a positive finite number"),
        ({"rope": {"interleaved": 1}}, "rope.interleaved", "true or false"),
        ({"rope": {"max_length": 0}}, "rope.max_length", "a positive integer"),
        ({"rope": {"rotary_dim": 0}}, "rope.rotary_dim", "a positive integer"),
        ({"rope": {"rotary_dim": 7}}, "rope.rotary_dim", "an even number of dims, at most head_dim = 16"),
        ({"rope": {"rotary_dim": 18}}, "rope.rotary_dim", "at most head_dim = 16"),
        ({"rope": True, "head_dim": 15}, "rope.rotary_dim", "an even number"),
        ({"rope": {"scaling": "llama"}}, "rope.scaling", '"linear", "llama3", "yarn"'),
        ({"rope": {"scaling": "yarn"}}, "rope.original_max_length", "a positive integer"),
        ({"rope": {"beta_fast": 9}}, "rope.beta_fast", 'a scaling that reads it, "yarn"'),
        ({"rope": LLAMA3 | {"low_freq_factor": 4}}, "rope.high_freq_factor", "more than low_freq_factor = 4.0"),
        ({"rope": YARN | {"theta": 1}}, "rope.theta", "more than 1"),
        ({"rope": YARN | {"truncate": 1}}, "rope.truncate", "true or false"),
        ({"rope": YARN | {"attention_factor": 0}}, "rope.attention_factor", "a positive finite number"),
        ({"rope": True, "kv_embed_dim": 8}, "rope", "self-attention"),
        ({"kv_cache": 1}, "kv_cache", "true, false or a format"),
        ({"kv_cache": "int8", "causal": True}, "kv_cache", "true, false or a format"),
        ({"kv_cache": {"bits": 8}, "causal": True}, "kv_cache", "the field dtype alone"),
        ({"kv_cache": {"dtype": "int4"}, "causal": True}, "kv_cache.dtype", '"int8"'),
        ({"kv_cache": {"dtype": "int8"}}, "causal", 'True or "bottom_right" with kv_cache'),
        ({"kv_cache": {"dtype": "float32"}, "causal": True, "dtype": "bfloat16"}, "kv_cache.dtype", "fewer bits: int8"),
        ({"kv_cache": {"dtype": "bfloat16"}, "causal": True, "dtype": "float16"}, "kv_cache.dtype", "fewer bits: int8"),
        ({"kv_cache": True}, "causal", 'True or "bottom_right" with kv_cache'),
        ({"kv_cache": True, "causal": "top_left"}, "causal", 'True or "bottom_right" with kv_cache'),
        ({"kv_cache": True, "causal": "bottom"}, "causal", '"bottom_right"'),
        ({"kv_cache": True, "causal": True, "kv_embed_dim": 8}, "kv_cache", "self-attention"),
        ({"kv_cache": True, "causal": True, "mask": "bool"}, "mask", "None with kv_cache"),
        ({"kv_cache": True, "causal": True, "static_mask": masks.Strided(stride=4)}, "static_mask", "None with"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, object], named: str, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        AttentionSpec(**{"embed_dim": 64, "num_heads": 4, **fields})
    assert isinstance(caught.value, MhsaError)
    assert caught.value.argument == named
    assert expected in caught.value.expected


@pytest.mark.parametrize(
    ("fields", "proposal"),
    [
        ({"causal": "yes"}, "Did you mean True?"),
        ({"causal": "False"}, "Did you mean False?"),
        ({"causal": "top-left"}, "Did you mean 'top_left'?"),
        ({"causal": "diagonal"}, ""),
        ({"kv_cache": True, "causal": "yes"}, "Did you mean True?"),
        ({"bias": "no"}, "Did you mean False?"),
        ({"dtype": "fp32"}, "Did you mean 'float32'?"),
        ({"dtype": "torch.bfloat16"}, "Did you mean 'bfloat16'?"),
        ({"mask": "boolean"}, "Did you mean 'bool'?"),
        ({"mask": "causal"}, "Did you mean causal=True?"),
        ({"mask": "hidden"}, ""),
        ({"n_heads": 8}, "Did you mean 'num_heads'?"),
        ({"d_model": 8}, f"The fields are {', '.join(AttentionSpec.__struct_fields__)}."),
    ],
    ids=str,
)
def test_refusals_say_what_was_probably_meant(fields: dict[str, object], proposal: str) -> None:
    with pytest.raises(SpecError) as caught:
        AttentionSpec(**{"embed_dim": 64, "num_heads": 4, **fields})
    assert caught.value.next_step == proposal


def test_a_spec_without_a_field_it_needs_says_which() -> None:
    with pytest.raises(SpecError, match="AttentionSpec: expected the field 'num_heads', got none"):
        AttentionSpec(embed_dim=64)


def test_an_array_is_a_constant_mask() -> None:
    array = np.random.default_rng(0).random((7, 5)) < 0.5
    spec = AttentionSpec(embed_dim=64, num_heads=4, static_mask=array)
    for again in (AttentionSpec.from_json(spec.to_json()), AttentionSpec.from_toml(spec.to_toml())):
        assert again == spec and again.static_mask is not None
        assert np.array_equal(again.static_mask.array(7, 5), array)
        assert np.array_equal(again.static_mask.visible([2, 3], 7, 5), array[2:4])
        with pytest.raises(InputError, match=r"dims: expected the lengths of the mask's array, \(7, 5\)"):
            again.static_mask.array(5, 7)
    spoiled = {"kind": "arraymask", "shape": [7, 5], "bits": "no zlib"}
    with pytest.raises(SpecError, match=r"arraymask\.bits"):
        AttentionSpec(embed_dim=64, num_heads=4, static_mask=spoiled).static_mask.array(7, 5)


class Wider(masks.Longformer, frozen=True):
    """What a user might write."""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            np.ones((2, 7, 5), np.bool_),
            r"a bool array \(L, S\), True takes part, got bool of shape \(2, 7, 5\)",
        ),
        (Wider(window=4), r"got Wider, a class of your own\. An artifact stores a pattern by its fields, and no code"),
    ],
    ids=["array", "own class"],
)
def test_masks_that_no_pattern_describes_are_refused_at_once(given: object, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        AttentionSpec(embed_dim=64, num_heads=4, static_mask=given)


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_round_trips(spec: AttentionSpec) -> None:
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert AttentionSpec.from_toml(spec.to_toml()) == spec


@pytest.mark.parametrize("read", [AttentionSpec.from_json, AttentionSpec.from_toml])
def test_text_that_is_no_spec(read) -> None:
    with pytest.raises(SpecError, match=r"expected (JSON|TOML)"):
        read("{ not = a spec")
    with pytest.raises(SpecError, match="a JSON object"):
        AttentionSpec.from_json("[1, 2]")


def test_unknown_and_missing_fields() -> None:
    with pytest.raises(SpecError, match="Did you mean 'num_heads'"):
        AttentionSpec.from_toml("embed_dim = 64\nnum_head = 4\n")
    with pytest.raises(SpecError, match="num_heads"):
        AttentionSpec.from_json('{"embed_dim": 64}')


def test_causal_true_needs_one_length() -> None:
    assert AttentionSpec(embed_dim=8, num_heads=2, causal=True).causal == "top_left"
    assert resolve_causal(True, same_length=True) == "top_left"
    assert resolve_causal(False, same_length=False) is None
    assert resolve_causal("bottom_right", same_length=False) == "bottom_right"
    with pytest.raises(SpecError, match="FlashAttention"):
        resolve_causal(True, same_length=False)


@given(L=st.integers(1, 40), S=st.integers(1, 40), alignment=st.sampled_from(["top_left", "bottom_right"]))
def test_causal_flops_count_visible_pairs(L: int, S: int, alignment: str) -> None:
    spec = AttentionSpec(embed_dim=30, num_heads=3, v_head_dim=7, kv_embed_dim=5, causal=alignment)
    assert spec.attention_flops(2, L, S) == 2 * 2 * 3 * int(masks.causal(L, S, alignment).sum()) * (10 + 7)


@given(
    L=st.integers(1, 40),
    S=st.integers(1, 40),
    causal=st.sampled_from([None, "top_left", "bottom_right"]),
    left=st.integers(-1, 50),
    right=st.integers(-1, 50),
    pattern=st.sampled_from([None, masks.Longformer(window=4, global_tokens=1), masks.Strided(stride=3)]),
)
def test_flops_count_what_is_visible(
    L: int, S: int, causal: str | None, left: int, right: int, pattern: masks.Pattern | None
) -> None:
    spec = AttentionSpec(
        embed_dim=4, num_heads=2, kv_embed_dim=5, causal=causal, window=(left, right), static_mask=pattern
    )
    visible = masks.window(L, S, left, right, causal or "top_left")
    visible &= masks.causal(L, S, causal) if causal else True
    visible &= pattern.array(L, S) if pattern else True
    assert spec.attention_flops(1, L, S) == 2 * 2 * int(visible.sum()) * (2 + 2)


def test_flops_of_long_sparse_attention_are_counted_in_pieces() -> None:
    """More rows than are looked at together."""
    spec = AttentionSpec(embed_dim=4, num_heads=2, causal=True, static_mask=masks.BigBird(block=16))
    visible = masks.BigBird(block=16).array(1300, 1300) & masks.causal(1300, 1300, "top_left")
    assert spec.attention_flops(1, 1300, 1300) == 2 * 2 * int(visible.sum()) * (2 + 2)


def test_windows_and_causality_resolve_to_one_band() -> None:
    def band(**fields: object) -> object:
        return AttentionSpec(embed_dim=8, num_heads=2, kv_embed_dim=8, **fields).band

    assert band() is None
    assert band(window=(-1, -1)) is None
    assert band(window=[3, -1]) == WindowSpec(3, None)
    assert band(causal="bottom_right") == WindowSpec(None, 0, "bottom_right")
    assert band(causal="bottom_right", window=(3, 4)) == WindowSpec(3, 0, "bottom_right")


def test_a_pattern_in_text() -> None:
    spec = AttentionSpec(embed_dim=8, num_heads=2, window=(3, 0), static_mask={"kind": "documents", "lengths": [3, 2]})
    assert spec.static_mask == masks.Documents(lengths=(3, 2))
    assert 'static_mask = { kind = "documents", lengths = [3, 2] }' in spec.to_toml()
    assert "window = [3, 0]" in spec.to_toml()
    assert AttentionSpec.from_toml(spec.to_toml()) == AttentionSpec.from_json(spec.to_json()) == spec
    assert hash(spec) == hash(AttentionSpec.from_json(spec.to_json()))


POSITIONS = (
    {"softcap": 30},
    {"rope": True},
    {"rope": {"theta": 5e5, "rotary_dim": 10, "interleaved": True, "factor": 4, "max_length": 131072}},
    {"rope": LLAMA3},
    {"rope": YARN | {"truncate": False}},
    {"alibi": True, "sinks": True},
    {"kv_cache": True, "causal": True, "rope": Rope(theta=1e6), "window": (64, 0)},
    {"kv_cache": {"dtype": "int8"}, "causal": True},
)


@pytest.mark.parametrize("fields", POSITIONS, ids=str)
def test_positions_caps_sinks_and_caches_round_trip(fields: dict[str, object]) -> None:
    spec = AttentionSpec(embed_dim=64, num_heads=4, **fields)
    assert AttentionSpec.from_json(spec.to_json()) == AttentionSpec.from_toml(spec.to_toml()) == spec
    assert hash(spec) == hash(AttentionSpec.from_json(spec.to_json()))


def test_positions_resolve() -> None:
    spec = AttentionSpec(embed_dim=64, num_heads=4, kv_cache=True, causal=True, rope=True, softcap=30)
    assert (spec.causal, spec.softcap, spec.rope) == ("bottom_right", 30.0, Rope(rotary_dim=16))
    assert AttentionSpec(embed_dim=64, num_heads=4, rope=False).rope is None
    assert spec.band == WindowSpec(None, 0, "bottom_right")


def test_ropes_on_a_command_line() -> None:
    assert parse_rope("default") == Rope()
    assert parse_rope("theta=5e5,interleaved=true,max_length=32") == Rope(theta=5e5, interleaved=True, max_length=32)
    assert parse_rope("scaling=llama3,factor=8,original_max_length=64").high_freq_factor == 4.0
    assert parse_rope("scaling=yarn,factor=8,original_max_length=64,truncate=false").truncate is False
    for text in ("theta", "theta=", "theta=big", "thetas=3", "scaling=ntk"):
        with pytest.raises(SpecError, match="rope"):
            parse_rope(text)


def test_rope_s_angles() -> None:
    rope = Rope(theta=100.0, factor=2.0, max_length=7).resolved(head_dim=6)
    cos, sin = rope.tables()
    assert cos.shape == sin.shape == (7, 3)
    for position in range(7):
        for pair in range(3):
            angle = position / 2 * 100.0 ** (-2 * pair / 6)
            assert cos[position, pair] == pytest.approx(math.cos(angle), abs=1e-15)
            assert sin[position, pair] == pytest.approx(math.sin(angle), abs=1e-15)


def test_flops_of_a_textbook_block() -> None:
    spec = AttentionSpec(embed_dim=512, num_heads=8)
    assert spec.projection_flops(1, 128, 128) == 4 * 2 * 128 * 512 * 512
    assert spec.attention_flops(1, 128, 128) == 2 * 2 * 8 * 128 * 128 * 64


def test_spec_and_masks_import_no_framework() -> None:
    code = "import sys, mhsa_compile as m; m.AttentionSpec, m.masks; print({'torch', 'onnx', 'tvm'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
