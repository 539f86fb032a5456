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
