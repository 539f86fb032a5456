"""The CPU kernels alone: every vector width and register count, both layouts, masks, tails, the code they become."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest
from support.attention_ops import attention_of, three_buffers
from support.kernel_runs import assembly, attention, call, compiled, heads, inner_loops, stack_stores, vector_machine

from mhsa_compile.kernels.cpu.attention.kernel import CpuAttentionKernel
from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.spec.window import WindowSpec

MACHINES = {"avx2": (256, 16), "avx512": (512, 32), "neon": (128, 32), "scalar": (64, 8)}
RTOL = 4e-6  # of the largest value: float32 sums of up to 200 terms


@pytest.fixture(params=MACHINES, scope="module")
def profile(request):
    return vector_machine(*MACHINES[request.param])


def half(**choices):
    """Every other pairing of a machine with the choices: each of these runs on two machines, and each machine has each
    value of each choice."""
    combined = [
        (machine, *(values[i] for values, i in zip(choices.values(), places, strict=True)))
        for m, machine in enumerate(MACHINES)
        for places in product(*(range(len(values)) for values in choices.values()))
        if (m + sum(places)) % 2 == 0
    ]
    return pytest.mark.parametrize(("profile", *choices), combined, indirect=["profile"], ids=str)


def self_attention(H=3, E=20, F=12, **fields) -> AttentionOp:
    """Q, K and V side by side in one buffer, as the fused projection leaves them."""
    width = H * (2 * E + F)
    return attention_of(
        batch="B", q_length="L", kv_length="L", num_heads=H, num_kv_heads=H, head_dim=E, v_head_dim=F,
        scale=E**-0.5, band=None, mask=None,
        query=HeadLayout(0, "rows", width), key=HeadLayout(0, "rows", width, H * E),
        value=HeadLayout(0, "rows", width, 2 * H * E), output=HeadLayout(0, "rows", H * F),
    )  # fmt: skip


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert np.isfinite(actual).all()
    assert np.abs(actual - expected).max() <= RTOL * np.abs(expected).max()


@pytest.mark.thorough_but("avx2")
def test_self_attention_reads_its_heads_in_one_buffer(profile):
    op, kernel = self_attention(), CpuAttentionKernel()
    library = compiled(kernel.emit(op, profile, kernel.default_config(op, profile)), profile)
    for length in (1, 7, 33, 197):
        rng = np.random.default_rng(length)
        x = rng.standard_normal((2, length, op.query.width), np.float32)
        y = call(library["run"], x, np.full((2, length, 36), np.nan, np.float32))
        q, k, v = (heads(part, 3) for part in np.split(x, [60, 120], axis=-1))
        close(y, attention(op, q, k, v, None))


@pytest.mark.thorough_but("avx2-heads-bottom_right")
@half(layout=["rows", "heads"], causal=["top_left", "bottom_right"])
def test_causal_attention_in_both_layouts(profile, layout, causal):
    op, kernel = three_buffers(layout=layout, band=WindowSpec(None, 0, causal)), CpuAttentionKernel()
    library = compiled(kernel.emit(op, profile, kernel.default_config(op, profile)), profile)
    rng = np.random.default_rng(0)
    for B, L, S in [(2, 37, 131), (1, 131, 37), (1, 1, 1)]:
        q, k, v = (rng.standard_normal((B, h, n, e), np.float32) for h, n, e in ((4, L, 16), (2, S, 16), (2, S, 24)))
        expected = attention(op, q, k, v, None)
        stored = [t if layout == "heads" else t.transpose(0, 2, 1, 3).reshape(B, t.shape[2], -1) for t in (q, k, v)]
        shape = (B, 4, L, 24) if layout == "heads" else (B, L, 96)
        y = call(library["run"], *map(np.ascontiguousarray, stored), np.full(shape, np.nan, np.float32))
        close(y.transpose(0, 2, 1, 3).reshape(B, L, -1) if layout == "heads" else y, expected)


@pytest.mark.thorough_but("avx2-(1, 4, 1, 1)-float32")
@half(shape=[(2, 4, 37, 131), (1, 1, 37, 131), (2, 1, 1, 131), (1, 4, 1, 1)], dtype=["bool", "float32"])
def test_masks_broadcast_and_nothing_masked_leaks(profile, shape, dtype):
    """One of the masked keys holds NaN and Inf, and some queries see no key at all."""
    names = tuple(1 if size == 1 else name for size, name in zip(shape, "BHLS", strict=True))
    op, kernel = three_buffers(mask=CallMask(dtype, names)), CpuAttentionKernel()
    library = compiled(kernel.emit(op, profile, kernel.default_config(op, profile)), profile)
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, h, n, e), np.float32) for h, n, e in ((4, 37, 16), (2, 131, 16), (2, 131, 24)))
    mask = rng.random(shape) < 0.7
    if shape[-1] > 1:
        mask[..., 5] = False
        mask[:, :, -1] = False
    if dtype == "float32":
        mask = np.where(mask, rng.standard_normal(shape), -np.inf).astype(np.float32)
    expected = attention(op, q, k, v, mask)
    if shape[-1] > 1:
        k[:, :, 5], v[:, :, 5, ::2], v[:, :, 5, 1::2] = np.nan, np.nan, np.inf
    rows = [np.ascontiguousarray(t.transpose(0, 2, 1, 3).reshape(2, t.shape[2], -1)) for t in (q, k, v)]
    close(call(library["run"], *rows, mask, np.full((2, 37, 96), np.nan, np.float32)), expected)


@pytest.mark.thorough
def test_nan_in_a_visible_place_comes_through():
    profile = vector_machine(512, 32)
    op, kernel = three_buffers(H=1, G=1, F=16, band=WindowSpec(None, 0, "top_left")), CpuAttentionKernel()
    library = compiled(kernel.emit(op, profile, kernel.default_config(op, profile)), profile)
    q, k, v = (np.ones((1, 40, 16), np.float32) for _ in range(3))
    v[0, 20, 3] = np.nan
    y = call(library["run"], q, k, v, np.zeros((1, 40, 16), np.float32))
    assert np.isnan(y[0, 20:, 3]).all()
    assert np.isfinite(y[0, :20]).all() and np.isfinite(np.delete(y[0], 3, axis=-1)).all()
    v[0, 20, 3], q[0, 7, 0] = 1, np.nan
    y = call(library["run"], q, k, v, np.zeros((1, 40, 16), np.float32))
    assert np.isnan(y[0, 7]).all() and np.isfinite(np.delete(y[0], 7, axis=0)).all()


@pytest.mark.thorough
def test_the_inner_loops_stay_in_registers_and_call_nothing():
    """AVX-512 only: AVX2's 16 registers are another machine (docs/lab/2026-11-24-cpu-kernels.md)."""
    profile = vector_machine(512, 32, mcpu="x86-64-v4")
    op, kernel = self_attention(H=2, E=64, F=64), CpuAttentionKernel()
    code = assembly(kernel.emit(op, profile, kernel.default_config(op, profile)), profile)
    assert not re.findall(r"call\w*\s+\S*(exp|pow|fmax)\S*", code)
    loops = [body for body in inner_loops(code, "vfmadd") if not any("vpslld" in line for line in body)]  # not exp2's
    assert loops
    for body in loops:
        assert not stack_stores(body), "\n".join(body)
