"""DFT and STFT against NumPy's transforms in float64: axes, lengths, halves of spectra, windows, free sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError

RNG = np.random.default_rng(0)
Array = np.ndarray[Any, Any]
N = helper.make_node
WINDOW = np.hanning(10).astype(np.float32)
REAL, COMPLEX, HALVES, SIGNAL = ("B", 7, 12, 1), ("B", 7, 12, 2), ("B", 7, 12, 1), ("B", "L", 1)
NODES = {
    "whole": N("DFT", ["real", "", "last"], ["whole"]),
    "first": N("DFT", ["real", "", "first_axis"], ["first"]),
    "onesided": N("DFT", ["real", "", "last"], ["onesided"], onesided=1),
    "cut": N("DFT", ["complex", "five", "first_axis"], ["cut"]),
    "longer": N("DFT", ["complex", "twenty", "last"], ["longer"]),
    "even": N("DFT", ["complex", "", "last"], ["even"]),
    "back": N("DFT", ["complex", "", "last"], ["back"], inverse=1),
    "odd_back": N("DFT", ["complex", "", "first_axis"], ["odd_back"], inverse=1),
    "real_back": N("DFT", ["complex", "", "last"], ["real_back"], inverse=1, onesided=1),
    "real_cut": N("DFT", ["complex", "nine", "last"], ["real_cut"], inverse=1, onesided=1),
    "halves": N("DFT", ["halves", "", "last"], ["halves_out"]),
    "frames": N("STFT", ["signal", "three", "window"], ["frames"]),
    "plain": N("STFT", ["signal", "three", "", "nine"], ["plain"], onesided=0),
    "pairs": N("STFT", ["pair_signal", "three", "window", "ten"], ["pairs"], onesided=0),
}
NUMBERS = {"last": -2, "first_axis": 1, "three": 3, "five": 5, "nine": 9, "ten": 10, "twenty": 20}


def model(nodes: list[onnx.NodeProto], opset: int = 20) -> onnx.ModelProto:
    dims: dict[str, Any] = {"real": REAL, "complex": COMPLEX, "halves": HALVES, "signal": SIGNAL}
    dims["pair_signal"] = ("B", "L", 2)
    read = {name for node in nodes for name in node.input}
    inputs = {name: shape for name, shape in dims.items() if name in read}
    outputs = {node.output[0]: None for node in nodes}
    constants = {name: array for name, array in (NUMBERS | {"window": WINDOW}).items() if name in read}
    kinds = dict.fromkeys(("halves", "halves_out"), "float16")
    return model_of(nodes, inputs, outputs, constants, kinds=kinds, opset=opset)


def joined(x: Array) -> Array:
    return x[..., 0].astype(np.float64) + (1j * x[..., 1] if x.shape[-1] == 2 else 0)


def parted(y: Array) -> Array:
    return np.stack([y.real, y.imag], -1)


def frames(x: Array, length: int, window: Array, step: int = 3) -> Array:
    count = (x.shape[1] - length) // step + 1
    return np.stack([joined(x)[:, i * step : i * step + length] * window for i in range(count)], 1)


def right(inputs: dict[str, Array]) -> dict[str, Array]:
    real, pairs = joined(inputs["real"]), joined(inputs["complex"])
    wide = WINDOW.astype(np.float64)
    return {
        "whole": parted(np.fft.fft(real, axis=2)),
        "first": parted(np.fft.fft(real, axis=1)),
        "onesided": parted(np.fft.rfft(real, axis=2)),
        "cut": parted(np.fft.fft(pairs, 5, axis=1)),
        "longer": parted(np.fft.fft(pairs, 20, axis=2)),
        "even": parted(np.fft.fft(pairs, axis=2)),
        "back": parted(np.fft.ifft(pairs, axis=2)),
        "odd_back": parted(np.fft.ifft(pairs, axis=1)),
        "real_back": np.fft.irfft(pairs, axis=2)[..., None],
        "real_cut": np.fft.irfft(pairs, 9, axis=2)[..., None],
        "halves": parted(np.fft.fft(joined(inputs["halves"]), axis=2)),
        "frames": parted(np.fft.rfft(frames(inputs["signal"], 10, wide).real)),
        "plain": parted(np.fft.fft(frames(inputs["signal"], 9, np.ones(9)))),
        "pairs": parted(np.fft.fft(frames(inputs["pair_signal"], 10, wide))),
    }


@pytest.fixture(scope="module")
def call() -> Any:
    return mhsa.load(mhsa.compile(model([*NODES.values()]), without_attention="accept"))


@pytest.mark.parametrize(("batch", "length"), [(1, 10), (3, 41)])
def test_against_numpy(call: Any, batch: int, length: int) -> None:
    inputs = {
        "real": RNG.standard_normal((batch, 7, 12, 1)).astype(np.float32),
        "complex": RNG.standard_normal((batch, 7, 12, 2)).astype(np.float32),
        "halves": RNG.standard_normal((batch, 7, 12, 1)).astype(np.float16),
        "signal": RNG.standard_normal((batch, length, 1)).astype(np.float32),
        "pair_signal": RNG.standard_normal((batch, length, 2)).astype(np.float32),
    }
    for output, (name, expected) in zip(call(**inputs), right(inputs).items(), strict=True):
        assert output.shape == expected.shape, name
        np.testing.assert_allclose(output, expected, atol=5e-3 if name == "halves" else 5e-6, err_msg=name)


def test_an_axis_as_an_attribute() -> None:
    call = mhsa.load(mhsa.compile(model([N("DFT", ["complex"], ["y"], axis=1)], 17), without_attention="accept"))
    x = RNG.standard_normal((2, 7, 12, 2)).astype(np.float32)
    np.testing.assert_allclose(call(x), parted(np.fft.fft(joined(x), axis=1)), atol=5e-6)


def test_the_size_of_a_spectrum_whose_half_is_not_asked_for_by_name() -> None:
    """onnx infers 10 places of a STFT that leaves out `onesided`, and 10 of what is computed from them."""
    source = """<ir_version: 9, opset_import: ["" : 17]> g (float[2,31,1] signal) => (float[2,8,a] y)
    <int64 step = {3}, int64 length = {10}, int64[1] end = {-1}, int64[2] shape = {2,8}> {
        z = STFT(signal, step, , length)  s = Shape <start = 2> (z)  whole = Concat <axis = 0> (shape, s)
        flat = Reshape(z, whole)  last = ReduceSum <keepdims = 0> (flat, end)  y = Mul(last, last) }"""
    call = mhsa.load(mhsa.compile(onnx.parser.parse_model(source), without_attention="accept", check=False))
    signal = RNG.standard_normal((2, 31, 1)).astype(np.float32)
    right = parted(np.fft.rfft(frames(signal, 10, np.ones(10)).real)).sum(-1) ** 2
    np.testing.assert_allclose(call(signal), right, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough_but("0")
@pytest.mark.parametrize("inverse", [0, 1])
def test_an_axis_that_comes_by_the_call(inverse: int) -> None:
    source = f"""<ir_version: 9, opset_import: ["" : 20]> g (float[3,4,5,2] x, int64 axis) => (float[3,4,5,2] y) {{
        y = DFT <inverse = {inverse}> (x, , axis) }}"""
    call = mhsa.load(mhsa.compile(onnx.parser.parse_model(source), without_attention="accept", check=False))
    x = RNG.standard_normal((3, 4, 5, 2)).astype(np.float32)
    for axis in (0, 1, 2, -2, -4):
        right = (np.fft.ifft if inverse else np.fft.fft)(joined(x), axis=axis % 4)
        np.testing.assert_allclose(call(x, np.array(axis)), parted(right), atol=5e-6)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (N("DFT", ["signal", "", "last"], ["y"], name="odd"), "a size along it that are known"),
        (N("DFT", ["complex", "", "last"], ["y"], name="odd", onesided=1), "real numbers, for onesided=1"),
        (N("DFT", ["real", "", "last"], ["y"], name="odd", inverse=1, onesided=1), "a spectrum of complex numbers"),
        (N("DFT", ["real", "", "nine"], ["y"], name="odd"), "an axis before the last of 4"),
        (N("STFT", ["signal", "three"], ["y"], name="odd"), "a frame_length that are known"),
        (N("STFT", ["signal", "three", "window", "nine"], ["y"], name="odd"), "a window of 9"),
        (N("STFT", ["pair_signal", "three", "window"], ["y"], name="odd"), "of complex numbers onesided=0"),
    ],
)
def test_refusals_name_the_node(node: onnx.NodeProto, expected: str) -> None:
    with pytest.raises(ModelError, match=f"'odd': expected .*{expected}"):
        mhsa.compile(model([node], 23), without_attention="accept")
