"""The oracle against the operator's own node tests, NaN, and the budget that is built on it."""

from __future__ import annotations

import tracemalloc
from functools import partial

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.backend.test.case import node as node_cases
from onnx.backend.test.case.node import attention as _attention_cases  # noqa: F401  # importing it makes the cases
from support.onnx_models import model_of

from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.oracle import attention
from mhsa_compile.verification.parity import DECIDING_VALUES, MOST_DRAWS, CaseResult, judge
from mhsa_compile.verification.precision import Precision
from mhsa_compile.verification.random_inputs import default_cases, random_inputs
from mhsa_compile.verification.verify import Verdict, check, eager, oracle

NODE_TESTS = [case for case in node_cases._NodeTestCases if case.model.graph.node[0].op_type == "Attention"]
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}


def attention_model(
    attributes: dict[str, int | float], inputs: dict[str, tuple[int, list[int | str]]], opset: int = 24
):
    names = ["q", "k", "v", "mask", "past_key", "past_value", "lengths"]
    while names[-1] not in inputs:
        names.pop()
    node = helper.make_node("Attention", [name if name in inputs else "" for name in names], ["y"], **attributes)
    return model_of([node], inputs, {"y": None}, opset=opset)


def four_dims(mask: bool = False) -> dict[str, tuple[int, list[int | str]]]:
    inputs = {"q": ["B", 4, "L", 8], "k": ["B", 2, "S", 8], "v": ["B", 2, "S", 5]}
    declared = {name: (TensorProto.FLOAT, shape) for name, shape in inputs.items()}
    return {**declared, "mask": (TensorProto.BOOL, ["mask_B", "mask_H", "mask_L", "mask_S"])} if mask else declared


def test_there_are_node_tests() -> None:
    assert len(NODE_TESTS) >= 80


@pytest.mark.parametrize("case", NODE_TESTS, ids=lambda case: case.name.removeprefix("test_attention_"))
def test_operators_own_node_tests(case) -> None:
    """Expected values were computed at the case's dtype: a few of its rounding steps off is right."""
    inputs, expected = case.data_sets[0]
    names = [value.name for value in case.model.graph.input]
    for ours, theirs in zip(oracle(case.model, dict(zip(names, inputs, strict=True))), expected, strict=True):
        finite = np.isfinite(theirs.astype(np.float64))
        assert np.array_equal(finite, np.isfinite(ours))
        wide = theirs.astype(np.float64)
        # Scores of E terms at that dtype: their rounding passes through the softmax into every output.
        tolerance = 8 * EPSILON[str(theirs.dtype)] * max(1.0, np.abs(wide[finite]).max(initial=0.0))
        assert np.abs(ours[finite] - wide[finite]).max(initial=0.0) <= tolerance


@pytest.mark.parametrize("evaluate", [oracle, eager])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_poison_stays_out_and_visible_poison_shows(evaluate, poison: float) -> None:
    model = attention_model({}, four_dims(mask=True))
    inputs = random_inputs(model, {"B": 2, "L": 5, "S": 6, "mask_B": 1})
    inputs["mask"][...] = True
    inputs["mask"][0, 0, :3, 4] = False  # key 4: masked for queries 0 to 2, visible to 3 and 4
    clean = evaluate(model, inputs)[0]
    inputs["k"][:, :, 4] = poison
    inputs["v"][:, :, 4] = poison
    dirty = evaluate(model, inputs)[0]
    assert np.allclose(dirty[:, :, :3], clean[:, :, :3], rtol=1e-6, atol=0)
    assert not np.isfinite(dirty[:, :, 3:]).any()


@pytest.mark.parametrize("evaluate", [oracle, eager])
def test_fully_masked_rows_are_zero(evaluate) -> None:
    model = attention_model({"is_causal": 1}, {**four_dims(), "lengths": (TensorProto.INT64, ["B"])})
    inputs = random_inputs(model, {"B": 2, "L": 5, "S": 3})
    inputs["lengths"] = np.array([3, 3])
    result = evaluate(model, inputs)[0]
    assert (result[:, :, :2] == 0).all()
    assert np.isfinite(result).all()


@pytest.mark.parametrize("evaluate", [oracle, eager])
@pytest.mark.parametrize(
    "attributes", [{}, {"is_causal": 1}, {"left_window_size": 2, "right_window_size": 1}, {"left_window_size": 0}]
)
def test_blocks_of_queries_change_nothing(
    evaluate, attributes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = attention_model(attributes, {**four_dims(mask=True), "lengths": (TensorProto.INT64, ["B"])}, opset=25)
    for dims in ({"B": 2, "L": 11, "S": 7}, {"B": 2, "L": 11, "S": 7, "mask_L": 1, "mask_H": 4, "mask_B": 1}):
        inputs = random_inputs(model, dims)
        inputs["lengths"] = np.array([7, 4])
        monkeypatch.setattr(attention, "QUERIES", 256)
        whole = evaluate(model, inputs)[0]
        monkeypatch.setattr(attention, "QUERIES", 3)
        in_blocks = evaluate(model, inputs)[0]
        assert np.abs(whole - in_blocks).max() <= 4 * np.finfo(whole.dtype).eps


@pytest.mark.thorough
def test_a_long_window_makes_no_l_by_s_array() -> None:
    L = 16384
    model = attention_model({"is_causal": 1, "left_window_size": 511}, four_dims(), opset=25)
    inputs = random_inputs(model, {"B": 1, "L": L, "S": L})
    tracemalloc.start()
    result = oracle(model, inputs)[0]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < L * L / 4  # a byte for each pair would be four times that
    last = {name: array[:, :, -513:] for name, array in inputs.items()}
    assert np.allclose(oracle(model, last)[0][:, :, -1], result[:, :, -1], rtol=1e-12, atol=0)


@pytest.mark.parametrize(("name", "kind"), [("bfloat16", TensorProto.BFLOAT16), ("float16", TensorProto.FLOAT16)])
def test_sixteen_bits(name: str, kind: int) -> None:
    """Inputs and a mask of -inf at that dtype; the oracle promotes them exactly, PyTorch computes at it."""
    shapes = {key: (kind, shape) for key, (_, shape) in four_dims(mask=True).items()}
    model = attention_model({"is_causal": 1}, shapes)
    inputs = random_inputs(model, {"B": 2, "L": 7, "S": 197})
    assert {str(array.dtype) for array in inputs.values()} == {name}
    exact, rounded = oracle(model, inputs)[0], eager(model, inputs)[0]
    assert (exact.dtype, str(rounded.dtype)) == (np.float64, name)
    wide = attention_model({"is_causal": 1}, four_dims(mask=True) | {"mask": (TensorProto.FLOAT, shapes["mask"][1])})
    promoted = {key: array.astype(np.float32) for key, array in inputs.items()}
    assert np.array_equal(exact, oracle(wide, promoted)[0])
    assert EPSILON[name] / 8 < max_error(exact, rounded) <= budget(exact, rounded, name) < 8 * EPSILON[name]


def test_a_finite_sentinel_in_float16_hides() -> None:
    """-65504 is the least float16: added to any score it leaves nothing of the key, and overflows nowhere."""
    shapes = {key: (TensorProto.FLOAT16, shape) for key, (_, shape) in four_dims(mask=True).items()}
    model = attention_model({}, shapes)
    inputs = random_inputs(model, {"B": 1, "L": 3, "S": 5})
    inputs["mask"] = np.where(np.arange(5) < 3, 0, np.finfo(np.float16).min).astype(np.float16).reshape(1, 1, 1, 5)
    few = {"q": inputs["q"], "k": inputs["k"][:, :, :3], "v": inputs["v"][:, :, :3], "mask": inputs["mask"][..., :3]}
    for evaluate in (oracle, eager):
        assert np.allclose(evaluate(model, inputs)[0], evaluate(model, few)[0], rtol=2e-3, atol=1e-3)


def linear_model(kind: int, weight: np.ndarray) -> onnx.ModelProto:
    rows = (kind, ["N", None])
    return model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": rows}, {"y": rows}, {"w": weight}, opset=23)


@pytest.mark.parametrize(("name", "kind"), [("float32", TensorProto.FLOAT), ("bfloat16", TensorProto.BFLOAT16)])
def test_eight_bits_are_a_scale_for_each_row_and_for_each_column(name: str, kind: int) -> None:
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((5, 64)).astype(name), rng.standard_normal((64, 7)).astype(name)
    x[2], w[:, 3] = 0, 0
    yardstick = eager(linear_model(kind, w), {"x": x}, Precision(int8_weights=True))[0]
    x_step = np.abs(x.astype(np.float64)).max(axis=1, keepdims=True) / 127
    w_step = np.abs(w.astype(np.float64)).max(axis=0, keepdims=True) / 127
    with np.errstate(invalid="ignore"):
        x8, w8 = np.nan_to_num(np.rint(x / x_step)), np.nan_to_num(np.rint(w / w_step))
    exact = (x8 @ w8) * x_step * w_step
    assert str(yardstick.dtype) == name
    assert np.abs(yardstick.astype(np.float64) - exact).max() <= EPSILON[name] * np.abs(exact).max()
    right = oracle(linear_model(kind, w), {"x": x})[0]
    assert max_error(right, yardstick) > max_error(right, eager(linear_model(kind, w), {"x": x})[0])


def test_short_masks_pad_from_opset_24_on() -> None:
    shapes = {**four_dims(mask=True), "mask": (TensorProto.BOOL, [1, 1, 1, "keys"])}
    inputs = random_inputs(attention_model({}, shapes), {"B": 1, "L": 2, "S": 3, "keys": 1})
    inputs["mask"][...] = True
    first_value = np.repeat(inputs["v"][:, :, :1], 2, axis=1)
    padded, broadcast = (oracle(attention_model({}, shapes, opset), inputs)[0] for opset in (24, 23))
    assert np.allclose(padded, np.broadcast_to(first_value, padded.shape))
    assert not np.allclose(padded, broadcast)


def test_oracle_is_more_exact_than_eager() -> None:
    model = attention_model({"softcap": 3.0}, four_dims())
    inputs = random_inputs(model, {"B": 2, "L": 7, "S": 197})
    exact, single = oracle(model, inputs)[0], eager(model, inputs)[0]
    assert (exact.dtype, single.dtype) == (np.float64, np.float32)
    assert 0 < max_error(exact, single) <= budget(exact, single, "float32") < 1e-5


def test_budget_is_two_errors_and_one_rounding_step() -> None:
    expected = np.array([0.5, -1.5])
    assert budget(expected, expected.astype(np.float32), "float32") == np.spacing(np.float32(1.5))
    assert budget(expected, expected.astype(np.float16), "float16") == np.spacing(np.float16(1.5))
    assert budget(expected, expected.astype(np.float32), "bfloat16") == 2.0**-7
    off = np.array([0.5, -1.25], np.float32)
    assert budget(expected, off, "float32") == 0.5 + np.spacing(np.float32(1.5))
    assert budget(expected, np.array([np.nan, -1.5]), "float32") == np.spacing(np.float32(1.5))


def test_max_error_of_what_is_not_comparable() -> None:
    assert max_error(np.zeros(2), np.array([0.0, np.nan])) == np.inf
    assert max_error(np.array([np.nan, 0.0]), np.zeros(2)) == np.inf
    assert max_error(np.zeros(2), np.zeros(3)) == np.inf
    assert max_error(np.zeros(0), np.zeros(0)) == 0.0


def test_random_inputs_are_reproducible_and_hard() -> None:
    model = attention_model({}, four_dims(mask=True))
    dims = {"B": 3, "L": 7, "S": 11, "mask_H": 4}
    inputs = random_inputs(model, dims, seed=1)
    again = random_inputs(model, dims, seed=1)
    assert all(np.array_equal(inputs[name], again[name]) for name in inputs)
    assert inputs["mask"].shape == (3, 4, 7, 11)
    assert not inputs["mask"].reshape(-1, 11)[3::7].any()
    assert 0.5 < inputs["mask"].mean() < 0.9


def test_check_and_verdict() -> None:
    model = attention_model({}, four_dims())
    cases = default_cases(model)
    assert {"B", "L", "S"} == set(cases[0])
    good = Verdict(tuple(check(model, lambda inputs: eager(model, inputs), dims) for dims in cases))
    assert good.ok
    assert good.worst.ratio <= 0.5
    bad = check(model, lambda inputs: [eager(model, inputs)[0] * 1.001], cases[1])
    assert not bad.ok
    assert not Verdict((*good.cases, bad)).ok


def test_constants_inside_the_graph() -> None:
    """Floats are promoted, also in Constant and Cast nodes; integers stay integers."""
    third = onnx.numpy_helper.from_array(np.array(1 / 3, np.float32), "third")
    nodes = [
        helper.make_node("Constant", [], ["c"], value=third),
        helper.make_node("Add", ["x", "c"], ["s"]),
        helper.make_node("Cast", ["s"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["f", "axis"], ["y"]),
    ]
    model = model_of(nodes, {"x": ["N"]}, {"y": [1, "N"]}, {"axis": np.array([0])})
    result = oracle(model, {"x": np.array([1e-9], np.float32)})[0]
    assert result.dtype == np.float64
    assert result[0, 0] == np.float64(np.float32(1e-9)) + np.float64(np.float32(1 / 3))


def test_few_numbers_are_drawn_several_times() -> None:
    """The largest errors of all draws are compared; what is wrong in one of them is found."""
    model, dims = attention_model({}, four_dims()), {"B": 1, "L": 1, "S": 7}
    queries: list[bytes] = []

    def off_in(turn: int, dims: dict[str, int]) -> CaseResult:
        queries.clear()

        def run(inputs):
            queries.append(inputs["q"].tobytes())
            return [eager(model, inputs)[0] + (len(queries) == turn)]

        return check(model, run, dims)

    assert off_in(0, dims).ok and len(set(queries)) == MOST_DRAWS
    wrong = off_in(5, dims)
    assert not wrong.ok and len(queries) == MOST_DRAWS
    assert 1 <= wrong.error < 1.001 and wrong.budget < 1e-5
    assert off_in(0, {"B": 3, "L": 31, "S": 7}).ok and len(queries) == 1


def test_a_little_over_budget_is_drawn_again() -> None:
    """Draws are repeated until the yardstick's error is known; what is off by more than that stays wrong."""
    truth, turns = np.linspace(1, 1.5, 40 * 64), []
    assert truth.size * MOST_DRAWS > DECIDING_VALUES

    def off_by(error: float):
        def draw(turn: int):
            turns.append(turn)
            return [(truth, truth + (0.001 if turn < 3 else 0.0015), truth + error)]

        turns.clear()
        return judge(draw, {})

    assert off_by(0.0019).ok and turns == [0]
    assert off_by(0.0025).ok and len(turns) == MOST_DRAWS
    assert not off_by(0.0035).ok and len(turns) == MOST_DRAWS
    assert not off_by(0.1).ok and turns == [0]
    truth = np.linspace(1, 1.5, 16 * 16)
    assert not off_by(0.0035).ok and len(turns) == DECIDING_VALUES // truth.size
    truth = np.ones((40, 64))  # one number, and so one error
    assert off_by(0.0019).ok and len(turns) == MOST_DRAWS


def filled(fill: float) -> onnx.ModelProto:
    """Attention whose hidden keys have `fill` added to their scores; every seventh row of a boolean mask sees none."""
    four = ["B", 2, "L", 8]
    inputs = {"q": four, "mask": (TensorProto.BOOL, ["B", 1, "L", "L"])}
    nodes = [helper.make_node("Where", ["mask", "z", "f"], ["bias"]),
             helper.make_node("Attention", ["q", "q", "q", "bias"], ["y"])]  # fmt: skip
    return model_of(nodes, inputs, {"y": four}, {"z": np.float32(0), "f": np.float32(fill)}, opset=23)


@pytest.mark.parametrize(
    "fill", [-1e4, pytest.param(-1e6, marks=pytest.mark.thorough), -1e9, float(np.finfo(np.float32).min)]
)
def test_rows_that_a_finite_fill_hides_whole_are_not_judged(fill: float) -> None:
    """No two runtimes agree there; judged, they would raise the budget of all other rows by orders of magnitude."""
    model, dims = filled(fill), {"B": 2, "L": 31}
    hidden = np.arange(2 * 31).reshape(2, 1, 31, 1) % 7 == 3

    def run(inputs, error_hidden=0.0, error_elsewhere=0.0):
        (y,) = eager(model, inputs)
        return [y + np.where(hidden, np.float32(error_hidden), np.float32(error_elsewhere))]

    result = check(model, run, dims)
    assert result.ok and result.budget < 1e-5
    assert result.note.startswith(f"{hidden.mean():.0%} not judged: rows that a finite fill")
    assert check(model, partial(run, error_hidden=0.5), dims).ok
    assert not check(model, partial(run, error_elsewhere=1e-4), dims).ok


def test_what_minus_infinity_hides_is_judged() -> None:
    model = filled(-np.inf)
    result = check(model, lambda inputs: eager(model, inputs), {"B": 2, "L": 31})
    assert result.ok and not result.note
    off = check(model, lambda inputs: [eager(model, inputs)[0] + np.float32(1e-4)], {"B": 2, "L": 31})
    assert not off.ok


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 5, 7)])
def test_a_global_maximum_is_over_all_axes_behind_the_channels_and_keeps_nan(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x[1, 2, 4] = np.nan
    model = model_of([helper.make_node("GlobalMaxPool", ["x"], ["y"])], {"x": list(shape)}, {"y": None}, opset=18)
    (y,) = oracle(model, {"x": x})
    np.testing.assert_array_equal(y.squeeze(), x.reshape(2, 3, -1).max(axis=-1))


@pytest.mark.parametrize("attributes", [{"pads": [1, 2]}, {"auto_pad": "SAME_LOWER", "strides": [2]}, {"group": 2}])
def test_a_dilated_convolution_reads_its_taps_alone(attributes: dict[str, object]) -> None:
    """The truth is written out place by place; between two taps lies a NaN."""
    x, w = (
        np.random.default_rng(0).standard_normal(shape)
        for shape in ((1, 4, 9), (2, 4 // attributes.get("group", 1), 3))
    )
    x[0, :, 4] = np.nan
    node = helper.make_node("Conv", ["x", "w"], ["y"], dilations=[2], **attributes)
    inputs = {"x": (TensorProto.DOUBLE, x.shape), "w": (TensorProto.DOUBLE, w.shape)}
    (y,) = oracle(model_of([node], inputs, {"y": (TensorProto.DOUBLE, None)}, opset=22), {"x": x, "w": w})
    begin, end = {"pads": (1, 2), "auto_pad": (2, 2), "group": (0, 0)}[next(iter(attributes))]
    padded, step, channels = np.pad(x, ((0, 0), (0, 0), (begin, end))), attributes.get("strides", [1])[0], w.shape[1]
    for m in range(2):
        own = padded[0, m * channels % 4 : m * channels % 4 + channels] if channels < 4 else padded[0]
        for place in range(y.shape[2]):
            taps = own[:, place * step : place * step + 5 : 2]
            np.testing.assert_allclose(y[0, m, place], (taps * w[m]).sum(), rtol=1e-12)
    assert np.isnan(y).any() and np.isfinite(y).any()


@pytest.mark.parametrize("opset", [13, 18, 21])
def test_bytes_in_every_opset(opset: int) -> None:
    """By one scale and by those of an axis, in float64: halves go to the even number, what does not fit is cut."""
    x = np.array([[-1.0, 0.25, 0.75, 500.0], [0.5, 1.5, 2.5, -7.0]], np.float32)
    scales, zeros = np.array([0.5, 2.0], np.float32), np.array([3, -4], np.int8)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale"], ["bytes"]),
        helper.make_node("DequantizeLinear", ["bytes", "scale"], ["y"]),
        helper.make_node("QuantizeLinear", ["x", "scales", "zeros"], ["rows"], axis=0),
        helper.make_node("DequantizeLinear", ["rows", "scales", "zeros"], ["z"], axis=0),
    ]
    constants = {"scale": np.array(0.5, np.float32), "scales": scales, "zeros": zeros}
    model = model_of(nodes, {"x": [2, 4]}, {"y": [2, 4], "z": [2, 4]}, constants, opset=opset, ir_version=8)
    y, z = oracle(model, {"x": x})
    np.testing.assert_array_equal(y, [[0, 0, 1.0, 127.5], [0.5, 1.5, 2.5, 0]])
    np.testing.assert_array_equal(z, [[-1, 0, 1.0, 62.0], [0, 2, 2, -8]])
