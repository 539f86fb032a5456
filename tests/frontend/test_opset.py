"""Files of older opsets mean the same after they are raised, as ONNX Runtime runs both; what onnx's converter would
change without a word is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from support.onnx_models import model_of

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.canonicalize.canonicalize import canonicalize
from mhsa_compile.frontend.canonicalize.passes.opset import LEAST, opset_of

X = np.random.default_rng(0).standard_normal((1, 6, 4, 5)).astype(np.float32)


def model(operator: str, opset: int, weights: Any = (), outputs: int = 1, **said: Any) -> onnx.ModelProto:
    """x (1, 6, 4, 5), and weights, through one node."""
    constants = {f"w{i}": array for i, array in enumerate(weights)}
    names = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(operator, ["x", *constants], names, name="odd", **said)
    return model_of([node], {"x": X.shape}, dict.fromkeys(names), constants, opset=opset, ir_version=8)


def run(file: onnx.ModelProto) -> list[np.ndarray]:
    return list(onnxruntime.InferenceSession(file.SerializeToString()).run(None, {"x": X}))


SCALES = np.array([1, 1, 2, 3], np.float32)
FILES = {
    "Upsample": model("Upsample", 9, [SCALES], mode="linear"),
    "Upsample, nearest": model("Upsample", 9, [SCALES], mode="nearest"),
    "Upsample by an attribute": model("Upsample", 7, mode="linear", scales=[1.0, 1.0, 2.0, 3.0]),
    "Resize": model("Resize", 10, [SCALES], mode="linear"),
    "Resize, nearest": model("Resize", 10, [np.array([1, 1, 1.5, 2.4], np.float32)], mode="nearest"),
    "Slice": model("Slice", 9, starts=[1, -3], ends=[5, -1], axes=[1, 3]),
    "Softmax": model("Softmax", 9, axis=2),
    "Hardmax of the last axis": model("Hardmax", 11, axis=3),
    "Split": model("Split", 9, outputs=2, axis=1, split=[2, 4]),
    "Pad": model("Pad", 9, pads=[0, 0, 1, 2, 0, 0, 0, 1], value=2.0),
    "Clip": model("Clip", 9, min=-0.5),
    "ReduceSum": model("ReduceSum", 11, axes=[1, -1], keepdims=0),
    "AveragePool": model("AveragePool", 10, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
}


@pytest.mark.parametrize("name", FILES)
def test_an_old_file_means_what_it_did(name: str) -> None:
    raised = canonicalize(FILES[name]).model
    assert opset_of(raised) >= LEAST
    for got, expected in zip(run(raised), run(FILES[name]), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("file", "got"),
    [
        (model("Hardmax", 11, axis=1), "axis=1 of opset 11"),
        (model("Resize", 10, [np.array([1, 1, 0.5, 1], "f4")]), "which leaves open"),
        (model("Hardmax", 12), "axis=1 of opset 12"),
        (
            model("GroupNormalization", 18, [np.ones(3, "f4")] * 2, num_groups=3),
            "opset 18, whose scales are those of groups",
        ),
    ],
)
def test_what_the_converter_would_change_is_refused(file: onnx.ModelProto, got: str) -> None:
    with pytest.raises(ModelError, match=f"node 'odd': expected .*, got .*{got}") as caught:
        canonicalize(file)
    assert caught.value.next_step
