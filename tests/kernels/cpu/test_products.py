"""Products of two activations against NumPy's in float64: ragged sizes, axes in any order, shared batches, threads."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import mhsa_compile as mhsa
from mhsa_compile.hardware.profile import detect
from mhsa_compile.kernels.cpu.units import tiles

DTYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
STEP = {"float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}
"""Of one rounding, relative."""


def compiled(nodes: list[onnx.NodeProto], inputs: dict[str, list[Any]], dtype: str = "float32") -> Any:
    kind = DTYPES[dtype]
    values = [helper.make_tensor_value_info(name, kind, dims) for name, dims in inputs.items()]
    y = helper.make_tensor_value_info("y", kind, None)
    graph = helper.make_graph(nodes, "product", values, [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return mhsa.compile(onnx.shape_inference.infer_shapes(model), without_attention="accept")


def numbers(shape: tuple[int, ...], dtype: str = "float32") -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def hold(y: Any, a: Any, b: Any, expected: Any, dtype: str = "float32", terms: int = 1) -> None:
    """One rounding of the result, and what a float32 sum of so many terms drifts by."""
    drift = 2**-22 * terms**0.5 * np.abs(a).max() * np.abs(b).max()
    allowed = STEP[dtype] * np.abs(expected) + drift
    assert np.shape(y) == expected.shape
    assert (np.abs(np.asarray(y, np.float64) - expected) <= allowed).all()


@pytest.fixture(scope="module", params=list(DTYPES))
def transposed(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """A B^T, every size free."""
    nodes = [
        helper.make_node("Transpose", ["b"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["a", "t"], ["y"]),
    ]
    return request.param, compiled(nodes, {"a": ["B", "M", "K"], "b": ["B", "N", "K"]}, request.param)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_free_sizes(transposed: tuple[str, Any], threads: int) -> None:
    dtype, artifact = transposed
    on_tiles = dtype == "bfloat16" and tiles.BFLOAT16.is_on(detect())
    kernel = "cpu.product_on_tiles" if on_tiles else "cpu.product"
    assert [(op.op, op.kernel) for op in artifact.manifest.ops] == [("product", kernel)]
    call = mhsa.load(artifact, threads=threads)
    for B, M, K, N in [(2, 7, 13, 5), (1, 197, 301, 197), (3, 211, 131, 67), (1, 1, 1, 1), (2, 3, 0, 4), (0, 3, 4, 5)]:
        a, b = numbers((B, M, K), dtype), numbers((B, N, K), dtype)
        wide = a.astype(np.float64), b.astype(np.float64)
        y = call(a, b)
        if y.size:
            hold(y, *(w if w.size else np.zeros(1) for w in wide), wide[0] @ wide[1].transpose(0, 2, 1), dtype, K)
        else:
            assert y.shape == (B, M, N)


CASES = {
    "heads": (
        [
            helper.make_node("Transpose", ["a"], ["s"], perm=[0, 2, 1, 3]),
            helper.make_node("Transpose", ["b"], ["t"], perm=[0, 2, 3, 1]),
            helper.make_node("MatMul", ["s", "t"], ["y"]),
        ],
        {"a": (2, 37, 3, 19), "b": (2, 53, 3, 19)},
        "blhk,bshk->bhls",
    ),
    "rows last": (
        [
            helper.make_node("Transpose", ["a"], ["s"], perm=[0, 2, 1]),
            helper.make_node("MatMul", ["s", "b"], ["y"]),
        ],
        {"a": (2, 29, 71), "b": (2, 29, 83)},
        "bkm,bkn->bmn",
    ),
    "broadcast": (
        [helper.make_node("MatMul", ["a", "b"], ["y"])],
        {"a": (3, 1, 13, 7), "b": (2, 7, 11)},
        "xymk,ykn->xymn",
    ),
    "shared": ([helper.make_node("MatMul", ["a", "b"], ["y"])], {"a": (5, 3, 7), "b": (7, 131)}, "bmk,kn->bmn"),
    "channels": (
        [helper.make_node("Einsum", ["a", "b"], ["y"], equation="bqc,bchw->bqhw")],
        {"a": (2, 13, 17), "b": (2, 17, 7, 11)},
        "bqc,bchw->bqhw",
    ),
    "turned": (
        [helper.make_node("Einsum", ["a", "b"], ["y"], equation="bhts,bhcs->bhct")],
        {"a": (2, 3, 23, 31), "b": (2, 3, 13, 31)},
        "bhts,bhcs->bhct",
    ),
    "two sums": (
        [helper.make_node("Einsum", ["a", "b"], ["y"], equation="bijc,bcjk->bik")],
        {"a": (2, 13, 7, 3), "b": (2, 3, 7, 11)},
        "bijc,bcjk->bik",
    ),
}


@pytest.mark.thorough_but("channels", "shared")
@pytest.mark.parametrize("name", CASES)
def test_axes(name: str) -> None:
    nodes, shapes, equation = CASES[name]
    artifact = compiled(nodes, {key: list(shape) for key, shape in shapes.items()})
    assert "cpu.product" in {op.kernel for op in artifact.manifest.ops}
    a, b = (numbers(shape) for shape in shapes.values())
    if name == "broadcast":
        expected = a.astype(np.float64) @ b.astype(np.float64)
    else:
        expected = np.einsum(equation, a.astype(np.float64), b.astype(np.float64))
    for threads in (1, 3):
        hold(mhsa.load(artifact, threads=threads)(a=a, b=b), a, b, expected, terms=64)
