"""Rows of x that begin within cache lines, as NumPy's do: copied before tiles load them, where they would be read in
place."""

from __future__ import annotations

import re

import numpy as np
import pytest
from support import this_cpu
from support.kernel_runs import assembly, tensor_at
from support.tiles.runs import BY_TILES, MACHINE, linear

from mhsa_compile.kernels.interface.ops import LinearOp


@pytest.mark.thorough_but("64-62")
@this_cpu.with_tiles
@pytest.mark.parametrize("first_byte", [2, 16, 62])
@pytest.mark.parametrize("in_features", [64, 70])
def test_y_has_the_same_bits_wherever_x_begins(first_byte: int, in_features: int) -> None:
    here, there = (linear(BY_TILES, (1, 17, 64), in_features, (40,), at, dtype="bfloat16") for at in (0, first_byte))
    assert all(y.any() and np.array_equal(y, other) for y, other in zip(here, there, strict=True))


def test_tensors_of_these_tests_begin_where_they_should() -> None:
    array = np.arange(6, dtype=np.uint16).reshape(2, 3)
    for first_byte in (0, 2, 16, 62):
        tensor = np.from_dlpack(tensor_at(array, first_byte))
        assert tensor.ctypes.data % 64 == first_byte
        assert np.array_equal(tensor, array)


@pytest.mark.thorough_but("64-True")
@pytest.mark.parametrize(("in_features", "asks"), [(64, True), (70, False)])
def test_the_code_asks_where_x_begins_unless_it_is_copied_anyway(in_features: int, asks: bool) -> None:
    op = LinearOp(("B", "L"), in_features, (40,), (True,), (False,), dtype="bfloat16")
    text = assembly(BY_TILES.emit(op, MACHINE, BY_TILES.default_config(op, MACHINE)), MACHINE)
    # Of 63, without the lowest bit, which no element of two bytes has.
    assert bool(re.search(r"(test|and)\w\s+\$62,", text)) is asks
