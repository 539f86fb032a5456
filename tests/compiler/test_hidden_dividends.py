"""Indices with quotients and remainders mean what they say, which TVM alone does not see to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tvm import te, tirx

import mhsa_compile as mhsa
from mhsa_compile.compiler.fallback.function_nodes import rewritten
from mhsa_compile.compiler.fallback.hidden_values import hide_dividends

SIZE = 16


def _quotient(a: Any, b: int) -> Any:
    return a // b if isinstance(a, int) else tirx.floordiv(a, b)


def _remainder(a: Any, b: int) -> Any:
    return a % b if isinstance(a, int) else tirx.floormod(a, b)


INDICES = {
    "counts down": lambda i, j: _remainder(15 - j, 8),
    "counts down, not by a multiple": lambda i, j: _remainder(10 - j, 8),
    "a quotient that counts down": lambda i, j: _quotient(15 - j, 8),
    "a quotient below another": lambda i, j: _remainder(7 - _quotient(j, 4), 3),
    "multiples beside it": lambda i, j: _quotient(8 * i - j + 30, 8),
    "a constant between divisions": lambda i, j: _remainder(5 + _quotient(2 * j + i + 7, 4), 8),
    "counts up": lambda i, j: _remainder(i * 16 + j, 24),
}


def _right(index: Any, *changes: Any) -> bool:
    """Whether x[index(i, j)] is that, as TVM compiles it."""
    expected = np.array([[index(i, j) for j in range(SIZE)] for i in range(SIZE)])
    low, size = int(expected.min()), int(np.ptp(expected)) + 1
    x = te.placeholder((size,), "float32", name="x")
    y = te.compute((SIZE, SIZE), lambda i, j: x[index(i, j) - low], name="y")
    function = rewritten(te.create_prim_func([x, y]), *changes).with_attr("global_symbol", "main")
    compiled = tvm.compile(tvm.IRModule({"main": function}), target={"kind": "llvm"})
    result = tvm.runtime.tensor(np.zeros((SIZE, SIZE), np.float32))
    compiled["main"](tvm.runtime.tensor(np.arange(size, dtype=np.float32)), result)
    return bool((result.numpy() + low == expected).all())


def test_indices_are_right_and_tvm_alone_gets_some_wrong() -> None:
    assert all(_right(index, hide_dividends) for index in INDICES.values())
    wrong = {name for name, index in INDICES.items() if not _right(index)}
    assert len(wrong) >= 4 and "counts up" not in wrong, wrong


@pytest.mark.parametrize("length", [8, 5])
def test_repeated_rows_are_reversed(length: int) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", length])
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y",)]
    outputs.append(helper.make_tensor_value_info("place", TensorProto.INT64, None))
    constants = {"twice": [1, 2], "last": [-1], "before": [-99], "axis": [1], "back": [-1]}
    nodes = [
        helper.make_node("Tile", ["x", "twice"], ["t"]),
        helper.make_node("Slice", ["t", "last", "before", "axis", "back"], ["y"]),
        helper.make_node("ArgMin", ["t"], ["place"], axis=1, select_last_index=1),
    ]
    tensors = [numpy_helper.from_array(np.array(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", [x], outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    data = np.random.default_rng(0).standard_normal((4, length)).astype(np.float32)
    results = mhsa.load(mhsa.compile(model, without_attention="accept", check=False))(data)
    for result, expected in zip(results, ReferenceEvaluator(model).run(None, {"x": data}), strict=True):
        assert np.array_equal(result, expected)
