"""Products with few rows or few columns against NumPy's in float64: orders of axes, ragged and free sizes, vectors of
two widths, dtypes, threads."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support import product_ops
from support.kernel_runs import call, compiled, vector_machine

import mhsa_compile as mhsa
from mhsa_compile.kernels.cpu.products.skinny import CpuSkinnyProductKernel
from mhsa_compile.kernels.interface.ops import ProductOp, ProductOperand

KERNEL = CpuSkinnyProductKernel()
SHAPES = {  # A as it is stored, B as it is stored, and what is made of them
    "one column": ((37, 53), (53, 1), "mk,kn->mn"),
    "few columns": ((3, 19, 53), (3, 53, 2), "bmk,bkn->bmn"),
    "few columns of a turned B": ((3, 19, 53), (3, 2, 53), "bmk,bnk->bmn"),
    "columns of a shared B": ((5, 3, 67), (67, 1), "bmk,kn->bmn"),
    "one column, A turned": ((53, 61), (53, 1), "km,kn->mn"),
    "few columns, A turned": ((2, 31, 139), (2, 31, 2), "bkm,bkn->bmn"),
    "one row": ((1, 31), (31, 173), "mk,kn->mn"),
    "few rows": ((2, 2, 31), (2, 31, 53), "bmk,bkn->bmn"),
    "few rows of a turned A": ((2, 31, 3), (2, 31, 53), "bkm,bkn->bmn"),
    "one row, B turned": ((3, 1, 83), (3, 41, 83), "bmk,bnk->bmn"),
    "rows of heads beside each other": ((2, 1, 3, 19), (2, 23, 3, 19), "bmhk,bnhk->bhmn"),
    "one number": ((5, 1, 301), (5, 301, 1), "bmk,bkn->bmn"),
    "terms fewer than lanes": ((97, 3), (3, 1), "mk,kn->mn"),
    "a tile and a vector": ((1, 5), (5, 144), "mk,kn->mn"),
}


def operation(name: str, *, free: bool = False) -> ProductOp:
    *shapes, equation = SHAPES[name]
    left, right, _ = equation.replace("->", ",").split(",")
    sizes = dict(zip(left + right, (*shapes[0], *shapes[1]), strict=True))
    few = {axis for axis in "mn" if sizes[axis] == min(sizes["m"], sizes["n"])}
    dims: dict[str, Any] = {axis: axis if free and axis not in few else size for axis, size in sizes.items()}
    return product_ops.operation(equation, dims, "ieee")


@pytest.mark.thorough_but(
    "columns of a shared B-machine1",
    "few columns of a turned B-machine1",
    "few rows of a turned A-machine0",
    "one column-machine1",
    "one row, B turned-machine1",
)
@pytest.mark.parametrize("machine", [(256, 16), (512, 32)])
@pytest.mark.parametrize("name", SHAPES)
def test_each_order_on_each_machine(name: str, machine: tuple[int, int]) -> None:
    *shapes, equation = SHAPES[name]
    profile, numbers = vector_machine(*machine), np.random.default_rng(0)
    a, b = (numbers.standard_normal(shape).astype(np.float32) for shape in shapes)
    expected = np.einsum(equation, a.astype(np.float64), b.astype(np.float64))
    for free in (False, True)[: machine[0] // 256]:
        op = operation(name, free=free)
        assert KERNEL.why_not(op, profile) is None
        run = compiled(KERNEL.emit(op, profile, {}), profile)["run"]
        y = call(run, a, b, np.full(expected.shape, np.nan, np.float32))
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module", params=["float32", "float16", "bfloat16"])
def columns_and_rows(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """A b, A^T b and b^T A for A (B, M, K) and b (B, K, 1) or (B, M, 1), sizes free."""
    kind = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
    dims = {"a": ["B", "M", "K"], "b": ["B", "K", 1], "c": ["B", "M", 1]}
    nodes = [
        helper.make_node("MatMul", ["a", "b"], ["x"]),
        helper.make_node("Transpose", ["a"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["t", "c"], ["y"]),
        helper.make_node("Transpose", ["c"], ["r"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["r", "a"], ["z"]),
    ]
    inputs = [helper.make_tensor_value_info(name, kind[request.param], dims[name]) for name in dims]
    outputs = [helper.make_tensor_value_info(name, kind[request.param], None) for name in "xyz"]
    graph = helper.make_graph(nodes, "skinny", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return request.param, mhsa.compile(onnx.shape_inference.infer_shapes(model), without_attention="accept")


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_free_sizes_and_dtypes(columns_and_rows: tuple[str, Any], threads: int) -> None:
    dtype, artifact = columns_and_rows
    assert {op.kernel for op in artifact.manifest.ops} == {"cpu.product.skinny"}
    product, numbers = mhsa.load(artifact, threads=threads), np.random.default_rng(0)
    step = {"float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    for B, M, K in [(3, 211, 131), (1, 1, 1), (2, 300, 16), (2, 3, 0), (0, 3, 4), (1, 0, 7)]:
        shapes = [(B, M, K), (B, K, 1), (B, M, 1)]
        a, b, c = (numbers.standard_normal(s).astype(np.dtype(getattr(ml_dtypes, dtype, dtype))) for s in shapes)
        wide = [one.astype(np.float64) for one in (a, b, c)]
        expected = (wide[0] @ wide[1], wide[0].transpose(0, 2, 1) @ wide[2], wide[2].transpose(0, 2, 1) @ wide[0])
        for y, value in zip(product(a=a, b=b, c=c), expected, strict=True):
            assert y.shape == value.shape
            assert (np.abs(np.asarray(y, np.float64) - value) <= step * np.abs(value) + 1e-4).all()


def test_many_of_both_are_left_to_panels() -> None:
    profile = vector_machine(256, 16)
    many = ProductOperand((64, 64), (), 0, 1)
    assert KERNEL.why_not(ProductOp((), 64, 64, 64, many, many), profile) is not None
    free = ProductOperand(("M", 64), (), 0, 1)
    assert KERNEL.why_not(ProductOp((), "M", 64, 64, free, many), profile) is not None
