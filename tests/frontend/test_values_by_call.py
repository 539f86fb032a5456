"""Axes, bounds and sizes that only a call knows, in one graph beside an attention, at free lengths, against onnx's
reference evaluator; and what cannot be, which ends the call."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError, ModelError

FLOATING = ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean")
REDUCTIONS = (*FLOATING, "ReduceL1", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare")


def model_of(text: str, constants: dict[str, Any] | None = None) -> onnx.ModelProto:
    body = parser.parse_graph(f"g {text}")
    body.initializer.extend(numpy_helper.from_array(np.array(a), name) for name, a in (constants or {}).items())
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)


def agree(compiled: Any, model: onnx.ModelProto, feeds: dict[str, Any]) -> None:
    names = [value.name for value in model.graph.output]
    results = compiled(**feeds)
    results = results if isinstance(results, tuple) else (results,)
    for name, one, other in zip(names, results, ReferenceEvaluator(model).run(None, feeds), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype, name
        assert np.allclose(one, other, atol=1e-5, rtol=1e-5, equal_nan=True), name


def _reductions() -> onnx.ModelProto:
    lines = [f"{name}_k = {name} (p, axes)" for name in REDUCTIONS]
    lines += [f"{name}_d = {name} <keepdims=0> (p, axis)" for name in REDUCTIONS[::4]]
    shapes = [f"float[A{i}, B{i}, C{i}] {name}_k" for i, name in enumerate(REDUCTIONS)]
    shapes += [f"float[D{i}, E{i}] {name}_d" for i, name in enumerate(REDUCTIONS[::4])]
    outputs = ", ".join(shapes)
    body = "\n".join(lines)
    return model_of(f"""(float[B, L, 8] x, int64[n] axes, int64[1] axis, bool[B, L] flags)
        => (float[N, M, K] y, bool[F, G] any, float[U, V, W] noop, {outputs}) {{
        q = Attention <q_num_heads=2, kv_num_heads=2> (x, x, x)
        p = Abs(q)  m = ReduceMean(x, axes)  y = Sub(x, m)
        any = ReduceMax(flags, axis)  noop = ReduceSumSquare <noop_with_empty_axes=1> (x, axes)
        {body} }}""")


@pytest.fixture(scope="module")
def reductions() -> tuple[onnx.ModelProto, Any]:
    model = _reductions()
    return model, mhsa.load(mhsa.compile(model))


@pytest.mark.parametrize(("axes", "axis"), [([1], 0), ([-1, 0], -1), ([], 1), ([0, 1, 2], -2)])
@pytest.mark.parametrize("length", [1, 13])
def test_reductions_over_axes_of_the_call(
    reductions: tuple[onnx.ModelProto, Any], axes: list[int], axis: int, length: int
) -> None:
    model, compiled = reductions
    x = np.random.default_rng(0).standard_normal((2, length, 8)).astype(np.float32)
    feeds = {"x": x, "axes": np.array(axes, np.int64), "axis": np.array([axis]), "flags": x[..., 0] > 0}
    agree(compiled, model, feeds | {"axis": np.array([axis if axis in (0, 1, -1, -2) else 0])})


@pytest.mark.parametrize(("name", "axes"), [("axes", [3]), ("axes", [0, -3]), ("axes", [-4]), ("axis", [2])])
def test_axes_that_there_are_not_end_the_call(
    reductions: tuple[onnx.ModelProto, Any], name: str, axes: list[int]
) -> None:
    x = np.zeros((2, 5, 8), np.float32)
    feeds = {"x": x, "axes": np.array([1]), "axis": np.array([1]), "flags": x[..., 0] > 0} | {name: np.array(axes)}
    with pytest.raises(InputError, match=rf"input '{name}': expected axes from .* for Reduce\w+ node"):
        reductions[1](**feeds)


def test_a_number_of_axes_that_nobody_knows_is_refused() -> None:
    model = model_of("(float[B, L, 8] x, int64[n] axes) => (float[N] y) { y = ReduceSum <keepdims=0> (x, axes) }")
    with pytest.raises(ModelError, match="fixed number of axes, or keepdims=1"):
        mhsa.compile(model, without_attention="accept")


@pytest.mark.thorough
def test_reductions_of_nothing() -> None:
    lines = "\n".join(f"{name}_y = {name} (x, one)" for name in REDUCTIONS)
    outputs = ", ".join(f"float[B, 1, 4] {name}_y" for name in REDUCTIONS)
    model = model_of(f"(float[B, L, 4] x) => ({outputs}) {{ {lines} }}", {"one": [1]})
    compiled = mhsa.load(mhsa.compile(model, without_attention="accept"))
    for length in (0, 3):
        x = np.random.default_rng(0).uniform(0.5, 1, (3, length, 4)).astype(np.float32)
        with np.errstate(all="ignore"):
            if length:
                agree(compiled, model, {"x": x})
                continue
        results = dict(zip(REDUCTIONS, compiled(x), strict=True))
        for name, value in {"ReduceMax": -np.inf, "ReduceMin": np.inf, "ReduceProd": 1, "ReduceLogSum": -np.inf,
                            "ReduceLogSumExp": -np.inf, "ReduceMean": np.nan}.items():  # fmt: skip
            assert np.array_equal(results.pop(name), np.full((3, 1, 4), value), equal_nan=True), name
        assert all(not result.any() for result in results.values())


SHAPES = """(float[B, L, 8] x, int64[2] starts, int64[2] ends, int64[2] axes, int64[2] steps, int64[3] target,
    int64 depth, float[2] values, int64[2] pads, int64[1] side, int64 start, int64 end, int64 delta,
    float[B, 2, 3] theta, int64[4] size, int64[1] k)
    => (float[C, D, E] cut, float[F, G, H] shaped, float[B, N, M] marks, float[P, Q, R] padded, int64[S] counted,
        float[B, T, U, 2] grid, float[B, L, V] best, int64[B, L, W] where) {
    y = Attention <q_num_heads=2, kv_num_heads=2> (x, x, x)
    cut = Slice(y, starts, ends, axes, steps)  shaped = Reshape(y, target)
    places = ArgMax <axis=2, keepdims=0> (y)  marks = OneHot(places, depth, values)
    padded = Pad <mode="edge"> (y, pads, , side)  counted = Range(start, end, delta)
    grid = AffineGrid <align_corners=1> (theta, size)  best, where = TopK(y, k) }"""


@pytest.fixture(scope="module")
def shapes() -> tuple[onnx.ModelProto, Any]:
    model = model_of(SHAPES)
    return model, mhsa.load(mhsa.compile(model))


def _shape_feeds(length: int) -> dict[str, Any]:
    rng = np.random.default_rng(length)
    lists = {"starts": [0, -1], "ends": [2**62, -(2**62)], "axes": [-2, 2], "steps": [2, -3], "target": [0, -1, 4],
             "depth": 6, "pads": [3, 1], "side": [-2], "size": [2, 1, 3, 5], "k": [5]}  # fmt: skip
    numbers = {"start": 7, "end": -2, "delta": -3}
    floats = {"x": (2, length, 8), "theta": (2, 2, 3), "values": (2,)}
    feeds: dict[str, Any] = {name: np.array(value) for name, value in (lists | numbers).items()}
    feeds |= {name: rng.standard_normal(shape).astype(np.float32) for name, shape in floats.items()}
    return feeds


CALLS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "nothing of an axis": {"starts": [3, 8], "ends": [3, -3], "axes": [2, -3], "steps": [1, 1]},
    "ends before starts": {"starts": [-1, 5], "ends": [-4, 1], "axes": [1, 2], "steps": [1, -2]},
    "a target without an open end": {"target": [2, 0, 8]},
    "pads of another axis": {"pads": [0, 2], "side": [2]},
    "a range of nothing": {"start": 3, "end": 3, "delta": 5, "k": [0]},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("length", [2, 13])
def test_bounds_and_sizes_of_the_call(shapes: tuple[onnx.ModelProto, Any], name: str, length: int) -> None:
    model, compiled = shapes
    agree(compiled, model, _shape_feeds(length) | {key: np.array(value) for key, value in CALLS[name].items()})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("axes", [0, -3], "axes from -3 to 2, each once, for Slice node 'cut'"),
        ("steps", [1, 0], "steps other than 0, for Slice node 'cut'"),
        ("target", [-1, -1, 4], "sizes of 0 or more, and -1 once at most, for Reshape node 'shaped'"),
        ("target", [3, 7, 4], "a shape of as many elements as its data has, for Reshape node 'shaped'"),
        ("depth", -2, "a depth of 0 or more, for OneHot node 'marks'"),
        ("side", [3], "axes from -3 to 2, each once, for Pad node 'padded'"),
        ("pads", [-9, 0], "sizes of 0 or more, for Pad node 'padded'"),
        ("delta", 0, "a delta other than 0, for Range node 'counted'"),
        ("size", [3, 1, 3, 5], "a size of 1 or more, of the batch of theta, for AffineGrid node 'grid'"),
        ("k", [9], "no more elements than the axis has, for TopK node 'best, where'"),
        ("k", [-1], "sizes of 0 or more, for TopK node 'best, where'"),
    ],
)
def test_what_cannot_be_ends_the_call(shapes: tuple[onnx.ModelProto, Any], name: str, value: Any, message: str) -> None:
    feeds = _shape_feeds(5)
    feeds[name] = np.array(value, feeds[name].dtype)
    with pytest.raises(InputError) as refusal:
        shapes[1](**feeds)
    assert str(refusal.value).startswith(f"input {name!r}: expected {message}, got ")
    agree(shapes[1], shapes[0], _shape_feeds(5))  # the next call is none the worse
