"""Calls whose sizes do not fit inside of the model: refused by the name of the node, in words of ours."""

import re

import numpy as np
import onnx
import pytest
from onnx import parser
from support.foreign_words import foreign_words

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError

HEADER = '<ir_version: 9, opset_import: ["" : 21]> g '
CASES = {  # name: (signature, node, shapes of a call that fits, shapes of one that does not, words of the error)
    "add": ("(float[n, 5] a, float[m, 5] b) => (float[r, c] y)", "[odd] y = Add (a, b)", [(3, 5), (1, 5)],
            [(3, 5), (4, 5)], "Add node 'odd'.*(n, 5) and (m, 5), got (3, 5) and (4, 5). The call brings a (3, 5), b"),
    "product": ("(float[n, k] a, float[m, 5] b) => (float[r, c] y)", "[odd] y = MatMul (a, b)", [(3, 4), (4, 5)],
                [(3, 6), (4, 5)], "MatMul node 'odd'.*(n, k) and (m, 5), got (3, 6) and (4, 5)"),
    "gemm": ("(float[k, n] a, float[m, 5] b) => (float[r, c] y)", "[odd] y = Gemm <transA = 1> (a, b)",
             [(4, 3), (4, 5)], [(6, 3), (4, 5)], "Gemm node 'odd'.*(k, n) and (m, 5), got (6, 3) and (4, 5)"),
    "gemm, added": ("(float[n, 4] a, float[4, 5] b, float[p, 5] c) => (float[r, s] y)", "[odd] y = Gemm (a, b, c)",
                    [(3, 4), (4, 5), (1, 5)], [(3, 4), (4, 5), (2, 5)],
                    "Gemm node 'odd'.*(n, 4), (4, 5) and (p, 5), got (3, 4), (4, 5) and (2, 5)"),
    "concat": ("(float[n, k] a, float[m, 5] b) => (float[r, c] y)", "[odd] y = Concat <axis = -1> (a, b)",
               [(3, 4), (3, 5)], [(3, 4), (2, 5)], "Concat node 'odd'.*(n, k) and (m, 5), got (3, 4) and (2, 5)"),
    "where": ("(bool[n, 1] c, float[n, k] a, float[m, 5] b) => (float[r, s] y)", "[odd] y = Where (c, a, b)",
              [(3, 1), (3, 5), (3, 5)], [(3, 1), (3, 6), (3, 5)], "Where node 'odd'.*got (3, 1), (3, 6) and (3, 5)"),
    "slope": ("(float[n, k] a, float[m] b) => (float[n, k] y)", "[odd] y = PRelu (a, b)", [(3, 5), (5,)],
              [(3, 5), (4,)], "PRelu node 'odd'.*(n, k) and (m), got (3, 5) and (4)"),
    "convolution": ("(float[n, c, 9] a, float[4, d, 3] b) => (float[n, 4, 7] y)", "[odd] y = Conv (a, b)",
                    [(1, 2, 9), (4, 2, 3)], [(1, 3, 9), (4, 2, 3)], "Conv node 'odd'.*got (1, 3, 9) and (4, 2, 3)"),
    "einsum": ("(float[n, k] a, float[m] b) => (float[n] y)", '[odd] y = Einsum <equation = "nk,k->n"> (a, b)',
               [(3, 5), (5,)], [(3, 5), (4,)], "node '.*'.*got (3, 5) and (4"),
    "scattered": ("(float[n, k] a, int64[m, k] i, float[p, k] u) => (float[n, k] y)",
                  "[odd] y = ScatterElements (a, i, u)", [(3, 5), (2, 5), (2, 5)], [(3, 5), (2, 5), (1, 5)],
                  "ScatterElements node 'odd'.*got (3, 5), (2, 5) and (1, 5)"),
    "gathered": ("(float[n, k] a, int64[m, l] i) => (float[m, l] y)", "[odd] y = GatherElements (a, i)",
                 [(3, 5), (2, 5)], [(3, 5), (2, 7)], "GatherElements node 'odd'.*The call brings a (3, 5), i (2, 7)"),
    "computed": ("(float[n, k] a, float[m, 3] b) => (float[r, 3] y)",
                 "s = Constant <value_ints = [-1, 3]> () t = Reshape (a, s) [odd] y = Add (t, b)", [(4, 6), (8, 3)],
                 [(4, 6), (7, 3)], "Add node 'odd'.*(n * k // 3, 3) and (m, 3), got (8, 3) and (7, 3)"),
    "reshape": ("(float[n, k] a) => (float[r, 4] y)", "s = Constant <value_ints = [-1, 4]> () [odd] y = Reshape (a, s)",
                [(4, 6)], [(3, 5)], "Reshape node 'odd'.*The call brings a (3, 5)."),
}  # fmt: skip


def drawn(function, shapes):
    draw = np.random.default_rng(0)
    return [
        draw.integers(0, 2, shape).astype(info.dtype)
        if info.dtype in ("int64", "bool")
        else draw.standard_normal(shape, np.float32)
        for info, shape in zip(function.inputs, shapes, strict=True)
    ]


@pytest.mark.thorough_only("add", "computed", "convolution", "gathered", "gemm", "gemm, added", "reshape", "where")
@pytest.mark.parametrize("name", CASES)
def test_a_call_whose_sizes_do_not_fit_names_the_node(name):
    signature, nodes, fitting, misfitting, words = CASES[name]
    model = parser.parse_model(f"{HEADER} {signature} {{ {nodes} }}")
    function = mhsa.load(mhsa.compile(model, without_attention="accept", check=False))
    arrays = drawn(function, fitting)
    feeds = dict(zip((info.name for info in function.inputs), arrays, strict=True))
    (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(function(*arrays), expected, rtol=1e-5, atol=1e-5)
    pattern = ".*".join(map(re.escape, words.split(".*")))
    with pytest.raises(InputError, match=pattern) as refused:
        function(*drawn(function, misfitting))
    assert foreign_words(str(refused.value)) == []


def test_sizes_that_values_make_are_told_with_the_nodes_that_they_reach():
    signature = "(float[n, k] a, float[m, k] b, int64[2] r) => (float[s, k] y)"
    model = parser.parse_model(f"{HEADER} {signature} {{ t = Tile (a, r) [odd] y = Add (t, b) }}")
    function = mhsa.load(mhsa.compile(model, without_attention="accept", check=False))
    a, b = np.ones((2, 3), np.float32), np.ones((4, 3), np.float32)
    assert function(a, b, np.array([2, 1])).shape == (4, 3)
    with pytest.raises(InputError, match=r"sizes of \d and \d that must be equal; .* Add node 'odd'") as refused:
        function(a, b, np.array([3, 1]))
    assert foreign_words(str(refused.value)) == []


def test_a_model_whose_sizes_are_told_by_its_symbols_notes_nothing():
    model = parser.parse_model(f"{HEADER} (float[n, k] a, float[n, k] b) => (float[n, k] y) {{ y = Add (a, b) }}")
    artifact = mhsa.compile(model, without_attention="accept", check=False)
    assert artifact.manifest.agreements == ()
    assert b"agreements" not in (artifact.path / "manifest.json").read_bytes()
