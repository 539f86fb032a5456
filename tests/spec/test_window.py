"""Which keys a query sees by its place, against the definition, pair by pair."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mhsa_compile.spec.window import WindowSpec, window_of

SIDES = (None, 0, 2, 9, -1, -3)  # a side below 0 ends before the query: a past shifts both


def sees(window: WindowSpec, i: int, j: int, L: int, S: int) -> bool:
    place = i + S - L if window.alignment == "bottom_right" else i
    return (window.left is None or j >= place - window.left) and (window.right is None or j <= place + window.right)


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("L", "S"), [(7, 7), (3, 8), (8, 3), (1, 5), (0, 4), (4, 0)])
def test_pairs(alignment: str, L: int, S: int) -> None:
    for left, right in itertools.product(SIDES, SIDES):
        window = WindowSpec(left, right, alignment)
        expected = np.array([[sees(window, i, j, L, S) for j in range(S)] for i in range(L)], np.bool_).reshape(L, S)
        assert (window.visible(range(L), L, S) == expected).all()
        assert window.pairs(L, S) == expected.sum()
        rows = [i for i in (0, L - 1, L // 2) if 0 <= i < L]
        assert (window.visible(rows, L, S) == expected[rows]).all()


def test_numbers_of_which_minus_one_is_unbounded() -> None:
    assert window_of(-1, -1, "top_left") is None
    assert window_of(-1, 0, "bottom_right") == WindowSpec(None, 0, "bottom_right")
    assert window_of(3, -1, "top_left") == WindowSpec(3, None)
