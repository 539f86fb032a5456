"""The spec's softclamp through the whole flow: against c * s / (c + |s|) in NumPy, at float64."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError, SpecError
from mhsa_compile.frontend.export.export import export
from mhsa_compile.nn.modules import MultiHeadAttention, ScaledDotProductAttention
from mhsa_compile.verification.verify import verify

H, G, E, CLAMP, CAP = 4, 2, 16, 1.5, 4.0
OUTPUTS = ("y", "lse", "weights")
ALL: dict[str, Any] = {"causal": "bottom_right", "mask": "bool", "alibi": True, "sinks": True, "softcap": CAP}


def core(**fields: Any) -> ScaledDotProductAttention:
    torch.manual_seed(3)
    fields = {"softclamp": CLAMP, "scale": 2.0, "outputs": OUTPUTS, **fields}
    return ScaledDotProductAttention(mhsa.AttentionSpec(embed_dim=H * E, num_heads=H, num_kv_heads=G, **fields)).eval()


def drawn(L: int, S: int, B: int = 2) -> list[np.ndarray]:
    rng = np.random.default_rng(L + S)
    q, k, v = (rng.standard_normal((B, heads, n, E), np.float32) for heads, n in ((H, L), (G, S), (G, S)))
    return [q, k, v, rng.random((B, 1, L, S)) < 0.8]


def expected(module: ScaledDotProductAttention, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """y, lse and weights, of what the spec has of softcap, softclamp, slopes, sinks and masks, in this order."""
    spec = module.spec
    q, k, v = (np.float64(array) for array in inputs[:3])
    k, v = (np.repeat(array, H // G, axis=1) for array in (k, v))
    (L, S), scores = (q.shape[2], k.shape[2]), q @ k.swapaxes(2, 3) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * np.tanh(scores / spec.softcap)
    if spec.softclamp is not None:
        scores = spec.softclamp * scores / (spec.softclamp + abs(scores))
    distance, seen = np.arange(S) - (np.arange(L)[:, None] + S - L), np.ones((L, S), np.bool_)
    if spec.alibi:
        scores = scores + 2.0 ** (-8 * np.arange(1, H + 1) / H)[:, None, None] * distance
    if spec.causal:
        seen = seen & (distance <= 0)
    if spec.mask:
        seen = seen & inputs[3]
    scores = np.where(seen, scores, -np.inf)
    sinks = module.sinks.detach().double().numpy()[:, None, None] if spec.sinks else np.full((H, 1, 1), -np.inf)
    with np.errstate(divide="ignore"):
        lse = np.logaddexp(np.logaddexp.reduce(scores, axis=-1, keepdims=True), sinks)
    weights = np.where(seen, np.exp(scores - np.where(np.isneginf(lse), 0, lse)), 0)
    return [weights @ v, lse[..., 0], weights][: len(spec.outputs)]


def check(module: ScaledDotProductAttention, call: Any, L: int, S: int) -> None:
    inputs = drawn(L, S)[: 4 if module.spec.mask else 3]
    for result, right in zip(call(*inputs), expected(module, inputs), strict=True):
        np.testing.assert_allclose(np.asarray(result), right, atol=2e-6, rtol=2e-5)


SPECS = {"alone": {}, "among others": ALL}


@functools.cache
def compiled(name: str) -> tuple[ScaledDotProductAttention, Any]:
    module = core(**SPECS[name])
    artifact = mhsa.compile(module)
    assert {op.source for op in artifact.manifest.ops} == {"default"}
    assert artifact.manifest.semantics[0].steps == {"softclamp": CLAMP}
    assert "softclamp 1.5" in artifact.manifest.ops[0].note
    return module, artifact


@pytest.mark.thorough_only("*among others")
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("L", "S"), [(37, 53), (1, 197), (5, 3)])
def test_kernels_for_many_queries_and_for_few(name: str, L: int, S: int) -> None:
    module, artifact = compiled(name)
    for threads in (1, 3):
        check(module, mhsa.load(artifact, threads=threads), L, S)
    check(module, lambda *inputs: [y.detach() for y in module(*map(torch.from_numpy, inputs))], L, S)


def test_it_is_not_softcap() -> None:
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(core(softclamp=None, softcap=CLAMP), mhsa.load(compiled("alone")[1]), 37, 53)


@pytest.mark.thorough_but("one query")
@pytest.mark.parametrize("fields", [{"dims": {"L": 1}}, {"clamp": 1e20}], ids=["one query", "no kernel"])
def test_decoding_and_what_no_kernel_computes(fields: dict[str, Any]) -> None:
    module = core(softclamp=fields.get("clamp", CLAMP), outputs=("y",))
    artifact = mhsa.compile(module, dims=fields.get("dims"))
    (op,) = artifact.manifest.ops
    assert op.source == "fallback" if "clamp" in fields else op.kernel == "cpu.decode"
    check(module, lambda *inputs: [mhsa.load(artifact)(*inputs)], 1, 197)


def test_huge_and_infinite_scores() -> None:
    """A huge score is within c of 0; what is no number is no number in eager attention, too."""
    module, artifact = compiled("alone")
    call = mhsa.load(artifact)
    q, k, v, _ = drawn(3, 70)
    for factor in (np.float32(1e15), np.float32(1e-15)):
        results = call(q * factor, k * factor, v)
        for result, right in zip(results, expected(module, [q * factor, k * factor, v]), strict=True):
            np.testing.assert_allclose(result, right, atol=2e-6, rtol=2e-5)
    k[:, :, 5] = np.inf
    eager = [y.detach().numpy() for y in module(*map(torch.from_numpy, (q, k, v)))]
    for result, same in zip(call(q, k, v), eager, strict=True):
        assert np.array_equal(np.isnan(result), np.isnan(same)) and np.isnan(same).any()


@pytest.mark.thorough
def test_a_cache_in_sixteen_bits_is_verified() -> None:
    spec = mhsa.AttentionSpec(embed_dim=32, num_heads=2, kv_cache=True, causal=True, softclamp=5.0, dtype="bfloat16")
    assert verify(mhsa.compile(spec), cases=[{"B": 2, "L": 1, "C": 31}, {"B": 1, "L": 9, "C": 40}]).ok


def test_a_file_says_it() -> None:
    model = export(MultiHeadAttention(mhsa.AttentionSpec(embed_dim=32, num_heads=2, softclamp=5.0)))
    (node,) = (node for node in model.graph.node if node.op_type == "Attention")
    assert node.domain == "mhsa" and not model.functions
    (attribute,) = (attribute for attribute in node.attribute if attribute.name == "softclamp")
    assert attribute.f == 5.0
    attribute.f = -5.0
    with pytest.raises(ModelError, match=r"Attention node .*: expected softclamp of 0 \(none\) or more, got -5.0"):
        mhsa.compile(onnx.ModelProto.FromString(model.SerializeToString()))


def test_the_spec_states_and_checks_it() -> None:
    spec = mhsa.AttentionSpec(embed_dim=32, num_heads=2, softclamp=5)
    assert spec.softclamp == 5.0 and mhsa.AttentionSpec.from_toml(spec.to_toml()) == spec
    for wrong in (0, -1.0, float("nan"), True, "5"):
        with pytest.raises(SpecError, match="softclamp: expected a positive finite number, or None for no clamp"):
            mhsa.AttentionSpec(embed_dim=32, num_heads=2, softclamp=wrong)
