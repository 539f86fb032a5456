"""Few bits by blocks: what is stored loses less than plain rounding, and stands for what the arrays say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mhsa_compile.nn.weight_blocks import WeightBlocks, in_blocks, rounded
from mhsa_compile.spec.weight_words import BlockForm

FORMS = [BlockForm(4, block, zeros) for block in (16, 32, 128) for zeros in ("", "bytes", "floats")]
FORMS_OF_EIGHT = [BlockForm(8, 32, zeros) for zeros in ("", "bytes", "floats")]


def loss(weight: torch.Tensor, blocks: WeightBlocks) -> float:
    return float((blocks.floats(weight.shape[1]) - weight).norm() / weight.norm())


def plainly_rounded(weight: torch.Tensor, form: BlockForm) -> torch.Tensor:
    """Round to nearest, the largest magnitude of a block on 7 or 127."""
    blocks = weight.view(len(weight), -1, form.block)
    steps = blocks.abs().amax(-1, keepdim=True) / (2 ** (form.bits - 1) - 1)
    return (torch.round(blocks / steps) * steps).view_as(weight)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_it_loses_less_than_rounding_by_the_largest(form: BlockForm) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    plain = float((plainly_rounded(weight, form) - weight).norm() / weight.norm())
    assert loss(weight, in_blocks(weight, form)) < 0.93 * plain


@pytest.mark.parametrize("form", FORMS_OF_EIGHT, ids=str)
def test_eight_bits_lose_a_sixteenth_of_what_four_do(form: BlockForm) -> None:
    weight = torch.randn(64, 250, generator=torch.Generator().manual_seed(0))
    blocks = in_blocks(weight, form)
    assert blocks.form() == BlockForm(8, 32, form.zeros, form.zeros != "floats")
    assert loss(weight, blocks) < 0.075 * loss(weight, in_blocks(weight, replace(form, bits=4)))


@pytest.mark.parametrize("block", [32, 128])
def test_zero_points_pay_where_weights_lie_on_one_side(block: int) -> None:
    weight = torch.rand(64, 256, generator=torch.Generator().manual_seed(0)) + 0.5
    without, with_zeros = (in_blocks(weight, BlockForm(4, block, zeros)) for zeros in ("", "bytes"))
    assert loss(weight, with_zeros) < 0.6 * loss(weight, without)


def test_what_four_bits_hold_is_kept() -> None:
    """Whole numbers of a power of two from -8 to 7, -8 and 7 among those of each block."""
    numbers = torch.randint(-8, 8, (8, 96), generator=torch.Generator().manual_seed(0)).float()
    numbers[:, ::32], numbers[:, 1::32] = -8, 7
    for zeros in ("", "bytes", "floats"):
        torch.testing.assert_close(in_blocks(numbers / 4, BlockForm(4, 32, zeros)).floats(96), numbers / 4)


def test_rows_of_odd_lengths_and_blocks_of_zeros() -> None:
    weight = torch.randn(5, 72, generator=torch.Generator().manual_seed(0))
    weight[1, 32:64] = 0
    weight[2, :32] = -0.7
    blocks = in_blocks(weight, BlockForm(4, 32, "bytes"))
    assert blocks.numbers.shape == (5, 3, 16) and blocks.zeros is not None and blocks.zeros.shape == (5, 2)
    assert bool((blocks.floats(72)[1, 32:64] == 0).all())
    constant = in_blocks(weight, BlockForm(4, 32, "floats")).floats(72)[2, :32]
    torch.testing.assert_close(constant, torch.full((32,), -0.7), rtol=3e-7, atol=0)
    assert blocks.named("w").keys() == {"w.numbers", "w.scales", "w.zeros"}


def test_activations_are_rounded_to_127_steps_of_their_block() -> None:
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    x[1, :32] = 0
    y = rounded(x, 32)
    step = x[0, :32].abs().max() / 127
    assert bool(((y - x).abs()[0, :32] <= step * 0.5001).all())
    assert bool((y[1, :32] == 0).all()) and y.shape == x.shape
