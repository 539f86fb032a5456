"""Operators of quantised numbers of com.microsoft: what they become gives ONNX Runtime's values for the same node.

Bytes within one step, as its kernels round at other places; floats within the roundings of float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from support.fused_encoders import fused_encoder
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError

MICROSOFT = "com.microsoft"
RNG = np.random.default_rng(0)
N = helper.make_node
Array = np.ndarray[Any, Any]
ROWS, K, WIDTH = 5, 12, 6


def whole(kind: str, *dims: int) -> Array:
    bounds = np.iinfo(kind)
    return RNG.integers(bounds.min, bounds.max + 1, dims).astype(kind)


def constants(kind: str) -> dict[str, Array]:
    """One number each, of the first value, the second and the result; then what products take."""
    offset = np.iinfo(kind).min
    return {
        "a_scale": np.array(0.0313, np.float32), "a_zero": np.array(120 + offset, kind),
        "b_scale": np.array(0.0487, np.float32), "b_zero": np.array(131 + offset, kind),
        "y_scale": np.array(0.0611, np.float32), "y_zero": np.array(125 + offset, kind),
        "unit": np.array(1 / 256, np.float32), "least": np.array(offset, kind),
        "w": whole("int8", K, WIDTH), "turned": whole("int8", WIDTH, K), "w_zero": np.array(3, np.int8),
        "w_scales": RNG.uniform(0.002, 0.01, WIDTH).astype(np.float32), "w_zeros": whole("int8", WIDTH),
        "bias": RNG.integers(-2000, 2000, WIDTH).astype(np.int32),
        "floats": RNG.standard_normal(WIDTH).astype(np.float32),
    }  # fmt: skip


NUMBERS = {name: [f"{name}_scale", f"{name}_zero"] for name in "aby"}
ONE = ["a", *NUMBERS["a"], *NUMBERS["y"]]
TWO = ["a", *NUMBERS["a"], "b", *NUMBERS["b"], *NUMBERS["y"]]
IMAGE = ["image", *NUMBERS["a"], *NUMBERS["y"]]
Case = tuple[str, list[str], dict[str, Any]]
CASES: dict[str, Case] = {
    "Add": ("QLinearAdd", TWO, {}),
    "Add, no zero point of the sum": ("QLinearAdd", TWO[:-1], {}),
    "Mul": ("QLinearMul", ["a", *NUMBERS["a"], "one", *NUMBERS["b"], *NUMBERS["y"]], {}),
    "Sigmoid": ("QLinearSigmoid", ["a", *NUMBERS["a"], "unit", "least"], {}),
    "LeakyRelu": ("QLinearLeakyRelu", ONE, {"alpha": 0.1}),
    "Softmax": ("QLinearSoftmax", ["a", *NUMBERS["a"], "unit", "least"], {"opset": 13, "axis": 1}),
    "Softmax of before": ("QLinearSoftmax", ["a", *NUMBERS["a"], "unit", "least"], {"opset": 12, "axis": 1}),
    "Concat": ("QLinearConcat", [*NUMBERS["y"], "a", *NUMBERS["a"], "b", *NUMBERS["b"]], {"axis": 1}),
    "Where": ("QLinearWhere", ["which", "a", *NUMBERS["a"], "b", *NUMBERS["b"], *NUMBERS["y"]], {}),
    "AveragePool": (
        "QLinearAveragePool", IMAGE, {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "strides": [2, 1]},
    ),
    "AveragePool, channels last": (
        "QLinearAveragePool", IMAGE, {"kernel_shape": [2, 2], "channels_last": 1, "count_include_pad": 1},
    ),
    "GlobalAveragePool": ("QLinearGlobalAveragePool", IMAGE, {}),
    "Gemm": ("QGemm", ["matrix", *NUMBERS["a"], "turned", "w_scales", "w_zeros", "bias", *NUMBERS["y"]], {"transB": 1}),
    "Gemm of floats": (
        "QGemm", ["across", *NUMBERS["a"], "w", "b_scale", "w_zero", "bias"], {"alpha": 0.5, "transA": 1},
    ),
    "Gemm without C": ("QGemm", ["matrix", *NUMBERS["a"], "w", "w_scales", "w_zeros", "", *NUMBERS["y"]], {}),
    "MatMulIntegerToFloat": (
        "MatMulIntegerToFloat", ["a", "w", "a_scale", "w_scales", "a_zero", "w_zeros", "floats"], {},
    ),
    "MatMulIntegerToFloat, no zeros": ("MatMulIntegerToFloat", ["a", "w", "a_scale", "b_scale"], {}),
    "DynamicQuantizeMatMul": ("DynamicQuantizeMatMul", ["x", "w", "w_scales", "w_zeros", "floats"], {}),
}  # fmt: skip
INPUTS: dict[str, list[int]] = {
    "a": [2, ROWS, K], "b": [2, ROWS, K], "one": [K], "which": [2, 1, K], "image": [8, 4, 6, 5],
    "matrix": [ROWS, K], "across": [K, ROWS], "x": [2, ROWS, K],
}  # fmt: skip
FLOATS = ("Gemm of floats", "MatMulIntegerToFloat", "MatMulIntegerToFloat, no zeros", "DynamicQuantizeMatMul")


def file(name: str, kind: str, **others: Array) -> onnx.ModelProto:
    operator, names, words = CASES[name]
    numbers = constants(kind) | others
    weights = {one: array for one, array in numbers.items() if one in names}
    node = helper.make_node(operator, names, ["y"], name="node", domain=MICROSOFT, **words)
    inputs = {one: dims for one, dims in INPUTS.items() if one in names}
    kinds = dict.fromkeys(inputs, kind) | {"which": "bool", "x": "float32"}
    kinds["y"] = "float32" if name in FLOATS else kind
    return model_of([node], inputs, {"y": None}, weights, kinds=kinds, opset=17, domain=MICROSOFT)


def feeds_of(model: onnx.ModelProto) -> dict[str, Array]:
    values = {}
    for value in model.graph.input:
        dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        kind = np.dtype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        if kind.kind == "f":
            values[value.name] = RNG.standard_normal(dims).astype(kind)
        else:
            values[value.name] = RNG.integers(0, 2, dims).astype(kind) if kind.kind == "b" else whole(kind.name, *dims)
    return values


def of_onnxruntime(model: onnx.ModelProto, feeds: dict[str, Array]) -> Array:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


@pytest.mark.thorough_but("Gemm-int8", "MatMulIntegerToFloat-uint8", "Softmax of before-uint8")
@pytest.mark.parametrize("kind", ["uint8", "int8"])
@pytest.mark.parametrize("name", CASES)
def test_each_as_onnx_runtime_has_it(name: str, kind: str) -> None:
    model = file(name, kind)
    feeds = feeds_of(model)
    expected = of_onnxruntime(model, feeds)
    y = mhsa.load(mhsa.compile(model, without_attention="accept"))(**feeds)
    assert y.dtype == expected.dtype and y.shape == expected.shape
    if name in FLOATS:
        np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
        return
    assert len(np.unique(expected)) > 10
    off = np.abs(y.astype(np.int64) - expected)
    assert off.max() <= 1 and (off > 0).mean() < 0.02


def test_bytes_of_one_value_are_computed_once() -> None:
    """Two products of the same floats are two linears of the same bytes."""
    model = file("DynamicQuantizeMatMul", "uint8")
    model.graph.node.append(helper.make_node("DynamicQuantizeMatMul", ["x", "w", "w_scales"], ["z"], domain=MICROSOFT))
    model.graph.output.append(helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None))
    operations = [op.op for op in mhsa.compile(model, without_attention="accept").manifest.ops]
    assert operations.count("quantise") == 1 and operations.count("linear") == 2


BAD: dict[str, tuple[str, dict[str, Array], str]] = {
    "a scale of 0": ("Add", {"b_scale": np.array(0, np.float32)}, "'b_scale' with 0.0"),
    "a negative scale": ("Gemm", {"w_scales": -np.ones(WIDTH, np.float32)}, "'w_scales' with -1.0"),
    "a scale of NaN": ("Softmax", {"unit": np.array(np.nan, np.float32)}, "'unit' with nan"),
    "a scale of the result": ("Concat", {"y_scale": np.array(np.inf, np.float32)}, "'y_scale' with inf"),
    "a zero point of another dtype": ("Add", {"b_zero": np.array(1, np.int8)}, "'b_zero' of uint8, as 'b', got int8"),
    "a zero point of wide numbers": ("Mul", {"y_zero": np.array(1, np.int32)}, "'y_zero' of uint8, as 'y', got int32"),
    "scales of halves": ("Sigmoid", {"a_scale": np.array(0.1, np.float16)}, "'a_scale' of float32, got float16"),
    "a product's": (
        "MatMulIntegerToFloat",
        {"w_zeros": np.ones(WIDTH, np.uint8)},
        "'w_zeros' of int8, as 'w', got uint8",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_number_is_refused_by_name(name: str) -> None:
    case, others, message = BAD[name]
    with pytest.raises(ModelError, match=message):
        mhsa.compile(file(case, "uint8", **others), without_attention="accept")


def quantised_encoder(folder: Path, *, kind: str = "QInt8", per_channel: bool = False) -> Path:
    """A file of quantize_dynamic, of the operators of a fused encoder. Weights of seven bits, as ONNX Runtime's sums
    saturate beyond on a CPU without VNNI."""
    onnx.save(fused_encoder(32, 2, 48), folder / "fused.onnx")
    names = {
        "weight_type": QuantType[kind],
        "per_channel": per_channel,
        "reduce_range": True,
        "extra_options": {"DefaultTensorType": 1},
    }
    quantize_dynamic(folder / "fused.onnx", folder / "small.onnx", **names)
    return folder / "small.onnx"


ENCODERS = [
    ("QInt8", True),
    *(pytest.param(*row, marks=pytest.mark.thorough) for row in (("QUInt8", False), ("QInt8", False))),
]


@pytest.mark.parametrize(("kind", "per_channel"), ENCODERS)
def test_an_encoder_that_was_fused_before(kind: str, per_channel: bool, tmp_path: Path) -> None:
    path = quantised_encoder(tmp_path, kind=kind, per_channel=per_channel)
    operators = [node.op_type for node in onnx.load(path).graph.node]
    assert {"QAttention", "QEmbedLayerNormalization"} <= {*operators}
    artifact = mhsa.compile(path)
    kernels = [op.kernel for op in artifact.manifest.ops if op.source != "fallback"]
    assert kernels.count("cpu.attention") == 1 and kernels.count("cpu.quantise") == 4
    if products := [name for name in kernels if name.startswith("cpu.linear_of_bytes")]:
        assert len(products) == 4 and not artifact.manifest.slow
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for B, L in ((1, 1), (2, 9)):
        feeds = {"ids": RNG.integers(0, 50, (B, L)), "kinds": RNG.integers(0, 2, (B, L)), "mask": np.ones((B, L))}
        feeds["mask"][-1, L // 2 + 1 :] = 0
        feeds = {name: array.astype(np.int32) for name, array in feeds.items()}
        expected = session.run(None, feeds)[0]
        # Where a float before a rounding differs in its last bit, a byte may differ by one step.
        assert np.abs(mhsa.load(artifact)(**feeds) - expected).max() < 0.05 * np.abs(expected).std()


@pytest.mark.thorough
def test_what_onnx_runtimes_optimizer_writes(tmp_path: Path) -> None:
    """MatMulIntegerToFloat and DynamicQuantizeMatMul, of a file as a session keeps it."""
    path, options = quantised_encoder(tmp_path), onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "kept.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    operators = [node.op_type for node in onnx.load(tmp_path / "kept.onnx").graph.node]
    assert "DynamicQuantizeMatMul" in operators and "MatMulInteger" not in operators
    artifact = mhsa.compile(tmp_path / "kept.onnx")
    feeds = dict.fromkeys(("kinds", "mask"), np.ones((2, 7), np.int32)) | {
        "ids": np.arange(14, dtype=np.int32).reshape(2, 7)
    }
    expected = session.run(None, feeds)[0]
    assert np.abs(mhsa.load(artifact)(**feeds) - expected).max() < 0.05 * np.abs(expected).std()


@pytest.mark.parametrize("keepdims", [1, pytest.param(0, marks=pytest.mark.thorough)])
def test_means_against_whole_numbers(keepdims: int) -> None:
    """QLinearReduceMean, which ONNX Runtime's documents have, and its CPUs no kernel of."""
    numbers = constants("uint8")
    words = {"axes": [1, -1], "keepdims": keepdims}
    node = helper.make_node("QLinearReduceMean", ONE, ["y"], name="node", domain=MICROSOFT, **words)
    weights = {name: array for name, array in numbers.items() if name in ONE}
    kinds = {"a": "uint8", "y": "uint8"}
    model = model_of([node], {"a": INPUTS["a"]}, {"y": None}, weights, kinds=kinds, opset=17, domain=MICROSOFT)
    a = whole("uint8", *INPUTS["a"])
    a[1] //= 9
    y = mhsa.load(mhsa.compile(model, without_attention="accept", check=False))(a=a)
    mean = (a - np.float64(numbers["a_zero"])).mean((1, 2), keepdims=bool(keepdims)) * numbers["a_scale"]
    expected = np.clip(np.rint(mean / numbers["y_scale"]) + numbers["y_zero"], 0, 255)
    assert y.shape == expected.shape and np.abs(y - expected).max() <= 1 and np.ptp(expected) > 10


PAIRS = {"int16": (-9, 400), "uint16": (0, 60000), "int4": (-8, 8), "uint4": (0, 16)}


@pytest.mark.thorough_but("int16", "uint4")
@pytest.mark.parametrize("kind", PAIRS)
def test_pairs_of_other_dtypes_than_bytes(kind: str) -> None:
    """What quantize_static writes in opsets whose own pairs have only bytes: activations of 16 bits, weights of four, a
    bias of 32."""
    dtype, (least, most) = getattr(ml_dtypes, kind, kind), PAIRS[kind]
    is_weight = kind.endswith("int4")
    weights = {
        "s": np.float32(0.01), "z": np.array(least + 7, dtype), "q": RNG.integers(least, most, (5, 3)).astype(dtype),
        "b": RNG.integers(-9999, 9999, 3).astype(np.int32),
    }  # fmt: skip
    pair = ["w", "s", "z"]
    nodes = [
        N("DequantizeLinear", ["q", *pair[1:]] if is_weight else pair, ["f"], name="pair", domain=MICROSOFT),
        N("DequantizeLinear", ["b", "s"], ["c"], name="bias", domain=MICROSOFT),
        *([N("MatMul", ["x", "f"], ["p"])] if is_weight else [N("MatMul", ["f", "m"], ["p"])]),
        N("Add", ["p", "c"], ["y"]),
    ]
    if not is_weight:
        nodes.insert(0, N("QuantizeLinear", ["x", *pair[1:]], ["w"], name="rounding", domain=MICROSOFT))
        weights["m"] = RNG.standard_normal((5, 3)).astype(np.float32)
        del weights["q"]
    model = model_of(nodes, {"x": ["B", 5]}, {"y": ["B", 3]}, weights, opset=18, domain=MICROSOFT)
    x = RNG.standard_normal((4, 5)).astype(np.float32) * 3
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    actual = mhsa.load(mhsa.compile(model, without_attention="accept", check=False))(x=x)
    # With weights of four bits ONNX Runtime may round activations to eight.
    assert np.abs(actual - expected).max() < (2e-2 if is_weight else 1e-5) * np.abs(expected).max()


def lstm(per_channel: bool, direction: str, kind: str) -> tuple[onnx.ModelProto, onnx.ModelProto, dict[str, Array]]:
    """(a DynamicQuantizeLSTM; an LSTM of what its bytes mean, which rounds x alike; x)"""
    rng, count, I, H = np.random.default_rng(7), 2 if direction == "bidirectional" else 1, 10, 12
    bounds, columns = np.iinfo(kind), (count, 4 * H) if per_channel else (count,)
    bytes_of = {
        name: rng.integers(bounds.min, bounds.max, (count, rows, 4 * H)).astype(kind)
        for name, rows in (("w", I), ("r", H))
    }
    numbers = {f"{name}s": rng.uniform(0.002, 0.004, columns).astype(np.float32) for name in "wr"}
    numbers |= {f"{name}z": np.full(columns, 3 + (bounds.max + bounds.min) // 2, kind) for name in "wr"}
    biases = {"b": rng.standard_normal((count, 8 * H)).astype(np.float32)}
    outputs, words = ["y", "h", "c"], {"hidden_size": H, "direction": direction}
    inputs = ["x", "w", "r", "b", "", "", "", "", "ws", "wz", "rs", "rz"]
    node = N("DynamicQuantizeLSTM", inputs, outputs, domain=MICROSOFT, **words)
    shapes = {"x": [6, 2, I]}
    of_bytes = model_of([node], shapes, dict.fromkeys(outputs), bytes_of | numbers | biases, domain=MICROSOFT, opset=21)
    spread = {name: array.reshape(count, 1, -1).astype(np.float32) for name, array in numbers.items()}
    floats = {
        n: ((a.astype(np.float32) - spread[f"{n}z"]) * spread[f"{n}s"]).swapaxes(1, 2).copy()
        for n, a in bytes_of.items()
    }
    nodes = [
        N("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]), N("DequantizeLinear", ["q", "s", "z"], ["rounded"]),
        N("LSTM", ["rounded", "w", "r", "b"], outputs, **words),
    ]  # fmt: skip
    x = {"x": rng.standard_normal((6, 2, I)).astype(np.float32)}
    return of_bytes, model_of(nodes, shapes, dict.fromkeys(outputs), floats | biases, opset=21), x


@pytest.mark.parametrize(
    ("per_channel", "direction", "kind"),
    [(False, "forward", "int8"), (True, "bidirectional", "uint8")],
    ids=["one scale", "a scale a column, both ways"],
)
def test_a_dynamic_lstm(per_channel: bool, direction: str, kind: str) -> None:
    """To float32's roundings the LSTM of its bytes; ONNX Runtime rounds the state of each step to bytes as well."""
    of_bytes, of_floats, x = lstm(per_channel, direction, kind)
    results = mhsa.load(mhsa.compile(of_bytes, without_attention="accept"))(**x)
    theirs, rounded = (
        onnxruntime.InferenceSession(one.SerializeToString()).run(None, x) for one in (of_floats, of_bytes)
    )
    for y, expected, with_states in zip(results, theirs, rounded, strict=True):
        np.testing.assert_allclose(y, expected, rtol=0, atol=3e-6)
        assert 1e-6 < np.abs(y - with_states).max() < 1 / 64  # four steps of states in bytes


def test_a_dynamic_lstm_with_scales_that_are_none_is_refused() -> None:
    file, _, _ = lstm(False, "forward", "int8")
    (tensor,) = (one for one in file.graph.initializer if one.name == "rs")
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(1, np.float32), "rs"))
    with pytest.raises(ModelError, match=r"'rs' with 0\.0"):
        mhsa.compile(file, without_attention="accept")


BY_BLOCKS = {
    "along rows": ((5, 48), 1, 16, "uint8", True),
    "along columns": ((6, 8), 0, 2, "int8", False),
    "a shorter last block": ((5, 40), 1, 16, "uint8", True),
    "the middle of three axes": ((2, 9, 3), -2, 4, "int16", True),
}


@pytest.mark.parametrize("name", BY_BLOCKS)
def test_values_by_blocks(name: str) -> None:
    dims, axis, block, kind, zeros = BY_BLOCKS[name]
    rng, shape, bounds = np.random.default_rng(8), list(dims), np.iinfo(kind)
    shape[axis] = -(-dims[axis] // block)
    numbers = {"s": rng.uniform(2, 4, shape).astype(np.float32) / bounds.max}
    numbers |= {"z": rng.integers(bounds.min // 4, bounds.max // 4, shape).astype(kind)} if zeros else {}
    names, words = list(numbers), {"axis": axis, "block_size": block}
    stated = {} if zeros else {"output_dtype": helper.np_dtype_to_tensor_dtype(np.dtype(kind))}
    nodes = [
        N("QuantizeLinear", ["x", *names], ["q"], **words, **stated),
        N("DequantizeLinear", ["q", *names], ["y"], **words),
    ]
    file = model_of(nodes, {"x": list(dims)}, {"q": None, "y": None}, numbers, kinds={"q": kind}, opset=21)
    x = {"x": (3 * rng.standard_normal(dims)).astype(np.float32)}
    results = mhsa.load(mhsa.compile(file, without_attention="accept"))(**x)
    for y, expected in zip(results, onnxruntime.InferenceSession(file.SerializeToString()).run(None, x), strict=True):
        assert y.dtype == expected.dtype
        np.testing.assert_array_equal(y, expected)
    assert (results[0] == bounds.max).any() and (results[0] < bounds.max).any()  # cut off, and not
