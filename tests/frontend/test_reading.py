"""What of a file is understood: vendors' domains, functions of standard names, attributes and outputs that nobody
reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, defs, helper
from onnx.reference import ReferenceEvaluator

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.canonicalize.canonicalize import canonicalize
from mhsa_compile.frontend.export.source import read_source
from mhsa_compile.frontend.onnx_graph import all_nodes
from mhsa_compile.frontend.reading.check import TABLE, check_graph
from mhsa_compile.frontend.reading.microsoft import MICROSOFT
from mhsa_compile.frontend.reading.row import ANY, MANY
from mhsa_compile.frontend.reading.standard import LAST, STANDARD

N = helper.make_node
OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1), helper.make_opsetid("com.microsoft", 1)]


def model(*nodes: onnx.NodeProto, functions: Any = (), outputs: Any = ("y",), opset: int = 21) -> onnx.ModelProto:
    """x (2, 3, 4) -> the outputs, float32."""
    value = helper.make_tensor_value_info
    x = value("x", TensorProto.FLOAT, [2, 3, 4])
    graph = helper.make_graph(list(nodes), "g", [x], [value(name, TensorProto.FLOAT, None) for name in outputs])
    opsets = [helper.make_opsetid("", opset), *OPSETS[1:]]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=list(functions))


def function(name: str, body: list[onnx.NodeProto], domain: str = "own", **more: Any) -> onnx.FunctionProto:
    return helper.make_function(domain, name, ["a"], ["b"], body, OPSETS[:2], **more)


@pytest.mark.parametrize("domain", ["vendor.nn", "ai.onnx.ml", "com.microsoft.nchwc", "mhsa"])
@pytest.mark.parametrize("operator", ["Softmax", "Gelu", "Identity", "LayerNormalization", "MhsaLinear"])
def test_a_vendors_operator_is_refused_by_name(domain: str, operator: str) -> None:
    odd = model(N("Relu", ["x"], ["r"]), N(operator, ["r"], ["y"], name="odd", domain=domain))
    odd.opset_import.append(helper.make_opsetid(domain, 1))
    with pytest.raises(ModelError, match=rf"{domain}.{operator} node 'odd': .*{domain}") as caught:
        read_source(odd, None, None)
    other = {"ai.onnx.ml": "leave them to ONNX Runtime", "com.microsoft.nchwc": "ORT_ENABLE_EXTENDED at most"}
    assert other.get(domain, "model-local function") in str(caught.value.next_step)


def test_inside_of_branches_too() -> None:
    value = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    branches = {
        name: helper.make_graph([N(operator, ["x"], ["z"], name="odd", domain=domain)], name, [], [value])
        for name, operator, domain in (("then_branch", "Relu", ""), ("else_branch", "Relu", "vendor.nn"))
    }
    odd = model(
        N("ReduceSum", ["x"], ["total"], keepdims=0),
        N("Cast", ["total"], ["c"], to=9),
        N("If", ["c"], ["y"], **branches),
    )
    odd.opset_import.append(helper.make_opsetid("vendor.nn", 1))
    with pytest.raises(ModelError, match=r"vendor.nn.Relu node 'odd'"):
        read_source(odd, None, None)


def test_a_function_is_what_its_body_says() -> None:
    """Of a standard name, called by another function, with an attribute that has a default."""
    square = function("Softmax", [N("Relu", ["a"], ["r"]), N("Mul", ["r", "r"], ["b"])])
    leaky = N("LeakyRelu", ["a"], ["l"])
    leaky.attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="slope")
    outer = function(
        "Tanh",
        [leaky, N("Softmax", ["l"], ["b"], domain="own")],
        attribute_protos=[helper.make_attribute("slope", 0.5)],
    )
    nodes = [N("Tanh", ["x"], ["t"], domain="own"), N("Tanh", ["t"], ["u"], domain="own", slope=-2.0)]
    file = model(*nodes, N("Softmax", ["u"], ["y"], axis=1), functions=[square, outer])
    inlined = read_source(file, None, None).model
    assert not inlined.functions and {node.domain for node in all_nodes(inlined.graph)} == {""}
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype("f4")
    expected = x
    for slope in (0.5, -2.0):  # onnx.reference knows no defaults of functions
        expected = np.maximum(np.where(expected < 0, slope * expected, expected), 0) ** 2
    powers = np.exp(expected - expected.max(1, keepdims=True))
    expected = powers / powers.sum(1, keepdims=True)
    (got,) = ReferenceEvaluator(inlined).run(None, {"x": x})
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def read(file: onnx.ModelProto) -> onnx.ModelProto:
    return read_source(file, None, None).model


def negated(name: str, opset: int = 21, operator: str = "Neg", **more: Any) -> onnx.FunctionProto:
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_function("own", name, ["a"], ["b"], [N(operator, ["a"], ["b"], **more)], opsets)


def test_inlined_nodes_are_named_for_their_call() -> None:
    body = [N("Neg", ["a"], ["n"], name="inner"), N("Abs", ["n"], ["b"])]
    nodes = [N("Odd", ["x"], ["t"], name="first", domain="own"), N("Odd", ["t"], ["y"], domain="own")]
    names = [node.name for node in read(model(*nodes, functions=[function("Odd", body)])).graph.node]
    assert names == ["first/inner", "first/Abs", "y/inner", "y/Abs"]


def test_functions_that_mean_two_things_are_refused() -> None:
    call = N("Odd", ["x"], ["y"], name="odd", domain="own")
    passing = helper.make_function("own", "Odd", ["a"], ["a"], [N("Neg", ["a"], ["b"])], OPSETS[:1])
    loop = function("Odd", [N("Odd", ["a"], ["b"], domain="own")])
    for file, got in (
        (model(call, functions=[negated("Odd", 11, "Softmax", axis=0)]), "Softmax of opset 11, which differs from"),
        (model(call, functions=[passing]), "its input 'a'"),
        (
            model(N("Relu", ["x"], ["y"], name="odd"), functions=[function("Relu", [N("Neg", ["a"], ["b"])], "")]),
            "Relu",
        ),
    ):
        with pytest.raises(ModelError, match=f"node 'odd', a function of the file: expected .*, got .*{got}"):
            read(file)
    with pytest.raises(ModelError, match="recursive"):
        read(model(call, functions=[loop]))
    assert read(model(call, functions=[negated("Odd", 14)])).graph.node[0].op_type == "Neg"  # alike since opset 13
    unused = function("Relu", [N("Neg", ["a"], ["b"])], "")
    assert read(model(N("Exp", ["x"], ["y"]), functions=[unused])).functions == []


def test_one_dialect() -> None:
    """The long name of the standard's domain, operators that ONNX Runtime has in it, a domain that is not imported, a
    weight among the inputs."""
    weight = helper.make_tensor("g", TensorProto.FLOAT, [4], [1.0, 2.0, 3.0, 4.0])
    nodes = [
        N("SimplifiedLayerNormalization", ["x", "g"], ["a"], epsilon=1e-5),
        N("Gelu", ["a"], ["b"], domain="com.microsoft"),
        N("Relu", ["b"], ["y"], domain="ai.onnx"),
    ]
    file = model(*nodes)
    file.graph.initializer.append(weight)
    file.graph.input.append(helper.make_tensor_value_info("g", TensorProto.FLOAT, [4]))
    del file.opset_import[:]
    file.opset_import.append(helper.make_opsetid("ai.onnx", 21))
    one = read(file)
    assert [(n.domain, n.op_type) for n in one.graph.node] == [
        ("com.microsoft", "SimplifiedLayerNormalization"),
        ("com.microsoft", "Gelu"),
        ("", "Relu"),
    ]
    assert {entry.domain: entry.version for entry in one.opset_import} == {"": 21, "com.microsoft": 1}
    assert [value.name for value in one.graph.input] == ["x"] and [t.name for t in one.graph.initializer] == ["g"]
    assert len(file.graph.input) == 2  # the caller's model is as it was
    file.opset_import.append(helper.make_opsetid("", 20))
    with pytest.raises(ModelError, match=r"opsets 20 and 21, one as 'ai.onnx'"):
        read(file)
    file.opset_import[0].domain = ""
    with pytest.raises(ModelError, match=r"got opsets 20 and 21\."):
        read(file)


def test_layer_normalization_of_old_opsets_is_onnx_runtimes() -> None:
    file = model(N("LayerNormalization", ["x", "g"], ["y"], epsilon=1e-3), opset=12)
    file.graph.initializer.append(helper.make_tensor("g", TensorProto.FLOAT, [4], [1.0, 2.0, 3.0, 4.0]))
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype("f4")
    (got,) = ReferenceEvaluator(canonicalize(read(file)).model).run(None, {"x": x})
    wide = x - x.mean(-1, keepdims=True)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * np.arange(1, 5)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_what_is_no_dense_tensor_is_refused() -> None:
    file = model(N("SequenceConstruct", ["x"], ["y"]))
    file.graph.output[0].CopyFrom(helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None))
    with pytest.raises(ModelError, match="output 'y': expected a tensor, got a sequence"):
        read(file)
    file = model(N("MatMul", ["x", "w"], ["y"]))
    values = helper.make_tensor("w", TensorProto.FLOAT, [1], [2.0])
    places = helper.make_tensor("at", TensorProto.INT64, [1], [3])
    file.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [4, 4]))
    with pytest.raises(ModelError, match="'w' as a sparse one"):
        read(file)


@pytest.mark.parametrize("operator", sorted(MICROSOFT))
def test_what_no_row_of_microsofts_says_is_refused(operator: str) -> None:
    said: dict[str, Any] = {"num_heads": 2} if "num_heads" in MICROSOFT[operator].attributes else {}
    said |= {"score_power": 2.0}
    odd = model(N(operator, ["x"] * 2, ["y"], name="odd", domain="com.microsoft", **said))
    with pytest.raises(ModelError, match=r"com.microsoft.\w+ node 'odd': expected no attribute 'score_power'"):
        read_source(odd, None, None)
    if MICROSOFT[operator].inputs == MANY:
        return
    late = ["x", *[""] * (MICROSOFT[operator].inputs - 1), "x"]
    odd = model(N(operator, late, ["y"], name="odd", domain="com.microsoft"))
    with pytest.raises(ModelError, match=r"com.microsoft.\w+ node 'odd': expected no .*, which is not understood"):
        read_source(odd, None, None)


def test_rows_are_of_attributes_that_there_are() -> None:
    for (domain, operator), row in TABLE.items():
        if domain == "":
            schema = defs.get_schema(operator, min(LAST, defs.onnx_opset_version()), "")
            assert set(row.attributes) <= set(schema.attributes), operator
            assert row.inputs <= schema.max_input or row.inputs == MANY, operator
            for name, values in row.attributes.items():
                assert values == ANY or name in schema.attributes


def test_every_row_has_its_converter() -> None:
    from tvm.relax.frontend.onnx.onnx_frontend import _get_convert_map

    from mhsa_compile.frontend.relax.op_converters import CONVERSIONS
    from mhsa_compile.kernels.interface.ops import GATES

    assert STANDARD.keys() <= {*_get_convert_map(), *CONVERSIONS, *GATES, "DFT", "If", "STFT"}


def test_names_that_microsoft_shares_with_onnx() -> None:
    """Passes ask for an operator by its type before Microsoft's are rewritten; these ask for its domain as well."""
    standard = {schema.name for schema in defs.get_all_schemas() if schema.domain == ""}
    floats = {"Attention", "Gelu", "LayerNormalization", "RotaryEmbedding"}
    assert standard & set(MICROSOFT) == floats | {"DequantizeLinear", "QLinearConv", "QuantizeLinear"}


def lost() -> Any:
    """Attributes, inputs and outputs of standard operators that a converter of TVM's drops."""
    yield N("LayerNormalization", ["x", "x"], ["y", "mean", ""]), ("y", "mean"), "a later output"
    yield N("Resize", ["x", "", "", "x"], ["y"], antialias=1), ("y",), "antialias=1"
    yield N("Resize", ["x", "", "", "x"], ["y"], axes=[1, 2]), ("y",), r"axes=\[1, 2\]"
    yield N("ConvTranspose", ["x", "x"], ["y"], output_shape=[9]), ("y",), "output_shape"
    yield N("BatchNormalization", ["x"] * 5, ["y", "m", "v"], training_mode=1), ("y",), "training_mode=1"


@pytest.mark.parametrize(("node", "outputs", "got"), list(lost()), ids=lambda part: getattr(part, "op_type", ""))
def test_what_a_converter_drops_is_refused(node: onnx.NodeProto, outputs: tuple[str, ...], got: str) -> None:
    node.name = "odd"
    with pytest.raises(ModelError, match=rf"{node.op_type} node 'odd': expected .*, got .*{got}") as caught:
        check_graph(model(node, outputs=outputs))
    assert caught.value.next_step
    for attribute in node.attribute:
        if attribute.name == "antialias":
            attribute.i = 1 - attribute.i
            check_graph(model(node, outputs=outputs))  # the default's value is no news


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_scales_that_are_no_numbers_are_refused(number: float) -> None:
    for odd in (
        N("Attention", ["x"] * 3, ["y"], name="odd", scale=number),
        N("LayerNormalization", ["x", "x"], ["y"], name="odd", epsilon=number),
        N("Attention", ["x"] * 3, ["y"], name="odd", domain="com.microsoft", num_heads=2, scale=number),
        N("LeakyRelu", ["x"], ["y"], name="odd", alpha=number),
    ):
        with pytest.raises(ModelError, match=rf"node 'odd': expected \w+ as a finite number, got \w+={number}"):
            read(model(odd, opset=23))
    file = model(N("QuantizeLinear", ["x", "s"], ["q"], name="odd"), N("DequantizeLinear", ["q", "s"], ["y"]))
    file.graph.initializer.append(helper.make_tensor("s", TensorProto.FLOAT, [4], [1.0, 2.0, number, 1.0]))
    with pytest.raises(ModelError, match=rf"'odd': expected scales that are finite and above 0, got 's' with {number}"):
        check_graph(file)
    read(model(N("Constant", [], ["y"], value_float=float(number)), N("Relu", ["x"], ["z"])))


def test_conditions_hold_in_branches_too() -> None:
    """A Resize by an uneven scale, which a constant in the branch states."""
    scales = helper.make_tensor("scales", TensorProto.FLOAT, [3], [1.0, 1.0, 0.7])
    z = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    odd = [N("Neg", ["x"], ["n"]), N("Resize", ["n", "", "scales"], ["z"], name="odd")]
    branch = helper.make_graph(odd, "then", [], [z], [scales])
    other = helper.make_graph([N("Abs", ["x"], ["z"])], "else", [], [z])
    total, flag = N("ReduceSum", ["x"], ["total"], keepdims=0), N("Cast", ["total"], ["c"], to=9)
    file = model(total, flag, N("If", ["c"], ["y"], then_branch=branch, else_branch=other))
    with pytest.raises(ModelError, match=r"Resize node 'odd': expected scales that make whole sizes, got 0.69.* of 4"):
        check_graph(file)


def test_an_opset_that_nobody_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mhsa_compile.frontend.reading.check.LAST", 9)
    with pytest.raises(ModelError, match=r"Relu node 'odd': expected Relu as opset 9 has it, got that of opset 14"):
        check_graph(model(N("Relu", ["x"], ["y"], name="odd")))
    assert "Relu" in STANDARD
