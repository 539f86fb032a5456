"""GroupQueryAttention of com.microsoft with a cache of eight bits, or of four, beside ONNX Runtime.

H heads, G key heads, E their width, C the cache's capacity.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.canonicalize.rewriting.shape_propagation import propagate_shapes
from mhsa_compile.frontend.fusion.stored_rows import StoredRows, stored_rows
from mhsa_compile.frontend.onnx_graph import GraphView

Array = np.ndarray[Any, Any]
B, H, G, E, C = 2, 6, 2, 16, 11
SCALES = {"PER_TENSOR": (1,), "PER_CHANNEL": (1, G, 1, E)}


def file(kind: str, scales: dict[str, Array] | None = None, bits: int = 8, **words: Any) -> onnx.ModelProto:
    """Scales are inputs of the call, or those of the file."""
    inputs = ["q", "k", "v", "past_k", "past_v", "last", "total", "cos", "sin", "", "", "", "k_scale", "v_scale"]
    stated = {"num_heads": H, "kv_num_heads": G, "do_rotary": 1, "kv_cache_bit_width": bits}
    stated |= {"k_quant_type": kind, "v_quant_type": kind}
    node = helper.make_node(
        "GroupQueryAttention", inputs, ["y", "present_k", "present_v"], name="gqa", domain="com.microsoft",
        **stated | words,
    )  # fmt: skip
    cache = (TensorProto.INT8, [B, G, C, E]) if bits == 8 else (TensorProto.UINT8, [B, G, C, E // 2])
    shapes: dict[str, Any] = {"q": [B, "L", H * E], "k": [B, "L", G * E], "v": [B, "L", G * E]}
    shapes |= {"past_k": cache, "past_v": cache, "last": (TensorProto.INT32, [B]), "total": (TensorProto.INT32, [])}
    if scales is None:
        shapes |= {"k_scale": list(SCALES[kind]), "v_scale": list(SCALES[kind])}
    outputs = {"y": [B, "L", H * E], "present_k": cache, "present_v": cache}
    angles = np.arange(C)[:, None] * 10.0 ** -np.linspace(0, 2, E // 2)
    tables = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    return model_of([node], shapes, outputs, tables | (scales or {}), opset=21, domain="com.microsoft")


def scales_of(kind: str) -> dict[str, Array]:
    rng = np.random.default_rng(3)
    return {name: rng.uniform(0.01, 0.03, SCALES[kind]).astype(np.float32) for name in ("k_scale", "v_scale")}


def rows(length: int, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    widths = {"q": H * E, "k": G * E, "v": G * E}
    return {name: rng.standard_normal((B, length, width)).astype(np.float32) for name, width in widths.items()}


def numbers(cache: Array, bits: int) -> Array:
    """Those that a cache holds, one to an element."""
    if bits == 8:
        return cache.astype(int)
    return np.stack([cache & 15, cache >> 4], -1).reshape(*cache.shape[:3], E).astype(int) - 8


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["PER_TENSOR", pytest.param("PER_CHANNEL", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("stored", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["call", "file"])
def test_a_prompt_and_tokens_behind_it(kind: str, stored: bool, bits: int) -> None:
    scales = {name: scale * (1 if bits == 8 else 12) for name, scale in scales_of(kind).items()}
    model = file(kind, scales if stored else None, bits)
    artifact = mhsa.compile(model)
    report = {op.op: op for op in artifact.manifest.ops}
    assert report["attention"].source != "fallback" and report["scatter"].source != "fallback"
    assert f"keys and values in int{bits}" in report["attention"].note
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    ours = mhsa.load(artifact)
    caches = [np.zeros([B, G, C, E // (8 // bits)], np.int8 if bits == 8 else np.uint8)] * 2
    theirs, end = list(caches), 0
    for length in (5, 1, 1, 1):
        end += length
        feeds = rows(length, end) | ({} if stored else scales)
        feeds |= {"last": np.full(B, end - 1, np.int32), "total": np.array(end, np.int32)}
        expected, *theirs = session.run(None, feeds | {"past_k": theirs[0], "past_v": theirs[1]})
        y, *caches = ours(**feeds, past_k=caches[0], past_v=caches[1])
        for own, other in zip(caches, theirs, strict=True):
            own, other = (numbers(cache, bits)[:, :, :end] for cache in (own, other))
            apart = np.abs(own - other)
            assert apart.max() <= 1 and (apart > 0).mean() < 0.02  # beside the middle between two steps
            assert np.abs(other).max() > (60 if bits == 8 else 6)
        np.testing.assert_allclose(y, expected, rtol=0, atol=0.02 * np.abs(expected).max())
        caches = [np.array(other) for other in theirs]  # then steps that differ are not counted again
    if not stored:
        doubled = {name: 2 * scale for name, scale in scales.items()}
        others = ours(**feeds | doubled, past_k=caches[0], past_v=caches[1])[0]
        assert np.abs(others - expected).max() > 0.2 * np.abs(expected).max()  # the control: scales count
    if bits == 4:
        swapped = [cache >> 4 | cache << 4 for cache in caches]
        others = ours(**feeds, past_k=swapped[0], past_v=swapped[1])[0]
        assert np.abs(others - expected).max() > 0.1 * np.abs(expected).max()  # the control: so do halves


@pytest.mark.parametrize(
    ("message", "words", "scales"),
    [
        ("'past_k' of uint8", {"kv_cache_bit_width": 4}, {}),
        ("'k_scale' with 0.0", {}, {"k_scale": np.zeros(1, np.float32)}),
        ("'v_scale' of 1 numbers", {}, {"v_scale": np.ones(3, np.float32)}),
        ("k_quant_type and v_quant_type", {"v_quant_type": "NONE"}, {}),
        ("no k_scale", {"kv_cache_bit_width": 0}, {}),
    ],
)
def test_what_is_refused(message: str, words: dict[str, Any], scales: dict[str, Array]) -> None:
    with pytest.raises(ModelError, match=message):
        mhsa.compile(file("PER_TENSOR", scales_of("PER_TENSOR") | scales, **words))


HALVES = {"[0, 0, 0, -1]": [0, 0, 0, -1], "sizes": [B, G, C, E]}
OTHERS = {"twice the keys": [B, G, 2 * C, E // 2], "twice the heads": [B, 2 * G, C, E // 2], "turned": [B, C, G, E]}


@pytest.mark.parametrize(
    ("shape", "joins"), [*((s, True) for s in HALVES.values()), *((s, False) for s in OTHERS.values())]
)
def test_halves_are_numbers_of_a_row_only_where_the_reshape_joins_them(shape: list[int], joins: bool) -> None:
    """Any other arrangement of the same numbers is a graph of its own."""
    node = helper.make_node
    nodes = [
        node("TensorScatter", ["past", "new", "at"], ["cache"], axis=2),
        node("BitwiseAnd", ["cache", "fifteen"], ["low"]),
        node("BitShift", ["cache", "four"], ["high"], direction="RIGHT"),
        *(node("Unsqueeze", [half, "last"], [f"{half}_apart"]) for half in ("low", "high")),
        node("Concat", ["low_apart", "high_apart"], ["both"], axis=4),
        node("Reshape", ["both", "shape"], ["joined"]),
        node("Cast", ["joined"], ["floats"], to=TensorProto.FLOAT),
        node("Sub", ["floats", "eight"], ["numbers"]),
    ]
    constants = {"fifteen": np.uint8(15), "four": np.uint8(4), "eight": np.float32(8), "last": np.array([4])}
    constants = {name: np.asarray(value) for name, value in constants.items()} | {"shape": np.array(shape)}
    cache = (TensorProto.UINT8, [B, G, C, E // 2])
    shapes = {"past": cache, "new": (TensorProto.UINT8, [B, G, 1, E // 2]), "at": (TensorProto.INT64, [B])}
    sizes = [(B, G, C, E)[i] if size == 0 else size for i, size in enumerate(shape)]
    model = model_of(nodes, shapes, {"numbers": [E if size == -1 else size for size in sizes]}, constants, opset=24)
    rows = stored_rows(GraphView(propagate_shapes(model, {})), "numbers")
    assert (rows == StoredRows("cache", numbers=2)) == joins
    assert joins or rows is None


@pytest.mark.thorough
def test_the_check_of_a_file_says_one_number_of_tokens() -> None:
    """Else ONNX Runtime takes the call to be a first prompt, and a right file is accused."""
    check = mhsa.compile(file("PER_CHANNEL", scales_of("PER_CHANNEL"), 4), check=True).manifest.check
    assert check is not None and "ONNX Runtime" in str(check.against)


@pytest.mark.parametrize("words", [{}, pytest.param({"smooth_softmax": 1}, marks=pytest.mark.thorough)])
def test_activations_of_float16_beside_scales_of_float32(words: dict[str, Any]) -> None:
    """Small scales leave nothing of a query of float16: what lies between scales is of float32."""
    scales = {name: scale * np.float32(1e-4) for name, scale in scales_of("PER_CHANNEL").items()}
    model = file("PER_CHANNEL", scales, **words, causal=0)
    halves = {"q", "k", "v", "y"}
    for value in (*model.graph.input, *model.graph.output):
        if value.name in halves:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for number, tensor in enumerate(model.graph.initializer):
        if tensor.name in ("cos", "sin"):
            table = onnx.numpy_helper.to_array(tensor).astype(np.float16)
            model.graph.initializer[number].CopyFrom(onnx.numpy_helper.from_array(table, tensor.name))
    feeds = {
        name: (array * np.float32(1e-4 if name != "q" else 1)).astype(np.float16) for name, array in rows(5, 7).items()
    }
    feeds |= {"last": np.full(B, 4, np.int32), "total": np.array(5, np.int32)}
    feeds |= {name: np.zeros([B, G, C, E], np.int8) for name in ("past_k", "past_v")}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected, *theirs = session.run(None, feeds)
    y, *caches = mhsa.load(mhsa.compile(model))(**feeds)
    assert y.dtype == np.float16 and np.abs(expected).max() > 1e-5
    np.testing.assert_allclose(y, expected, rtol=0, atol=0.02 * np.abs(expected).max())
    for own, other in zip(caches, theirs, strict=True):
        apart = np.abs(own[:, :, :5].astype(int) - other[:, :, :5])
        assert apart.max() <= 1 and (apart > 0).mean() < 0.05 and np.abs(other).max() > 60
