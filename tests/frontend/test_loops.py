"""Loops written out against ONNX Runtime's of the same file: axes, directions, batches, loops in loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.canonicalize.passes import loops
from mhsa_compile.frontend.onnx_graph import all_nodes, is_standard

RNG = np.random.default_rng(0)
N = helper.make_node
Array = np.ndarray[Any, Any]
Dims = Sequence[int | str] | None


def value(name: str, dims: Dims, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: Sequence[str],
    constants: dict[str, Any] | None = None,
    opset: int = 16,
) -> onnx.ModelProto:
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(nodes, "g", inputs, [value(name, None) for name in outputs], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def outputs_of(source: onnx.ModelProto, feeds: dict[str, Array]) -> list[Array]:
    import onnxruntime

    session = onnxruntime.InferenceSession(source.SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(array) for array in session.run(None, feeds)]


def drawn(source: onnx.ModelProto) -> dict[str, Array]:
    return {
        one.name: RNG.standard_normal([d.dim_value for d in one.type.tensor_type.shape.dim]).astype(np.float32)
        for one in source.graph.input
    }


def check(source: onnx.ModelProto) -> onnx.ModelProto:
    """The model written out, which computes what ONNX Runtime's loop does."""
    written, feeds = loops.rewrite(source, {}), drawn(source)
    assert not any(is_standard(node, "Scan", "Loop") for node in all_nodes(written.graph))
    for own, theirs in zip(outputs_of(written, feeds), outputs_of(source, feeds), strict=True):
        assert own.shape == theirs.shape
        np.testing.assert_allclose(own, theirs, rtol=1e-5, atol=1e-6)
    return written


def running(inner: list[onnx.NodeProto] | None = None) -> onnx.GraphProto:
    """Two states and two rows; a weight of its own, and one of the graph around it."""
    nodes = inner or [
        N("Mul", ["s", "own"], ["scaled"]),
        N("Add", ["scaled", "a"], ["sum"]),
        N("Mul", ["p", "b"], ["product"]),
        N("Add", ["product", "outer"], ["p_out"]),
        N("Sub", ["sum", "p_out"], ["row"]),
        N("Identity", ["sum"], ["s_out"]),
        N("Neg", ["row"], ["other"]),
    ]
    own = numpy_helper.from_array(np.array([0.5, -0.5], np.float32), "own")
    names, results = ["s", "p", "a", "b"], ["s_out", "p_out", "row", "other"]
    return helper.make_graph(nodes, "body", [value(n, [2]) for n in names], [value(n, [2]) for n in results], [own])


def test_axes_and_directions() -> None:
    said = {"scan_input_axes": [-1, 0], "scan_input_directions": [0, 1]}
    said |= {"scan_output_axes": [1, 0], "scan_output_directions": [1, 0]}
    scan = N("Scan", ["s0", "p0", "x", "y"], ["s1", "p1", "rows", "others"], num_scan_inputs=2, body=running(), **said)
    later = N("Add", ["s1", "s0"], ["twice"])
    inputs = [value("s0", [2]), value("p0", [2]), value("x", [2, 5]), value("y", [5, 2])]
    results, outer = ["s1", "p1", "rows", "others", "twice"], {"outer": np.array([0.1, 0.2], np.float32)}
    for opset in (9, 11, 16):
        if opset < 11:
            scan.attribute[[a.name for a in scan.attribute].index("scan_input_axes")].ints[0] = 1
        else:
            scan.attribute[[a.name for a in scan.attribute].index("scan_input_axes")].ints[0] = -1
        written = check(model([scan, later], inputs, results, outer, opset))
        assert sum(node.op_type == "Sub" for node in written.graph.node) == 5


def test_a_scan_of_opset_8_has_a_batch() -> None:
    scan = N("Scan", ["", "s0", "p0", "x", "y"], ["s1", "p1", "rows", "others"], num_scan_inputs=2, body=running(),
             directions=[1, 0])  # fmt: skip
    inputs = [value("s0", [3, 2]), value("p0", [3, 2]), value("x", [3, 4, 2]), value("y", [3, 4, 2])]
    check(model([scan], inputs, ["s1", "p1", "rows", "others"], {"outer": np.ones(2, np.float32)}, opset=8))


def test_loops_in_loops_and_branches_in_them() -> None:
    row = helper.make_graph(
        [N("Add", ["t", "e"], ["t_out"]), N("Mul", ["t_out", "s"], ["out"])],
        "row", [value("t", [2]), value("e", [2])], [value("t_out", [2]), value("out", [2])],
    )  # fmt: skip
    more = helper.make_graph([N("Add", ["last", "s"], ["t_out"])], "then", [], [value("t_out", [2])])
    less = helper.make_graph([N("Neg", ["mean"], ["kept"])], "else", [], [value("kept", [2])])
    body = helper.make_graph(
        [
            N("Scan", ["s", "a"], ["last", "mixed"], num_scan_inputs=1, body=row),
            N("ReduceMean", ["mixed"], ["mean"], axes=[0], keepdims=0),
            N("ReduceSum", ["last"], ["sum"], keepdims=0),
            N("Greater", ["sum", "zero"], ["positive"]),
            N("If", ["positive"], ["s_out"], then_branch=more, else_branch=less),
        ],
        "body", [value("s", [2]), value("a", [3, 2])], [value("s_out", [2])],
    )  # fmt: skip
    scan = N("Scan", ["s0", "x"], ["s1"], num_scan_inputs=1, body=body)
    source = model([scan], [value("s0", [2]), value("x", [4, 3, 2])], ["s1"], {"zero": np.float32(0)})
    for _ in range(3):
        written = check(source)
    assert sum(node.op_type == "If" for node in written.graph.node) == 4


def counted(condition: list[onnx.NodeProto], constants: dict[str, Any], names: Sequence[str] = ("n", "go")) -> Any:
    body = helper.make_graph(
        [*condition, N("Cast", ["i"], ["number"], to=TensorProto.FLOAT), N("Mul", ["s", "number"], ["row"]),
         N("Add", ["row", "x"], ["s_out"])],
        "body",
        [value("i", [], TensorProto.INT64), value("c", [], TensorProto.BOOL), value("s", [2])],
        [value("c_out", [], TensorProto.BOOL), value("s_out", [2]), value("row", [2])],
    )  # fmt: skip
    loop = N("Loop", [*names, "x"], ["last", "rows"], name="odd", body=body)
    return model([loop], [value("x", [2])], ["last", "rows"], constants)


def test_a_loop_that_counts() -> None:
    same, true = (
        [N("Identity", ["c"], ["c_out"])],
        [N("Constant", [], ["c_out"], value=numpy_helper.from_array(np.array(True)))],
    )
    known = {"n": np.int64(4), "go": np.array(True)}
    check(counted(same, known))
    check(counted(true, known))
    check(counted(same, {"n": np.int64(3)}, ["n", ""]))


def test_what_only_a_call_tells_is_refused_by_name() -> None:
    stops = [N("ReduceSum", ["s"], ["sum"], keepdims=0), N("Less", ["sum", "most"], ["c_out"])]
    known = {"n": np.int64(4), "go": np.array(True), "most": np.float32(3)}
    same = [N("Identity", ["c"], ["c_out"])]
    free = model([N("Scan", ["s", "s", "x", "x"], ["a", "b", "c", "d"], name="odd", num_scan_inputs=2, body=running())],
                 [value("s", [2]), value("x", ["T", 2])], "abcd", {"outer": np.ones(2, np.float32)})  # fmt: skip
    for source in (counted(stops, known), counted(same, known | {"n": np.int64(5000)}), free):
        assert loops.rewrite(source, {}) is source
        with pytest.raises(ModelError, match=r"'odd': expected a (Loop|Scan) of steps whose number is known"):
            mhsa.compile(source, without_attention="accept")


def test_attention_in_a_scan() -> None:
    """Each step attends to a table; the length is fixed by the call of compile."""
    body = helper.make_graph(
        [
            N("Add", ["s", "e"], ["q"]),
            N("MatMul", ["q", "keys"], ["scores"]),
            N("Softmax", ["scores"], ["probs"], axis=-1),
            N("MatMul", ["probs", "table"], ["s_out"]),
            N("Identity", ["s_out"], ["row"]),
        ],
        "body", [value("s", [1, 3, 8]), value("e", [1, 3, 8])], [value("s_out", [1, 3, 8]), value("row", [1, 3, 8])],
    )  # fmt: skip
    nodes = [N("Transpose", ["table"], ["keys"], perm=[0, 2, 1]),
             N("Scan", ["s0", "x"], ["s1", "rows"], num_scan_inputs=1, body=body)]  # fmt: skip
    inputs = [value("s0", [1, 3, 8]), value("x", ["T", 1, 3, 8]), value("table", [1, 11, 8])]
    source = model(nodes, inputs, ["s1", "rows"])
    artifact = mhsa.compile(source, dims={"T": 2}, without_attention="refuse", check=False)
    assert [block.fused for block in artifact.manifest.attention] == [True, True]
    inputs[1] = value("x", [2, 1, 3, 8])
    feeds = drawn(model(nodes, inputs, ["s1", "rows"]))
    for own, theirs in zip(mhsa.load(artifact)(**feeds), outputs_of(source, feeds), strict=True):
        np.testing.assert_allclose(own, theirs, atol=1e-5)
    assert any(node.op_type == "Scan" for node in all_nodes(source.graph))
