"""The PyTorch modules: PyTorch's own results where both mean the same, and the contract where they do not."""

from __future__ import annotations

import copy
import math
import pickle

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mhsa_compile import masks
from mhsa_compile.errors import InputError, SpecError
from mhsa_compile.frontend.export.module_state import state_of
from mhsa_compile.nn.functional import to_torch
from mhsa_compile.nn.modules import MultiHeadAttention, QueryKeyValueAttention, ScaledDotProductAttention, weights
from mhsa_compile.nn.score_features import alibi_slopes
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.position_encoding import Rope

pytestmark = pytest.mark.usefixtures("float64")

CLOSE = {"rtol": 0, "atol": 1e-12}  # everything here runs in float64, where both sides are exact to about 1e-15


def core(**fields) -> ScaledDotProductAttention:
    return ScaledDotProductAttention(AttentionSpec(embed_dim=24, num_heads=4, **fields))


def qkv(B: int = 2, L: int = 5, S: int = 7, G: int = 4, E: int = 6, F: int = 6) -> tuple[torch.Tensor, ...]:
    return torch.randn(B, 4, L, E), torch.randn(B, G, S, E), torch.randn(B, G, S, F)


@pytest.mark.parametrize("G", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_core_equals_pytorch(G: int, scale: float | None) -> None:
    q, k, v = qkv(G=G, F=9)
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=scale)
    actual = core(num_kv_heads=G, v_head_dim=9, scale=scale)(q, k, v)
    torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("mask", ["bool", "additive"])
@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (1, 4, 1, 7), (2, 1, 5, 1), (5, 7), (7,)])
def test_masks_broadcast_as_in_pytorch(mask: str, shape: tuple[int, ...]) -> None:
    q, k, v = qkv()
    values = torch.rand(shape) < 0.8 if mask == "bool" else torch.randn(shape)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=values.expand(2, 4, 5, 7))
    torch.testing.assert_close(core(mask=mask)(q, k, v, values), expected, **CLOSE)


@pytest.mark.parametrize(("L", "S"), [(5, 5), (3, 7), (7, 3), (1, 4), (4, 1)])
@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("window", [(0, 0), (2, 1), (1, -1), (-1, 1)])
def test_windows(L: int, S: int, causal: str | None, window: tuple[int, int]) -> None:
    q, k, v = qkv(L=L, S=S)
    visible = masks.window(L, S, *window, causal or "top_left")
    if causal is not None:
        visible &= masks.causal(L, S, causal)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.from_numpy(visible))
    expected = torch.where(torch.from_numpy(visible.any(axis=1))[:, None], expected, 0)
    torch.testing.assert_close(core(causal=causal, window=window)(q, k, v), expected, **CLOSE)


@pytest.mark.parametrize("causal", [None, "bottom_right"])
def test_static_masks(causal: str | None) -> None:
    q, k, v = qkv(L=11, S=13)
    pattern = masks.BigBird(block=2, random_blocks=1)
    visible = pattern.array(11, 13)
    if causal is not None:
        visible &= masks.causal(11, 13, causal)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.from_numpy(visible))
    torch.testing.assert_close(core(causal=causal, static_mask=pattern)(q, k, v), expected, **CLOSE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_and_results_are_of_the_spec_s_dtype(dtype: str) -> None:
    module = MultiHeadAttention(AttentionSpec(embed_dim=8, num_heads=2, dtype=dtype, window=(2, 0)))
    assert {parameter.dtype for parameter in module.parameters()} == {getattr(torch, dtype)}
    assert module(torch.ones(2, 3, 8, dtype=getattr(torch, dtype))).dtype == getattr(torch, dtype)
    for name, array in weights(module).items():
        assert str(array.dtype) == dtype
        assert torch.equal(to_torch(array), module.get_parameter(name))


@pytest.mark.parametrize(("L", "S"), [(5, 5), (3, 7), (7, 3), (1, 4), (4, 1)])
@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_causal_alignments(L: int, S: int, causal: str) -> None:
    q, k, v = qkv(L=L, S=S)
    visible = torch.from_numpy(masks.causal(L, S, causal))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    actual = core(causal=causal)(q, k, v)
    torch.testing.assert_close(actual, expected, **CLOSE)
    assert (actual[:, :, ~visible.any(dim=-1)] == 0).all()


@pytest.mark.parametrize("mask", ["bool", "key_padding"])
def test_masks_of_integers(mask: str) -> None:
    q, k, v = qkv()
    visible = torch.rand((2, 7) if mask == "key_padding" else (2, 1, 5, 7)) < 0.6
    attention = core(mask=mask)
    assert torch.equal(attention(q, k, v, visible.long()), attention(q, k, v, visible))
    with pytest.raises(InputError, match=r"mask: expected bool, .* or integers 0 and 1, got integers from"):
        attention(q, k, v, visible.long() * 5 - 1)
    with pytest.raises(InputError, match=r"mask: expected bool, .*, got torch\.float64"):
        attention(q, k, v, visible.double())


def test_causal_and_mask_compose() -> None:
    q, k, v = qkv(L=7, S=7)
    padding = torch.from_numpy(masks.key_padding([7, 3], 7))
    visible = torch.from_numpy(masks.causal(7, 7, "top_left")) & padding[:, None, None, :]
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    torch.testing.assert_close(core(causal="top_left", mask="key_padding")(q, k, v, padding), expected, **CLOSE)


@pytest.mark.parametrize("mask", ["bool", "additive"])
def test_fully_masked_rows_are_zero_with_finite_gradients(mask: str) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in qkv())
    visible = torch.ones(5, 7, dtype=torch.bool)
    visible[2] = False
    values = visible if mask == "bool" else torch.where(visible, 0.0, -torch.inf)
    y = core(mask=mask)(q, k, v, values)
    assert (y[:, :, 2] == 0).all()
    y.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (q, k, v))


@pytest.mark.parametrize("mask", ["bool", "additive"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poison_reaches_the_queries_that_see_it_and_no_other(mask: str, poison: float) -> None:
    q, k, v = qkv()
    visible = torch.ones(5, 7, dtype=torch.bool)
    visible[:3, 4] = False
    values = visible if mask == "bool" else torch.where(visible, 0.0, -torch.inf)
    attention = core(mask=mask)
    clean = attention(q, k, v, values)
    for broken in (k, v):
        kept = broken.clone()
        broken[:, :, 4] = poison
        dirty = attention(q, k, v, values)
        torch.testing.assert_close(dirty[:, :, :3], clean[:, :, :3], **CLOSE)
        if broken is v or math.isnan(poison):  # an infinite key may also win or lose a softmax outright
            assert not dirty[:, :, 3:].isfinite().any()
        broken.copy_(kept)


def test_infinities_of_both_signs_meet_as_nan() -> None:
    q, k, v = qkv()
    v[:, :, 1], v[:, :, 2] = torch.inf, -torch.inf
    assert core(mask="bool")(q, k, v, torch.ones(7, dtype=torch.bool)).isnan().all()


def apart(**fields: object) -> MultiHeadAttention:
    return MultiHeadAttention(AttentionSpec(embed_dim=24, num_heads=4, kv_embed_dim=10, v_embed_dim=17, **fields))


def test_a_module_of_three_inputs_is_one_when_it_is_copied_too() -> None:
    module = apart(dtype="float32").double().eval()
    q, k, v = torch.randn(2, 5, 24), torch.randn(2, 7, 10), torch.randn(2, 7, 17)
    expected = module(q, k, v)
    for other in (copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(other, QueryKeyValueAttention)
        assert torch.equal(other(q, k, v), expected)
    y, heads = module.with_outputs("y", "heads")(q, k, v)
    assert torch.equal(y, expected) and heads.shape == (2, 4, 5, 6)
    (gradient,) = torch.autograd.grad(module(q, k, v.requires_grad_()).sum(), v)
    assert gradient.abs().min() > 0


def test_the_class_follows_from_the_spec() -> None:
    assert type(MultiHeadAttention(AttentionSpec(embed_dim=24, num_heads=4, kv_embed_dim=10))) is MultiHeadAttention
    assert type(apart()) is QueryKeyValueAttention

    class Own(MultiHeadAttention):
        """A layer whose forward takes a context."""

    with pytest.raises(SpecError, match="v_embed_dim: expected set for a QueryKeyValueAttention"):
        Own(apart().spec)
    with pytest.raises(SpecError, match="v_embed_dim: expected set for a QueryKeyValueAttention"):
        QueryKeyValueAttention(AttentionSpec(embed_dim=24, num_heads=4, kv_embed_dim=10))


OTHERS = (
    {"rope": True, "causal": True},
    {"alibi": True, "sinks": True},
    {"num_kv_heads": 2, "v_head_dim": 5, "bias": False},
)


@pytest.mark.parametrize("fields", OTHERS, ids=str)
def test_other_outputs_of_the_same_weights(fields: dict[str, object]) -> None:
    layer = MultiHeadAttention(AttentionSpec(embed_dim=24, num_heads=4, **fields)).eval()
    looked_into = layer.with_outputs("y", "heads", "weights")
    x = torch.randn(2, 5, 24, dtype=torch.float32)
    y, heads, rows = looked_into(x)
    assert torch.equal(y, layer(x))
    assert (heads.shape, rows.shape) == ((2, 4, 5, layer.spec.v_head_dim), (2, 4, 5, 5))
    assert layer.spec.outputs == ("y",) and not looked_into.training
    assert {id(p) for p in looked_into.parameters()} == {id(p) for p in layer.parameters()}  # one set of weights
    assert looked_into.with_outputs("y").spec == layer.spec
    assert state_of(looked_into) is not None  # as a new one is: it is found among what was compiled before
    state = {name: value.clone() for name, value in looked_into.state_dict().items()}
    MultiHeadAttention(looked_into.spec).load_state_dict(state)


@pytest.mark.parametrize("hidden", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_dropout_is_of_the_weights_and_in_training_alone(hidden: bool) -> None:
    spec = AttentionSpec(embed_dim=24, num_heads=4, mask="bool" if hidden else None, outputs=("y", "weights"))
    q, k, _ = qkv(S=7)
    v = torch.eye(7).expand(2, 4, 7, 7)  # y is the weights
    dropping = ScaledDotProductAttention(msgspec.structs.replace(spec, v_head_dim=7), dropout=0.25)
    mask = (torch.rand(5, 7) < 0.6,) if hidden else ()
    plain, weights_ = dropping.eval()(q, k, v, *mask)
    assert torch.allclose(plain, weights_, **CLOSE)
    dropping.train()
    dropped, kept = zip(*(dropping(q, k, v, *mask) for _ in range(300)), strict=True)
    assert all(torch.allclose(one, weights_, **CLOSE) for one in kept)  # what is looked at is before dropout
    dropped = torch.stack(dropped)
    whole = torch.isclose(dropped, plain / 0.75, rtol=1e-12)
    assert (whole | (dropped == 0)).all()
    assert (dropped[:, plain > 0] == 0).double().mean() == pytest.approx(0.25, abs=0.01)


def test_dropout_of_a_block() -> None:
    layer = MultiHeadAttention(AttentionSpec(embed_dim=24, num_heads=4), dropout=0.5)
    x = torch.randn(2, 5, 24, dtype=torch.float32)
    looked_into = layer.with_outputs("y", "lse")
    assert looked_into.dropout == 0.5 and looked_into.training
    assert not torch.equal(layer(x), layer(x)) and not torch.equal(looked_into(x)[0], looked_into(x)[0])
    assert torch.equal(layer.eval()(x), layer(x))
    for wrong in (1.0, -0.1, "0.1", True):
        with pytest.raises(SpecError, match="dropout: expected a probability from 0 to below 1"):
            MultiHeadAttention(layer.spec, dropout=wrong)


def test_other_outputs_that_there_are_not() -> None:
    layer = MultiHeadAttention(AttentionSpec(embed_dim=24, num_heads=4))
    for words, named in ((("heads",), 'Add "y"'), (("y", "hads"), "'heads'"), ((), "some of")):
        with pytest.raises(SpecError, match=named):
            layer.with_outputs(*words)
    core = ScaledDotProductAttention(AttentionSpec(embed_dim=24, num_heads=4))
    assert len(core.with_outputs("y", "lse")(*(t.float() for t in qkv(S=5)))) == 2


def test_weights_carry_pytorchs_names_and_layouts() -> None:
    spec = AttentionSpec(embed_dim=20, num_heads=4, num_kv_heads=2, head_dim=6, v_head_dim=7, kv_embed_dim=9)
    shapes = {name: array.shape for name, array in weights(MultiHeadAttention(spec)).items()}
    assert shapes == {
        "q_proj.weight": (24, 20), "q_proj.bias": (24,),
        "k_proj.weight": (12, 9), "k_proj.bias": (12,),
        "v_proj.weight": (14, 9), "v_proj.bias": (14,),
        "out_proj.weight": (20, 28), "out_proj.bias": (20,),
    }  # fmt: skip
    assert all(isinstance(array, np.ndarray) for array in weights(MultiHeadAttention(spec)).values())


APART = {"kv_embed_dim": 6, "v_embed_dim": 7}


@pytest.mark.parametrize(
    ("fields", "call", "named"),
    [
        ({}, {"x": (2, 3, 9)}, "x"),
        ({}, {"x": (3, 8)}, "x"),
        ({}, {"x": (2, 3, 8), "context": (2, 3, 8)}, "context"),
        ({"kv_embed_dim": 6}, {"x": (2, 3, 8)}, "context"),
        ({"kv_embed_dim": 6}, {"x": (2, 3, 8), "context": (2, 3, 8)}, "context"),
        (APART, {"x": (2, 3, 8)}, "key"),
        (APART, {"x": (2, 3, 8), "key": (2, 5, 6)}, "value"),
        (APART, {"x": (2, 3, 8), "value": (2, 5, 7)}, "key"),
        (APART, {"x": (2, 3, 6), "key": (2, 5, 6), "value": (2, 5, 7)}, "x"),
        (APART, {"x": (2, 3, 8), "key": (2, 5, 8), "value": (2, 5, 7)}, "key"),
        (APART, {"x": (2, 3, 8), "key": (2, 5, 6), "value": (2, 5, 6)}, "value"),
        (APART, {"x": (2, 3, 8), "key": (2, 5, 6), "value": (2, 4, 7)}, "value"),
        (APART, {"x": (2, 3, 8), "key": (2, 5, 6), "value": (1, 5, 7)}, "value"),
        (APART, {"x": (2, 3, 8), "key": (2, 5, 6), "value": (2, 5, 7), "mask": (2, 5)}, "mask"),
        ({}, {"x": (2, 3, 8), "mask": (2, 3)}, "mask"),
        ({"mask": "bool"}, {"x": (2, 3, 8)}, "mask"),
        ({"mask": "bool"}, {"x": (2, 3, 8), "mask": (3, 4)}, "mask"),
        ({"mask": "additive"}, {"x": (2, 3, 8), "mask": (3, 3)}, "mask"),
        ({"mask": "key_padding"}, {"x": (2, 3, 8), "mask": (1, 3)}, "mask"),
        ({"mask": "key_padding"}, {"x": (2, 3, 8), "mask": (2, 1, 1, 3)}, "mask"),
    ],
)
def test_calls_that_are_refused(fields: dict[str, object], call: dict[str, tuple[int, ...]], named: str) -> None:
    module = MultiHeadAttention(AttentionSpec(embed_dim=8, num_heads=2, **fields)).double()
    tensors = {name: torch.ones(shape, dtype=torch.bool if name == "mask" else None) for name, shape in call.items()}
    with pytest.raises(InputError) as caught:
        module(**tensors)
    assert caught.value.argument == named


def test_core_refuses_other_heads() -> None:
    q, k, v = qkv()
    with pytest.raises(InputError, match="k: expected shape"):
        core()(q, k[:, :2], v)


def test_softcap_and_scale() -> None:
    q, k, v = qkv()
    scores = torch.tanh(q @ k.transpose(-1, -2) * 0.7 / 1.5) * 1.5
    torch.testing.assert_close(core(softcap=1.5, scale=0.7)(q, k, v), scores.softmax(dim=-1) @ v, **CLOSE)


@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("mask", [None, "bool", "additive"])
def test_alibi_is_a_bias_that_grows_with_the_distance(causal: str | None, mask: str | None) -> None:
    q, k, v = qkv(L=5, S=7)
    attention = core(causal=causal, mask=mask, alibi=True)
    place = torch.arange(5)[:, None] + (2 if causal == "bottom_right" else 0)
    bias = torch.tensor(alibi_slopes(4))[:, None, None] * (torch.arange(7) - place)
    given = () if mask is None else (torch.rand(5, 7) < 0.8 if mask == "bool" else torch.randn(2, 1, 5, 7),)
    added = bias + given[0] if mask == "additive" else bias.masked_fill(~given[0], -math.inf) if mask else bias
    if causal is not None:
        added = added.masked_fill(~torch.from_numpy(masks.causal(5, 7, causal)), -math.inf)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=added.expand(2, 4, 5, 7))
    expected = torch.where((added > -math.inf).any(-1, keepdim=True), expected, 0)
    torch.testing.assert_close(attention.double()(q, k, v, *given), expected, **CLOSE)


@pytest.mark.parametrize("causal", [None, "bottom_right"])
def test_a_sink_is_one_more_key_of_no_value(causal: str | None) -> None:
    q, k, v = qkv(L=7, S=5)
    attention = core(causal=causal, sinks=True).double()
    more_k, more_v = (torch.cat((torch.zeros(2, 4, 1, 6), rows), dim=2) for rows in (k, v))
    added = torch.zeros(4, 7, 6)
    added[..., 0] = attention.sinks.detach()[:, None]
    if causal is not None:
        added[..., 1:].masked_fill_(~torch.from_numpy(masks.causal(7, 5, causal)), -math.inf)
    expected = F.scaled_dot_product_attention(q, more_k, more_v, attn_mask=added)
    actual = attention(q, k, v)
    torch.testing.assert_close(actual, expected, **CLOSE)
    if causal is not None:
        assert (actual[:, :, :2] == 0).all()  # who sees no key gives all its weight to the sink
    assert "sinks" in weights(attention)


def turned(x: torch.Tensor, rope: Rope, first: int = 0) -> torch.Tensor:
    """Turns x (B, heads, L, E) by complex numbers, and by the paper's formula."""
    n = rope.rotary_dim // 2
    angles = (first + torch.arange(x.shape[2]))[:, None] / rope.factor * rope.theta ** (-torch.arange(n) / n)
    one, other = (x[..., 0 : 2 * n : 2], x[..., 1 : 2 * n : 2]) if rope.interleaved else (x[..., :n], x[..., n : 2 * n])
    result = torch.complex(one, other) * torch.polar(torch.ones(()), angles)
    parts = (result.real, result.imag)
    both = torch.stack(parts, -1).flatten(-2) if rope.interleaved else torch.cat(parts, -1)
    return torch.cat((both, x[..., 2 * n :]), -1)


ROPES = ({}, {"interleaved": True}, {"rotary_dim": 4, "theta": 100.0}, {"factor": 3.0, "rotary_dim": 2})


@pytest.mark.parametrize("fields", ROPES, ids=str)
def test_rope_turns_queries_and_keys(fields: dict[str, object]) -> None:
    spec = AttentionSpec(embed_dim=24, num_heads=4, num_kv_heads=2, rope={"max_length": 7, **fields})
    module, x = exact(spec), torch.randn(2, 7, 24)
    q, k, v = heads_of(module, x)
    y = F.scaled_dot_product_attention(turned(q, spec.rope), turned(k, spec.rope), v, enable_gqa=True)
    torch.testing.assert_close(module(x), module.out_proj(y.transpose(1, 2).flatten(2)), **CLOSE)
    with pytest.raises(InputError, match=r"rope\.max_length = 7, got one at position 7"):
        module(torch.randn(1, 8, 24))


def exact(spec: AttentionSpec) -> MultiHeadAttention:
    """The layer of a spec in float64, with tables that never were anything else."""
    module = MultiHeadAttention(spec).double()
    if spec.rope is not None:
        module.rope_cos, module.rope_sin = map(torch.from_numpy, spec.rope.tables())
    return module


def heads_of(module: MultiHeadAttention, x: torch.Tensor) -> list[torch.Tensor]:
    parts = ((module.q_proj, module.spec.num_heads), (module.k_proj, module.spec.num_kv_heads))
    return [
        project(x).unflatten(-1, (heads, -1)).transpose(1, 2)
        for project, heads in (*parts, (module.v_proj, module.spec.num_kv_heads))
    ]


CACHED = (
    {},
    {"rope": {"max_length": 32}, "num_kv_heads": 2},
    {"alibi": True, "sinks": True},
    {"window": (3, 0), "v_head_dim": 7, "softcap": 2.0},
)


@pytest.mark.parametrize("fields", CACHED, ids=str)
def test_a_cache_filled_in_any_steps_gives_what_one_call_gives(fields: dict[str, object]) -> None:
    cached = exact(AttentionSpec(embed_dim=24, num_heads=4, causal=True, kv_cache=True, **fields))
    whole = exact(AttentionSpec(embed_dim=24, num_heads=4, causal=True, **fields))
    whole.load_state_dict(cached.state_dict())
    x, spec = torch.randn(2, 11, 24), cached.spec
    expected = whole(x)
    key = torch.full((2, spec.num_kv_heads, 13, spec.head_dim), math.nan)  # what is not valid yet is hidden
    value = torch.full((2, spec.num_kv_heads, 13, spec.v_head_dim), math.nan)
    done = 0
    for L in (5, 1, 3, 1, 1):
        step = x[:, done : done + L]
        y, key, value = cached(step, past_key=key, past_value=value, length=torch.full((2,), done))
        torch.testing.assert_close(y, expected[:, done : done + L], **CLOSE)
        done += L


def test_sequences_of_a_batch_may_have_lengths_of_their_own() -> None:
    cached = exact(AttentionSpec(embed_dim=24, num_heads=4, causal=True, kv_cache=True, rope={"max_length": 9}))
    x = torch.randn(2, 7, 24)
    empty = torch.zeros(2, 4, 9, 6)
    _, key, value = cached(x, past_key=empty, past_value=empty, length=torch.tensor([0, 0]))
    step = torch.randn(2, 1, 24)
    y, _, _ = cached(step, past_key=key, past_value=value, length=torch.tensor([7, 3]))
    for i, length in enumerate((7, 3)):
        alone = torch.cat((x[i : i + 1, :length], step[i : i + 1]), dim=1)
        expected, _, _ = cached(alone, past_key=empty[:1], past_value=empty[:1], length=torch.tensor([0]))
        torch.testing.assert_close(y[i], expected[0, -1:], **CLOSE)


@pytest.mark.parametrize(
    ("changes", "named", "expected"),
    [
        ({"past_key": None}, "past_key", "the spec has kv_cache"),
        ({"length": None}, "length", "the spec has kv_cache"),
        ({"past_key": torch.zeros(2, 3, 9, 6)}, "past_key", r"\(B, G, C, 6\)"),
        ({"past_value": torch.zeros(2, 4, 8, 6)}, "past_value", r"\(B, G, C, 6\)"),
        ({"length": torch.tensor([0, 0, 0])}, "length", r"int64 of shape \(B,\) = \(2,\)"),
        ({"length": torch.tensor([0, 7])}, "length", "0 to 6, which leaves room for 3 more positions of 9"),
        ({"length": torch.tensor([-1, 0])}, "length", "0 to 6"),
    ],
)
def test_caches_that_do_not_fit(changes: dict[str, object], named: str, expected: str) -> None:
    module = MultiHeadAttention(AttentionSpec(embed_dim=24, num_heads=4, causal=True, kv_cache=True)).double()
    empty = torch.zeros(2, 4, 9, 6)
    call = {"past_key": empty, "past_value": empty, "length": torch.tensor([0, 0])} | changes
    with pytest.raises(InputError, match=f"{named}: expected .*{expected}"):
        module(torch.zeros(2, 3, 24), **call)


def test_a_cache_without_kv_cache_and_rope_without_a_block() -> None:
    module = MultiHeadAttention(AttentionSpec(embed_dim=24, num_heads=4)).double()
    with pytest.raises(InputError, match="length: expected None"):
        module(torch.zeros(1, 3, 24), length=torch.tensor([0]))
    with pytest.raises(SpecError, match="rope: expected none in ScaledDotProductAttention"):
        core(rope=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_slopes_and_sinks_are_of_the_spec_s_dtype(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    spec = AttentionSpec(embed_dim=24, num_heads=4, dtype=name, rope={"max_length": 5}, alibi=True, sinks=True)
    module = MultiHeadAttention(spec)
    assert {tensor.dtype for tensor in (*module.parameters(), *module.buffers())} == {dtype}
    assert module(torch.ones(1, 5, 24, dtype=dtype)).dtype == dtype
    assert set(module.state_dict()) == set(weights(module))  # tables follow from the spec: nobody stores them


def test_alibi_s_slopes_are_the_paper_s() -> None:
    assert alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert alibi_slopes(1) == [2.0**-8]
    # 12 heads: those of 8, then every other one of 16.
    assert alibi_slopes(12) == [*alibi_slopes(8), 2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]


@pytest.mark.thorough_but("changed")
@pytest.mark.parametrize("fields", [{}, {"softcap": 5.0, "sinks": True}], ids=["plain", "changed"])
def test_dynamo_follows_it_whole(fields: dict[str, object]) -> None:
    layer = MultiHeadAttention(AttentionSpec(embed_dim=16, num_heads=2, **fields)).eval()
    x = torch.randn(2, 9, 16, dtype=torch.float32)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))
