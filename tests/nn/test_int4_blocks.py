"""Four bits by blocks: what is stored loses less than plain rounding, and stands for what the arrays say."""

from __future__ import annotations

import pytest
import torch

from mhsa_compile.nn.int4_blocks import Int4Blocks, in_blocks, rounded
from mhsa_compile.spec.weight_words import Int4Weights

FORMS = [Int4Weights(block, zeros) for block in (16, 32, 128) for zeros in (False, True)]


def loss(weight: torch.Tensor, blocks: Int4Blocks) -> float:
    return float((blocks.floats(weight.shape[1]) - weight).norm() / weight.norm())


def plainly_rounded(weight: torch.Tensor, block: int) -> torch.Tensor:
    """Round to nearest, the largest magnitude of a block on 7."""
    blocks = weight.view(len(weight), -1, block)
    steps = blocks.abs().amax(-1, keepdim=True) / 7
    return (torch.round(blocks / steps) * steps).view_as(weight)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_it_loses_less_than_rounding_by_the_largest(form: Int4Weights) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    plain = float((plainly_rounded(weight, form.block) - weight).norm() / weight.norm())
    assert loss(weight, in_blocks(weight, form)) < 0.93 * plain


@pytest.mark.parametrize("block", [32, 128])
def test_zero_points_pay_where_weights_lie_on_one_side(block: int) -> None:
    weight = torch.rand(64, 256, generator=torch.Generator().manual_seed(0)) + 0.5
    without, with_zeros = (in_blocks(weight, Int4Weights(block, zeros)) for zeros in (False, True))
    assert loss(weight, with_zeros) < 0.6 * loss(weight, without)


def test_what_four_bits_hold_is_kept() -> None:
    """Whole numbers of a power of two from -8 to 7, -8 and 7 among those of each block."""
    numbers = torch.randint(-8, 8, (8, 96), generator=torch.Generator().manual_seed(0)).float()
    numbers[:, ::32], numbers[:, 1::32] = -8, 7
    for zeros in (False, True):
        torch.testing.assert_close(in_blocks(numbers / 4, Int4Weights(32, zeros)).floats(96), numbers / 4)


def test_rows_of_odd_lengths_and_blocks_of_zeros() -> None:
    weight = torch.randn(5, 72, generator=torch.Generator().manual_seed(0))
    weight[1, 32:64] = 0
    blocks = in_blocks(weight, Int4Weights(32, zeros=True))
    assert blocks.numbers.shape == (5, 3, 16) and blocks.zeros is not None and blocks.zeros.shape == (5, 2)
    assert bool((blocks.floats(72)[1, 32:64] == 0).all())
    assert blocks.named("w").keys() == {"w.numbers", "w.scales", "w.zeros"}


def test_activations_are_rounded_to_127_steps_of_their_block() -> None:
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    x[1, :32] = 0
    y = rounded(x, 32)
    step = x[0, :32].abs().max() / 127
    assert bool(((y - x).abs()[0, :32] <= step * 0.5001).all())
    assert bool((y[1, :32] == 0).all()) and y.shape == x.shape
