"""The attention kernel for Hopper where there is no GPU: what it computes, run in NumPy with its warpgroups in any
order, against float64; and what nvcc makes of it."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import cuda_code
import cuda_compiler
import ml_dtypes
import numpy as np
import pytest
import torch
from cuda_attention_checks import check, operation, scattered
from fuzz_attention import draw_operands, evaluated
from hopper_runs import HOPPER, KERNEL, config_of, runner
from kernel_runs import attention

from mhsa_compile.kernels.operations import AttentionOp, Band, MaskInput, Placement, StaticMask
from mhsa_compile.parity import judge

pytestmark = pytest.mark.cuda
SMALL_TILES = config_of(2, 32, 2)


@pytest.mark.parametrize(
    ("widths", "dtype"), [((64, 64), "bfloat16"), ((96, 96), "float16"), ((128, 128), "bfloat16"), ((256, 256),
    "float16"), ((24, 40), "bfloat16"),
     ((8, 256), "bfloat16"), ((192, 128), "bfloat16")],
    ids=str,
)  # fmt: skip
def test_heads_of_any_width(widths, dtype):
    check(runner(seed=1), operation((2, 1), widths, dtype=dtype, band=Band(None, 0)), (1, 131, 131))


@pytest.mark.parametrize("sizes", [(1, 1, 7), (3, 7, 1), (1, 197, 64)], ids=str)
def test_ragged_lengths(sizes):
    check(runner(SMALL_TILES), operation((5, 1), (64, 64), dtype="float16"), sizes)


def test_no_keys():
    check(runner(SMALL_TILES), operation(), (1, 7, 0))


@pytest.mark.parametrize("config", [(2, 16, 2), (2, 48, 3), (3, 32, 2), (2, 96, 4)], ids=str)
@pytest.mark.parametrize("seed", [None, 2, 3])
def test_configs_in_any_order(config, seed):
    op = operation(widths=(72, 48), band=Band(None, 3, "bottom_right"))
    check(runner(config_of(*config), seed), op, (1, 331, 197))


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
    check(runner(SMALL_TILES), operation(band=band), sizes, poisoned=True)


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
        {"mask": MaskInput("bool", ("B", 4, "L", "S")), "band": Band(None, 0, "bottom_right")},
        {"mask": MaskInput("bfloat16", ("B", 1, 1, "mask_S"))},
    ],
    ids=str,
)
def test_scores_and_masks(fields):
    check(runner(SMALL_TILES), operation(**fields), (3, 67, 131), poisoned=True)


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32"])
def test_masks_in_pairs(dtype):
    """Where their rows are of an even number of elements; the last tile has keys beyond."""
    mask = MaskInput(dtype, ("B", 4, "L", "S"))
    check(runner(SMALL_TILES), operation(mask=mask, lengths=True), (2, 67, 106), poisoned=True)


def test_placements():
    H, G, E, F = 4, 2, 24, 40
    parts = {"query": 0, "key": H * E, "value": H * E + G * E}
    width = H * E + G * (E + F) + 8  # the padding that rows of a fused projection may have
    fused = operation(**{role: Placement(0, "rows", width, first) for role, first in parts.items()})
    check(runner(SMALL_TILES), replace(fused, kv_length="L"), (2, 67, 67))
    apart = {"query": H * E, "key": G * E, "value": G * F}
    places = {role: Placement(i, "rows", width) for i, (role, width) in enumerate(apart.items())}
    check(runner(SMALL_TILES), operation(output=Placement(0, "heads", H * F), **places), (2, 67, 131))


@pytest.mark.parametrize(
    ("heads", "fields"), [(4, {}), (1, {"lengths": True, "band": Band(90, 0, "bottom_right"), "slopes": True})], ids=str
)
def test_constant_masks(heads, fields):
    B, L, S = 2, 131, 197
    op = replace(operation(static_mask=StaticMask(scattered((heads, L, S))), **fields), q_length=L, kv_length=S)
    check(runner(SMALL_TILES), op, (B, L, S), poisoned=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_that_are_not_finite_reach_only_those_who_see_them(dtype):
    """Infinity of either sign, both, and NaN, each in a column of its own, at keys that half of the rows see."""
    op, sizes = operation((2, 1), dtype=dtype, band=Band(None, 0)), (1, 67, 67)
    given = draw_operands(np.random.default_rng(3), op, sizes, 1.0, 0)
    given.v[0, 0, 40, :3] = np.inf, -np.inf, np.nan
    given.v[0, 0, 41:43, 3] = np.inf, -np.inf
    expected = attention(op, given.q, given.k, given.v, None)
    y = runner(SMALL_TILES)(op, given, sizes).astype(np.float64)
    for kind in (np.isposinf, np.isneginf, np.isnan):
        np.testing.assert_array_equal(kind(y), kind(expected))
        assert kind(y).any()
    assert np.isfinite(y[0, :40]).all()


@pytest.mark.parametrize("step", [30.0, -30.0])
def test_scores_that_rise_or_fall_with_the_keys(step):
    """Every key is `step` above the one before: the maximum is raised again and again, or never."""
    op, sizes = operation(), (1, 17, 131)
    given = draw_operands(np.random.default_rng(5), op, sizes, 1.0, 0)
    given.q[...], given.k[...] = 0, 0
    given.q[..., 0] = 1
    given.k[..., 0] = (np.arange(131) % 64 * step * 24**0.5)[None, None]
    truth, narrow = evaluated(op, given, torch.float64), evaluated(op, given, torch.bfloat16)
    y = runner(SMALL_TILES)(op, given, sizes)
    assert judge(lambda _: [(truth, narrow.astype(ml_dtypes.bfloat16), y)], {}).ok


ALL: dict[str, Any] = {"softcap": 5.0, "lengths": True, "sinks": True, "slopes": True}
MASK = MaskInput("bfloat16", ("B", 4, "L", "S"))
CONSTANT = StaticMask(scattered((1, 256, 512)))
OPERATIONS = {
    "64 causal": operation(widths=(64, 64), band=Band(None, 0)),
    "96 causal": operation(widths=(96, 96), band=Band(None, 0), dtype="float16"),
    "128": operation(widths=(128, 128)),
    "128 causal": operation(widths=(128, 128), band=Band(None, 0)),
    "256 causal": operation(widths=(256, 256), band=Band(None, 0)),
    "256 window": operation(widths=(256, 256), band=Band(40, 3, "bottom_right"), dtype="float16"),
    "256 of everything": operation(widths=(256, 256), band=Band(30, 0, "bottom_right"), **ALL),
    "256 constant": replace(operation(widths=(256, 256), static_mask=CONSTANT, **ALL), q_length=256, kv_length=512),
    "64 of everything": operation(widths=(64, 64), band=Band(None, 0, "bottom_right"), mask=MASK, **ALL),
    "64 constant": replace(operation(widths=(64, 64), static_mask=CONSTANT, **ALL), q_length=256, kv_length=512),
}


@pytest.mark.parametrize("op", OPERATIONS.values(), ids=OPERATIONS)
def test_machine_code(op: AttentionOp, tmp_path):
    """Products of warpgroups that overlap, nothing spilt, the registers that the roles hand to each other, and softmax
    between the two waits of the loop."""
    config = KERNEL.default(op, HOPPER)
    text, host = cuda_code.source(KERNEL.emit(op, HOPPER, config), "sm_90a")
    code = cuda_code.machine_code(text, "sm_90a", tmp_path)
    assert (code.spilled, code.stack) == (0, 0)
    assert code.instructions["HMMA"] == 0
    steps = -(-op.head_dim // 16) + config["keys"] // 16
    assert code.instructions["HGMMA"] == 2 * steps  # the first tile and the loop; the loop and the last values
    assert code.instructions["UTMALDG"] and code.instructions["UTMASTG"] and code.instructions["USETMAXREG"] == 2
    assert not re.search(r"C75\d\d|serialized", code.said), code.said
    assert _exponentials_in_flight(code.order, steps) >= 0.8 * config["keys"] / 2
    assert "cuTensorMapEncodeTiled" in host
    threads = 128 * (1 + config["consumers"])
    assert f"__launch_bounds__({threads}, 1)" in text


@pytest.mark.parametrize("name", ["256 causal", "256 of everything", "256 constant"])
def test_nothing_spills_by_nvrtc_either(name, tmp_path):
    cuda_compiler.require_nvrtc()
    op = OPERATIONS[name]
    text, _ = cuda_code.source(KERNEL.emit(op, HOPPER, KERNEL.default(op, HOPPER)), "sm_90a")
    code = cuda_code.machine_code(text, "sm_90a", tmp_path, by_nvrtc=True)
    assert (code.spilled, code.stack) == (0, 0) and code.instructions["HGMMA"]


def _exponentials_in_flight(order: tuple[str, ...], products: int) -> int:
    """How many there are while the products of the loop are under way: after the wait for the first half of so many."""
    names = [name for name in order if name in ("HGMMA", "WARPGROUP.DEPBAR", "MUFU")]
    runs = [(name, len(list(run))) for name, run in itertools.groupby(names)]
    at = runs.index(("HGMMA", products))
    (waits, _), (takes, count), (waits_again, _) = runs[at + 1 : at + 4]
    assert (waits, takes, waits_again) == ("WARPGROUP.DEPBAR", "MUFU", "WARPGROUP.DEPBAR"), runs
    return count
