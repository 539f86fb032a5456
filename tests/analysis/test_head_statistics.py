"""What heads do, measured: on planted facts, on compiled outputs against float64, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import Tensor

import mhsa_compile as mhsa
from mhsa_analysis.head_report import HeadReport, linkage_order
from mhsa_compile import analysis
from mhsa_compile.errors import InputError, MhsaError, ModelError, SpecError
from mhsa_compile.nn.functional import to_numpy
from mhsa_compile.nn.modules import MultiHeadAttention
from mhsa_compile.runtime.compiled_attention import CompiledAttention
from mhsa_compile.spec.attention_spec import AttentionSpec

H, D, F = 8, 64, 8
WORDS = ("y", "heads", "entropy", "weights")
SPEC = AttentionSpec(embed_dim=D, num_heads=H, mask="key_padding", outputs=WORDS)
MATRICES = ("cka", "contribution", "js", "information")
VECTORS = ("entropy", "entropy_share", "distance")


def sharp_layer(spec: AttentionSpec = SPEC, seed: int = 0) -> MultiHeadAttention:
    """A layer of random weights that are large enough for heads to choose."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(spec).eval()
    with torch.no_grad():
        for part in (layer.q_proj, layer.k_proj, layer.v_proj):
            part.weight.mul_(2)
    return layer


def orthogonal(n: int, seed: int) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0]


@torch.no_grad()
def turn(layer: MultiHeadAttention, source: int, to: int, seed: int) -> None:
    """Head `to` becomes head `source` in another basis: y stays what it would be with `source` itself there."""
    old, new = slice(source * F, source * F + F), slice(to * F, to * F + F)
    for part, basis in ((layer.q_proj, 1), (layer.k_proj, 1), (layer.v_proj, 2)):
        R = orthogonal(F, basis * 1000 + seed)
        part.weight[new] = (R @ part.weight[old].double()).to(part.weight.dtype)
        part.bias[new] = (R @ part.bias[old].double()).to(part.bias.dtype)
    R = orthogonal(F, 2000 + seed)
    layer.out_proj.weight[:, new] = (layer.out_proj.weight[:, old].double() @ R.T).to(layer.out_proj.weight.dtype)


def batches(dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, Tensor]]:
    """x (B, L, D), valid (B, L); of lengths of their own."""
    generator = torch.Generator().manual_seed(7)
    for lengths in ([19, 7, 13], [11, 23], [29, 2, 17, 5]):
        L = max(lengths)
        yield (
            torch.randn(len(lengths), L, D, generator=generator).to(dtype),
            torch.arange(L) < torch.tensor(lengths)[:, None],
        )


def report(layer: MultiHeadAttention, attention: CompiledAttention | MultiHeadAttention | None = None) -> HeadReport:
    call = layer if attention is None else attention
    stats = analysis.HeadStatistics(layer)
    with torch.no_grad():
        for x, valid in batches(layer.out_proj.weight.dtype):
            stats.add(x, call(x, mask=valid), valid)
    assert stats.tokens == 126
    return stats.report()


@pytest.fixture(scope="module")
def artifact() -> mhsa.Artifact:
    return mhsa.compile(SPEC)


def compiled(artifact: mhsa.Artifact, layer: MultiHeadAttention) -> CompiledAttention:
    return mhsa.load(artifact, weights=mhsa.weights(layer), threads=1)


@pytest.mark.thorough
def test_a_planted_twin_is_found(artifact: mhsa.Artifact) -> None:
    layer = sharp_layer()
    turn(layer, source=3, to=7, seed=1)
    found = report(layer, compiled(artifact, layer))
    (first, *others) = found.twins(within=2.0)
    assert first[:2] == (3, 7) and first[2] <= 1e-6
    assert others[0][2] > 0.1
    assert abs(found.order.index(3) - found.order.index(7)) == 1
    assert found.contribution[3, 7] == pytest.approx(1.0, abs=1e-6)
    assert abs(found.rho[3, 7]) < 0.9  # the textbook's measure does not see it
    assert found.information[3, 7] > 10 * np.delete(found.information[3], [3, 7]).max()


def test_turning_every_head_changes_nothing_but_rho(artifact: mhsa.Artifact) -> None:
    layer, turned = sharp_layer(), sharp_layer()
    for head in range(H):
        turn(turned, head, head, seed=head)
    before, after = (report(one, compiled(artifact, one)) for one in (layer, turned))
    for name in (*MATRICES, *VECTORS):
        np.testing.assert_allclose(getattr(after, name), getattr(before, name), rtol=0, atol=1e-5, err_msg=name)
    assert after.roles == before.roles
    assert np.abs(after.rho - before.rho).max() > 0.1
    plans = [found.prune(3) for found in (before, after)]
    assert plans[0].heads == plans[1].heads
    assert plans[0].relative_error == pytest.approx(plans[1].relative_error, abs=1e-5)


def test_compiled_outputs_give_what_float64_gives(artifact: mhsa.Artifact) -> None:
    layer = sharp_layer(seed=3)
    ours = report(layer, compiled(artifact, layer))
    exact = report(layer.double())
    for name in ("rho", *MATRICES, *VECTORS):
        np.testing.assert_allclose(getattr(ours, name), getattr(exact, name), rtol=0, atol=1e-5, err_msg=name)
    assert ours.roles == exact.roles
    for place, share in exact.shares.items():
        np.testing.assert_allclose(ours.shares[place], share, rtol=0, atol=1e-5)


def test_matrices_are_what_they_are_by_definition() -> None:
    """The matrices are held against sums over all tokens at once, of the heads themselves."""
    layer = sharp_layer().double()
    found = report(layer)
    rows, weights = [], []
    with torch.no_grad():
        for x, valid in batches(torch.float64):
            _, heads, _, probs = layer(x, mask=valid)
            rows.append(heads.transpose(1, 2)[valid].numpy())  # (n, H, F)
            weights.append([row.numpy() for row in probs.transpose(1, 2)[valid]])
    heads = np.concatenate(rows)
    centred = heads - heads.mean(axis=0)
    blocks = layer.out_proj.weight.detach().numpy().T.reshape(H, F, D)
    added = np.einsum("nhf,hfd->hnd", centred, blocks)
    for i, j in ((0, 1), (5, 2), (6, 7), (4, 4)):
        a, b = centred[:, i], centred[:, j]
        rho = (heads[:, i] * heads[:, j]).sum() / np.linalg.norm(heads[:, i]) / np.linalg.norm(heads[:, j])
        cka = np.linalg.norm(a.T @ b) ** 2 / np.linalg.norm(a.T @ a) / np.linalg.norm(b.T @ b)
        cosine = (added[i] * added[j]).sum() / np.linalg.norm(added[i]) / np.linalg.norm(added[j])
        js = np.mean([jensen_shannon(row[i], row[j]) for batch in weights for row in batch])
        expected = {"rho": rho, "cka": cka, "contribution": cosine, "js": js}
        for name, value in expected.items():
            assert getattr(found, name)[i, j] == pytest.approx(value, abs=1e-7), name  # the root of what js rounds
    assert np.isinf(np.diagonal(found.information)).all()


def jensen_shannon(p: np.ndarray, q: np.ndarray) -> float:
    middle = (p + q) / 2
    divergence = sum((x[x > 0] * np.log(x[x > 0] / middle[x > 0])).sum() for x in (p, q)) / 2
    return float(np.sqrt(divergence / np.log(2)))


def placed_report(rows: np.ndarray, valid: np.ndarray, separators: np.ndarray | None = None) -> HeadReport:
    """The report of attention weights (B, H, L, L) that are made by hand."""
    spec = AttentionSpec(embed_dim=8, num_heads=rows.shape[1], head_dim=2, outputs=("y", "heads", "weights"))
    B, L = valid.shape
    random = np.random.default_rng(0)
    stats = analysis.HeadStatistics(MultiHeadAttention(spec))
    outputs = {"heads": random.standard_normal((B, rows.shape[1], L, 2)), "weights": rows}
    return stats.add(random.standard_normal((B, L, 8)), outputs, valid, separators=separators).report()


def test_roles_are_found_where_they_were_planted() -> None:
    L, names = 10, ("previous", "next", "self", "first", "last", "separator", "broad", "mixed")
    valid = np.array([[True] * 10, [False] * 2 + [True] * 7 + [False]])  # the second has padding on both sides
    separators = np.zeros((2, L), bool)
    separators[:, 4] = True
    weights = np.zeros((2, len(names), L, L))
    for b in range(2):
        first, *_, last = keys = np.flatnonzero(valid[b])
        for q in keys:
            looked_at = {"previous": max(q - 1, first), "next": min(q + 1, last), "self": q, "first": first,
                         "last": last, "separator": 4}  # fmt: skip
            for h, name in enumerate(names):
                if name in looked_at:
                    weights[b, h, q, keys] = 0.3 / len(keys)
                    weights[b, h, q, looked_at[name]] += 0.7
            weights[b, 6, q, keys] = 1 / len(keys)
            weights[b, 7, q, keys] = 0.2 / len(keys)
            weights[b, 7, q, keys[:3]] += (0.3, 0.3, 0.2)
    found = placed_report(weights, valid, separators)
    assert found.roles == names
    assert found.entropy_share[6] == pytest.approx(1.0)
    assert found.entropy[6] == pytest.approx((10 * np.log(10) + 7 * np.log(7)) / 17)  # of each row ln of its keys
    away = {n: np.abs(np.subtract.outer(np.arange(n), np.arange(n))).mean() for n in (10, 7)}
    assert found.distance[6] == pytest.approx((10 * away[10] + 7 * away[7]) / 17)
    assert found.distance[2] == pytest.approx(0.3 * found.distance[6])
    assert "separator" not in placed_report(weights, valid).shares
    assert [line.split()[1] for line in repr(found).splitlines()[2:]] == list(names)


def test_padding_counts_nowhere() -> None:
    layer = sharp_layer()
    plain, padded = analysis.HeadStatistics(layer), analysis.HeadStatistics(layer)
    with torch.no_grad():
        for x, valid in batches():
            plain.add(x, layer(x, mask=valid), valid)
            x, valid = torch.nn.functional.pad(x, (0, 0, 0, 3), value=torch.nan), torch.nn.functional.pad(valid, (0, 3))
            padded.add(x, layer(x, mask=valid), valid.long())  # a tokenizer's mask is 0 and 1
    before, after = plain.report(), padded.report()
    for name in ("rho", *MATRICES, *VECTORS):
        np.testing.assert_allclose(getattr(after, name), getattr(before, name), rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "kind",
    [
        {"causal": True, "sinks": True},
        {"num_kv_heads": 2, "rope": True, "causal": True},
        {"kv_embed_dim": 24},
        {"kv_embed_dim": 24, "v_embed_dim": 17},
        {"dtype": "bfloat16", "v_head_dim": 4},
    ],
    ids=str,
)
def test_other_layers(kind: dict[str, object]) -> None:
    spec = AttentionSpec(embed_dim=32, num_heads=4, outputs=("y", "weights", "heads"), **kind)
    layer = sharp_layer(spec)
    x = torch.randn(3, 20, 32, dtype=layer.out_proj.weight.dtype)
    widths = {"context": 24, "key": 24, "value": 17}
    context = [torch.randn(3, 9, widths[name]) for name in dict.fromkeys(spec.sources) if name != "x"]
    with torch.no_grad():
        found = analysis.HeadStatistics(layer).add(x, layer(x, *context)).report()
    if spec.dtype == "bfloat16":  # as an artifact gives them to NumPy
        with torch.no_grad():
            arrays = [to_numpy(array) for array in (x, *layer(x))]
        again = analysis.HeadStatistics(layer).add(arrays[0], tuple(arrays[1:])).report()
        assert np.array_equal(again.js, found.js) and np.array_equal(again.cka, found.cka)
    assert all(np.isfinite(getattr(found, name)).all() for name in ("rho", "cka", "js", "entropy", "contribution"))
    assert (found.entropy_share <= 1 + 1e-2).all() and (found.js <= 1).all()
    assert (found.distance is None) == spec.is_cross
    if spec.causal:
        assert not found.shares["next"].any()
    if spec.sinks:
        with torch.no_grad():
            expected = layer.with_outputs("y", "entropy")(x)[1].mean(dim=(0, 2))
        np.testing.assert_allclose(found.entropy, expected.numpy(), rtol=0, atol=1e-5)  # the sink is one of the choices


def test_an_artifact_is_a_layer(artifact: mhsa.Artifact) -> None:
    attention = mhsa.load(artifact, threads=1)
    stats = analysis.HeadStatistics(artifact)
    for x, valid in batches():
        stats.add(x.numpy(), attention(x.numpy(), mask=valid.numpy()), valid.numpy())
    assert stats.report().tokens == 126


NAN = torch.full((2, 9, D), torch.nan)
HIDDEN = torch.zeros(2, 9, dtype=torch.bool)
REFUSED = {
    "a rank": ({"x": torch.zeros(9, D)}, r"x: expected shape \(B, L, 64\), got \(9, 64\)"),
    "a NaN": ({"x": NAN}, "x: expected finite numbers at all valid tokens, got NaN or infinities. Say in `valid`"),
    "everything hidden": ({"valid": HIDDEN}, "valid: expected at least one valid token, got none of 2 x 9: the mask"),
    "a mask's shape": ({"valid": HIDDEN[:1]}, r"valid: expected bool of shape \(B, L\) = \(2, 9\), got bool of shape"),
    "a mask of numbers": ({"valid": HIDDEN.long() + 2}, "valid: expected bool, or integers 0 and 1, got numbers"),
    "y alone": ({"outputs": torch.zeros(2, 9, D)}, "outputs: expected what a call returns.*with_outputs"),
    "no heads": ({"outputs": {"y": NAN}}, 'outputs: expected also "heads" and "weights", got y.*with_outputs'),
    "some weights": ({"rows": slice(0, 2)}, r"outputs.weights: expected shape \(2, 8, 9, 9\).*Ask for all heads"),
    "another layer": ({"seed": 5}, "outputs: expected outputs of this layer.*Are the weights the same"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_calls_that_are_refused(change: dict[str, object], message: str) -> None:
    layer, x = sharp_layer(), torch.randn(2, 9, D)
    valid = torch.ones(2, 9, dtype=torch.bool)
    with torch.no_grad():
        outputs = dict(zip(WORDS, sharp_layer(seed=change.get("seed", 0))(x, mask=valid), strict=True))
    if "rows" in change:
        outputs["weights"] = outputs["weights"][:, change["rows"]]
    call = {"x": x, "outputs": outputs, "valid": valid} | {k: v for k, v in change.items() if k not in ("rows", "seed")}
    stats = analysis.HeadStatistics(layer)
    with pytest.raises(InputError, match=message):
        stats.add(**call)
    assert stats.tokens == 0  # nothing of it was counted


def test_too_few_tokens() -> None:
    layer, stats = sharp_layer(), analysis.HeadStatistics(sharp_layer())
    with torch.no_grad():
        x = torch.randn(1, 31, D)
        stats.add(x, layer(x, mask=torch.ones(1, 31, dtype=torch.bool)))
    with pytest.raises(InputError, match=r"stats: expected statistics of at least 32 valid tokens.*, got 31"):
        stats.report()


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (torch.nn.Linear(2, 2), ModelError),
        (mhsa.ScaledDotProductAttention(AttentionSpec(embed_dim=8, num_heads=2)), ModelError),
        (MultiHeadAttention(AttentionSpec(embed_dim=8, num_heads=2, causal=True, kv_cache=True)), SpecError),
    ],
)
def test_layers_that_are_refused(layer: torch.nn.Module, kind: type[MhsaError]) -> None:
    with pytest.raises(kind, match="layer: expected"):
        analysis.HeadStatistics(layer)


def test_what_is_alike_stands_together() -> None:
    places = np.array([5.0, 0.0, 5.2, 0.1, 9.0, 0.3])
    assert linkage_order(np.abs(np.subtract.outer(places, places))) in ((1, 3, 5, 0, 2, 4), (4, 2, 0, 5, 3, 1))
    assert linkage_order(np.zeros((1, 1))) == (0,)


def test_every_array_is_of_the_heads() -> None:
    found = report(sharp_layer())
    shapes = {f.name: value.shape for f in fields(found) if isinstance(value := getattr(found, f.name), np.ndarray)}
    assert shapes == dict.fromkeys(("rho", *MATRICES), (H, H)) | dict.fromkeys(VECTORS, (H,))
