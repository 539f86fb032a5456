"""The float32 attention kernel for GPUs, by itself and where there is no GPU: what it computes, run in NumPy, against
float64; and what nvcc makes of it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import cuda_code
import numpy as np
import pytest
import simt
import torch
from fuzz_attention import (
    Operands,
    draw_operands,
    evaluated,
    farthest,
    output_rows,
    output_shape,
    placed,
    poison,
    reordered,
)
from kernel_runs import attention

from mhsa_compile.kernels.cuda.attention_float32 import KNOBS, AttentionFloat32Kernel
from mhsa_compile.kernels.operations import AttentionOp, Band, LinearOp, MaskInput, Placement, StaticMask
from mhsa_compile.parity import Draw, judge
from mhsa_compile.profile import load_profile

GPU = load_profile("cuda-sm80")
KERNEL = AttentionFloat32Kernel()
slow = pytest.mark.cuda  # of `make test-cuda`; a part is in the suite
ORDERS = 8
"""In which PyTorch's sums are taken, where one may be luck."""


def operation(heads: tuple[int, int] = (4, 2), widths: tuple[int, int] = (20, 68), **fields: Any) -> AttentionOp:
    """Heads first and apart, rows out, with symbolic sizes, unless `fields` say otherwise."""
    (H, G), (E, F) = heads, widths
    places = {role: Placement(i, "heads", 0) for i, role in enumerate(("query", "key", "value"))}
    rest = {"band": None, "mask": None, "output": Placement(0, "rows", H * F), "scale": E**-0.5}
    return AttentionOp("B", "L", "S", H, G, E, F, **{**rest, **places, **fields})


def run(
    op: AttentionOp, given: Operands, sizes: tuple[int, int, int], config: tuple[int, int, int] | None = None
) -> np.ndarray:
    machine, constants = translated(op, config)
    y = np.full(output_shape(op, sizes), np.nan, np.float32)
    machine(*placed(op, given), *constants, y)
    return output_rows(y, op.output)


@lru_cache(maxsize=4)
def translated(op: AttentionOp, config: tuple[int, int, int] | None) -> tuple[simt.Machine, tuple[np.ndarray, ...]]:
    knobs = KERNEL.default(op, GPU) if config is None else dict(zip(KNOBS, config, strict=True))
    assert KERNEL.applies(op, GPU) is None and KERNEL.unfit(op, GPU, knobs) is None
    emitted = KERNEL.emit(op, GPU, knobs)
    return simt.Machine(emitted.run), emitted.constants


def check(
    op: AttentionOp,
    sizes: tuple[int, int, int] = (2, 67, 131),
    config: tuple[int, int, int] | None = None,
    *,
    poisoned: bool = False,
) -> None:
    """Within the budget of `parity`: PyTorch's eager attention at this dtype is the yardstick."""

    def draw(turn: int, orders: int) -> list[Draw]:
        given = draw_operands(np.random.default_rng((17, turn)), op, sizes, 1.0, turn)
        truth = evaluated(op, given, torch.float64)
        yardstick = farthest(truth, [evaluated(op, reordered(given, i), torch.float32) for i in range(orders)])
        if poisoned:
            poison(op, given)
        return [(truth, yardstick.astype(np.float32), run(op, given, sizes, config))]

    result = judge(lambda turn: draw(turn, 1), {})
    if not result.ok:
        result = judge(lambda turn: draw(turn, ORDERS), {})
    assert result.ok, result


@pytest.mark.parametrize(
    "widths", [(20, 68), *(pytest.param(widths, marks=slow) for widths in ((64, 64), (4, 256), (128, 12)))], ids=str
)
def test_heads_of_any_width(widths):
    check(operation((2, 1), widths))


@slow
@pytest.mark.parametrize("sizes", [(1, 1, 7), (3, 7, 1), (1, 197, 61), (1, 13, 1031)], ids=str)
def test_ragged_lengths(sizes):
    check(operation((3, 1)), sizes)


@slow
@pytest.mark.parametrize("config", [(64, 16, 1), (64, 48, 2), (32, 64, 1), (16, 32, 2), (8, 16, 1)], ids=str)
def test_configs(config):
    check(operation((2, 2), (24, 48), band=Band(None, 3, "bottom_right")), (1, 71, 131), config)


@slow
@pytest.mark.parametrize(
    ("sizes", "band"),
    [
        ((1, 197, 197), Band(5, 0)),
        ((1, 131, 131), Band(None, 20)),
        ((1, 131, 61), Band(None, 0, "bottom_right")),
        ((1, 61, 131), Band(100, 0, "top_left")),
        ((2, 64, 512), Band(40, 3, "bottom_right")),
        ((1, 7, 197), Band(0, 0, "bottom_right")),
    ],
    ids=str,
)
def test_bands(sizes, band):
    check(operation(band=band), sizes, (32, 32, 2), poisoned=True)


@slow
@pytest.mark.parametrize(
    "fields",
    [
        {"softcap": 2.0},
        {"scale": -0.3},
        {"scale": 0.0},
        {"lengths": True},
        {"lengths": True, "band": Band(None, 0, "bottom_right")},
        {"sinks": True, "lengths": True},
        {"slopes": True, "band": Band(None, 0, "bottom_right")},
        {"slopes": True, "sinks": True, "softcap": 5.0, "band": Band(30, 20)},
    ],
    ids=str,
)
def test_scores(fields):
    check(operation(**fields), (3, 67, 131), poisoned=True)


@slow
@pytest.mark.parametrize("dtype", ["bool", "float32"])
@pytest.mark.parametrize("dims", [("B", 4, "L", "S"), (1, 1, "L", "S"), ("B", 1, 1, "mask_S")], ids=str)
def test_masks(dtype, dims):
    band = Band(None, 0, "bottom_right") if dtype == "bool" else None
    check(operation(mask=MaskInput(dtype, dims), band=band), (2, 67, 131), poisoned=True)


@slow
def test_placements():
    H, G, E, F = 4, 2, 20, 68
    parts = {"query": 0, "key": H * E, "value": H * E + G * E}
    width = H * E + G * (E + F) + 4  # the padding that rows of a fused projection may have
    fused = operation(**{role: Placement(0, "rows", width, first) for role, first in parts.items()})
    check(replace(fused, kv_length="L"), (2, 67, 67))
    apart = {"query": H * E, "key": G * E, "value": G * F}
    places = {role: Placement(i, "rows", width) for i, (role, width) in enumerate(apart.items())}
    check(operation(output=Placement(0, "heads", H * F), **places))


@slow
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"band": Band(None, 0, "bottom_right")},
        {"lengths": True, "band": Band(90, 0, "bottom_right"), "slopes": True},
    ],
    ids=str,
)
def test_constant_masks(fields):
    """Random pairs, with keys that nobody sees, a corner that everybody sees, and a query that sees nothing."""
    B, L, S = 2, 71, 197
    visible = np.random.default_rng(1).random((4, L, S)) < 0.5
    visible[:, :, S // 3 : S // 2] = False
    visible[:, : L // 2, S // 2 :] = True
    visible[:, L - 1] = False
    op = replace(operation(static_mask=StaticMask(visible)), q_length=L, kv_length=S, **fields)
    check(op, (B, L, S), (32, 64, 2), poisoned=True)


@slow
def test_values_that_are_not_finite_reach_only_those_who_see_them():
    """Infinity of either sign, both, and NaN, each in a column of its own, at keys that half of the rows see."""
    op, sizes = operation((2, 1), band=Band(None, 0)), (1, 67, 67)
    given = draw_operands(np.random.default_rng(3), op, sizes, 1.0, 0)
    given.v[0, 0, 40, :3] = np.inf, -np.inf, np.nan
    given.v[0, 0, 41:43, 3] = np.inf, -np.inf
    expected, y = attention(op, given.q, given.k, given.v, None), run(op, given, sizes).astype(np.float64)
    np.testing.assert_array_equal(np.isposinf(y), np.isposinf(expected))
    np.testing.assert_array_equal(np.isneginf(y), np.isneginf(expected))
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    assert np.isnan(y).any() and np.isinf(y).any() and np.isfinite(y[0, :40]).all()


@slow
def test_long_sums_are_sums_of_short_ones():
    """All terms alike, so that roundings of one long sum would not cancel: they come to a hundredfold there."""
    op, S = operation((1, 1), (4, 4)), 2048
    given = draw_operands(np.random.default_rng(0), op, (1, 1, S), 1.0, 0)
    for array in (given.q, given.k, given.v):
        array[...] = 0.1
    exact = np.float64(np.float32(0.1))
    one_sum = abs(np.cumsum(given.v[0, 0, :, 0])[-1] / np.float64(S) - exact)
    assert np.abs(run(op, given, (1, 1, S), (64, 64, 1)) - exact).max() <= one_sum / 16


def test_what_it_does_not_take_is_named():
    assert "not an attention" in str(KERNEL.applies(LinearOp((1, 1), 8, (8,), (False,), (False,)), GPU))
    refused = [
        (operation(dtype="bfloat16"), "float32"),
        (operation(widths=(22, 40)), "multiple of 4"),
        (operation(widths=(260, 40)), "up to 256"),
        (operation(query=Placement(0, "rows", 102)), "multiples of 4"),
        (operation(softmax="float64"), "float64"),
    ]
    for op, words in refused:
        assert words in str(KERNEL.applies(op, GPU))
    op = operation(widths=(256, 256))
    for config, words in (((64, 64, 2), "shared memory"), ((60, 64, 1), "multiples"), ((64, 16, 1), "registers")):
        assert words in str(KERNEL.unfit(op, GPU, dict(zip(KNOBS, config, strict=True))))


ALL = {
    "softcap": 5.0,
    "lengths": True,
    "sinks": True,
    "slopes": True,
    "band": Band(100, 0, "bottom_right"),
    "mask": MaskInput("float32", ("B", 4, "L", "S")),
}


@slow
@pytest.mark.parametrize(
    ("target", "op"),
    [
        ("cuda-sm90a", operation(widths=(128, 128))),
        ("cuda-sm80", operation(widths=(256, 256), band=Band(None, 0))),
        ("cuda-sm86", operation(widths=(64, 64), **ALL)),
    ],
    ids=["128", "256 causal", "64 of everything"],
)
def test_machine_code(target, op, tmp_path):
    """All in registers, on no tensor core, with our barriers alone."""
    profile = load_profile(target)
    config = KERNEL.default(op, profile)
    text, host = cuda_code.source(KERNEL.emit(op, profile, config), profile.tvm.arch)
    code = cuda_code.machine_code(text, profile.tvm.arch, tmp_path)
    assert (code.spilled, code.stack) == (0, 0) and code.instructions["LDL"] == code.instructions["STL"] == 0
    assert code.instructions["HMMA"] == 0 and code.instructions["LDGSTS"] and code.instructions["BAR"] == 2
    assert f" {KERNEL.shape(op, config).shared_bytes}" in host  # what it is launched with, no more and no less
