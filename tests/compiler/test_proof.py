"""What compile() proves by itself: a run against another evaluation of the very file, and what comes of it."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

import mhsa_compile as mhsa
from mhsa_compile.cli.app import app
from mhsa_compile.errors import InputError, MismatchError
from mhsa_compile.frontend.canonicalize import canonicalize
from mhsa_compile.verification.evaluators import Evaluators
from mhsa_compile.verification.file_check import Check, Difference, check_file

ATTENTION = """<ir_version: 11, opset_import: ["" : 23]>
g (float[B, L, 16] x, bool switch) => (float[B, L, 16] y) {
    twice = Add(x, x)
    o = Attention<q_num_heads = 2, kv_num_heads = 2>(twice, x, x)
    y = Where(switch, o, x)
}"""


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(text)


def graph(body: str, inputs: str = "float[N, 8] x", output: str = "float[N, M] y") -> onnx.ModelProto:
    return parsed(f'<ir_version: 10, opset_import: ["" : 20]> g ({inputs}) => ({output}) {{ {body} }}')


def outcome(model: onnx.ModelProto, run, monkeypatch=None):
    return check_file(Evaluators(model, model, None), run, [value.name for value in model.graph.output])


def without_runtime(monkeypatch):
    monkeypatch.setattr(Evaluators, "rounded", lambda self, inputs: None)


@pytest.mark.thorough
def test_what_was_checked_is_in_the_manifest_and_in_the_commands(tmp_path):
    onnx.save(parsed(ATTENTION), tmp_path / "m.onnx")
    command = ["compile", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "m.mhsa")]
    result = CliRunner().invoke(app, [*command, "--check", "--json"])
    assert result.exit_code == 0, result.output
    check = json.loads(result.stdout)["check"]
    assert check["sizes"] == [{"B": 2, "L": 5}, {"B": 3, "L": 8}] and len(check["against"]) == 2
    assert 0 < check["error"] <= check["budget"] < 1e-5
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "m.mhsa")]).stdout
    assert "agrees with ONNX Runtime" in " ".join(shown.split())
    off = CliRunner().invoke(app, [*command, "--no-check", "--force"])
    assert "not checked: it was switched off" in off.stdout


def test_a_fault_is_an_error_that_names_the_first_node_and_keeps_both_arrays(monkeypatch, tmp_path):
    whole = canonicalize.whole

    def with_a_fault(model, tensors):
        result = whole(model, tensors)
        for node in result.graph.node:
            if node.op_type == "Relu":
                node.op_type = "Abs"
        return result

    monkeypatch.setattr(canonicalize, "whole", with_a_fault)
    inputs, output = "float[B, L, 16] x, bool switch", "float[B, L, 16] y"
    model = graph("twice = Add(x, x) o = Relu(twice) y = Where(switch, o, x)", inputs, output)
    with pytest.raises(MismatchError, match=r"first node whose value differs is 'o' \(Relu\)"):
        mhsa.compile(model, check=True, dump=tmp_path, without_attention="accept")
    with np.load(tmp_path / "5_mismatch.npz") as arrays:
        assert arrays["expected"].shape == arrays["got"].shape == (2, 5, 16)
        assert np.abs(arrays["expected"] - arrays["got"]).max() > 1e-3
        assert set(arrays.files) == {"expected", "got", "input.x", "input.switch"}
    plain = mhsa.compile(graph("y = Relu(x)"), check=False, without_attention="accept")
    assert plain.manifest.check == Check(note="it was switched off")


def test_a_module_is_held_against_its_exported_graph():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval()
    artifact = mhsa.compile(model, example_inputs=(torch.randn(2, 3, 8),), check=True, without_attention="accept")
    assert artifact.manifest.check.against and len(artifact.manifest.check.sizes) == 2


@pytest.mark.thorough
def test_why_a_model_was_not_checked():
    spec = mhsa.AttentionSpec(embed_dim=16, num_heads=2)
    assert "module of this library" in mhsa.compile(spec, check=True).manifest.check.note
    foreign = mhsa.compile(parsed(ATTENTION), target="aarch64-generic", check=True)
    assert foreign.manifest.check.note.startswith("it does not run here")
    random = graph("r = RandomNormalLike(x) y = Add(r, x)", output="float[N, 8] y")
    assert outcome(random, lambda inputs: []).sentence() == "not checked: RandomNormalLike draws numbers at random"


def test_inputs_are_not_drawn_where_they_are_too_large():
    """They would take 32 GiB."""
    fixed = graph("y = Relu(x)", inputs="float[1048576, 4096] x", output="float[1048576, 4096] y")
    assert "too large" in outcome(fixed, lambda inputs: []).note


def test_the_environment_switches_it_off_and_nothing_else(monkeypatch):
    monkeypatch.setenv("MHSA_CHECK", "no")
    with pytest.raises(InputError, match="MHSA_CHECK"):
        mhsa.compile(parsed(ATTENTION))


ROUNDED = {
    "softmax": (graph("y = Softmax<axis = -1>(x)", output="float[N, 8] y"), 4e-6),
    "sums": (graph("axes = Constant<value = int64[1] {1}>() y = ReduceSum(x, axes)", output="float[N, 1] y"), 4e-5),
}


@pytest.mark.thorough_but("False-softmax")
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("runtime", [True, False])
def test_a_fault_of_some_roundings_is_seen_and_one_rounding_is_not(name, runtime, monkeypatch):
    model, fault = ROUNDED[name]
    if not runtime:
        without_runtime(monkeypatch)
    evaluators = Evaluators(model, model, None)

    def exactly(inputs):
        return [array.astype("f4") for array in evaluators.exact(inputs)]

    assert outcome(model, exactly).against
    wrong = outcome(model, lambda inputs: [array + np.float32(fault) for array in exactly(inputs)])
    assert isinstance(wrong, Difference) and wrong.name == "y" and wrong.error == pytest.approx(fault, rel=0.2)
    assert isinstance(outcome(model, lambda inputs: [exactly(inputs)[0][:1]]), Difference)
    assert isinstance(outcome(model, lambda inputs: [exactly(inputs)[0].astype("f8")]), Difference)


@pytest.mark.thorough
def test_ties_that_rounding_decides_are_not_judged_however_few_the_nudges_show():
    """Two sums that are one number and end in other last bits: every machine says anew which is the least."""
    model = graph(
        "low = Constant<value_float = -0.6>() axes = Constant<value_ints = [1]>() "
        "p = Softmax<axis = 1>(x) q = Softmax<axis = 1>(z) b = Mul(p, low) c = Mul(q, low) "
        "d = ReduceSum<keepdims = 1>(b, axes) e = ReduceSum<keepdims = 1>(c, axes) f = Concat<axis = 1>(d, e) "
        "y = ArgMin<axis = 1, keepdims = 0>(f)",
        inputs="float[N, 8] x, float[N, 8] z",
        output="int64[N] y",
    )

    def argmin(inputs):
        sums = []
        for name in ("x", "z"):
            weights = np.exp(inputs[name] - inputs[name].max(axis=1, keepdims=True)).astype("f4")
            sums.append(((weights / weights.sum(axis=1, keepdims=True)) * np.float32(-0.6))[:, ::-1].sum(axis=1))
        return [np.stack(sums, axis=1).argmin(axis=1)]

    assert not isinstance(outcome(model, argmin), Difference)
    assert isinstance(outcome(model, lambda inputs: [argmin(inputs)[0] + 2]), Difference)


@pytest.mark.thorough
def test_what_jumps_is_not_judged_where_it_is_near_its_edge_and_is_elsewhere():
    model = graph("y = ArgMax<axis = 1, keepdims = 0>(x)", output="int64[N] y")

    def argmax(inputs):
        return [inputs["x"].argmax(axis=1)]

    assert outcome(model, argmax).error == 0
    assert isinstance(outcome(model, lambda inputs: [argmax(inputs)[0] * 0]), Difference)
    near = graph(
        "one = Constant<value_float = 1.0>() tiny = Constant<value_float = 1e-9>() a = Mul(x, tiny) b = Add(a, one)"
        " y = ArgMax<axis = 1, keepdims = 0>(b)",
        output="int64[N] y",
    )
    assert not isinstance(outcome(near, lambda inputs: [argmax({"x": inputs["x"] * 0})[0]]), Difference)


def test_rows_that_see_no_key_are_zeros_here_and_nan_elsewhere():
    text = ATTENTION.replace("bool switch", "bool[B, 1, L, L] hidden").replace("y = Where(switch, o, x)", "").replace(
        "twice, x, x)", "twice, x, x, seen)").replace("o = Att", "seen = Not(hidden) y = Att")  # fmt: skip
    artifact = mhsa.compile(parsed(text), check=True)  # a mask of True that hides, under a name that does not say so
    assert artifact.manifest.check.against


def test_narrow_floats_beyond_their_largest_number_are_not_judged():
    values = helper.make_tensor("c", TensorProto.FLOAT16, [], [60000.0])
    model = graph("y = Mul(x, c)", inputs="float16[N, 8] x", output="float16[N, 8] y")
    model.graph.initializer.append(values)

    def run(inputs):
        with np.errstate(over="ignore"):
            return [inputs["x"] * np.float16(60000)]

    found = outcome(model, run)
    assert not isinstance(found, Difference) and "largest number" in found.note


HALVES = """<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
g (float[N, 64] x) => (float[N, 64] y) { h = Cast<to = 10>(x) a = com.microsoft.Gelu(h) y = Cast<to = 1>(a) }"""


@pytest.mark.parametrize(("factor", "agrees"), [(1 + 2**-9, True), (1.2, False)])
def test_what_is_computed_in_float16_has_no_more_digits(factor, agrees):
    """Of float32, as a converter leaves a file's outputs: ONNX Runtime alone takes it, in float32 between its casts."""
    model = parsed(HALVES)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    result = outcome(model, lambda inputs: [(session.run(None, dict(inputs))[0] * factor).astype(np.float32)])
    assert isinstance(result, Check if agrees else Difference)


def test_weights_of_float16_that_are_widened_first_leave_all_digits():
    bodies = ("v = Cast<to = 1>(w) y = Mul(x, v)", "h = Cast<to = 10>(x) a = Mul(h, w) y = Cast<to = 1>(a)")
    models = [graph(body, "float[N, 8] x, float16[8] w") for body in bodies]
    for model in models:
        model.graph.initializer.append(numpy_helper.from_array(np.ones(8, np.float16), "w"))
    assert [Evaluators(model, model, None).narrow for model in models] == ["", "float16"]


@pytest.mark.thorough_but("grows")
@pytest.mark.parametrize(
    ("past", "cap", "length", "rotary"),
    [(5, 6, 1, False), (0, 3, 3, False), (16, 16, 1, False), (5, 6, 1, True), (0, 3, 3, True)],
    ids=["grows", "begins", "buffer", "position", "positions"],
)
def test_caches_of_microsofts_are_called_by_what_their_files_say(past, cap, length, rotary):
    """seqlens_k, the total and positions come by the call. ONNX Runtime makes presents as long as the total, and reads
    the first position of a prompt alone."""
    values = {
        "q": (1, [2, length, 64]), "k": (1, [2, length, 32]), "v": (1, [2, length, 32]), "pk": (1, [2, 2, past, 16]),
        "pv": (1, [2, 2, past, 16]), "last": (6, [2]), "total": (6, [1]),
    }  # fmt: skip
    names, tables = [*values], []
    if rotary:
        angles = np.arange(20)[:, np.newaxis] / 100.0 ** (np.arange(8) / 8)
        pairs = {"cos": np.cos(angles), "sin": np.sin(angles)}
        tables = [numpy_helper.from_array(table.astype("f4"), name) for name, table in pairs.items()]
        values["at"] = (7, [2, length])
        names += ["cos", "sin", "at"]
    node = helper.make_node(
        "GroupQueryAttention", names, ["y", "ok", "ov"], domain="com.microsoft", num_heads=4, kv_num_heads=2,
        do_rotary=int(rotary),
    )  # fmt: skip
    outputs = {"y": [2, length, 64], "ok": [2, 2, cap, 16], "ov": [2, 2, cap, 16]}
    body = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info(name, *value) for name, value in values.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in outputs.items()], tables,
    )  # fmt: skip
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    check = mhsa.compile(helper.make_model(body, opset_imports=imports, ir_version=10), check=True).manifest.check
    assert check is not None and check.sizes == ({},) and "ONNX Runtime" in " ".join(check.against)


@pytest.mark.thorough
def test_an_entry_of_the_cache_keeps_its_outcome(monkeypatch, tmp_path):
    monkeypatch.setenv("MHSA_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, again, off = (mhsa.compile(parsed(ATTENTION), check=check) for check in (True, True, False))
    assert first.manifest.check == again.manifest.check and first.manifest.check.against
    assert not off.manifest.check.against


@pytest.mark.thorough
def test_an_evaluator_that_is_wrong_by_itself_raises_no_alarm():
    """onnx's evaluator rounds the sizes of SAME_LOWER down; ONNX Runtime refuses the file for another of its nodes."""
    body = """y = MaxPool<auto_pad = "SAME_LOWER", strides = [2, 3], kernel_shape = [3, 3], ceil_mode = 1>(x)
    z = BitwiseNot(k)"""
    model = graph(body, inputs="float[1, 2, 9, 8] x, int16[4] k", output="float[1, 2, P, Q] y, int16[4] z")
    artifact = mhsa.compile(model, check=True, without_attention="accept")
    assert "MaxPool" in artifact.manifest.check.note or artifact.manifest.check.against
