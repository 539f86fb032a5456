"""The ONNX operator Attention, whole: what no exporter of ours writes, compiled and held against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from fuzz import onnx_operator
from support.operator_models import F, G, H, draw, model

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError
from mhsa_compile.runtime.compiled_attention import CompiledAttention
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.verify import eager, oracle

ALL = ("y", "present_key", "present_value")
FULL = {"B": 3, "L": 5, "S": 11, "P": 13}


def compiled(source: onnx.ModelProto) -> CompiledAttention:
    return mhsa.load(mhsa.compile(source))


def assert_right(attention: CompiledAttention, source: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> None:
    """Asserts that every output is within its budget."""
    results = attention(**inputs)
    actual = results if isinstance(results, tuple) else (results,)
    with np.errstate(all="ignore"):  # NaN and Inf are part of some inputs
        pairs = zip(oracle(source, inputs), eager(source, inputs), actual, strict=True)
    for expected, yardstick, found in pairs:
        assert found.dtype == yardstick.dtype
        assert max_error(expected, found) <= budget(expected, yardstick, str(yardstick.dtype))


# name -> (what the model is, the sizes of two calls)
MODELS: dict[str, tuple[dict[str, Any], list[dict[str, int]]]] = {
    "past": (
        {"attributes": {"is_causal": 1}, "L": "L", "S": "L", "past": "P", "outputs": ALL},
        [{}, {"P": 0}, {"L": 1}],
    ),
    "past, heads side by side, window": (
        {"attributes": {"left_window_size": 4}, "S": 5, "past": "P", "outputs": ALL, "axes": 3, "dtype": "bfloat16"},
        [{}, {"P": 0}],
    ),
    "past, as many new keys as the call brings": (
        {
            "attributes": {"left_window_size": 3, "right_window_size": 2},
            "past": "P", "outputs": ALL, "mask": ("float32", ["B", 1, "L", "T"]),
        },
        [{"T": 24}, {"T": 9, "S": 2}],
    ),
    "past, fixed number of new keys": (
        {"attributes": {"is_causal": 1}, "L": 7, "S": 4, "past": "P", "outputs": ALL, "dtype": "float16"},
        [{}, {"P": 0}, {"P": 1}],
    ),
    "present without past": ({"outputs": ALL, "axes": 3, "S": 11}, [{}]),
    "mask of keys": ({"mask": ("bool", ["T"]), "opset": 24}, [{"T": 11}, {"T": 1}, {"T": 6}]),
    "mask of pairs": ({"mask": ("float32", ["L", "T"]), "opset": 24, "axes": 3}, [{"T": 11}, {"T": 1}]),
    "mask of heads": ({"mask": ("bool", [H, "mL", "S"]), "opset": 23}, [{"mL": 5}, {"mL": 1}]),
    "mask of everything": (
        {"mask": ("bfloat16", ["mB", "mH", "L", "S"]), "dtype": "bfloat16", "opset": 23},
        [{"mB": 3, "mH": 1}, {"mB": 1, "mH": H}],
    ),
    "additive mask of keys": ({"mask": ("bfloat16", ["S"]), "dtype": "bfloat16", "opset": 23}, [{}]),
    "additive mask of keys, many queries": (
        {"mask": ("bfloat16", ["B", 1, 1, "S"]), "dtype": "bfloat16", "opset": 23, "L": 19}, [{}],
    ),
    "fixed short mask": ({"mask": ("float16", [1, H, "L", 4]), "dtype": "float16", "S": 11, "opset": 24}, [{}]),
    "lengths": ({"lengths": True, "axes": 3, "L": "L"}, [{}, {"L": 1}]),
    "lengths, causal, window, mask": (
        {"attributes": {"is_causal": 1, "left_window_size": 6}, "lengths": True, "mask": ("bool", ["B", 1, 1, "S"])},
        [{}, {"S": 3}],
    ),
    "softcap": ({"attributes": {"softcap": 1.5, "scale": 0.7}, "mask": ("float32", ["L", "S"])}, [{}]),
    "softcap, lengths, fewer bits": ({"attributes": {"softcap": 20.0}, "lengths": True, "dtype": "bfloat16"}, [{}]),
    "double": ({"attributes": {"softmax_precision": 11, "is_causal": 1}, "axes": 3}, [{}]),
}  # fmt: skip


@pytest.mark.thorough_but(
    "past, heads side by side, window",
    "past, as many new keys as the call brings",
    "additive mask of keys, many queries",
    "softcap",
)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    said, calls = MODELS[name]
    source = model(**said)
    attention = compiled(source)
    for seed, sizes in enumerate(calls):
        assert_right(attention, source, draw(source, {**FULL, **sizes}, seed))


@pytest.mark.thorough_but("0", "3")
@pytest.mark.parametrize("seed", range(4))
def test_a_few_random_ones(seed: int) -> None:
    """These are the first cases of `make fuzz-operator`."""
    result = onnx_operator.run(*onnx_operator.drawn(seed), seed)
    assert result.ok, onnx_operator.drawn(seed)


@pytest.mark.thorough_but("3")
@pytest.mark.parametrize("stage", range(4))
def test_scores(stage: int) -> None:
    """qk_matmul_output, beside Y and a cache: at each stage, at each dtype."""
    attributes = {"qk_matmul_output_mode": stage, "softcap": 3.0, "is_causal": 1}
    dtype = ("float32", "float16", "bfloat16", "float32")[stage]
    outputs = (*ALL, "scores")
    source = model(
        attributes, dtype=dtype, S=5, past="P", mask=("bool", ["L", "T"]), outputs=outputs, axes=3 + stage % 2
    )
    inputs = draw(source, {**FULL, "T": 18})
    attention = compiled(source)
    assert_right(attention, source, inputs)
    assert [info.dims[2] for info in attention.outputs] == [5 if stage % 2 else H * F, "P + 5", "P + 5", 5]


HIDDEN = {"mask": ("bool", ["L", "S"])}, {"lengths": True}, {"attributes": {"is_causal": 1}}


@pytest.mark.thorough_but("inf-causal")
@pytest.mark.parametrize("said", HIDDEN, ids=["mask", "lengths", "causal"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_hidden_never_shows_in_the_plain_form(said: dict[str, Any], poison: float) -> None:
    """Keys and values that no query sees hold NaN or Inf; so does one that all see, and its rows tell."""
    attributes = {"softmax_precision": 11, **said.get("attributes", {})}
    source = model(**{**said, "attributes": attributes}, outputs=("y", "", "", "scores"))
    attention, inputs = compiled(source), draw(source, FULL)
    if "mask" in inputs:
        inputs["mask"][:, 6:] = False
    if "lengths" in inputs:
        inputs["lengths"][:] = (6, 0, 5)
    inputs["k"][:, :, 7:] = poison
    inputs["v"][:, :, 7:] = poison
    y, _ = attention(**inputs)
    assert np.isfinite(y).all()
    inputs["v"][0, 0, 0, 2] = poison
    expected = oracle(source, inputs)[0]
    y, _ = attention(**inputs)
    assert np.array_equal(np.isfinite(y), np.isfinite(expected))
    assert not np.isfinite(y).all()


def test_a_row_that_sees_nothing_is_zeros() -> None:
    source = model(
        {"qk_matmul_output_mode": 3, "softmax_precision": 11}, lengths=True, outputs=("y", "", "", "weights")
    )
    inputs = draw(source, FULL)
    inputs["lengths"][:] = (0, 3, 11)
    y, weights = compiled(source)(**inputs)
    assert not y[0].any()
    assert not weights[0].any()
    assert np.allclose(weights[1:].sum(-1), 1)


@pytest.mark.thorough
def test_what_a_call_must_bring() -> None:
    """Sizes and numbers that do not fit are refused by the input's name, before anything runs."""
    source = model({"is_causal": 1}, S=5, past="P", mask=("bool", ["B", 1, "L", "T"]), outputs=ALL)
    attention = compiled(source)
    inputs = draw(source, {**FULL, "T": 18})
    with pytest.raises(InputError, match=r"input 'mask': expected bool of shape \(.*1 to P \+ 5\).*P \+ 5 = 18"):
        attention(**{**inputs, "mask": np.ones((3, 1, 5, 19), np.bool_)})
    with pytest.raises(InputError, match=r"input 'past_value': expected .*P = 13 as in 'past_key'"):
        attention(**{**inputs, "past_value": inputs["past_value"][:, :, :-1]})
    source = model(lengths=True)
    inputs = draw(source, FULL)
    inputs["lengths"][1] = 12
    with pytest.raises(InputError, match="input 'lengths': expected numbers from 0 to S = 11, got 12"):
        compiled(source)(**inputs)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("axes", [pytest.param(3, marks=pytest.mark.thorough), 4])
def test_a_present_is_its_past_bit_for_bit(dtype: str, axes: int) -> None:
    """The lengths lie around the stretches that are copied, with signalling NaN among the values."""
    source = model(past="P", S="S", outputs=ALL, axes=axes, dtype=dtype)
    alone = compiled(source)
    for P, S in ((0, 1), (63, 1), (64, 65), (128, 7), (1, 190)):
        inputs = draw(source, {"B": 2, "P": P, "S": S})
        for array in inputs.values():
            bits = array.reshape(-1).view(np.uint16 if dtype == "bfloat16" else np.uint32)
            bits[::5] = 0x7F81 if dtype == "bfloat16" else 0x7F800001
        results = alone(**inputs)
        for name, past, present in (("k", "past_key", results[1]), ("v", "past_value", results[2])):
            new = inputs[name] if axes == 4 else inputs[name].reshape(2, S, G, -1).swapaxes(1, 2)
            expected = np.concatenate((inputs[past], new), axis=2)
            assert present.tobytes() == expected.tobytes()


@pytest.mark.thorough
def test_dims_without_names_are_free() -> None:
    source = model(lengths=True)
    for value in source.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.Clear()
    attention = compiled(source)
    assert [info.dims for info in attention.inputs][1] == ("k_0", G, "k_2", 7)
    inputs = draw(model(lengths=True), FULL)
    assert_right(attention, source, inputs)
    with pytest.raises(
        InputError, match=r"Attention node .*: expected operands whose sizes fit each other.* The call brings q \("
    ):
        attention(**{**inputs, "v": inputs["v"][:, :, 1:]})


@pytest.mark.thorough
def test_models_made_elsewhere_are_verified() -> None:
    """The sizes of a mask, and numbers of keys, follow from the others."""
    mask = ("bool", ["B", 1, 5, "T"])
    for said in ({"past": "P", "outputs": ALL, "S": 5}, {"lengths": True}):
        verdict = mhsa.verify(mhsa.compile(model({"is_causal": 1}, mask=mask, **said)))
        assert verdict.ok, verdict


@pytest.mark.thorough
def test_the_report_says_what_is_written_out() -> None:
    artifact = mhsa.compile(model({"softmax_precision": 11}, past="P", S=5, outputs=(*ALL, "scores")))
    found = {(op.op, op.kernel, op.source) for op in artifact.manifest.ops}
    assert found == {
        ("attention", "plain", "fallback"),
        ("scores", "plain", "fallback"),
        ("present", "cpu.present", "default"),
    }
    assert artifact.manifest.semantics[0].softmax == "float64"
    assert "its softmax is float32, not float64" in artifact.manifest.ops[2].note


@pytest.mark.thorough
def test_the_kernel_computes_y_beside_the_scores() -> None:
    artifact = mhsa.compile(model(outputs=("y", "", "", "scores")))
    assert [(op.op, op.kernel) for op in artifact.manifest.ops] == [("attention", "cpu.decode"), ("scores", "plain")]
