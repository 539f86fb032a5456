"""ONNX If beside an attention: what its branches hold is counted, runs only where it is taken, and reads any memory."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from onnx.reference import ReferenceEvaluator

import mhsa_compile as mhsa
from mhsa_compile.verification.verify import check

HEAD = '<ir_version: 10, opset_import: ["" : 23]>'
INPUTS = "(float[B, 3, L, 16] q, float[B, 3, L, 16] x, bool flag, bool other, int64[N] d)"
PLACES = "float[B, 3, L, 16]"

NESTED = f"""agraph {INPUTS} => ({PLACES} y, {PLACES} z, int64[N] k) {{
    w = Relu(x)
    v = Exp(q)
    y = Attention(q, w, v)
    u = If (flag) <
        then_branch = t () => ({PLACES} a) {{
            a = If (other) <
                then_branch = tt () => ({PLACES} aa) {{ aa = Add(x, w) }},
                else_branch = te () => ({PLACES} ab) {{
                    half = Constant <value_float = 0.5> ()
                    h = Mul(v, half)
                    ab = Mul(h, w)
                }}
            >
        }},
        else_branch = e () => ({PLACES} b) {{ c = Mul(x, x)  b = Sub(c, y) }}
    >
    z = Add(u, w)
    seven = Constant <value_int = 7> ()
    k = If (flag) <
        then_branch = t2 () => (int64[N] m) {{ p = Div(seven, d)  m = Add(p, d) }},
        else_branch = e2 () => (int64[N] n) {{ n = Identity(d) }}
    >
}}"""
ONLY_THERE = f"""agraph {INPUTS} => ({PLACES} y, {PLACES} z) {{
    y = Attention(q, x, x)
    z = If (flag) <
        then_branch = t () => ({PLACES} a) {{ a = Add(x, q) }},
        else_branch = e () => ({PLACES} b) {{ b = Identity(q) }}
    >
}}"""


def parsed(text: str) -> onnx.ModelProto:
    model = parser.parse_model(HEAD + text)
    onnx.checker.check_model(model)
    return model


def unaligned(array: np.ndarray) -> np.ndarray:
    """A copy of the array that begins 4 bytes behind a cache line."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + 4
    view = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


@pytest.mark.thorough
@pytest.mark.parametrize("text", [NESTED, ONLY_THERE], ids=["nested", "only there"])
def test_branches_are_right_wherever_their_inputs_lie(text: str) -> None:
    model = parsed(text)
    artifact = mhsa.compile(model)
    assert artifact.manifest.has_fallbacks
    compiled = mhsa.load(artifact)

    def run(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        return list(
            compiled(**{n: unaligned(a) if a.dtype == np.float32 else np.asarray(a) for n, a in inputs.items()})
        )

    for seed in range(16):
        assert check(model, run, {"B": 1 + seed % 3, "L": 1 + 9 * seed, "N": 2}, seed).ok
    if text is NESTED:
        x, no = np.ones((1, 3, 5, 16), np.float32), np.array(False)
        assert compiled(q=x, x=x, flag=no, other=no, d=np.array([0, 1]))[2].tolist() == [0, 1]


def test_the_report_says_what_branches_hold() -> None:
    held = [row.op for row in mhsa.compile(parsed(NESTED)).manifest.ops if "branch of an If" in row.note]
    division = ["divide", "equal", "equal", "subtract", "where", "where", "where", "where"]  # by what may be 0 or -1
    assert sorted(held) == sorted(["add", "add", "multiply", "multiply", "multiply", "subtract", *division])


DECODER = """agraph (float[B, L, 32] x, float[B, S, 32] past, bool flag) => (float[B, L, 32] y) {
    l = Shape <start=1, end=2> (x)
    same = Equal(l, one)
    step = Squeeze(same)
    y = If (step) <
        then_branch = t () => (float[B, L, 32] a) {
            keys = MatMul(past, w_k)
            a = Attention <q_num_heads = 4, kv_num_heads = 4> (x, keys, past)
        },
        else_branch = e () => (float[B, L, 32] b) {
            b = If (flag) <
                then_branch = et () => (float[B, L, 32] c) {
                    q0 = MatMul(x, w_q)  k0 = MatMul(x, w_k)
                    q1 = Reshape(q0, heads)  k1 = Reshape(k0, heads)  v1 = Reshape(x, heads)
                    q = Transpose <perm = [0, 2, 1, 3]> (q1)  k = Transpose <perm = [0, 2, 3, 1]> (k1)
                    v = Transpose <perm = [0, 2, 1, 3]> (v1)
                    s = MatMul(q, k)  p = Softmax <axis = -1> (s)  o = MatMul(p, v)
                    rows = Transpose <perm = [0, 2, 1, 3]> (o)  c = Reshape(rows, joined)
                },
                else_branch = ee () => (float[B, L, 32] d) {
                    d = Attention <q_num_heads = 4, kv_num_heads = 4, is_causal = 1> (x, x, x)
                }
            >
        }
    >
}"""


@pytest.mark.thorough
def test_attention_in_branches() -> None:
    model = parser.parse_model(HEAD + DECODER)
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((32, 32)).astype(np.float32) / 6 for name in ("w_q", "w_k")}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    shapes = {"heads": [0, 0, 4, 8], "joined": [0, 0, 32], "one": [1]}
    for name, numbers in shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(numbers), name))
    inner = model.graph.node[3].attribute[1].g.node[0].attribute[0].g  # a branch may hold its weights itself
    inner.initializer.append(model.graph.initializer[0])
    del model.graph.initializer[0]
    onnx.checker.check_model(model)
    artifact = mhsa.compile(model)
    assert [(block.name, block.fused) for block in artifact.manifest.attention] == [
        ("a", True),
        ("p", True),
        ("d", True),
    ]
    assert {info.name for info in artifact.manifest.weights} == set(weights)
    compiled = mhsa.load(artifact)
    for length, flag in ((1, True), (7, True), (7, False)):
        inputs = {name: rng.standard_normal((2, n, 32)).astype(np.float32) for name, n in (("x", length), ("past", 5))}
        inputs["flag"] = np.array(flag)
        (expected,) = ReferenceEvaluator(model).run(None, inputs)
        assert np.allclose(compiled(**inputs), expected, atol=1e-5)


def test_results_of_another_length() -> None:
    text = """agraph (float[B, L, 16] x, bool flag) => (float[B, M, 16] y) {
        r = If (flag) <
            then_branch = t () => (float[B, L, 16] a) { a = Relu(x) },
            else_branch = e () => (float[B, K, 16] b) { b = Concat <axis = 1> (x, x) }
        >
        turned = Transpose <perm = [0, 2, 1]> (r)
        s = MatMul(r, turned)  p = Softmax <axis = -1> (s)  y = MatMul(p, r)
    }"""
    model = parsed(text)
    compiled = mhsa.load(mhsa.compile(model))
    for length in (1, 5):
        for flag in (True, False):
            inputs = {"x": np.random.default_rng(1).standard_normal((2, length, 16)).astype(np.float32)}
            inputs["flag"] = np.array(flag)
            (expected,) = ReferenceEvaluator(model).run(None, inputs)
            actual = np.asarray(compiled(**inputs))
            assert actual.shape == expected.shape and np.allclose(actual, expected, atol=1e-5)


@pytest.mark.thorough_but("True")
@pytest.mark.parametrize("flag", [True, False])
def test_weights_that_branches_give_out_may_have_one_name(flag: bool) -> None:
    model = parsed(
        """agraph (float[B, 4] x, bool flag) => (float[B, 4] y) {
            w = If (flag) <
                then_branch = t () => (float[1] one) <float[1] one = {3}> {},
                else_branch = e () => (float[1] one) <float[1] one = {5}> {}
            >
            y = Mul(x, w)
        }"""
    )
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    y = mhsa.load(mhsa.compile(model, without_attention="accept"))(x, np.array(flag))
    np.testing.assert_array_equal(y, x * (3 if flag else 5))
