"""The attention kernel for Hopper where there is no GPU: a part of what test_hopper_all.py runs."""

from __future__ import annotations

import pytest
from support.cuda.cuda_tile_kernels import HOPPER, operation

from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.spec.window import WindowSpec

KERNEL, PROFILE = HOPPER.kernel, load_profile(HOPPER.target)


def test_a_causal_attention_of_ragged_length_over_few_heads():
    op = operation(widths=(64, 72), band=WindowSpec(None, 0, "bottom_right"))
    HOPPER.check(op, (1, 67, 83), (2, 32, 2, 2), seed=1, poisoned=True)


def test_what_it_does_not_take_is_named():
    assert "warpgroups" in str(KERNEL.why_not(operation(), load_profile("cuda-sm80")))
    refused = [
        (operation(dtype="float32"), "16-bit"),
        (operation(widths=(64, 256), mask=CallMask("bool", ("B", 1, "L", "S"))), "registers"),
    ]
    for op, words in refused:
        assert words in str(KERNEL.why_not(op, PROFILE))


@pytest.mark.parametrize("widths", [(64, 64), (96, 96), (128, 128), (256, 256), (192, 128)], ids=str)
def test_defaults_fit_and_larger_tiles_are_refused(widths):
    op = operation(widths=widths)
    default = KERNEL.default_config(op, PROFILE)
    assert KERNEL.why_not_config(op, PROFILE, default) is None and default["keys"] >= 64
    refused = [((2, 128, 9, 1), "shared memory"), ((4, 64, 2, 1), "consumers"), ((2, 64, 1, 1), "two tiles")]
    refused += [((2, 64, 2, 3), "of two")]
    refused += [((3, 176, 2, 1), "registers")] if widths == (64, 64) else []
    for config, words in refused:
        assert words in str(KERNEL.why_not_config(op, PROFILE, HOPPER.config(*config)))
