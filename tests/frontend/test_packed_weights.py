"""DequantizeLinear of weights of four bits, or by blocks: (q - z) s, as a linear whose weights are made when bound."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.canonicalize.passes import packed_weights
from mhsa_compile.frontend.onnx_graph import replace

K, N = 64, 96  # fewer numbers would be constants of the program
RANGES = {"INT4": (-8, 8), "UINT4": (0, 16), "INT8": (-128, 128), "UINT8": (0, 256)}
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def product(
    kind: str, axis: int, block: int, *, zeros: bool = True, dtype: str = "float32", single: bool = False
) -> tuple[onnx.ModelProto, np.ndarray]:
    """(x (B, L, K) times a matrix (K, N) of such numbers; that matrix)."""
    rng, (low, high) = np.random.default_rng(0), RANGES[kind]
    q = rng.integers(low, high, (K, N))
    shape: tuple[int, ...] = () if single else ((K, N)[axis],)
    if block:
        shape = tuple(size // block if i == axis else size for i, size in enumerate((K, N)))
    s, z = (rng.random(shape) * 0.02 + 0.01).astype(dtype), rng.integers(low, high, shape) * int(zeros)
    code = getattr(TensorProto, kind)
    constants = [helper.make_tensor("q", code, [K, N], q.ravel().tolist()), numpy_helper.from_array(np.asarray(s), "s")]
    if zeros:
        constants.append(helper.make_tensor("z", code, list(shape), np.ravel(z).tolist()))
    words: dict[str, Any] = {"block_size": block} if block else {}
    names = ["q", "s", "z"] if zeros else ["q", "s"]
    nodes = [
        helper.make_node("DequantizeLinear", names, ["w"], name="weights", axis=axis, **words),
        helper.make_node("MatMul", ["x", "w"], ["y"], name="product"),
    ]
    x, y = (helper.make_tensor_value_info(name, TYPES[dtype], ["B", "L", size]) for name, size in (("x", K), ("y", N)))
    graph = helper.make_graph(nodes, "g", [x], [y], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    s, z = (np.asarray(a, np.float64) for a in (s, z))
    if block:
        s, z = (np.repeat(a, block, axis=axis) for a in (s, z))
    elif not single:
        s, z = (a.reshape([-1 if i == axis else 1 for i in range(2)]) for a in (s, z))
    return model, (q - z) * s


BLOCKS, FLOATS = "cpu.linear_of_blocks", "cpu.linear"
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # what becomes of them, as in ONNX Runtime
    "rows in blocks": (BLOCKS, {"kind": "INT4", "axis": 0, "block": 16}),
    "columns in blocks": (FLOATS, {"kind": "INT4", "axis": 1, "block": 8}),
    "unsigned": (BLOCKS, {"kind": "UINT4", "axis": 0, "block": 32}),
    "unsigned, no zero points": (BLOCKS, {"kind": "UINT4", "axis": 0, "block": 32, "zeros": False}),
    "no zero points": (BLOCKS, {"kind": "INT4", "axis": 0, "block": 16, "zeros": False}),
    "small blocks": (FLOATS, {"kind": "INT4", "axis": 0, "block": 8}),
    "bytes in blocks": (BLOCKS, {"kind": "INT8", "axis": 0, "block": 16}),
    "a scale a column": (BLOCKS, {"kind": "INT4", "axis": 1, "block": 0}),
    "a scale a column of bytes": (BLOCKS, {"kind": "UINT8", "axis": 1, "block": 0}),
    "a scale a row": (FLOATS, {"kind": "INT4", "axis": 0, "block": 0}),
    "one scale": (BLOCKS, {"kind": "UINT4", "axis": 1, "block": 0, "single": True}),
    "float16": (BLOCKS, {"kind": "INT4", "axis": 0, "block": 16, "dtype": "float16"}),
}


@pytest.mark.thorough_but("a scale a row")
@pytest.mark.parametrize(("kernel", "words"), CASES.values(), ids=CASES)
def test_products(kernel: str, words: dict[str, Any]) -> None:
    """The values of ONNX Runtime: exact ones differ by half a per cent where it rounds activations."""
    model, weights = product(**words)
    artifact = mhsa.compile(model, without_attention="accept", check=True)
    assert [(op.op, op.kernel) for op in artifact.manifest.ops] == [("linear", kernel)]
    x = np.random.default_rng(1).standard_normal((2, 3, K)).astype(words.get("dtype", "float32"))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    y, expected, exact = mhsa.load(artifact)(x), session.run(None, {"x": x})[0], x.astype(np.float64) @ weights
    tolerance = 4e-3 if x.dtype == np.float16 else 2e-6
    np.testing.assert_allclose(y, expected, atol=tolerance * np.abs(expected).max())
    if x.dtype == np.float32:
        assert (np.abs(y - exact).max() > 1e-4 * np.abs(exact).max()) == (kernel == BLOCKS)


@pytest.mark.parametrize("domain", ["com.microsoft", pytest.param("", marks=pytest.mark.thorough)])
def test_activations_that_are_bytes_already_are_not_rounded_once_more(domain: str) -> None:
    """Of either domain: before opset 21 the quantiser writes pairs beside weights of four bits as Microsoft's."""
    model, weights = product("INT4", 1, 0)
    scale, zero = numpy_helper.from_array(np.float32(0.03), "xs"), numpy_helper.from_array(np.int8(-4), "xz")
    model.graph.initializer.extend([scale, zero])
    model.graph.node[1].input[0] = "xd"
    pair = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"], domain=domain),
        helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"], domain=domain),
    ]
    nodes = [*pair, *model.graph.node]
    nodes[2].domain = domain
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    x = np.random.default_rng(1).standard_normal((2, 3, K)).astype(np.float32)
    y = mhsa.load(mhsa.compile(model, without_attention="accept", check=False))(x)
    exact = (np.clip(np.rint(x / np.float32(0.03)) - 4, -128, 127) + 4) * np.float64(np.float32(0.03)) @ weights
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for expected in (exact, session.run(None, {"x": x})[0]):
        np.testing.assert_allclose(y, expected, atol=2e-6 * np.abs(exact).max())


@pytest.mark.thorough
def test_weights_that_others_read_too_are_floats() -> None:
    model, weights = product("INT4", 0, 16)
    model.graph.node.append(helper.make_node("ReduceSum", ["w"], ["sum"]))
    model.graph.output.append(helper.make_tensor_value_info("sum", TensorProto.FLOAT, [1, 1]))
    artifact = mhsa.compile(model, without_attention="accept", check=True)
    x = np.random.default_rng(1).standard_normal((2, 3, K)).astype(np.float32)
    y, _ = mhsa.load(artifact)(x)
    np.testing.assert_allclose(y, x @ weights, atol=1e-6 * np.abs(y).max())


def in_branches(model: onnx.ModelProto, inside: bool) -> onnx.ModelProto:
    """y where `c` is true, else -y, each by nodes of its own, whose weights are the graph's or the branch's."""
    graph, branches = model.graph, {}
    for branch, last in (("then_branch", "Identity"), ("else_branch", "Neg")):
        names = {name: f"{branch}_{name}" for name in ("q", "s", "z", "w", "y")}
        own = names if inside else {name: names[name] for name in ("w", "y")}
        nodes, weights = [copy.deepcopy(node) for node in graph.node], [copy.deepcopy(t) for t in graph.initializer]
        for node in nodes:
            replace(node.input, [own.get(name, name) for name in node.input])
            replace(node.output, [own[name] for name in node.output])
        for tensor in weights:
            tensor.name = names[tensor.name]
        result = helper.make_tensor_value_info(f"{branch}_out", TensorProto.FLOAT, None)
        nodes.append(helper.make_node(last, [names["y"]], [result.name]))
        branches[branch] = helper.make_graph(nodes, branch, [], [result], weights if inside else [])
    choice = helper.make_node("If", ["c"], ["y"], name="choice", **branches)
    inputs = [*graph.input, helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
    whole = helper.make_graph([choice], "g", inputs, graph.output, [] if inside else graph.initializer)
    return helper.make_model(whole, opset_imports=model.opset_import, ir_version=10)


@pytest.mark.thorough_but("outside")
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_weights_that_a_branch_reads(inside: bool) -> None:
    """By what the file says: ONNX Runtime 1.31 rounds activations there, or ends for want of the graph's weights."""
    model, weights = product("INT4", 0, 16)
    call = mhsa.load(mhsa.compile(in_branches(model, inside), without_attention="accept", check=False))
    x = np.random.default_rng(1).standard_normal((2, 3, K)).astype(np.float32)
    for condition, sign in ((True, 1), (False, -1)):
        y = call(x, np.array(condition))
        np.testing.assert_allclose(y, sign * (x @ weights), atol=1e-6 * np.abs(y).max())


def test_blocks_that_are_not_whole_are_refused() -> None:
    model, _ = product("INT4", 0, 16)
    model.graph.node[0].attribute[1].i = 24
    with pytest.raises(ModelError, match=r"'weights'.*whole number of blocks.*block_size=24"):
        mhsa.compile(model, without_attention="accept")


@pytest.mark.parametrize(("block", "scale"), [(0, 0.0), (0, -0.1), (16, np.nan)])
def test_scales_that_are_none_are_refused_by_their_own_name(block: int, scale: float) -> None:
    """But blocks may have scales of 0, and below: quantisers write such."""
    model, _ = product("INT8", 0 if block else 1, block)
    scales = next(one for one in model.graph.initializer if one.name == "s")
    values = numpy_helper.to_array(scales).copy()
    values.flat[3] = scale
    scales.CopyFrom(numpy_helper.from_array(values, "s"))
    with pytest.raises(ModelError, match=f"'weights': expected scales that are finite.*'s' with {scale}"):
        mhsa.compile(model, without_attention="accept")
    if block:
        values.flat[3:5] = 0, -0.01
        scales.CopyFrom(numpy_helper.from_array(values, "s"))
        assert "MatMulNBits" in {node.op_type for node in packed_weights.rewrite(model).graph.node}


def test_numbers_in_blocks_that_a_call_brings() -> None:
    model, weights = product("INT8", 0, 16)
    numbers = next(one for one in model.graph.initializer if one.name == "q")
    model.graph.initializer.remove(numbers)
    model.graph.input.append(helper.make_tensor_value_info("q", TensorProto.INT8, [K, N]))
    x = np.random.default_rng(1).standard_normal((2, 3, K)).astype(np.float32)
    y = mhsa.load(mhsa.compile(model, without_attention="accept"))(x, numpy_helper.to_array(numbers))
    np.testing.assert_allclose(y, x @ weights, atol=1e-6 * np.abs(y).max())


NARROW = {"INT4": (TensorProto.INT4, -8, 7), "UINT4": (TensorProto.UINT4, 0, 15)}


@pytest.mark.thorough_but("INT4-True")
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("kind", NARROW)
def test_activations_of_four_bits(kind: str, zero: bool) -> None:
    """Bytes inside, cut to what four bits hold: ONNX Runtime's values to the bit; a table of such numbers that a
    Transpose turns is bytes, too."""
    code, least, most = NARROW[kind]
    rng, point = np.random.default_rng(0), [1] * zero
    table, words = rng.integers(least, most + 1, (6, 5)), {} if zero else {"output_dtype": code}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", *["z"] * zero], ["q"], **words),
        helper.make_node("DequantizeLinear", ["q", "s", *["z"] * zero], ["d"]),
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("DequantizeLinear", ["t", "s"], ["f"]),
        helper.make_node("Add", ["d", "f"], ["y"]),
    ]
    model = model_of(nodes, {"x": [5, 6]}, {"y": [5, 6]}, {"s": np.float32(0.25)}, opset=21)
    model.graph.initializer.append(helper.make_tensor("w", code, [6, 5], table.reshape(-1).tolist()))
    model.graph.initializer.extend(helper.make_tensor("z", code, [], point) for _ in point)
    x = rng.uniform(-5, 5, (5, 6)).astype(np.float32)  # beyond both bounds
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    np.testing.assert_array_equal(mhsa.load(mhsa.compile(model, without_attention="accept"))(x), expected)


def test_a_cast_to_four_bits_is_refused() -> None:
    nodes = [helper.make_node("Cast", ["x"], ["q"], to=TensorProto.INT4), helper.make_node("Cast", ["q"], ["y"], to=1)]
    with pytest.raises(ModelError, match="a Cast to eight bits or more, got int4"):
        mhsa.compile(model_of(nodes, {"x": [5]}, {"y": [5]}, opset=21), without_attention="accept")
