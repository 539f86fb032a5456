"""ONNX If beside an attention: what its branches hold is counted, runs only where it is taken, and reads any memory."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError
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
    if text is NESTED:  # 7 / 0 ends the program where a branch that is not taken runs
        x, no = np.ones((1, 3, 5, 16), np.float32), np.array(False)
        assert compiled(q=x, x=x, flag=no, other=no, d=np.array([0, 1]))[2].tolist() == [0, 1]


def test_the_report_says_what_branches_hold() -> None:
    held = [row.op for row in mhsa.compile(parsed(NESTED)).manifest.ops if "branch of an If" in row.note]
    assert sorted(held) == ["add", "add", "divide", "multiply", "multiply", "multiply", "subtract"]


def test_attention_in_a_branch_is_refused() -> None:
    text = ONLY_THERE.replace("a = Add(x, q)", "a = Attention(x, q, q)")
    with pytest.raises(ModelError, match="branches of an If, got Attention"):
        mhsa.compile(parsed(text))
