"""Transposed convolutions and those of groups as sums of their own: against PyTorch's in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.canonicalize.canonicalize import canonicalize
from mhsa_compile.frontend.fusion.fuse import fuse
from mhsa_compile.frontend.fusion.output_phases import PhasedAxis, by_windows
from mhsa_compile.verification.error_budget import budget, max_error

N = helper.make_node


class Form(NamedTuple):
    """x, the weights, and what the node says."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    words: dict[str, Any]


def transposed(x: np.ndarray, w: np.ndarray, b: np.ndarray, words: dict[str, Any], dtype: torch.dtype) -> np.ndarray:
    """What ONNX says: the whole of it, without pads, by PyTorch, then more behind and what pads cut off."""
    rank = w.ndim - 2
    function = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)[rank - 1]
    strides, dilations = (words.get(word, [1] * rank) for word in ("strides", "dilations"))
    x, w = (torch.from_numpy(one).to(dtype) for one in (x, w))
    y = function(x, w, stride=strides, dilation=dilations, groups=words.get("group", 1)).numpy()
    pads, more = words.get("pads", [0] * 2 * rank), words.get("output_padding", [0] * rank)
    y = np.pad(y, [(0, 0), (0, 0), *((0, count) for count in more)])
    y = y[(..., *(slice(pads[i], y.shape[2 + i] - pads[rank + i]) for i in range(rank)))]
    return y + b.astype(y.dtype).reshape(-1, *[1] * rank)


def convolved(x: np.ndarray, w: np.ndarray, b: np.ndarray, words: dict[str, Any], dtype: torch.dtype) -> np.ndarray:
    rank = w.ndim - 2
    function = (torch.conv1d, torch.conv2d, torch.conv3d)[rank - 1]
    pads = words.get("pads", [0] * 2 * rank)
    x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
    strides, dilations = (words.get(word, [1] * rank) for word in ("strides", "dilations"))
    x, w, b = (torch.from_numpy(one).to(dtype) for one in (x, w, b))
    return function(x, w, b, stride=strides, dilation=dilations, groups=words.get("group", 1)).numpy()


MEANING = {"ConvTranspose": transposed, "Conv": convolved}


def source(op_type: str, form: Form, free: bool) -> tuple[onnx.ModelProto, np.ndarray, np.ndarray]:
    rng, groups = np.random.default_rng(0), form.words.get("group", 1)
    w = (rng.standard_normal(form.weight) / np.prod(form.weight[1:]) ** 0.5).astype(np.float32)
    channels = form.weight[1] * groups if op_type == "ConvTranspose" else form.weight[0]
    b = rng.standard_normal(channels).astype(np.float32)
    sizes = ["Z", "Y", "X"][-len(form.x) + 2 :] if free else form.x[2:]
    nodes = [N(op_type, ["x", "w", "b"], ["c"], **form.words), N("Relu", ["c"], ["y"])]
    return model_of(nodes, {"x": ["B", form.x[1], *sizes]}, {"y": None}, {"w": w, "b": b}), w, b


def check(op_type: str, form: Form, free: bool) -> mhsa.Artifact:
    file, w, b = source(op_type, form, free)
    artifact = mhsa.compile(file, without_attention="accept")
    assert not any("conv" in row.op for row in artifact.manifest.ops)  # loops of TVM's
    one, two = (mhsa.load(artifact, threads=threads) for threads in (1, 2))
    batch, channels, *sizes = form.x
    for shape in [form.x, (batch + 1, channels, *sizes)] + [(1, channels, *(2 * size + 1 for size in sizes))] * free:
        x = np.random.default_rng(shape[-1]).standard_normal(shape).astype(np.float32)
        truth, yardstick = (
            np.maximum(MEANING[op_type](x, w, b, form.words, dtype), 0) for dtype in (torch.float64, torch.float32)
        )
        y = one(x=x)
        assert y.shape == truth.shape
        assert max_error(truth, y) <= budget(truth, yardstick, "float32")
        assert np.array_equal(two(x=x), y)
    return artifact


TRANSPOSED = {
    "of GANs": Form((2, 5, 6, 7), (5, 3, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "of U-Nets": Form((2, 5, 6, 7), (5, 17, 2, 2), {"strides": [2, 2]}),
    "of vocoders": Form((2, 19, 11), (19, 7, 16), {"strides": [8], "pads": [4, 4]}),
    "a kernel that strides do not divide": Form(
        (2, 5, 6, 7), (5, 3, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}
    ),
    "phases without a tap": Form((2, 5, 6, 7), (5, 17, 3, 2), {"strides": [4, 3], "output_padding": [3, 1]}),
    "one tap": Form((2, 5, 9), (5, 17, 1), {"strides": [3], "output_padding": [2]}),
    "one step": Form((2, 5, 9), (5, 17, 4), {"dilations": [2], "pads": [3, 1]}),
    "dilations and strides without a divisor": Form(
        (2, 5, 9), (5, 17, 3), {"strides": [2], "dilations": [3], "pads": [2, 1], "output_padding": [1]}
    ),
    "dilations and strides with one": Form((2, 5, 9), (5, 17, 4), {"strides": [6], "dilations": [4], "pads": [0, 5]}),
    "volumes": Form((1, 3, 4, 5, 3), (3, 4, 3, 2, 4), {"strides": [2, 1, 3], "pads": [1, 0, 2, 0, 0, 1]}),
    "groups": Form((2, 6, 9), (6, 4, 4), {"strides": [2], "group": 2, "pads": [1, 1]}),
    "each channel": Form((2, 6, 9, 8), (6, 1, 4, 4), {"strides": [2, 2], "group": 6, "pads": [1, 1, 1, 1]}),
    "several of each channel": Form((2, 6, 9), (6, 2, 3), {"strides": [2], "group": 6, "output_padding": [1]}),
}


@pytest.mark.thorough_only(
    *("a kernel that strides do not divide-fixed", "of U-Nets-fixed", "of vocoders-fixed", "volumes-fixed"),
    "dilations and strides without a divisor-fixed",
)
@pytest.mark.parametrize("free", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["fixed", "free"])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_ones_are_a_sum_for_each_phase(name: str, free: bool) -> None:
    check("ConvTranspose", TRANSPOSED[name], free)


STATED: dict[str, dict[str, Any]] = {
    "SAME_UPPER": {"auto_pad": "SAME_UPPER", "strides": [2], "output_padding": [1], "dilations": [2]},
    "SAME_LOWER": {"auto_pad": "SAME_LOWER", "strides": [3]},
    "output_shape": {"output_shape": [15], "strides": [2]},
    "output_shape, SAME_UPPER": {"output_shape": [15], "strides": [2], "auto_pad": "SAME_UPPER"},
}


@pytest.mark.parametrize("name", STATED)
def test_sizes_that_are_stated_say_what_is_cut_off(name: str) -> None:
    """And weights of the call: against ONNX Runtime."""
    words, rng = STATED[name], np.random.default_rng(0)
    length: Any = 7 if "output_shape" in words else "L"
    inputs = {"x": ["B", 5, length], "w": [5, 6, 4]}
    model = model_of([N("ConvTranspose", ["x", "w"], ["y"], **words)], inputs, {"y": None}, opset=21)
    artifact = mhsa.compile(model, without_attention="accept")
    assert not any("conv" in row.op for row in artifact.manifest.ops)
    feeds = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("x", (2, 5, 7)), ("w", (5, 6, 4)))
    }
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, feeds)[0]
    y = mhsa.load(artifact)(**feeds)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_an_output_shape_of_free_sizes_is_refused() -> None:
    node = N("ConvTranspose", ["x", "w"], ["y"], output_shape=[15], name="up")
    model = model_of([node], {"x": ["B", 5, "L"]}, {"y": None}, {"w": np.ones((5, 6, 4), np.float32)}, opset=21)
    with pytest.raises(ModelError, match=r"'up': .*output_shape=.15.* where dims fix the sizes"):
        mhsa.compile(model, without_attention="accept")


GROUPED = {
    "wav2vec2's": Form((2, 24, 31), (24, 6, 10), {"group": 4, "pads": [5, 4]}),
    "ResNeXt's": Form((2, 24, 9, 7), (18, 4, 3, 3), {"group": 6, "pads": [1] * 4, "strides": [2, 2]}),
    "wide groups": Form((1, 34, 9, 7), (6, 17, 3, 2), {"group": 2, "dilations": [2, 1], "pads": [1, 0, 0, 1]}),
    "pixels of groups": Form((2, 6, 5, 4), (9, 2, 1, 1), {"group": 3}),
    "each channel": Form((2, 19, 11, 9), (19, 1, 7, 7), {"group": 19, "pads": [3] * 4}),
    "each channel, in steps": Form((2, 16, 11), (16, 1, 3), {"group": 16, "strides": [2], "dilations": [2]}),
    "several of each channel": Form((2, 5, 11), (15, 1, 3), {"group": 5, "pads": [1, 1]}),
    "volumes": Form((1, 4, 5, 4, 6), (4, 1, 3, 2, 3), {"group": 4, "pads": [1, 0, 1, 1, 1, 1]}),
}


@pytest.mark.parametrize("free", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["fixed", "free"])
@pytest.mark.parametrize("name", GROUPED)
def test_those_of_groups_are_a_product_for_each_group(name: str, free: bool) -> None:
    artifact = check("Conv", GROUPED[name], free)
    assert ("depthwise" in [row.op for row in artifact.manifest.ops]) == name.startswith(("each", "volumes", "ResNeXt"))


def test_phases_have_each_tap_once() -> None:
    for kernel, stride, dilation in ((4, 2, 1), (3, 2, 1), (3, 5, 2), (5, 4, 6), (7, 6, 4), (1, 3, 1)):
        axis = PhasedAxis.of(kernel, stride, dilation, (0, 0), 0)
        assert sorted(tap for r in range(stride) for tap in axis.taps(r)) == list(range(kernel))
        assert axis.cut >= 0 and all(min(*before, *behind) >= 0 for _, before, behind in by_windows([axis]))
    assert len(by_windows([PhasedAxis.of(4, 2, 1, (1, 1), 0)] * 2)) == 1  # all phases are one product
    assert len(by_windows([PhasedAxis.of(3, 2, 1, (1, 1), 1)] * 2)) == 4


@pytest.mark.thorough
def test_a_block_of_mobile_nets_has_its_channels_last_throughout() -> None:
    """Depthwise, Clip, one pixel, Clip, depthwise: one Transpose at each end."""
    rng = np.random.default_rng(0)
    shapes = {"d": (12, 1, 3, 3), "p": (12, 12, 1, 1), "e": (12, 1, 3, 3)}
    weights = {name: (rng.standard_normal(shape) / 3).astype(np.float32) for name, shape in shapes.items()}
    words = {"group": 12, "pads": [1] * 4}
    nodes = [
        N("Conv", ["x", "d"], ["a"], **words), N("Clip", ["a", "least", "most"], ["b"]),
        N("Conv", ["b", "p"], ["c"]), N("Clip", ["c", "least", "most"], ["f"]),
        N("Conv", ["f", "e"], ["y"], **words),
    ]  # fmt: skip
    bounds = {"least": np.float32(0), "most": np.float32(6)}
    file = model_of(nodes, {"x": ["B", 12, 9, 7]}, {"y": None}, weights | bounds)
    artifact = mhsa.compile(file, without_attention="accept")
    assert [row.op for row in artifact.manifest.ops].count("permute_dims") == 2
    x = rng.standard_normal((2, 12, 9, 7)).astype(np.float32)
    none = np.zeros(12)
    truth = x.astype(np.float64)
    for name, own in (("d", words), ("p", {}), ("e", words)):
        truth = convolved(truth, weights[name].astype(np.float64), none, own, torch.float64)
        truth = truth.clip(0, 6) if name != "e" else truth
    yardstick = onnxruntime.InferenceSession(file.SerializeToString()).run(None, {"x": x})[0]
    assert max_error(truth, mhsa.load(artifact)(x)) <= budget(truth, yardstick, "float32")


@pytest.mark.thorough_only("a kernel that strides do not divide-one scale", "groups-one scale")
@pytest.mark.parametrize("per_channel", [False, True], ids=["one scale", "a scale a channel"])
@pytest.mark.parametrize("name", ["of GANs", "a kernel that strides do not divide", "groups"])
def test_pairs_around_a_transposed_one(name: str, per_channel: bool) -> None:
    """As quantize_static writes it; bytes are multiplied but where there are groups."""
    form, rng = TRANSPOSED[name], np.random.default_rng(0)
    groups = form.words.get("group", 1)
    channels = form.weight[1] if per_channel else ()
    constants = {
        "w": rng.integers(-128, 128, form.weight).astype(np.int8),
        "w_scale": rng.uniform(0.005, 0.01, channels).astype(np.float32),
        "bias": rng.integers(-900, 900, form.weight[1] * groups).astype(np.int32),
        "b_scale": np.full(form.weight[1] * groups, 1e-3, np.float32),
        "x_scale": np.float32(0.02), "x_zero": np.uint8(117), "y_scale": np.float32(0.05), "y_zero": np.uint8(131),
    }  # fmt: skip
    nodes = [
        N("QuantizeLinear", ["x", "x_scale", "x_zero"], ["x_bytes"]),
        N("DequantizeLinear", ["x_bytes", "x_scale", "x_zero"], ["x_floats"]),
        N("DequantizeLinear", ["w", "w_scale"], ["w_floats"], axis=1),
        N("DequantizeLinear", ["bias", "b_scale"], ["b_floats"], axis=0),
        N("ConvTranspose", ["x_floats", "w_floats", "b_floats"], ["floats"], **form.words),
        N("QuantizeLinear", ["floats", "y_scale", "y_zero"], ["y"]),
    ]
    file = model_of(nodes, {"x": ["B", *form.x[1:]]}, {"y": None}, constants, kinds={"y": "uint8"}, opset=21)
    fused = [node.op_type for node in fuse(canonicalize(file).model).graph.node]
    assert "ConvTranspose" not in fused and ("MhsaQuantisedLinear" in fused) == (groups == 1)
    x = rng.standard_normal(form.x).astype(np.float32)
    expected = onnxruntime.InferenceSession(file.SerializeToString()).run(None, {"x": x})[0]
    y = mhsa.load(mhsa.compile(file, without_attention="accept"))(x=x)
    assert np.abs(y.astype(int) - expected.astype(int)).max() <= 1 and expected.std() > 5


def test_pads_that_leave_nothing_are_refused() -> None:
    form = Form((1, 3, 2), (3, 4, 2), {"strides": [1], "pads": [2, 2]})
    with pytest.raises(mhsa.errors.ModelError):
        mhsa.compile(source("ConvTranspose", form, False)[0], without_attention="accept")
