"""The attention kernel by itself: bands, constant masks, dtypes, and scores that rise as the keys go by."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support.attention_ops import by_heads, scattered
from support.kernel_runs import attention, call, compiled, vector_machine

from mhsa_compile.hardware.profile import TargetProfile, detect
from mhsa_compile.kernels.cpu.attention.block_sparsity import HIDDEN, PARTIAL, WHOLE, _kinds, _runs, plan
from mhsa_compile.kernels.cpu.attention.kernel import CpuAttentionKernel
from mhsa_compile.kernels.interface.ops import AttentionOp
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.kernels.scores.static_mask import StaticMask
from mhsa_compile.spec.window import WindowSpec

WIDE, NARROW = vector_machine(512, 32), vector_machine(128, 32)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
UNIT = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def random_operands(op: AttentionOp, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    B, L, S, H, G, E, F = (  # fixed sizes only
        op.batch, op.q_length, op.kv_length, op.num_heads, op.num_kv_heads, op.head_dim, op.v_head_dim
    )  # fmt: skip
    shapes = ((B, H, L, E), (B, G, S, E), (B, G, S, F))
    return [rng.standard_normal(shape).astype(DTYPES[op.dtype]) for shape in shapes]


def run(op: AttentionOp, profile: TargetProfile, operands: list[np.ndarray]) -> np.ndarray:
    kernel = CpuAttentionKernel()
    assert kernel.why_not(op, profile) is None
    emitted = kernel.emit(op, profile, kernel.default_config(op, profile))
    y = np.full((op.batch, op.q_length, op.num_heads * op.v_head_dim), np.nan, DTYPES[op.dtype])
    return call(compiled(emitted, profile)["run"], *operands, *emitted.constants, y)


def check(op: AttentionOp, profile: TargetProfile, operands: list[np.ndarray] | None = None) -> None:
    """Asserts that the error is within what weights and sums of the dtype may lose: some units of the largest value."""
    operands = random_operands(op) if operands is None else operands
    expected = attention(op, *operands, None)
    error = np.abs(run(op, profile, operands).astype(np.float64) - expected).max()
    assert error <= 8 * UNIT[op.dtype] * np.abs(expected).max()


@pytest.mark.thorough_but("narrow-300-300-WindowSpec(left=70, right=None, alignment='top_left')")
@pytest.mark.parametrize(
    ("machine", "L", "S", "band"),
    [
        ("narrow", 197, 197, WindowSpec(5, 0)),
        ("wide", 197, 197, WindowSpec(5, 0)),
        ("wide", 197, 197, WindowSpec(None, 20)),
        ("narrow", 300, 300, WindowSpec(70, None)),
        ("wide", 64, 512, WindowSpec(40, 3, "bottom_right")),
        ("narrow", 130, 61, WindowSpec(None, 0, "bottom_right")),
        ("wide", 130, 61, WindowSpec(None, 0, "bottom_right")),
        ("wide", 61, 130, WindowSpec(100, 0, "top_left")),
        ("narrow", 7, 197, WindowSpec(0, 0, "bottom_right")),
    ],
    ids=str,
)
def test_bands(machine, L, S, band):
    check(by_heads(L, S, band=band), {"wide": WIDE, "narrow": NARROW}[machine])


@pytest.mark.thorough
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("band", [None, WindowSpec(None, 0, "bottom_right")], ids=["free", "causal"])
def test_constant_masks(heads, band):
    L, S = (197, 197) if (heads == 1) == (band is None) else (130, 61)
    check(by_heads(L, S, band=band, static_mask=StaticMask(scattered((heads, L, S)))), WIDE)


@pytest.mark.thorough
def test_what_a_constant_mask_hides_reaches_no_output():
    visible = scattered((1, 100, 90))
    op = by_heads(100, 90, static_mask=StaticMask(visible))
    q, k, v = random_operands(op)
    hidden = ~visible.any(axis=(0, 1))
    seen_by_some = np.flatnonzero(visible.any(axis=(0, 1)) & ~visible.all(axis=(0, 1)))[0]
    k[:, :, hidden], v[:, :, hidden] = np.nan, np.inf
    v[:, :, seen_by_some] = np.nan
    y = run(op, WIDE, [q, k, v])
    blind = ~visible[0, :, seen_by_some]
    assert np.isfinite(y[:, blind]).all() and np.isnan(y[:, ~blind]).all()


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("E", "F", "band"),
    [(64, 64, None), (64, 64, WindowSpec(None, 0)), (40, 48, WindowSpec(9, 2)), (7, 24, None)],
    ids=str,
)
def test_sixteen_bits(dtype, E, F, band):
    # Narrow vectors widen both on their way, as well with widths of 40 and 48 as with 64.
    for profile in (detect(), NARROW) if E != 64 else (detect(),):
        check(by_heads(67, 67, E=E, F=F, band=band, dtype=dtype), profile)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("step", [0.5, 30.0, -30.0])
def test_scores_that_rise_or_fall_with_the_keys(dtype, step):
    """Every key is `step` above the one before: the reference is raised again and again, or never."""
    op = by_heads(70, 150, E=32, F=32, dtype=dtype)
    q, k, v = random_operands(op)
    q[...], k[...] = 0, 0
    q[..., 0] = 1
    k[..., 0] = (np.arange(150) % 64 * step * 32**0.5)[None, None]
    check(op, detect(), [q, k, v])


@pytest.mark.thorough
def test_the_largest_numbers_do_not_overflow():
    """Weights may exceed 1, up to 2^8: sums of values near the largest float32 must leave room for that."""
    op = by_heads(20, 90)
    q, k, v = random_operands(op)
    v *= np.float32(1e33)
    expected = attention(op, q, k, v, None)
    assert np.abs(run(op, WIDE, [q, k, v]) - expected).max() <= 1e-6 * np.abs(expected).max()


def test_a_plan_visits_what_is_seen_and_nothing_else():
    visible = np.zeros((1, 128, 256), np.bool_)
    visible[0, :64, :64] = True  # whole for the first tile
    visible[0, 64:, 100:110] = True  # for the second, the middle of some groups
    made = plan(visible, None, queries=64, lanes=16, key_tile=4, keys=64)
    assert made.index.tolist() == [0, 1, 2]
    assert made.runs.tolist() == [[0, 64, -1], [100, 12, 0]]
    assert made.bits.shape == (12, 4) and (made.bits[:10] == 0xFFFF).all() and not made.bits[10:].any()


def test_runs_join_short_stretches_and_keep_to_the_longest():
    kinds = np.array([WHOLE] * 2 + [PARTIAL] + [HIDDEN] * 3 + [WHOLE] * 9, np.int8)
    assert _runs(kinds, 4) == [(PARTIAL, 0, 3), (WHOLE, 6, 10), (WHOLE, 10, 14), (WHOLE, 14, 15)]
    block = np.ones((3, 10), np.bool_)
    block[1, 4:8] = False
    assert _kinds(block, 4).tolist() == [WHOLE, PARTIAL, PARTIAL]  # the last group is cut by S = 10


def test_static_and_brought_masks_are_not_taken_together():
    op = by_heads(8, 8, static_mask=StaticMask(np.ones((1, 8, 8), np.bool_)), mask=CallMask("bool", (1, 1, 1, 8)))
    assert "not both" in str(CpuAttentionKernel().why_not(op, WIDE))
