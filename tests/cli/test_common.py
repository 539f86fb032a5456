"""What commands print while they work, what they know of it afterwards, and the arrays that they draw."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mhsa_compile.cli.common import output
from mhsa_compile.cli.common.arrays import complete
from mhsa_compile.runtime.artifact.manifest import TensorInfo
from mhsa_compile.verification.random_inputs import random_array


def test_stages_are_printed_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    seconds: dict[str, float] = {}
    with output.stages(seconds) as stage:
        stage("export")
        time.sleep(0.02)
        stage("build")
    assert list(seconds) == ["export", "build"] and seconds["export"] >= 0.02
    assert capsys.readouterr().err.splitlines() == ["export", "build"]


def test_warnings_of_ours_are_sentences_and_those_of_others_stay_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output.warning(UserWarning("the model holds no attention"), UserWarning, output.__file__, 7)
    output.warning(UserWarning("theirs"), UserWarning, "/elsewhere/theirs.py", 7)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "Warning: The model holds no attention." and second == "/elsewhere/theirs.py:7: UserWarning: theirs"


DTYPES = ("bool", "float32", "float16", "bfloat16", "int64", "int32", "uint8")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["s", "mask"])
def test_an_input_of_rank_0_is_an_array_of_its_dtype(name, dtype):
    drawn = [random_array(np.random.default_rng(0), name, dtype, ())]
    drawn += complete({}, [TensorInfo(name, dtype, ())], {}, seed=0).values()
    assert [(type(array), str(array.dtype), array.shape) for array in drawn] == [(np.ndarray, dtype, ())] * 2
