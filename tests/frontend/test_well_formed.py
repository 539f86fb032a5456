"""Files that are no graphs, and graphs whose shapes contradict each other: refused by the name of the node, from a path
and from memory alike."""

import re

import numpy as np
import onnx
import pytest
from onnx import parser
from support.foreign_words import foreign_words

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.onnx_graph import node_error
from mhsa_compile.frontend.reading.well_formed import CORRECT

HEADER = '<ir_version: 9, opset_import: ["" : 21]> g '
CASES = {
    "no rank": ("(float[] a) => (float[3] y) { y = Relu (a) }", "input 'a'.*for each of its axes, got no shape"),
    "input twice": ("(float[3] a, float[3] a) => (float[3] y) { y = Relu (a) }", "input 'a'.*of that name, got two"),
    "nobody makes it": ("(float[3] a) => (float[3] y) { [odd] y = Add (a, z) }",
                        "Add node 'odd'.*'z', which nothing makes"),
    "circle": ("(float[3] a) => (float[3] y) { y = Add (a, z) [odd] z = Relu (y) }", "Relu node 'odd'.*a circle"),
    "made twice": ("(float[3] a) => (float[3] y) { [one] y = Relu (a) [odd] y = Abs (a) }",
                    "Abs node 'odd'.*Relu node 'one'"),
    "no output": ("(float[3] a) => (float[3] q) { y = Relu (a) }", "output 'q'.*no node makes"),
    "no operator": ("(float[3] a) => (float[3] y) { [odd] y = Sofmax (a) }",
                    "Sofmax node 'odd'.*Did you mean 'Softmax'?"),
    "later operator": ("(float[3] a) => (float[3] y) { [odd] y = Swish (a) }", "Swish node 'odd'.*Import opset 24"),
    "too few": ("(float[3] a) => (float[3] y) { [odd] y = Add (a) }", "Add node 'odd': expected 2 inputs.*got 1"),
    "left out": ("(float[3] a) => (float[3] y) { [odd] y = Sub (, a) }", "Sub node 'odd': expected input 0, 'A'"),
    "no attribute": ("(float[3] a) => (float[3] y) { [odd] y = Relu <alpha = 3> (a) }", "Relu node 'odd'.*got 'alpha'"),
    "missing attribute": ("(float[3] a) => (float[3] y) { [odd] y = Cast (a) }",
                    "Cast node 'odd': expected attribute 'to'"),
    "kind of attribute": ("(float[3] a) => (float[3] y) { [odd] y = Softmax <axis = 1.5> (a) }",
                          "Softmax node 'odd': expected attribute 'axis' as a whole number, got a number"),
    "in a branch": ("(float[3] a, bool c) => (float[3] y) { y = If (c) <then_branch = t () => (float[3] p) "
                    "{ [odd] p = Add (a, z) }, else_branch = e () => (float[3] q) { q = Relu (a) }> }",
                    "Add node 'odd'.*'z'"),
    "sum": ("(float[3, 5] a, float[4, 5] b) => (float[r, c] y) { [odd] y = Add (a, b) }",
            "Add node 'odd'.*a float32 (3, 5), b float32 (4, 5)"),
    "product": ("(float[3, 5] a, float[4, 5] b) => (float[r, c] y) { [odd] y = MatMul (a, b) }",
                "MatMul node 'odd'.*a float32 (3, 5), b float32 (4, 5)"),
    "added to a product": ("(float[3, 5] a, float[5, 4] b, float[3] c) => (float[r, s] y) { [odd] y = Gemm (a, b, c) }",
                           "Gemm node 'odd'.*(3, 5), (5, 4) and (3)"),
    "channels": ("(float[1, 3, 9] a, float[4, 2, 3] b) => (float[1, 4, 7] y) { [odd] y = Conv (a, b) }",
                 "Conv node 'odd'.*the kernel's 2 channels.*(1, 3, 9).*(4, 2, 3)"),
    "numbers of a shape": ("(float[3, 5] a) => (float[r, c] y) { s = Constant <value_ints = [-1, 4]> () "
                           "[odd] y = Reshape (a, s) }", "Reshape node 'odd'.*[-1, 4]"),
    "axis": ("(float[3, 5] a) => (float[3, 5] y) { [odd] y = Softmax <axis = 2> (a) }", "Softmax node 'odd'.*axis=2"),
    "declared": ("(float[3, 5] a) => (float[4, 5] y) { [odd] y = Relu (a) }",
                 "Relu node 'odd': expected its output 'y' as the file declares it.*(4, 5), got float32 (3, 5)"),
    "declared dtype": ("(float[3, 5] a) => (int64[3, 5] y) { [odd] y = Relu (a) }",
                       "Relu node 'odd'.*int64 (3, 5), got float32 (3, 5)"),
    "two dtypes": ("(float[3] a, int64[3] b) => (float[3] y) { [odd] y = Add (a, b) }",
                   "Add node 'odd'.*'a' of float32 and 'b' of int64"),
    "two dtypes in a branch": ("(float[3] a, int64[3] b, bool c) => (float[3] y) { y = If (c) <then_branch = t () => "
                               "(float[3] p) { [odd] p = Add (a, b) }, else_branch = e () => (float[3] q) "
                               "{ q = Relu (a) }> }", "Add node 'odd'.*'a' of float32 and 'b' of int64"),
    "dtype of a condition": ("(float[3] a) => (float[3] y) { [odd] y = Where (a, a, a) }",
                             "Where node 'odd': expected 'condition' of bool, got 'a' of float32"),
    "dtype of indices": ("(float[3, 5] a, float[2] b) => (float[2, 5] y) { [odd] y = Gather (a, b) }",
                         "Gather node 'odd': expected 'indices' of int32 or int64, got 'b' of float32"),
    "index beyond": ("(float[3, 5] a) => (float[r, c] y) { i = Constant <value_ints = [0, 7]> () "
                     "[odd] y = Gather (a, i) }", "Gather node 'odd': expected indices from -3 to 2.*with 7"),
    "coordinate beyond": ("(float[3, 5] a) => (float[r] y) { i = Constant <value = int64[1, 2] {-4, 4}> () "
                          "[odd] y = GatherND (a, i) }", "GatherND node 'odd': expected indices from -3 to 2.*with -4"),
    "axis of a sum": ("(float[3, 5] a) => (float[3, 5] y) { i = Constant <value_int = 2> () "
                      "[odd] y = CumSum (a, i) }", "CumSum node 'odd': expected an axis from -2 to 1, got 2"),
    "parts": ("(float[6] a) => (float[r] y, float[s] z) { [odd] y, z = Split <num_outputs = 3> (a) }",
              "Split node 'odd': expected num_outputs=2, its outputs, got 3"),
    "axes of an addend": ("(float[3, 5] a, float[5, 4] b, float[1, 3, 4] c) => (float[r, s] y) "
                          "{ [odd] y = Gemm (a, b, c) }", "Gemm node 'odd': expected an addend C of 2 axes at most"),
    "factors of a row": ("(float[3, 8] a, float[5] b) => (float[3, 8] y) { [odd] y = LayerNormalization (a, b) }",
                         "LayerNormalization node 'odd': expected 'b' that spreads over 'a' of (3, 8)"),
    "factors of channels": ("(float[1, 3, 8] a, float[2] b) => (float[1, 3, 8] y) "
                            "{ [odd] y = InstanceNormalization (a, b, b) }",
                            "InstanceNormalization node 'odd': expected 'b' of (3), got 'b' of (2)"),
    "scales": ("(int8[3, 8] a, float[3] b) => (float[3, 8] y) { [odd] y = DequantizeLinear (a, b) }",
               "DequantizeLinear node 'odd': expected 'b' of (), (1) or (8), as axis 1"),
    "columns of a recurrence": ("(float[5, 1, 8] a, float[1, 16, 7] w, float[1, 16, 4] r) => (float[s, d, b, h] y) "
                                "{ [odd] y = LSTM <hidden_size = 4> (a, w, r) }",
                                "LSTM node 'odd': expected an input of the 7 columns of 'w'"),
    "letters": ("(float[3, 5] a, float[3, 5] b) => (float[r, c] y) "
                "{ [odd] y = Einsum <equation = \"ij,jk->ik\"> (a, b) }",
                "Einsum node 'odd': expected one size of 'j'.*5 in 'a' and 3 in 'b'"),
    "blocks": ("(float[1, 3, 2, 2] a) => (float[n, c, h, w] y) { [odd] y = DepthToSpace <blocksize = 2> (a) }",
               "DepthToSpace node 'odd': expected a size that 4 divides"),
    "random": ("(float[3] a) => (float[3] y) { [odd] y = Bernoulli (a) }",
                    "Bernoulli node 'odd'.*pass them as an input"),
    "empty range": ("() => (int64[n] y) { s = Constant <value_int = 0> () l = Constant <value_int = 5> () "
                    "[odd] y = Range (s, l, s) }", "Range node 'odd'"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("opsets", "got"), [([], "got none"), ([("", 0)], "got 0"), ([("", 99)], "got 99"), ([("other", 1)], "got none")]
)
def test_a_model_says_which_operators_it_means(opsets, got):
    model = parser.parse_model(f"{HEADER} (float[3] a) => (float[3] y) {{ y = Relu (a) }}")
    del model.opset_import[:]
    model.opset_import.extend(onnx.helper.make_opsetid(*opset) for opset in opsets)
    with pytest.raises(ModelError, match=f"model: expected an opset of ONNX's operators from 1 .* {got}"):
        mhsa.compile(model, without_attention="accept", check=False)


def test_a_file_of_a_format_to_come_says_what_reads_it():
    model = parser.parse_model(HEADER + "(float[3] a) => (float[3] y) { y = Relu (a) }")
    model.ir_version = onnx.IR_VERSION + 1
    with pytest.raises(ModelError, match=f"ir_version of at most {onnx.IR_VERSION}.*Install a newer onnx"):
        mhsa.compile(model, without_attention="accept")


def test_what_the_checker_of_onnx_refuses_has_a_next_step():
    model = parser.parse_model(HEADER + "(float[3] a) => (float[3] y) { z = Relu (a) y = Abs (z) }")
    model.graph.initializer.add().CopyFrom(onnx.numpy_helper.from_array(np.ones(3, np.float32), "z"))
    with pytest.raises(ModelError, match="'z'") as caught:
        mhsa.compile(model, without_attention="accept")
    assert caught.value.next_step == CORRECT


def test_a_graph_gives_something_out():
    model = parser.parse_model(f"{HEADER} (float[3] a) => (float[3] y) {{ y = Relu (a) }}")
    del model.graph.output[:]
    with pytest.raises(ModelError, match="model: expected an output at least"):
        mhsa.compile(model, without_attention="accept", check=False)


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_hold_together_is_refused_by_name(name, tmp_path):
    text, words = CASES[name]
    model = parser.parse_model(f"{HEADER} {text}")
    onnx.save(model, tmp_path / "m.onnx")
    for source in (model, tmp_path / "m.onnx"):
        with pytest.raises(ModelError, match=".*".join(map(re.escape, words.split(".*")))) as refused:
            mhsa.compile(source, without_attention="accept", check=False)
        assert refused.value.next_step
        assert foreign_words(str(refused.value)) == []


def test_only_what_is_named_as_a_node_is_told_to_go_without_it(tmp_path):
    place = tmp_path / "a node of mine.onnx"
    place.write_bytes(b"")
    with pytest.raises(ModelError, match="no graph") as refused:
        mhsa.compile(place)
    assert refused.value.next_step == ""
    node = onnx.helper.make_node("Relu", ["a"], ["y"], name="odd")
    assert "without it" in node_error(node, "another", "this").next_step
    assert node_error(node, "another", "this", "Change it.").next_step == "Change it."
