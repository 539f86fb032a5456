"""A quick part of test_cuda_moves and test_cuda_inside, for `make test`."""

from __future__ import annotations

import pytest
import test_cuda_inside
import test_cuda_moves
from test_statistics import ALL, operation

from mhsa_compile.kernels.operations import Band


@pytest.mark.parametrize("shape", ["pieces", "part, interleaved"])
def test_rope(shape: str) -> None:
    test_cuda_moves.test_rope(shape, "bfloat16")


@pytest.mark.parametrize("shape", ["heads of rows", "free row"])
def test_scatter(shape: str) -> None:
    test_cuda_moves.test_scatter(shape, circular=False, in_place=True)


def test_an_index_beyond_the_cache() -> None:
    test_cuda_moves.test_of_an_index_beyond_the_cache_no_row_is_written(in_place=True)


def test_present() -> None:
    test_cuda_moves.test_present(64, "rows", "float16")


def test_inside() -> None:
    features = {"softcap": 2.0, "lengths": True, "sinks": True, "slopes": True, "dtype": "bfloat16"}
    test_cuda_inside.check(operation(**features, band=Band(None, 0, "bottom_right")), ALL)
