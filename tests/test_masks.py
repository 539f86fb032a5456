"""Masks against their definitions, element by element."""

from __future__ import annotations

import numpy as np
import pytest

from mhsa_compile import masks
from mhsa_compile.errors import InputError


@pytest.mark.parametrize(("L", "S"), [(1, 1), (1, 7), (7, 1), (5, 5), (3, 7), (7, 3)])
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_causal(L: int, S: int, alignment: str) -> None:
    offset = {"top_left": 0, "bottom_right": S - L}[alignment]
    expected = [[j <= i + offset for j in range(S)] for i in range(L)]
    mask = masks.causal(L, S, alignment)
    assert mask.dtype == np.bool_
    assert mask.tolist() == expected


def test_bottom_right_shows_the_last_query_everything_and_early_ones_nothing() -> None:
    mask = masks.causal(7, 3, "bottom_right")
    assert mask[-1].all()
    assert not mask[:4].any()


def test_causal_refuses_another_alignment() -> None:
    with pytest.raises(InputError, match="top_left"):
        masks.causal(3, 3, "top-left")


def test_key_padding() -> None:
    mask = masks.key_padding([0, 2, 3], 3)
    assert mask.tolist() == [[False] * 3, [True, True, False], [True] * 3]
    assert masks.key_padding(np.array([1]), 4).shape == (1, 4)


@pytest.mark.parametrize("lengths", [[4], [-1], [1.0], [[1]]])
def test_key_padding_refuses(lengths: object) -> None:
    with pytest.raises(InputError, match="lengths"):
        masks.key_padding(lengths, 3)
