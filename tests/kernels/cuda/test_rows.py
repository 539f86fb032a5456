"""A quick part of test_cuda_moves and test_cuda_inside, for `make test`."""

from __future__ import annotations

import pytest
from kernels.cuda import test_data_movement, test_softmax_outputs
from support.softmax_outputs_cases import ALL, operation

from mhsa_compile.kernels.interface.ops import WindowSpec


@pytest.mark.parametrize("shape", ["pieces", "part, interleaved"])
def test_rope(shape: str) -> None:
    test_data_movement.test_rope(shape, "bfloat16")


@pytest.mark.parametrize("shape", ["heads of rows", "free row"])
def test_scatter(shape: str) -> None:
    test_data_movement.test_scatter(shape, circular=False, in_place=True)


def test_an_index_beyond_the_cache() -> None:
    test_data_movement.test_of_an_index_beyond_the_cache_no_row_is_written(in_place=True)


def test_present() -> None:
    test_data_movement.test_present(64, "rows", "float16")


def test_inside() -> None:
    features = {"softcap": 2.0, "lengths": True, "sinks": True, "slopes": True, "dtype": "bfloat16"}
    test_softmax_outputs.check(operation(**features, band=WindowSpec(None, 0, "bottom_right")), ALL)
