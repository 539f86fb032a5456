"""Arithmetic means what it says, which TVM alone does not see to: floats keep their roundings and their NaN, whole
numbers beyond 32 and 64 bits wrap as NumPy's do, whatever reads them next, and indices have their quotients."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
import tvm
from onnx import ModelProto, NodeProto, TensorProto, helper
from onnx.reference import ReferenceEvaluator
from support.onnx_models import model_of
from tvm import te, tirx

import mhsa_compile as mhsa
from mhsa_compile.compiler.codegen import cuda_compiler
from mhsa_compile.compiler.fallback import cpu_schedule
from mhsa_compile.compiler.fallback.function_nodes import rewritten
from mhsa_compile.compiler.fallback.hidden_values import hide_dividends
from mhsa_compile.kernels.cpu.linear import epilogue

Chain = list[tuple[str, ...]]
"""An operator and its inputs, _ for what came before."""

TYPES = {"float": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def chained(name: str, chain: Chain) -> list[NodeProto]:
    nodes, value = [], ""
    for place, (kind, *inputs) in enumerate(chain):
        result = f"{name} {place}" if place + 1 < len(chain) else name
        to = {"to": TYPES[inputs.pop()]} if kind == "Cast" else {}
        nodes.append(helper.make_node(kind, [value if one == "_" else one for one in inputs], [result], **to))
        value = result
    return nodes


def outputs_of(model: ModelProto, **arrays: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each output as it is compiled, and as the reference has it."""
    with np.errstate(all="ignore"):
        expected = ReferenceEvaluator(model).run(None, arrays)
    results = mhsa.load(mhsa.compile(model, without_attention="accept", check=False))(**arrays)
    return list(zip(results, expected, strict=True))


def nothing(nodes: Any) -> None:
    """Leaves the nodes as they are."""


# Floats

X = np.array([[np.nan, np.inf, -np.inf, 1.5, -0.0, 1e-40, 3e38, -7.25], [1, 2, -3, 4, 5, -6, 7, 0.125]], np.float32)
W = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
CONSTANTS = {
    "zero": np.float32(0), "one": np.float32(1), "many": np.float32(1e8), "large": np.float32(3e38),
    "half": np.float16(1000), "axis": np.array([1]), "weight": W, "other": -W,
}  # fmt: skip

FLOATS: dict[str, Chain] = {
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
"""No two begin alike, so that each is fused."""


def _floats(rows: str | int) -> ModelProto:
    outputs = {
        name: (TensorProto.BOOL if chain[-1][0] == "Not" else TensorProto.FLOAT, None) for name, chain in FLOATS.items()
    }
    nodes = [node for name in FLOATS for node in chained(name, FLOATS[name])]
    return model_of(nodes, {"x": [rows, 8]}, outputs, CONSTANTS, opset=18)


def _wrong_floats(rows: str | int) -> set[str]:
    """The chains whose values are not the reference's, bit for bit but for products, which are rounded otherwise."""
    wrong = set()
    for name, (one, other) in zip(FLOATS, outputs_of(_floats(rows), x=X), strict=True):
        finite = np.isfinite(other)
        signs = one.dtype == np.bool_ or np.array_equal(np.signbit(one[finite]), np.signbit(other[finite]))
        close = np.allclose(one, other, rtol=0, atol=8 if name == "behind a product" else 0, equal_nan=True)
        rounded = name != "behind a product" or np.array_equal(one[finite] % 8, 0 * one[finite])
        if not (signs and close and rounded):
            wrong.add(name)
    return wrong


@pytest.mark.thorough_but("N")
@pytest.mark.parametrize("rows", [2, "N"])
def test_values_are_those_of_the_operators(rows: str | int) -> None:
    assert _wrong_floats(rows) == set()


@pytest.mark.thorough
def test_tvm_alone_takes_floats_for_numbers_on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_schedule, "hide_operands", nothing)
    monkeypatch.setattr(cpu_schedule, "_OF_ZERO", {})
    monkeypatch.setattr(epilogue, "opaque_pair", lambda one, other: (one, other))
    wrong = _wrong_floats("N")
    assert wrong >= {"put on and taken off", "by zero", "not less", "a product without itself"}


@pytest.mark.cuda
@pytest.mark.usefixtures("cuda_compiler")
def test_on_a_gpu_each_operation_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = []
    compiled = cuda_compiler.compiled

    def kept(source: str, arch: str) -> bytes:
        sources.append(source)
        return compiled(source, arch)

    monkeypatch.setattr(cuda_compiler, "compiled", kept)
    mhsa.compile(_floats("N"), "cuda-sm80", without_attention="accept")
    bodies = {part.split("_kernel(")[0].split()[-1]: part for part in sources[-1].split('extern "C"')[1:]}
    operations = {"fused_add_subtract3": "+-", "fused_add1_subtract": "+-", "fused_less_tir_logical_not": "<"}
    for name, operators in operations.items():
        for operator in operators:  # of what was reinterpreted, not of indices
            assert f"))) {operator} " in bodies[name].replace("((int64_t)threadIdx.x)))", ""), (name, operator)


# Whole numbers

CODES = {"int32": TensorProto.INT32, "int64": TensorProto.INT64}
WHOLE: dict[str, Chain] = {
    "larger than before": [("Add", "x", "many"), ("Greater", "_", "x")],
    "twice, halved": [("Mul", "x", "two"), ("Div", "_", "two")],
    "a difference below 0": [("Sub", "x", "w"), ("Less", "_", "zero")],
    "what is left of a multiple": [("Mul", "x", "seven"), ("Mod", "_", "seven")],
    "the smaller of it and before": [("Sub", "x", "many"), ("Min", "_", "x")],
    "a hash": [("Mul", "x", "prime"), ("Add", "_", "w"), ("Mul", "_", "prime"), ("Mod", "_", "seven")],
    "the opposite": [("Neg", "x"), ("Less", "_", "two")],
    "a sum of squares": [("Mul", "w", "w"), ("ReduceSum", "_", "axis")],
}


def _wrong_whole_numbers(kind: str, chains: Collection[str]) -> set[str]:
    code, least, most = CODES[kind], np.iinfo(kind).min, np.iinfo(kind).max
    numbers = {"zero": 0, "two": 2, "seven": 7, "prime": 1000000007, "many": most - 3}
    x = np.array([[0, 1, 5, -1, -7, most, most - 1, most // 2 + 1, least, least + 1]], kind)
    w = np.array([[1, most, least, 5, least, 4, most, 1, most, 1234567]], kind)
    inputs = dict.fromkeys("xw", (code, ["n", x.shape[1]]))
    flags = ("Greater", "Less")
    outputs = {name: (TensorProto.BOOL if WHOLE[name][-1][0] in flags else code, None) for name in chains}
    constants = {name: np.array(number, kind) for name, number in numbers.items()} | {"axis": np.array([1])}
    nodes = [node for name in chains for node in chained(name, WHOLE[name])]
    model = model_of(nodes, inputs, outputs, constants, opset=18)
    values = zip(chains, outputs_of(model, x=x, w=w), strict=True)
    return {name for name, (one, other) in values if not np.array_equal(one, other)}


@pytest.mark.thorough_but("int64")
@pytest.mark.parametrize("kind", CODES)
def test_whole_numbers_wrap(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _wrong_whole_numbers(kind, WHOLE) == set()
    monkeypatch.setattr(cpu_schedule, "wrap_in_llvm", nothing)
    wrong = _wrong_whole_numbers(kind, [name for name in WHOLE if name != "a hash"])  # which TVM alone fails to compile
    assert wrong >= {"larger than before", "twice, halved", "what is left of a multiple"}


# Indices

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


@pytest.mark.thorough
def test_indices_are_right_and_tvm_alone_gets_some_wrong() -> None:
    assert all(_right(index, hide_dividends) for index in INDICES.values())
    wrong = {name for name, index in INDICES.items() if not _right(index)}
    assert len(wrong) >= 4 and "counts up" not in wrong, wrong


@pytest.mark.thorough_but("5")
@pytest.mark.parametrize("length", [8, 5])
def test_repeated_rows_are_reversed(length: int) -> None:
    constants = {"twice": [1, 2], "last": [-1], "before": [-99], "axis": [1], "back": [-1]}
    nodes = [
        helper.make_node("Tile", ["x", "twice"], ["t"]),
        helper.make_node("Slice", ["t", "last", "before", "axis", "back"], ["y"]),
        helper.make_node("ArgMin", ["t"], ["place"], axis=1, select_last_index=1),
    ]
    outputs = {"y": None, "place": (TensorProto.INT64, None)}
    model = model_of(nodes, {"x": ["N", length]}, outputs, constants, opset=18)
    data = np.random.default_rng(0).standard_normal((4, length)).astype(np.float32)
    for result, expected in outputs_of(model, x=data):
        assert np.array_equal(result, expected)
