"""Masks against their definitions, element by element."""

from __future__ import annotations

import numpy as np
import pytest

from mhsa_compile import masks
from mhsa_compile.errors import InputError, SpecError


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


@pytest.mark.parametrize(("L", "S"), [(1, 1), (1, 7), (7, 1), (5, 5), (3, 7), (7, 3)])
@pytest.mark.parametrize(("left", "right"), [(-1, -1), (0, 0), (2, 0), (1, 3), (-1, 2), (2, -1), (50, 50)])
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_window(L: int, S: int, left: int, right: int, alignment: str) -> None:
    offset = {"top_left": 0, "bottom_right": S - L}[alignment]
    expected = [
        [(left < 0 or i + offset - left <= j) and (right < 0 or j <= i + offset + right) for j in range(S)]
        for i in range(L)
    ]
    assert masks.window(L, S, left, right, alignment).tolist() == expected


def test_window_refuses_other_negative_sizes() -> None:
    with pytest.raises(InputError, match="right: expected a number of keys, or -1 for unbounded, got -2"):
        masks.window(3, 3, 0, -2)


def blocks(i: int, j: int, L: int, S: int) -> bool:
    return i // 3 == j // 3


def strided(i: int, j: int, L: int, S: int) -> bool:
    return abs(i - j) < 4 or (i - j) % 4 == 0


def longformer(i: int, j: int, L: int, S: int) -> bool:
    return abs(i - j) <= 2 or i < 2 or j < 2


def documents(i: int, j: int, L: int, S: int) -> bool:
    document = [0, 0, 0, 1, 1] + [None] * 100
    return document[i] is not None and document[i] == document[j]


def bigbird(i: int, j: int, L: int, S: int) -> bool:
    """BigBird's mask without random blocks, which are of 3: the first two blocks and the last are global, a query's own
    and its neighbours near."""
    i, j, rows, columns = i // 3, j // 3, -(-L // 3), -(-S // 3)
    return abs(i - j) <= 1 or i < 2 or j < 2 or i == rows - 1 or j == columns - 1


DEFINITIONS = {
    "longformer:window=4,global_tokens=2": longformer,
    "strided:stride=4": strided,
    "blockdiagonal:block=3": blocks,
    "documents:lengths=3+2": documents,
    "bigbird:block=3,global_blocks=3,random_blocks=0": bigbird,
}


@pytest.mark.parametrize(("L", "S"), [(5, 5), (7, 7), (31, 31), (5, 23), (23, 5)])
@pytest.mark.parametrize("text", DEFINITIONS)
def test_patterns(text: str, L: int, S: int) -> None:
    pattern = masks.parse_pattern(text)
    expected = [[DEFINITIONS[text](i, j, L, S) for j in range(S)] for i in range(L)]
    array = pattern.array(L, S)
    assert array.dtype == np.bool_
    assert array.tolist() == expected
    assert pattern.visible([4, 2], L, S).tolist() == [expected[4], expected[2]]


def test_bigbird_draws_blocks_that_were_not_visible() -> None:
    without, drawn = (masks.BigBird(block=2, random_blocks=n, seed=5).array(197, 211) for n in (0, 3))
    assert (drawn >= without).all()
    added = (drawn & ~without)[::2, ::2].sum(axis=1)
    rows_that_see_all = without[::2].all(axis=1)
    assert (added[~rows_that_see_all] == 3).all()


def test_bigbird_is_the_same_everywhere() -> None:
    """This very mask: an artifact made from a spec today and one made on another machine must agree."""
    array = masks.BigBird(block=1, global_blocks=0, window_blocks=1, random_blocks=2, seed=1).array(9, 9)
    assert [np.flatnonzero(row).tolist() for row in array] == [
        [0, 2, 4],
        [0, 1, 7],
        [0, 1, 2],
        [1, 3, 4],
        [0, 3, 4],
        [3, 5, 7],
        [1, 6, 7],
        [2, 3, 7],
        [1, 3, 8],
    ]
    assert not np.array_equal(array, masks.BigBird(block=1, global_blocks=0, window_blocks=1, seed=2).array(9, 9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("longformer:window=3", "longformer.window: expected an even number"),
        ("longformer:window=-2", "longformer.window: expected an integer of at least 0, got -2"),
        ("longformer", "longformer: expected the field 'window', got none"),
        ("longformer:window=4,globals=1", "fields among window, global_tokens, got the unknown 'globals'"),
        ("longformer:window=4+5", r"longformer.window: expected an integer of at least 0, got \[4, 5\]"),
        ("bigbird:block=0", "bigbird.block: expected an integer of at least 1, got 0"),
        ("bigbird:window_blocks=2", "bigbird.window_blocks: expected an odd number"),
        ("bigbird:random_blocks=-1", "bigbird.random_blocks: expected an integer of at least 0"),
        ("strided:stride=0", "strided.stride: expected an integer of at least 1"),
        ("blockdiagonal:block=x", "static_mask: expected KIND:FIELD=NUMBER"),
        ("documents:lengths=3+0", "documents.lengths: expected an integer of at least 1, got 0"),
        ("big-bird", "static_mask: expected a kind among .* Did you mean 'bigbird'"),
        ("", "static_mask: expected a kind among"),
    ],
)
def test_patterns_that_are_none(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        masks.parse_pattern(text)


def test_documents_longer_than_the_sequence() -> None:
    with pytest.raises(InputError, match="a sum of at most 7, the length, got 8 positions"):
        masks.Documents(lengths=(5, 3)).array(7, 7)
