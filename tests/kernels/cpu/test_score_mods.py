"""Softcap, lengths, sinks and slopes in both attention kernels, alone and together, against float64 within the budget.

What a query must not see holds NaN and infinities in every case that hides anything.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from support.attention_ops import by_heads, changed, features, scattered
from support.kernel_runs import attention, call, compiled, vector_machine

from mhsa_compile.hardware.profile import TargetProfile, detect
from mhsa_compile.kernels.cpu.attention.kernel import CpuAttentionKernel
from mhsa_compile.kernels.cpu.decode.kernel import CpuDecodeKernel
from mhsa_compile.kernels.interface.kernel import Kernel
from mhsa_compile.kernels.interface.ops import AttentionOp
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.kernels.scores.static_mask import StaticMask
from mhsa_compile.spec.window import WindowSpec
from mhsa_compile.verification.error_budget import budget, max_error

ATTENTION, DECODE = CpuAttentionKernel(), CpuDecodeKernel()
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
AVX512, AVX2, NEON = vector_machine(512, 32), vector_machine(256, 16), vector_machine(128, 32)
ALL = {"softcap": 2.5, "lengths": True, "sinks": True, "slopes": True}
CAUSAL, WINDOW = WindowSpec(None, 0, "bottom_right"), WindowSpec(40, 3, "bottom_right")


def cores(profile: TargetProfile, count: int) -> TargetProfile:
    return msgspec.structs.replace(profile, hardware=msgspec.structs.replace(profile.hardware, cores=count))


operation = partial(by_heads, B=3)


def symbolic(op: AttentionOp, lengths: str) -> AttentionOp:
    """The operation with an open batch and the open lengths named."""
    names = {"L": "q_length", "S": "kv_length"}
    op = replace(op, batch="B", **{names[axis]: axis for axis in lengths})
    dims = ("B", op.num_heads, op.q_length, op.kv_length)
    return op if features(op).mask is None else changed(op, mask=CallMask(features(op).mask.dtype, dims))


def operands(op: AttentionOp, lengths: list[int], seed: int = 0) -> dict[str, Any]:
    """Random q, k, v and all that the operation takes; of fixed sizes."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[op.dtype]
    B, L, S, H = op.batch, op.q_length, op.kv_length, op.num_heads
    shapes = ((B, H, L, op.head_dim), (B, op.num_kv_heads, S, op.head_dim), (B, op.num_kv_heads, S, op.v_head_dim))
    taken: dict[str, Any] = dict(zip("qkv", (rng.standard_normal(s).astype(dtype) for s in shapes), strict=True))
    mask = None
    if features(op).mask is not None:
        mask = rng.random((B, H, L, S)) < 0.6
        mask[..., S // 3] = False
        if features(op).mask.dtype != "bool":
            mask = np.where(mask, rng.standard_normal(mask.shape), -np.inf).astype(DTYPES[features(op).mask.dtype])
    taken["mask"] = mask
    taken["lengths"] = np.array(lengths, np.int64) if features(op).lengths else None
    taken["sinks"] = np.resize([0.5, -np.inf, 30, -7], H).astype(dtype) if features(op).sinks else None
    taken["slopes"] = np.resize([0.25, 0, 0.0625, 1], H).astype(dtype) if features(op).slopes else None
    return taken


def poisoned(op: AttentionOp, taken: dict[str, Any]) -> dict[str, Any]:
    """The operands, but what no query may see is NaN and infinite."""
    k, v = taken["k"].copy(), taken["v"].copy()
    S = k.shape[2]
    hidden = np.zeros((k.shape[0], S), bool)
    if features(op).lengths:
        hidden |= np.arange(S) >= taken["lengths"][:, None]
    if features(op).mask is not None:
        hidden[:, S // 3] = True
    rows = np.broadcast_to(hidden[:, None], k.shape[:3])
    k[rows], v[rows] = np.nan, np.inf
    return {**taken, "k": k, "v": v}


def check(
    kernel: Kernel[AttentionOp], compiled_for: AttentionOp, profile: TargetProfile, *runs: tuple[AttentionOp, list[int]]
) -> None:
    """Compiles one operation, and runs it at the fixed sizes and lengths of each of `runs`."""
    assert kernel.why_not(compiled_for, profile) is None
    emitted = kernel.emit(compiled_for, profile, kernel.default_config(compiled_for, profile))
    function = compiled(emitted, profile)["run"]
    for op, lengths in runs:
        taken = operands(op, lengths)
        y = np.full((op.batch, op.q_length, op.num_heads * op.v_head_dim), np.nan, DTYPES[op.dtype])
        arrays = [array for array in poisoned(op, taken).values() if array is not None]
        y = call(function, *arrays, *emitted.constants, y)
        expected = attention(op, **taken)
        yardstick = attention(op, **taken, dtype=getattr(torch, op.dtype))
        assert max_error(expected, y) <= budget(expected, yardstick, op.dtype), (op.q_length, op.kv_length, lengths)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("profile", "fields"),
    [(AVX512, {"softcap": 2.5}), (NEON, {"lengths": True}), (AVX2, {"sinks": True}), (AVX512, {"slopes": True})],
    ids=["softcap", "lengths", "sinks", "slopes"],
)
def test_each_alone(profile, fields):
    """Few queries and many, tails, and entries with no key, one, and more than there are."""
    op = operation(5, 131, **fields)
    runs = [(op, [131, 0, 77]), (replace(op, kv_length=1), [0, 1, 9]), (replace(op, kv_length=300), [300, -4, 1])]
    check(DECODE, symbolic(op, "S"), cores(profile, 5), *runs)
    check(ATTENTION, symbolic(op, "S"), profile, *runs[:2], (replace(op, kv_length=200), [200, 3, 130]))


@pytest.mark.parametrize(
    ("profile", "op", "free", "lengths"),
    [
        pytest.param(AVX2, operation(67, 131, band=CAUSAL, **ALL), "LS", [131, 20, 0], marks=pytest.mark.thorough),
        pytest.param(
            AVX512,
            operation(125, 131, mask=CallMask("float32", (3, 4, 125, 131)), **ALL),
            "",
            [131, 1, 90],
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            AVX512,
            operation(125, 197, band=CAUSAL, static_mask=StaticMask(scattered((1, 125, 197), seed=7)), **ALL),
            "",
            [197, 40, 123],
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            detect(),
            operation(125, 131, E=32, F=64, band=WINDOW, dtype="bfloat16", **ALL),
            "",
            [131, 0, 77],
            marks=pytest.mark.thorough,
        ),
        (NEON, operation(125, 131, mask=CallMask("bool", (3, 4, 125, 131)), dtype="float16", **ALL), "", [131, 5, 77]),
    ],
    ids=["causal", "biased", "constant mask", "window, bfloat16", "masked, float16"],
)
def test_all_together_in_attention(profile, op, free, lengths):
    runs = [(op, lengths)] + ([(replace(op, q_length=1, kv_length=7), [0, 7, 3])] if free else [])
    check(ATTENTION, symbolic(op, free) if free else op, profile, *runs)


def close(L: int, S: int) -> np.ndarray:
    """Keys close to each query, and the very first key."""
    distance = np.arange(S) - np.arange(L)[:, None]
    return (abs(distance) <= 15) | (distance == -np.arange(L)[:, None])


CLOSE = StaticMask(close(197, 197)[None])
ADDED = CallMask("float32", (1, 1, 197, 197))


@pytest.mark.parametrize(
    ("kernel", "op", "hidden", "sign"),
    [
        pytest.param(
            ATTENTION,
            operation(197, 197, E=16, F=16, static_mask=CLOSE, slopes=True, sinks=True),
            None,
            1,
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            ATTENTION, operation(197, 197, E=16, F=16, mask=ADDED, slopes=True), -1e4, 1, marks=pytest.mark.thorough
        ),
        pytest.param(
            DECODE,
            operation(3, 601, mask=replace(ADDED, dims=(1, 1, 3, 601)), slopes=True),
            -1e4,
            1,
            marks=pytest.mark.thorough,
        ),
        (DECODE, operation(5, 601, mask=replace(ADDED, dims=(1, 1, 5, 601)), slopes=True), -np.inf, -1),
    ],
    ids=["constant mask", "added mask", "decode, added mask", "decode, masked"],
)
def test_distances_are_exact_where_the_weights_are(kernel, op, hidden, sign):
    """Without causality the last key wins, unless a mask hides it; what does not, and where the largest score then is,
    nothing says beforehand. Distances that are counted from elsewhere are large, and so are their rounding errors."""
    profile = cores(AVX512, 3)
    emitted = kernel.emit(op, profile, kernel.default_config(op, profile))
    function = compiled(emitted, profile)["run"]
    for seed in range(3):
        taken = operands(op, [], seed)
        taken["slopes"] = (sign * taken["slopes"]).astype(taken["slopes"].dtype)
        if hidden is not None:
            taken["mask"] = np.where(close(op.q_length, op.kv_length), 0, hidden).astype(np.float32)[None, None]
        y = np.full((op.batch, op.q_length, op.num_heads * op.v_head_dim), np.nan, np.float32)
        y = call(function, *(array for array in taken.values() if array is not None), *emitted.constants, y)
        expected = attention(op, **taken)
        yardstick = attention(op, **taken, dtype=torch.float32)
        assert max_error(expected, y) <= budget(expected, yardstick, "float32"), seed


@pytest.mark.parametrize(
    ("profile", "op"),
    [
        pytest.param(AVX512, operation(5, 600, band=CAUSAL, **ALL), marks=pytest.mark.thorough),
        pytest.param(
            AVX2, operation(3, 600, mask=CallMask("float32", (3, 4, 3, 600)), **ALL), marks=pytest.mark.thorough
        ),
        pytest.param(
            NEON,
            operation(2, 600, H=6, G=1, band=WINDOW, mask=CallMask("bool", (3, 6, 2, 600)), **ALL),
            marks=pytest.mark.thorough,
        ),
        (detect(), operation(1, 600, E=64, F=64, H=8, G=1, dtype="bfloat16", **ALL)),
        (AVX512, operation(4, 600, H=16, G=2, band=CAUSAL, dtype="float16", **ALL)),
    ],
    ids=["causal", "biased", "masked window", "bfloat16", "float16"],
)
def test_all_together_in_decoding(profile, op):
    runs = [(op, [600, 0, 130]), (replace(op, batch=1, kv_length=1), [1]), (replace(op, kv_length=131), [2, 129, 70])]
    check(DECODE, symbolic(op, "S"), cores(profile, 5), *runs)


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 7, 13])
def test_uneven_caches_are_dealt_out_whole(count):
    """Shares begin and end within heads, several within one, and there may be fewer pieces of keys than cores."""
    op = operation(1, 2048, H=6, G=3, lengths=True, sinks=True)
    cases = [[2048], [130], [2047, 0, 1, 129], [5, 128, 300, 1, 0, 0, 1500], [0], [0, 0], [1], [300] * 11]
    runs = [(replace(op, batch=len(lengths)), lengths) for lengths in cases]
    check(DECODE, symbolic(op, "S"), cores(AVX512, count), *runs)


@pytest.mark.parametrize(
    ("kernel", "L", "F"),
    [pytest.param(ATTENTION, 64, 40, marks=pytest.mark.thorough), (DECODE, 7, 1)],
    ids=["attention", "decode"],
)
def test_sums_of_equal_weights_are_exact(kernel: Kernel[AttentionOp], L: int, F: int):
    """All scores are 0: all weights are one number, and each addition of it to a long sum is rounded the same way."""
    op = operation(L, 256, B=64 // L + 3, G=4, F=F, sinks=True)
    taken = operands(op, [])
    taken["q"] = np.zeros_like(taken["q"])
    taken["sinks"] = np.linspace(-2, 2, op.num_heads, dtype=np.float32)
    y = np.full((op.batch, op.q_length, op.num_heads * op.v_head_dim), np.nan, np.float32)
    emitted = kernel.emit(op, detect(), kernel.default_config(op, detect()))
    given = [taken[name] for name in ("q", "k", "v", "sinks")]
    y = call(compiled(emitted, detect())["run"], *given, *emitted.constants, y)
    truth, eager = (
        attention(op, *given[:3], None, sinks=given[3], dtype=dtype) for dtype in (torch.float64, torch.float32)
    )
    assert max_error(truth, y) <= budget(truth, eager.astype(np.float32), "float32")


@pytest.mark.parametrize(
    "kernel", [pytest.param(ATTENTION, marks=pytest.mark.thorough), DECODE], ids=["attention", "decode"]
)
def test_sinks_and_caps_at_the_ends_of_the_range(kernel):
    """A sink may be far above or below all scores, and a score so large that its product overflows is at the cap."""
    op = operation(3, 90, B=1, G=4, softcap=20.0, sinks=True)
    emitted = kernel.emit(op, AVX2, kernel.default_config(op, AVX2))
    function = compiled(emitted, AVX2)["run"]
    taken = operands(op, [])
    taken["sinks"] = np.array([3e38, -3e38, 1e4, -np.inf], np.float32)
    taken["q"][:, :, 1] *= np.float32(1e38)
    taken["k"][:, :, :, 0] *= np.float32(1e3)
    y = call(function, taken["q"], taken["k"], taken["v"], taken["sinks"], np.full((1, 3, 160), np.nan, np.float32))
    assert max_error(attention(op, **taken), y) <= 1e-5
    assert not y[0, :, :40].any() and not y[0, :, 80:120].any()
    taken["q"][0, 1, 2, 3] = np.nan
    y = call(function, taken["q"], taken["k"], taken["v"], taken["sinks"], np.zeros((1, 3, 160), np.float32))
    assert np.isnan(y[0, 2, 40:80]).all() and np.isnan(y).sum() == 40


@pytest.mark.parametrize("kernel", [ATTENTION, DECODE], ids=["attention", "decode"])
def test_a_softcap_that_no_product_can_be_measured_in_is_refused(kernel):
    for softcap in (1e-20, 1e30, np.inf, np.nan, -1.0):
        assert "softcap from 1e-12 to 1e+12" in str(kernel.why_not(operation(3, 90, softcap=softcap), AVX512))
