"""The float32 attention kernel for GPUs, by itself and where there is no GPU: beside what `test_tiled_attention.py`
runs, its widths and sizes, its sums, and what nvcc makes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fuzz.attention import draw_operands
from support.cuda import cuda_code
from support.cuda.cuda_tile_kernels import FLOAT32

from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.kernels.scores.static_mask import StaticMask
from mhsa_compile.spec.window import WindowSpec

KERNEL, GPU = FLOAT32.kernel, FLOAT32.profile
slow = pytest.mark.cuda  # of `make test-cuda`; a part is in the suite


@pytest.mark.thorough_but("(20, 68)", "(64, 64)")
@pytest.mark.parametrize(
    "widths", [(20, 68), *(pytest.param(widths, marks=slow) for widths in ((64, 64), (4, 256), (128, 12)))], ids=str
)
def test_heads_of_any_width(widths):
    FLOAT32.check(FLOAT32.operation((2, 1), widths))


@slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param((64, 16, 1), marks=pytest.mark.thorough),
        pytest.param((64, 48, 2), marks=pytest.mark.thorough),
        pytest.param((32, 64, 1), marks=pytest.mark.thorough),
        (16, 32, 2),
        pytest.param((8, 16, 1), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_configs(config):
    FLOAT32.check(FLOAT32.operation((2, 2), (24, 48), band=WindowSpec(None, 3, "bottom_right")), (1, 71, 131), config)


@pytest.mark.thorough
@slow
def test_long_sums_are_sums_of_short_ones():
    """All terms alike, so that roundings of one long sum would not cancel: they come to a hundredfold there."""
    op, S = FLOAT32.operation((1, 1), (4, 4)), 2048
    given = draw_operands(np.random.default_rng(0), op, (1, 1, S), 1.0, 0)
    for array in (given.q, given.k, given.v):
        array[...] = 0.1
    exact = np.float64(np.float32(0.1))
    one_sum = abs(np.cumsum(given.v[0, 0, :, 0])[-1] / np.float64(S) - exact)
    assert np.abs(FLOAT32.runner(64, 64, 1)(op, given, (1, 1, S)) - exact).max() <= one_sum / 16


def test_what_it_does_not_take_is_named():
    assert "float32" in str(KERNEL.why_not(FLOAT32.operation(dtype="bfloat16"), GPU))
    op = FLOAT32.operation(widths=(256, 256))
    for config, words in (((64, 64, 2), "shared memory"), ((60, 64, 1), "multiples"), ((64, 16, 1), "registers")):
        assert words in str(KERNEL.why_not_config(op, GPU, FLOAT32.config(*config)))


ALL = {
    "softcap": 5.0,
    "lengths": True,
    "sinks": True,
    "slopes": True,
    "band": WindowSpec(100, 0, "bottom_right"),
    "mask": CallMask("float32", ("B", 4, "L", "S")),
}


@slow
@pytest.mark.parametrize(
    ("target", "op"),
    [
        ("cuda-sm90a", FLOAT32.operation(widths=(128, 128))),
        pytest.param(
            "cuda-sm80", FLOAT32.operation(widths=(256, 256), band=WindowSpec(None, 0)), marks=pytest.mark.thorough
        ),
        ("cuda-sm86", FLOAT32.operation(widths=(64, 64), **ALL)),
    ],
    ids=["128", "256 causal", "64 of everything"],
)
def test_machine_code(target, op, tmp_path):
    """The code computes all in registers, on no tensor core, with our barriers alone."""
    profile = load_profile(target)
    config = KERNEL.default_config(op, profile)
    text, host = cuda_code.source(KERNEL.emit(op, profile, config), profile.tvm.arch)
    code = cuda_code.machine_code(text, profile.tvm.arch, tmp_path)
    assert (code.spilled, code.stack) == (0, 0) and code.instructions["LDL"] == code.instructions["STL"] == 0
    assert code.instructions["HMMA"] == 0 and code.instructions["LDGSTS"] and code.instructions["BAR"] == 2
    assert f" {KERNEL.shape(op, config).shared_bytes}" in host  # what it is launched with, no more and no less


def test_slopes_are_counted_from_what_a_constant_mask_leaves():
    """Counted from the last key of all, scores are so large far away from it that their last bits are lost."""
    L = 197
    near = np.abs(np.subtract.outer(np.arange(L), np.arange(L))) <= 15
    op = FLOAT32.operation((2, 2), (16, 16), static_mask=StaticMask(near[None]), slopes=True, sinks=True)
    FLOAT32.check(replace(op, q_length=L, kv_length=L), (1, L, L))
