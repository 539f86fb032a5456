"""GridSample by lines of pictures with several channels: places once, then sums of rows of channels."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.verification.oracle.operators import REPAIRED

C = 5


def file(opset: int = 20, **words: Any) -> onnx.ModelProto:
    node = helper.make_node("GridSample", ["x", "grid"], ["y"], **words)
    shapes = {"x": ["B", C, "H", 7], "grid": ["B", "P", 4, 2]}
    return model_of([node], shapes, {"y": ["B", C, "P", 4]}, opset=opset)


def feeds(height: int = 9) -> dict[str, np.ndarray]:
    """Places in the picture, beside it and on its edges."""
    rng = np.random.default_rng(0)
    grid = rng.uniform(-1.4, 1.4, (2, 6, 4, 2)).astype(np.float32)
    grid[0, 0] = [[1, 1], [-1, -1], [0.9999999, -1.0000001], [3, 0]]
    return {"x": rng.standard_normal((2, C, height, 7)).astype(np.float32), "grid": grid}


@pytest.mark.thorough_but("zeros-0")
@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border"])
def test_samples(padding: str, aligned: int) -> None:
    model = file(padding_mode=padding, align_corners=aligned, **({"mode": "linear"} if aligned else {}))
    artifact = mhsa.compile(model, without_attention="accept", check=True)
    assert artifact.manifest.check is not None and len(artifact.manifest.check.against) == 2
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    compiled = mhsa.load(artifact)
    for height in (9, 1):
        inputs = feeds(height)
        (expected,) = session.run(None, inputs)
        np.testing.assert_allclose(compiled(**inputs), expected, rtol=0, atol=4e-6 * np.abs(expected).max())
    inputs["grid"][0, 0] = [[1e30, np.inf], [-np.inf, 0], [np.nan, np.nan], [-1e30, 1e30]]
    y = compiled(**inputs)
    assert padding == "border" or not y[0, :, 0].any()  # outside, wherever that is
    assert np.isfinite(y).all()
    inputs["x"][...] = np.nan
    inputs["grid"][1] = 3
    assert padding == "border" or not compiled(**inputs)[1].any()  # nothing of the picture is multiplied by 0


def test_the_oracle_says_what_onnx_says() -> None:
    """onnx's own takes seconds for each ten thousand samples."""
    inputs, begin = feeds(), time.process_time()
    for words in ({}, {"padding_mode": "border", "align_corners": 1}):
        results = [ReferenceEvaluator(file(**words), new_ops=list(ops)).run(None, inputs)[0] for ops in ((), REPAIRED)]
        np.testing.assert_allclose(*results, rtol=0, atol=1e-5)
        assert np.abs(results[0]).max() > 1
    large = {"x": np.ones((1, C, 200, 7), np.float32), "grid": np.zeros((1, 2000, 4, 2), np.float32)}
    ReferenceEvaluator(file(), new_ops=list(REPAIRED)).run(None, large)
    assert time.process_time() - begin < 5
