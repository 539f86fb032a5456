"""Files of ONNX Runtime's dynamic quantiser: their products of bytes as linears, against whole numbers in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from support.encoder_layers import WIDE, encoder_layer
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.fusion.fuse import fuse
from mhsa_compile.frontend.fusion.fused_nodes import FusedQuantisedLinear
from mhsa_compile.frontend.relax.importer import import_onnx
from mhsa_compile.kernels.cpu.linear.bytes_on_tiles import CpuTileQuantisedLinearKernel
from mhsa_compile.kernels.cpu.linear.quantised import CpuQuantisedLinearKernel

RNG = np.random.default_rng(0)
Array = np.ndarray[Any, Any]
N = helper.make_node
K, WIDTH = 13, 6


def whole(kind: str, *dims: int) -> Array:
    bounds = np.iinfo(kind)
    return RNG.integers(bounds.min, bounds.max + 1, dims).astype(kind)


CONSTANTS = {
    **{f"w_{kind}": whole(kind, K, WIDTH) for kind in ("int8", "uint8")},
    "turned": whole("int8", WIDTH, K),
    **{f"zeros_{kind}": whole(kind, WIDTH) for kind in ("int8", "uint8")},
    "zero_int8": np.array(0, np.int8),
    "zero_uint8": np.array([255], np.uint8),
    "scale": np.array(0.02, np.float32),
    "one_scale": np.array([0.03], np.float32),
    "scales": RNG.uniform(0.01, 0.05, WIDTH).astype(np.float32),
    "deep_scales": RNG.uniform(0.01, 0.05, K).astype(np.float32),
    "bias": RNG.standard_normal(WIDTH).astype(np.float32),
}


def linear(name: str, weight: str, zero: str, scale: str, *, bias: str = "", x_zero: str = "x_zero") -> list[Any]:
    """As quantize_dynamic writes one, of the bytes of x."""
    nodes = [
        N("Mul", ["x_scale", scale], [f"{name}_scale"]),
        N("MatMulInteger", ["x_bytes", weight, x_zero, zero][: 4 if zero else 3], [f"{name}_sums"]),
        N("Cast", [f"{name}_sums"], [f"{name}_float"], to=TensorProto.FLOAT),
        N("Mul", [f"{name}_float", f"{name}_scale"], [f"{name}_scaled" if bias else name]),
    ]
    return nodes + [N("Add", [bias, f"{name}_scaled"], [name])] * bool(bias)


BYTES = N("DynamicQuantizeLinear", ["x"], ["x_bytes", "x_scale", "x_zero"])
LINEARS = {  # name -> (nodes, weight, zero, scale, bias, whether x's zero is taken)
    "plain": (linear("plain", "w_int8", "zero_int8", "scale", bias="bias"), "w_int8", 0, "scale", True, True),
    "unsigned": (linear("unsigned", "w_uint8", "zero_uint8", "one_scale"), "w_uint8", 255, "one_scale", False, True),
    "each": (
        linear("each", "w_uint8", "zeros_uint8", "scales", bias="bias"),
        "w_uint8", "zeros_uint8", "scales", True, True,
    ),
    "signed": (linear("signed", "w_int8", "zeros_int8", "scales"), "w_int8", "zeros_int8", "scales", False, True),
    "no zeros": (linear("no zeros", "w_uint8", "", "scale", x_zero=""), "w_uint8", 0, "scale", False, False),
    "one by one": (
        [
            N("Transpose", ["turned"], ["upright"], perm=[1, 0]),
            N("MatMulInteger", ["x_bytes", "upright", "x_zero"], ["sums"]),
            N("Cast", ["sums"], ["floats"], to=TensorProto.FLOAT),
            N("Mul", ["scales", "floats"], ["once"]),
            N("Mul", ["once", "x_scale"], ["one by one"]),
        ],
        "turned", 0, "scales", False, True,
    ),
}  # fmt: skip


def model(nodes: list[onnx.NodeProto], outputs: list[str], kind: str = "float32") -> onnx.ModelProto:
    read = {name for node in nodes for name in node.input}
    weights = {name: array for name, array in CONSTANTS.items() if name in read}
    kinds = dict.fromkeys(outputs, kind)
    return model_of(nodes, {"x": ["B", "L", K]}, dict.fromkeys(outputs), weights, kinds=kinds, opset=21)


def every_form() -> onnx.ModelProto:
    return model([BYTES, *(node for form in LINEARS.values() for node in form[0])], list(LINEARS))


def bytes_of(x: Array) -> tuple[Array, Array, Array]:
    """As ONNX's text of DynamicQuantizeLinear has it, in float32."""
    least, most = np.minimum(x.min(), np.float32(0)), np.maximum(x.max(), np.float32(0))
    scale = np.float32(1) if most == least else (most - least) / np.float32(255)
    zero = np.rint(np.clip(-least / scale, 0, 255))
    return np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.int64), scale, zero.astype(np.int64)


def right(form: Any, x: Array, constants: dict[str, Array] = CONSTANTS) -> tuple[Array, Array]:
    """(the value in float64, how far float32 may be from it)."""
    _, weight, zero, scale, biased, zeroed = form
    rows, x_scale, x_zero = bytes_of(x)
    w = constants[weight].astype(np.int64)
    sums = (rows - x_zero * zeroed) @ (
        (w.T if weight == "turned" else w) - (constants[zero].astype(np.int64) if zero in constants else zero)
    )
    scaled = sums * (np.float64(x_scale) * constants[scale])
    value = scaled + (constants["bias"] if biased else 0)
    return value, 2.0**-24 * (3 * np.abs(scaled) + np.abs(value))


@pytest.fixture(scope="module")
def artifact() -> mhsa.Artifact:
    return mhsa.compile(every_form(), without_attention="accept")


INPUTS = [RNG.standard_normal((2, 5, K)), RNG.uniform(1, 2, (1, 1, K)), np.zeros((3, 1, K)), -RNG.random((1, 197, K))]


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_form(artifact: mhsa.Artifact, threads: int) -> None:
    call = mhsa.load(artifact, threads=threads)
    for x in INPUTS:
        x = x.astype(np.float32)
        for name, y in zip(LINEARS, call(x=x), strict=True):
            value, allowed = right(LINEARS[name], x)
            assert (np.abs(y - value) <= allowed).all(), name


def test_each_is_a_linear_and_bytes_are_computed_once(artifact: mhsa.Artifact) -> None:
    kinds = [op.op for op in artifact.manifest.ops if op.op in ("linear", "quantise") or op.source == "fallback"]
    assert sorted(kinds) == [*["linear"] * len(LINEARS), "quantise"]
    stored = {info.name: info.dtype for info in artifact.manifest.weights}
    assert (stored["w_int8"], stored["w_uint8"]) == ("int8", "uint8")


def test_other_weights_are_bound(artifact: mhsa.Artifact) -> None:
    others = {info.name: RNG.permutation(CONSTANTS[info.name]) for info in artifact.manifest.weights}
    x = INPUTS[0].astype(np.float32)
    for name, y in zip(LINEARS, mhsa.load(artifact, weights=others)(x=x), strict=True):
        value, allowed = right(LINEARS[name], x, {**CONSTANTS, **others})
        assert (np.abs(y - value) <= allowed).all(), name


STATIC = {  # name -> (nodes, weight, zero, scale, bias)
    "one scale": (
        [
            N("DequantizeLinear", ["w_int8", "one_scale"], ["w1"]),
            N("MatMul", ["x_floats", "w1"], ["p1"]),
            N("Add", ["bias", "p1"], ["one scale"]),
        ],
        "w_int8", 0, "one_scale", True,
    ),
    "each": (
        [
            N("DequantizeLinear", ["w_uint8", "scales", "zeros_uint8"], ["w2"], axis=-1),
            N("MatMul", ["x_floats", "w2"], ["each"]),
        ],
        "w_uint8", "zeros_uint8", "scales", False,
    ),
    "turned": (
        [
            N("DequantizeLinear", ["turned", "scales", "zeros_int8"], ["w3"], axis=0),
            N("Transpose", ["w3"], ["w4"], perm=[1, 0]),
            N("MatMul", ["x_floats", "w4"], ["turned_y"]),
        ],
        "turned", "zeros_int8", "scales", False,
    ),
}  # fmt: skip
STATIC_NODES = [
    N("QuantizeLinear", ["x", "step", "x_origin"], ["x_bytes"]),
    N("DequantizeLinear", ["x_bytes", "step", "x_origin"], ["x_floats"]),
]
STATIC_NUMBERS = {"step": np.array([0.03], np.float32), "x_origin": np.array(-7, np.int8)}
"""Of one number each, but not of one shape: so ONNX Runtime's quantiser writes them beside biases."""


def static() -> onnx.ModelProto:
    file = model(
        [*STATIC_NODES, *(node for form in STATIC.values() for node in form[0])], ["one scale", "each", "turned_y"]
    )
    file.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in STATIC_NUMBERS.items())
    return file


@pytest.mark.thorough
def test_products_between_pairs_of_a_static_quantiser() -> None:
    artifact = mhsa.compile(static(), without_attention="accept")
    fused = [node.op_type for node in fuse(static()).graph.node]
    assert fused.count(FusedQuantisedLinear.op_type) == 3 and "MatMul" not in fused and "DequantizeLinear" not in fused
    for x in INPUTS:
        rows = np.clip(np.rint(x.astype(np.float32) / np.float32(0.03)) - 7, -128, 127).astype(np.int64)
        results = mhsa.load(artifact)(x=x.astype(np.float32))
        for (name, (_, weight, zero, scale, biased)), y in zip(STATIC.items(), results, strict=True):
            w = CONSTANTS[weight].astype(np.int64).T if weight == "turned" else CONSTANTS[weight].astype(np.int64)
            origin = CONSTANTS[zero].astype(np.int64) if isinstance(zero, str) else zero
            scaled = ((rows + 7) @ (w - origin)) * (np.float64(np.float32(0.03)) * CONSTANTS[scale])
            value = scaled + (CONSTANTS["bias"] if biased else 0)
            assert (np.abs(y - value) <= 2.0**-24 * (3 * np.abs(scaled) + np.abs(value))).all(), name


def test_weights_of_the_file_are_not_rounded_again() -> None:
    with pytest.raises(ModelError, match="a model with a linear"):
        import_onnx(every_form(), int8_weights=True)


def test_a_machine_without_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in (CpuTileQuantisedLinearKernel, CpuQuantisedLinearKernel):
        monkeypatch.setattr(kernel, "why_not", lambda *_: "avx_vnni")
    artifact = mhsa.compile(every_form(), without_attention="accept")
    rows = [op for op in artifact.manifest.ops if op.op == "linear"]
    assert {op.source for op in rows} == {"fallback"} and all("avx_vnni" in op.note for op in rows)
    x = INPUTS[0].astype(np.float32)
    for name, y in zip(LINEARS, mhsa.load(artifact)(x=x), strict=True):
        value, allowed = right(LINEARS[name], x)
        assert (np.abs(y - value) <= allowed).all(), name


UNFIT = {
    "read by others": [*linear("y", "w_int8", "", "scale"), N("Cast", ["y_sums"], ["z"], to=TensorProto.FLOAT)],
    "scales along the sum": [
        N("DequantizeLinear", ["x_bytes", "x_scale", "x_zero"], ["x_floats"]),
        N("DequantizeLinear", ["w_int8", "deep_scales"], ["w_floats"], axis=0),
        N("MatMul", ["x_floats", "w_floats"], ["y"]),
    ],
    "floats of 64 bits": [
        N("MatMulInteger", ["x_bytes", "w_int8", "x_zero"], ["sums"]),
        N("Cast", ["sums"], ["floats"], to=TensorProto.DOUBLE),
        N("Cast", ["floats"], ["y"], to=TensorProto.FLOAT),
    ],
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_stays(name: str) -> None:
    fused = fuse(model([BYTES, *UNFIT[name]], ["y", "z"] if name == "read by others" else ["y"]))
    operators = [node.op_type for node in fused.graph.node]
    assert {"MatMul", "MatMulInteger"} & {*operators} and FusedQuantisedLinear.op_type not in operators


@pytest.mark.thorough
@pytest.mark.parametrize("per_channel", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", ["QUInt8", pytest.param("QInt8", marks=pytest.mark.thorough)])
def test_an_encoder_of_the_quantiser(kind: str, per_channel: bool, tmp_path: Path) -> None:
    """Against ONNX Runtime, with weights of seven bits: with eight its sums saturate on a CPU without VNNI."""
    small = tmp_path / "small.onnx"
    onnx.save(encoder_layer(RNG, ["B", "L", WIDE], 0.2, 1.0), tmp_path / "plain.onnx")
    quantize_dynamic(
        tmp_path / "plain.onnx", small, weight_type=QuantType[kind], per_channel=per_channel, reduce_range=True
    )
    artifact = mhsa.compile(small)
    kernels = [op.kernel for op in artifact.manifest.ops if op.source != "fallback"]
    assert kernels.count("cpu.attention") == 1
    # Q, K and V are one linear, of the same bytes.
    assert kernels.count("cpu.quantise") == 4
    if products := [name for name in kernels if name.startswith("cpu.linear_of_bytes")]:
        assert len(products) == 4 and not artifact.manifest.slow
    session = onnxruntime.InferenceSession(small, providers=["CPUExecutionProvider"])
    for B, L in ((1, 1), (2, 9)):
        x = RNG.standard_normal((B, L, WIDE)).astype(np.float32)
        expected = session.run(None, {"x": x})[0]
        # Where a float before a rounding differs in its last bit, a byte may differ by one step.
        assert np.abs(mhsa.load(artifact)(x) - expected).max() < 0.05 * np.abs(expected).std()
