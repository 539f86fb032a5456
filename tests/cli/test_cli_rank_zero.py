"""Switches, scales and counts of rank 0 are drawn wherever inputs are drawn."""

from __future__ import annotations

import numpy as np
import pytest

from mhsa_compile.cli.common.arrays import complete
from mhsa_compile.runtime.artifact.manifest import TensorInfo
from mhsa_compile.verification.random_inputs import random_array

DTYPES = ("bool", "float32", "float16", "bfloat16", "int64", "int32", "uint8")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["s", "mask"])
def test_an_input_of_rank_0_is_an_array_of_its_dtype(name, dtype):
    drawn = [random_array(np.random.default_rng(0), name, dtype, ())]
    drawn += complete({}, [TensorInfo(name, dtype, ())], {}, seed=0).values()
    assert [(type(array), str(array.dtype), array.shape) for array in drawn] == [(np.ndarray, dtype, ())] * 2
