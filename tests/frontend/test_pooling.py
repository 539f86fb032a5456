"""MaxPool that gives where its values come from, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import helper, parser

import mhsa_compile as mhsa

CASES = {
    "pads and strides": ((2, 3, 7, 6), "kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]"),
    "by columns": ((2, 3, 7, 6), "kernel_shape=[2, 3], dilations=[2, 1], storage_order=1"),
    "three axes": ((1, 2, 5, 4, 6), "kernel_shape=[2, 2, 2], pads=[0, 0, 0, 1, 0, 1]"),
    "a whole window at the end": ((1, 2, 9), "kernel_shape=[3], strides=[2], ceil_mode=1"),
}


@pytest.mark.thorough_but("a whole window at the end", "by columns")
@pytest.mark.parametrize("name", CASES)
def test_places_of_the_largest(name: str) -> None:
    shape, said = CASES[name]
    values, places = (", ".join(axes[: len(shape)]) for axes in ("ABCDE", "FGHIJ"))
    graph = parser.parse_graph(
        f"g (float[{', '.join(map(str, shape))}] x) => (float[{values}] y, int64[{places}] i) "
        f"{{ y, i = MaxPool <{said}> (x) }}"
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    x = np.random.default_rng(0).integers(0, 5, shape).astype(np.float32)  # with many equal ones
    x[0, 0] = -np.inf
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    for one, other in zip(mhsa.load(mhsa.compile(model, without_attention="accept"))(x), expected, strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)


LARGE = {
    "an image": ((2, 3, 17, 11), "kernel_shape=[5, 3], pads=[2, 1, 1, 1], strides=[2, 1]"),
    "as large": ((2, 3, 17, 11), 'kernel_shape=[5, 5], auto_pad="SAME_LOWER", strides=[2, 2]'),
    "a whole window at the end": ((1, 2, 9, 8), "kernel_shape=[3, 3], strides=[2, 2], dilations=[1, 2], ceil_mode=1"),
    "three axes": ((1, 2, 7, 6, 9), "kernel_shape=[2, 3, 4], pads=[0, 1, 0, 1, 1, 2]"),
    "free sizes": ((2, 3, 17, 11), "kernel_shape=[5, 3], pads=[2, 1, 2, 1], dilations=[1, 2]"),
}


@pytest.mark.parametrize("name", LARGE)
def test_windows_go_axis_by_axis(name: str) -> None:
    shape, said = LARGE[name]
    axes = ", ".join("ABCDE"[: len(shape)])
    graph = parser.parse_graph(f"g (float[{axes}] x) => (float[{axes}] y) {{ y = MaxPool <{said}> (x) }}")
    for dim, size in zip(graph.input[0].type.tensor_type.shape.dim, shape, strict=True):
        if name != "free sizes":
            dim.dim_value = size
    del graph.output[0].type.tensor_type.shape.dim[:]
    for letter in axes.split(", "):
        graph.output[0].type.tensor_type.shape.dim.add().dim_param = letter + "y"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x[0, 0, 0, 0], x[0, 1, 3, 3], x[0, 1, 5] = -np.inf, np.inf, -np.inf
    artifact = mhsa.compile(model, without_attention="accept")
    assert [row.op.rstrip("123d") for row in artifact.manifest.ops].count("nn.max_pool") == len(shape) - 2
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_array_equal(mhsa.load(artifact)(x), expected)
