"""Arithmetic of floats keeps its roundings and its NaN, which TVM alone takes away."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import mhsa_compile as mhsa
from mhsa_compile.compiler.codegen import cuda_compiler
from mhsa_compile.compiler.fallback import cpu_schedule
from mhsa_compile.kernels.cpu.linear import epilogue

X = np.array([[np.nan, np.inf, -np.inf, 1.5, -0.0, 1e-40, 3e38, -7.25], [1, 2, -3, 4, 5, -6, 7, 0.125]], np.float32)
W = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
CONSTANTS = {
    "zero": np.float32(0), "one": np.float32(1), "many": np.float32(1e8), "large": np.float32(3e38),
    "half": np.float16(1000), "axis": np.array([1]), "weight": W, "other": -W,
}  # fmt: skip

CHAINS: dict[str, list[tuple[str, ...]]] = {
    "a difference of itself": [("Sub", "x", "x")],
    "put on and taken off": [("Add", "x", "many"), ("Sub", "_", "many")],
    "twice without once": [("Add", "x", "x"), ("Sub", "_", "x")],
    "by zero": [("Mul", "x", "zero")],
    "zero by it": [("Div", "zero", "x")],
    "zero put on": [("Add", "x", "zero")],
    "products of it, one without the other": [("Mul", "x", "large"), ("Sub", "_", "_")],
    "not less": [("Less", "x", "one"), ("Not", "_")],
    "not equal": [("Equal", "x", "x"), ("Not", "_")],
    "less, or not": [("Less", "x", "large"), ("Where", "_", "zero", "x"), ("Sub", "_", "_")],
    "a product compared": [("Mul", "x", "zero"), ("Greater", "_", "many"), ("Not", "_")],
    "a sum of differences": [("Sub", "x", "x"), ("ReduceSum", "_", "axis")],
    "of float16": [("Cast", "x", "float16"), ("Add", "_", "half"), ("Sub", "_", "half"), ("Cast", "_", "float")],
    "of bfloat16": [("Cast", "x", "bfloat16"), ("Sub", "_", "_"), ("Cast", "_", "float")],
    "behind a product": [("MatMul", "x", "weight"), ("Add", "_", "many"), ("Sub", "_", "many")],
    "a product without itself": [("MatMul", "x", "other"), ("Sub", "_", "_")],
}
TYPES = {"float": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}

"""The nodes of each: an operator and its inputs, _ for what came before; no two begin alike, so that each is fused."""


def _nodes(name: str) -> list[NodeProto]:
    nodes, value = [], ""
    for place, (kind, *inputs) in enumerate(CHAINS[name]):
        result = f"{name} {place}" if place + 1 < len(CHAINS[name]) else name
        to = {"to": TYPES[inputs.pop()]} if kind == "Cast" else {}
        nodes.append(helper.make_node(kind, [value if one == "_" else one for one in inputs], [result], **to))
        value = result
    return nodes


def _model(rows: str | int) -> ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, 8])
    kinds = {name: TensorProto.BOOL if CHAINS[name][-1][0] == "Not" else TensorProto.FLOAT for name in CHAINS}
    outputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in CONSTANTS.items()]
    graph = helper.make_graph([node for name in CHAINS for node in _nodes(name)], "g", [x], outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def _wrong(rows: str | int) -> set[str]:
    """The chains whose values are not the reference's, bit for bit but for products, which are rounded otherwise."""
    model, wrong = _model(rows), set()
    with np.errstate(all="ignore"):
        expected = ReferenceEvaluator(model).run(None, {"x": X})
    results = mhsa.load(mhsa.compile(model, without_attention="accept", check=False))(X)
    for name, one, other in zip(CHAINS, results, expected, strict=True):
        finite = np.isfinite(other)
        signs = one.dtype == np.bool_ or np.array_equal(np.signbit(one[finite]), np.signbit(other[finite]))
        close = np.allclose(one, other, rtol=0, atol=8 if name == "behind a product" else 0, equal_nan=True)
        rounded = name != "behind a product" or np.array_equal(one[finite] % 8, 0 * one[finite])
        if not (signs and close and rounded):
            wrong.add(name)
    return wrong


@pytest.mark.parametrize("rows", [2, "N"])
def test_values_are_those_of_the_operators(rows: str | int) -> None:
    assert _wrong(rows) == set()


def test_tvm_alone_takes_floats_for_numbers_on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(nodes: Any) -> None:
        """Leaves the nodes as they are."""

    monkeypatch.setattr(cpu_schedule, "hide_operands", nothing)
    monkeypatch.setattr(cpu_schedule, "_OF_ZERO", {})
    monkeypatch.setattr(epilogue, "opaque_pair", lambda one, other: (one, other))
    wrong = _wrong("N")
    assert wrong >= {"put on and taken off", "by zero", "not less", "behind a product", "a product without itself"}


@pytest.mark.cuda
@pytest.mark.usefixtures("cuda_compiler")
def test_on_a_gpu_each_operation_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = []
    compiled = cuda_compiler.compiled

    def kept(source: str, arch: str) -> bytes:
        sources.append(source)
        return compiled(source, arch)

    monkeypatch.setattr(cuda_compiler, "compiled", kept)
    mhsa.compile(_model("N"), "cuda-sm80", without_attention="accept")
    bodies = {part.split("_kernel(")[0].split()[-1]: part for part in sources[-1].split('extern "C"')[1:]}
    operations = {"fused_add_subtract3": "+-", "fused_add1_subtract": "+-", "fused_less_tir_logical_not": "<"}
    for name, operators in operations.items():
        for operator in operators:  # of what was reinterpreted, not of indices
            assert f"))) {operator} " in bodies[name].replace("((int64_t)threadIdx.x)))", ""), (name, operator)
