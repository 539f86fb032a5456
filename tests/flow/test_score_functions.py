"""mask_mod and score_mod, through the whole flow: against FlexAttention itself, in float64."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.score_functions import DOCUMENTS, HEADS, MASKS, SCORES, SLOPES
from torch.nn.attention.flex_attention import create_mask, flex_attention

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError, SpecError
from mhsa_compile.nn.modules import ScaledDotProductAttention
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.verify import verify

E = 24


def core(**fields: Any) -> ScaledDotProductAttention:
    return ScaledDotProductAttention(mhsa.AttentionSpec(embed_dim=HEADS * E, num_heads=HEADS, num_kv_heads=2, **fields))


def loaded(module: torch.nn.Module, folder: Path, **options: Any) -> Any:
    threads = options.pop("threads", None)
    folder.mkdir(exist_ok=True)
    path = folder / "a.mhsa"
    mhsa.compile(module, **options).save(path)
    return mhsa.load(path, threads=threads)


def drawn(L: int, S: int, B: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(L + S)
    return [torch.randn(B, heads, n, E, generator=generator) for heads, n in ((HEADS, L), (2, S), (2, S))]


def expected(
    inputs: list[torch.Tensor], mask_mod: Any, score_mod: Any, dtype: torch.dtype = torch.float64
) -> np.ndarray:
    """The result as FlexAttention computes it without compiling; masks as scores of -inf, rows without any key as
    zeros."""
    q, k, v = (x.to(dtype) for x in inputs)
    B, L, S = q.shape[0], q.shape[2], k.shape[2]
    seen = torch.ones(B, HEADS, L, S, dtype=torch.bool)
    if mask_mod is not None:
        seen = create_mask(mask_mod, B, HEADS, L, S, device="cpu")

    def with_mask(score, b, h, q_idx, kv_idx):
        made = score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)
        return torch.where(seen[b, h, q_idx, kv_idx], made, -float("inf"))

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        y = flex_attention(q, k, v, score_mod=with_mask, enable_gqa=True)
    return y.masked_fill(~seen.any(-1, keepdim=True), 0.0).numpy()


def check(compiled: Any, inputs: list[torch.Tensor], mask_mod: Any = None, score_mod: Any = None) -> None:
    exact, yardstick = (expected(inputs, mask_mod, score_mod, dtype) for dtype in (torch.float64, torch.float32))
    y = compiled(*(x.numpy() for x in inputs))
    assert max_error(exact, y) <= budget(exact, yardstick, "float32")


@pytest.mark.thorough
@pytest.mark.parametrize("name", MASKS)
def test_masks_mean_what_they_mean_to_flex_attention(name: str, tmp_path: Path):
    mask_mod = MASKS[name]
    compiled = loaded(core(mask_mod=mask_mod), tmp_path)
    assert compiled.manifest.semantics[0].mask_mod
    for L, S in ((97, 97), (1, 5), (144, 131)):
        check(compiled, drawn(L, S), mask_mod=mask_mod)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SCORES)
def test_score_functions_mean_what_they_mean_to_flex_attention(name: str, tmp_path: Path):
    compiled = loaded(core(score_mod=SCORES[name]), tmp_path)
    for L, S in ((97, 97), (1, 5), (34, 131)):
        check(compiled, drawn(L, S), score_mod=SCORES[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["causal", "document, causal", "NATTEN", "by head and entry"])
def test_masks_of_fixed_sizes_are_computed_once(name: str, tmp_path: Path):
    compiled = loaded(core(mask_mod=MASKS[name], score_mod=SCORES["alibi"]), tmp_path, dims={"L": 97, "S": 131})
    (meaning,) = compiled.manifest.semantics
    assert (meaning.static_mask is None) == (name in ("by head and entry", "causal"))  # nobody knows the entry; a band
    check(compiled, drawn(97, 131), MASKS[name], SCORES["alibi"])


@pytest.mark.parametrize("mask", [pytest.param("document", marks=pytest.mark.thorough), "by head and entry"])
@pytest.mark.parametrize("score", ["T5", pytest.param("causal, as a score", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("L", [pytest.param(1, marks=pytest.mark.thorough), 5])
def test_few_queries(L: int, mask: str, score: str, tmp_path: Path):
    compiled = loaded(core(mask_mod=MASKS[mask], score_mod=SCORES[score]), tmp_path, dims={"L": L})
    assert "cpu.decode" in {op.kernel for op in compiled.manifest.ops}
    for S in (1, 67, 251):
        check(compiled, drawn(L, S), MASKS[mask], SCORES[score])


def test_what_no_kernel_takes_is_right_too(tmp_path: Path):
    fields = {"mask_mod": MASKS["by head and entry"], "score_mod": SCORES["relative position, from the end"]}
    module = core(static_mask=mhsa.masks.BlockDiagonal(block=40), **fields)
    compiled = loaded(module, tmp_path, dims={"L": 41, "S": 41})
    assert {op.kernel for op in compiled.manifest.ops} == {"plain"}
    blocks = lambda b, h, q, k: (q // 40 == k // 40) & fields["mask_mod"](b, h, q, k)  # noqa: E731
    check(compiled, drawn(41, 41), blocks, fields["score_mod"])


@pytest.mark.thorough
def test_verify_knows_them_elsewhere(tmp_path: Path):
    """The artifact holds all that its meaning needs: the spec, the steps, what they capture."""
    fields = {"mask_mod": MASKS["document, causal"], "score_mod": SCORES["relative position, a table"]}
    spec = mhsa.AttentionSpec(embed_dim=32, num_heads=HEADS, outputs=("y", "lse", "top_k:3", "weights"), **fields)
    compiled = loaded(mhsa.MultiHeadAttention(spec), tmp_path)
    assert compiled.manifest.limits == {"L": len(DOCUMENTS)}
    verdict = verify(tmp_path / "a.mhsa")
    assert all(case.error <= case.budget for case in verdict.cases)
    assert not [one for one in verdict.checks if one.difference is not None and one.difference > one.budget]
    with pytest.raises(InputError, match="L"):
        compiled(np.zeros((1, len(DOCUMENTS) + 1, 32), np.float32))


@pytest.mark.thorough
def test_with_a_cache_places_are_those_of_the_sequence(tmp_path: Path):
    fields = {"mask_mod": MASKS["sliding window"], "score_mod": SCORES["alibi"]}
    spec = mhsa.AttentionSpec(embed_dim=32, num_heads=HEADS, causal=True, kv_cache=True, **fields)
    loaded(mhsa.MultiHeadAttention(spec), tmp_path)
    (step,) = [one for one in verify(tmp_path / "a.mhsa").checks if one.name.startswith("decoding")]
    assert step.difference is not None and step.difference <= step.budget


@pytest.mark.thorough
def test_nan_in_what_they_hide_stays_there(tmp_path: Path):
    for fields in ({"mask_mod": MASKS["causal"]}, {"score_mod": SCORES["causal, as a score"]}):
        for L in (None, 3):
            folder = tmp_path / f"{next(iter(fields))}{L}"
            compiled = loaded(core(**fields), folder, dims={} if L is None else {"L": L})
            q, k, v = (x.numpy() for x in drawn(L or 40, 40))
            clean = compiled(q, k, v)
            v[:, :, 2:] = np.nan
            assert np.array_equal(compiled(q, k, v)[:, :, :2], clean[:, :, :2])
            assert np.isnan(compiled(q, k, v)[:, :, 2:]).all()


@pytest.mark.thorough
def test_an_index_outside_of_its_tensor_is_nan_and_reads_nothing(tmp_path: Path):
    table = torch.ones(9)
    compiled = loaded(core(score_mod=lambda score, b, h, q, k: score + table[k // 2]), tmp_path)
    q, k, v = (x.numpy() for x in drawn(30, 18))
    assert np.isfinite(compiled(q, k, v)).all()
    q, k, v = (x.numpy() for x in drawn(30, 19))
    assert np.isnan(compiled(q, k, v)).all()


@pytest.mark.thorough
def test_any_number_of_threads_and_callers_gives_the_same_bits(tmp_path: Path):
    module = core(mask_mod=MASKS["document, causal"], score_mod=SCORES["T5"])
    inputs = [x.numpy() for x in drawn(211, 211, B=3)]
    first = loaded(module, tmp_path, threads=1)(*inputs)
    for threads in (1, 2, 8):
        compiled = mhsa.load(tmp_path / "a.mhsa", threads=threads)
        with ThreadPoolExecutor(3) as callers:
            results = [one.result() for one in [callers.submit(compiled, *inputs) for _ in range(24)]]
        assert all(np.array_equal(result, first) for result in results)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits(dtype: str, tmp_path: Path):
    spec = mhsa.AttentionSpec(
        embed_dim=64, num_heads=HEADS, dtype=dtype, mask_mod=MASKS["prefix LM"], score_mod=SCORES["alibi"]
    )
    loaded(mhsa.MultiHeadAttention(spec), tmp_path)
    assert all(case.error <= case.budget for case in verify(tmp_path / "a.mhsa").cases)


def _branches(score, b, h, q, k):
    return score if q >= k else score - SLOPES[0]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"score_mod": _branches}, "score_mod: expected an expression .* without branches"),
        ({"score_mod": lambda score, b, h, q, k: torch.sin(score)}, "the operator sin. It may use"),
        ({"score_mod": lambda score, b, h: score}, "score_mod: .*TypeError"),
        ({"mask_mod": lambda b, h, q, k: q - k}, "mask_mod: expected a function whose result is bool"),
        ({"mask_mod": lambda b, h, q, k: k == DOCUMENTS}, "mask_mod: expected a captured tensor with an index"),
        ({"mask_mod": "causal"}, r"mask_mod: expected None, or a function of \(b, h, q_idx, kv_idx\)"),
        ({"score_mod": lambda score, b, h, q, k: score + SLOPES[k.item()]}, "score_mod: expected an expression"),
    ],
)
def test_what_cannot_be_traced_is_one_message(fields: dict[str, Any], named: str):
    with pytest.raises(SpecError, match=named):
        core(**fields)


@pytest.mark.thorough
def test_captured_tensors_that_are_too_short():
    doc, few = torch.arange(30), SLOPES[:3]
    module = core(mask_mod=lambda b, h, q, k: doc[q] == doc[k])
    with pytest.raises(SpecError, match="mask_mod: expected a captured tensor of at least 31 elements, got one of 30"):
        mhsa.compile(module, dims={"L": 31, "S": 7})
    with pytest.raises(SpecError, match="score_mod: expected a captured tensor of at least 4 elements"):
        mhsa.compile(core(score_mod=lambda score, b, h, q, k: score * few[h]))


TABLE = torch.tensor([-128, 127, 5, -1, 100, -77, 3], dtype=torch.int8)
NARROW = {
    "distances as int8": lambda score, b, h, q, k: score + ((q - k) * 40).to(torch.int8) / 80.0,
    "places as uint8": lambda score, b, h, q, k: score + (q * 40 - k * 70).to(torch.uint8) / 99.0,
    "int16 and int32": lambda score, b, h, q, k: (
        score + (q * 9000 * k).to(torch.int16) / 2e4 - (k * 2**30 + q * 2**29).to(torch.int32) / 2.0**31
    ),
    "sums of int8": lambda score, b, h, q, k: score + (TABLE[q % 7] + TABLE[k % 7]) / 64.0,
    "a number beside int8": lambda score, b, h, q, k: (
        score + ((q - k).to(torch.int8) // 200) % 5 + (k.to(torch.uint8) - 9) / 50
    ),
    "a product beyond 64 bits": lambda score, b, h, q, k: score + (((q + 3) * 2**61 * (k + 5)) >> 55) / 128.0,
    "shifts": lambda score, b, h, q, k: (
        score + (((q << 5) - (k << 7)).to(torch.int8) >> 2) / 8 - ~(q - k).to(torch.uint8) / 64
    ),
    "signs": lambda score, b, h, q, k: score + (-(k * 32).to(torch.int8)).abs() / 50 + (-k.to(torch.uint8)) / 99,
    "floats beyond 32 bits": lambda score, b, h, q, k: (
        score + (((q - k) * 1e9).to(torch.int64) % 17) / 8.0 + ((q - k) * 1e9).to(torch.int32) / 2.0**31
    ),
    "floats beyond all": lambda score, b, h, q, k: (
        score + ((q - k) * 1e20).to(torch.int64) / 2.0**63 + ((q - k) * 1e3).to(torch.uint8) / 64
    ),
}


@pytest.mark.thorough
def test_whole_numbers_wrap_as_pytorch_s(tmp_path: Path) -> None:
    """All in one function, by heads, so that it is compiled once; and each by itself, in eager and as the oracle."""
    functions = list(NARROW.values())

    def by_head(score, b, h, q, k):
        changed = score
        for number, function in enumerate(functions):
            changed = torch.where(h == number, function(score, b, h, q, k), changed)
        return changed

    H, L, S = len(functions), 13, 21
    spec = mhsa.AttentionSpec(embed_dim=4 * H, num_heads=H, score_mod=by_head, outputs=("y", "weights"))
    module = ScaledDotProductAttention(spec)
    zeros = [np.zeros((1, H, n, 4), np.float32) for n in (L, S, S)]
    q, k = torch.arange(L)[:, None], torch.arange(S)
    wanted = [torch.softmax(f(torch.zeros(L, S), 0, 0, q, k).double(), -1).numpy() for f in functions]
    attention = loaded(module, tmp_path)
    for weights in (attention(*zeros).weights, module(*map(torch.from_numpy, zeros))[1].detach().numpy()):
        for name, want, got in zip(NARROW, wanted, weights[0], strict=True):
            assert np.abs(got - want).max() < 1e-5, name
    assert verify(tmp_path / "a.mhsa").ok


GAPS = torch.randn(40, 40, generator=torch.Generator().manual_seed(0))
GAPS[3, 5] = GAPS[0, 7] = float("nan")


@pytest.mark.thorough
@pytest.mark.parametrize("queries", [1, 13])
def test_floats_are_rounded_and_nan_stays(queries: int, tmp_path: Path) -> None:
    """Scores rounded to whole numbers by a sum, NaN hidden by a comparison that is false for it, and one that stays."""

    def rounded(score, b, h, q, k):
        return (score * 4 + 12582912.0) - 12582912.0

    def unless_less(b, h, q, k):
        return ~(GAPS[q, k] < 0.5) & (GAPS[q, k] != GAPS[k, q]) | (k == q)

    def broken(score, b, h, q, k):
        return score + (GAPS[q, k] - GAPS[q, k]) + GAPS[q, k] * 0.0

    q, k, v = (x[:1] for x in drawn(queries, 29))
    scores = q @ k.repeat_interleave(HEADS // 2, 1).mT / E**0.5
    rows, columns = torch.arange(queries)[:, None], torch.arange(29)
    wanted = {
        "rounded": torch.round(scores * 4),
        "unless less": scores.masked_fill(~unless_less(0, 0, rows, columns), -torch.inf),
        "broken": broken(scores, 0, 0, rows, columns),
    }
    functions = {
        "rounded": {"score_mod": rounded},
        "unless less": {"mask_mod": unless_less},
        "broken": {"score_mod": broken},
    }
    for name, fields in functions.items():
        y = loaded(core(**fields), tmp_path / name, check=False)(q, k, v)
        expected = torch.softmax(wanted[name], -1) @ v.repeat_interleave(HEADS // 2, 1)
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda score, b, h, q, k: 1, "whose result is one tensor"),
        (lambda score, b, h, q, k: True, "whose result is one tensor"),
        (lambda score, b, h, q, k: (score,), "whose result is one tensor"),
        (lambda score, b, h, q, k: None, "whose result is one tensor"),
        (lambda score, b, h, q, k: score + torch.full((3,), 1.0), "one number for each pair"),
        (lambda score, b, h, q, k: score + torch.zeros(3), "one number for each pair"),
        (lambda score, b, h, q, k: score + len(COUNTED.append(1) or COUNTED), "says the same each time"),
        (lambda score, b, h, q, k: score + q.to(torch.uint32), "uint32"),
        (lambda score, b, h, q, k: score.to(torch.complex64).abs(), "complex64"),
        (lambda score, b, h, q, k: score + TABLE[q.to(torch.uint8)], "score_mod"),
        (lambda score, b, h, q, k: score + torch.tensor([1e39], dtype=torch.float64)[h], "float32 holds"),
        (lambda score, b, h, q, k: score + torch.eye(3).to_sparse()[h, q], "score_mod"),
    ],
    ids=range(12),
)
def test_functions_that_are_none(function, message) -> None:
    with pytest.raises(SpecError, match=message):
        core(score_mod=function)


COUNTED: list[int] = []
