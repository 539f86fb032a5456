"""Products of two activations on matrix tiles: every order of axes, ragged and free sizes, as exact as their words say;
Inf, NaN, huge and tiny numbers where float32 has them; the same bits in any number of threads."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from support import this_cpu
from support.kernel_runs import call, compiled
from support.product_ops import NARROW, ORDERS, matrices, operation
from support.term_products import products_of_terms
from support.this_cpu import with_tiles

import mhsa_compile as mhsa
from mhsa_compile.compiler.selection.float32_products import resolve
from mhsa_compile.compiler.selection.select_kernel import kernels_for
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.cpu.products.on_tiles import CpuTileProductKernel
from mhsa_compile.kernels.interface.ops import ProductOp
from mhsa_compile.spec.float32_products import TERM_PRODUCTS
from mhsa_compile.verification.error_budget import budget, max_error

KERNEL = CpuTileProductKernel()
PROFILE, WITH_FLOAT16 = load_profile("sapphirerapids"), load_profile("graniterapids")
KINDS = ("bfloat16", *TERM_PRODUCTS)
"""Words of float32's products, or bfloat16."""
RTOL = 4e-6  # of the largest value: float32 sums of up to 1,000 terms


def plain(m: Any, k: Any, n: Any, kind: str = "bf16x6", equation: str = "bmk,bkn->bmn") -> ProductOp:
    return operation(equation, {"b": 4, "h": 2, "m": m, "k": k, "n": n}, kind)


@functools.cache
def code(op: ProductOp) -> Any:
    profile = WITH_FLOAT16 if op.dtype == "float16" else PROFILE
    this_cpu.require(profile.tvm_config())
    assert KERNEL.why_not(op, profile) is None
    return compiled(KERNEL.emit(op, profile, {}), profile)["run"]


def free(equation: str, kind: str, result: str | None = None) -> ProductOp:
    return operation(equation, {axis: axis for axis in "bhmkn"}, kind, result)


def numbers(rng: np.random.Generator, axes: str, sizes: dict[str, int], kind: str = "bf16x6") -> np.ndarray:
    dtype = NARROW.get(kind, np.float32)
    return rng.standard_normal([sizes[axis] for axis in axes], np.float32).astype(dtype)


def check(run: Any, equation: str, sizes: dict[str, int], kind: str, result: Any = None) -> None:
    rng = np.random.default_rng(sum(sizes.values()))
    left, right, y = equation.replace("->", ",").split(",")
    a, b = numbers(rng, left, sizes, kind), numbers(rng, right, sizes, kind)
    dtype = a.dtype if result is None else np.dtype(result)
    found = call(run, a, b, np.full([sizes[axis] for axis in y], np.nan, dtype)).astype(np.float64)
    if not found.size:
        return
    wide = [one.astype(np.float32) for one in matrices(equation, a, b)]
    exact = np.matmul(*(one.astype(np.float64) for one in wide))
    terms = exact if kind in NARROW else products_of_terms(*wide, kind)
    step = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11}[str(dtype)]
    drift = (
        RTOL * np.sqrt(max(1, sizes["k"])) * (np.abs(a).max(initial=0) * np.abs(b).max(initial=0)).astype(np.float64)
    )
    assert (np.abs(found - terms) <= 1.001 * step * np.abs(terms) + drift).all()
    if kind == "bf16x6" and dtype == np.float32:
        eager = torch.matmul(*map(torch.from_numpy, map(np.ascontiguousarray, wide))).numpy()
        assert max_error(exact, found) <= budget(exact, eager, "float32")


SIZES = [
    (3, 37, 77, 53), (1, 1, 1, 1), (2, 33, 801, 65), (2, 31, 32, 31), (2, 16, 64, 32), (1, 3, 0, 4), (0, 3, 4, 5),
    (1, 17, 33, 197), (1, 300, 70, 5), (1, 64, 129, 64), (1, 0, 3, 4), (1, 5, 385, 96),
]  # fmt: skip


@pytest.mark.thorough_but("bfloat16-heads", "bf16x6-in order")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_free_sizes(kind: str, order: str) -> None:
    run = code(free(ORDERS[order], kind))
    for b, m, k, n in SIZES:
        check(run, ORDERS[order], {"b": b, "h": 2, "m": m, "k": k, "n": n}, kind)


@pytest.mark.thorough
@pytest.mark.parametrize("order", ["in order", "both turned", "heads"])
def test_tiles_of_float16(order: str) -> None:
    run = code(free(ORDERS[order], "float16"))
    for b, m, k, n in SIZES:
        check(run, ORDERS[order], {"b": b, "h": 2, "m": m, "k": k, "n": n}, "float16")


@pytest.mark.thorough_but("bfloat16-B turned")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_fixed_sizes(kind: str, order: str) -> None:
    """Whole tiles, and none."""
    for m, k, n in ((48, 64, 96), (37, 45, 71)):
        sizes = {"b": 2, "h": 3, "m": m, "k": k, "n": n}
        check(code(operation(ORDERS[order], sizes, kind)), ORDERS[order], sizes, kind)


@pytest.mark.thorough_but("float16-bfloat16")
@pytest.mark.parametrize("kind", ["bfloat16", "bf16x6"])
@pytest.mark.parametrize("result", ["float32", "bfloat16", "float16"])
def test_results_of_other_dtypes(kind: str, result: str) -> None:
    sizes = {"b": 2, "h": 1, "m": 33, "k": 40, "n": 45}
    op = operation(ORDERS["in order"], sizes, kind, result)
    check(code(op), ORDERS["in order"], sizes, kind, getattr(ml_dtypes, result, result))


@pytest.mark.thorough
@pytest.mark.parametrize("order", ["in order", "both turned"])
def test_blocks_and_parts(order: str) -> None:
    """Several blocks of rows and of columns, several parts of K."""
    for kind in KINDS:
        run = code(free(ORDERS[order], kind))
        for b, m, k, n in ((1, 557, 131, 541), (1, 1031, 97, 33), (2, 150, 1601, 300)):
            check(run, ORDERS[order], {"b": b, "h": 1, "m": m, "k": k, "n": n}, kind)


SPECIAL = (np.inf, -np.inf, np.nan, 3.4e38, -3.39e38, 1.003e30, 1e-40, 2e-45)


def with_special(a: np.ndarray, b: np.ndarray, special: tuple[float, ...] = SPECIAL) -> tuple[np.ndarray, np.ndarray]:
    """Every kind in a row of A and in a column of B, of the last of two entries."""
    a, b = a.copy(), b.copy()
    for i, value in enumerate(special):
        a[1, 33 + i, i], b[1, 2 * i, 40 + i] = value, value
    a[1, 50], b[1, :, 50] = 0, 0
    for factor, i in ((1e-30, 51), (1e-42, 52)):
        a[1, i] *= np.float32(factor)
        b[1, :, i] *= np.float32(factor)
    return a, b


def stored(equation: str, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    left, right = equation.split("->")[0].split(",")
    turned = (a.swapaxes(1, 2) if left == "bkm" else a, b.swapaxes(1, 2) if right == "bnk" else b)
    return np.ascontiguousarray(turned[0]), np.ascontiguousarray(turned[1])


@pytest.mark.thorough
@pytest.mark.parametrize("word", ["bf16x6", "bf16x3"])
@pytest.mark.parametrize("order", ["in order", "B turned", "A turned", "both turned"])
def test_extraordinary_rows_and_columns(order: str, word: str) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 100, 200), np.float32), rng.standard_normal((2, 200, 100), np.float32)
    odd_a, odd_b = with_special(a, b)
    run = code(free(ORDERS[order], word))

    def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return call(run, *stored(ORDERS[order], left, right), np.full((2, 100, 100), np.nan, np.float32))

    large, clean = np.float32(2.0**60), product(a, b)
    rtol = RTOL if word == "bf16x6" else 2.0**-15
    for left, right in ((odd_a, b), (a, odd_b), (odd_a, odd_b), (a * large, b * large), (a / large, b)):
        y = product(left, right)
        eager = torch.matmul(torch.from_numpy(left), torch.from_numpy(right)).numpy()
        np.testing.assert_array_equal(np.isnan(y), np.isnan(eager))
        np.testing.assert_array_equal(np.where(np.isinf(y), y, 0), np.where(np.isinf(eager), eager, 0))
        with np.errstate(invalid="ignore", over="ignore"):
            exact = left.astype(np.float64) @ right.astype(np.float64)
            allowed = rtol * (np.abs(left.astype(np.float64)) @ np.abs(right.astype(np.float64)))
            allowed += 200 * np.finfo(np.float32).smallest_subnormal
            assert (np.abs(y - exact) <= allowed)[np.isfinite(eager)].all()
        if left is a or left is odd_a:  # what has nothing to do with them is the same, bit for bit
            np.testing.assert_array_equal(y[0], clean[0])
            np.testing.assert_array_equal(y[1, 64:, 64:], clean[1, 64:, 64:])


def test_infinities_of_bfloat16_go_through_tiles() -> None:
    """No sum of numbers overflows here: where one does, what it is added to depends on the order."""
    rng, special = np.random.default_rng(1), tuple(value for value in SPECIAL if not 1e30 < abs(value) < np.inf)
    plain_factors = (rng.standard_normal(shape, np.float32) for shape in ((2, 100, 200), (2, 200, 100)))
    a, b = (factor.astype(ml_dtypes.bfloat16) for factor in with_special(*plain_factors, special))
    y = call(code(free(ORDERS["in order"], "bfloat16")), a, b, np.zeros((2, 100, 100), a.dtype))
    with np.errstate(invalid="ignore", over="ignore"):
        exact = np.matmul(a.astype(np.float64), b.astype(np.float64))
        size = np.matmul(np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64)))
        eager = torch.matmul(torch.from_numpy(a.astype(np.float32)), torch.from_numpy(b.astype(np.float32))).numpy()
        np.testing.assert_array_equal(np.isnan(y), np.isnan(eager))
        finite = np.isfinite(eager) & np.isfinite(y.astype(np.float32))
        assert (np.abs(y.astype(np.float64) - exact) <= 2**-7 * size + 1e-35)[finite].all()
    assert (finite == np.isfinite(eager.astype(ml_dtypes.bfloat16))).all()


def test_one_hot_rows_select_exactly() -> None:
    rng = np.random.default_rng(2)
    b = rng.standard_normal((1, 64, 70), np.float32)
    run = code(free(ORDERS["in order"], "bf16x6"))
    y = call(run, np.eye(64, dtype=np.float32)[None], b, np.zeros((1, 64, 70), np.float32))
    np.testing.assert_array_equal(y, b)


def _graph(dtype: int, dims: dict[str, list[Any]]) -> onnx.ModelProto:
    """sin(A B^T) C, of which no attention is read."""
    nodes = [
        helper.make_node("Transpose", ["b"], ["t"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["a", "t"], ["s"]),
        helper.make_node("Sin", ["s"], ["r"]),
        helper.make_node("MatMul", ["r", "c"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, dtype, dims[name]) for name in "abc"]
    graph = helper.make_graph(nodes, "products", values, [helper.make_tensor_value_info("y", dtype, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


@with_tiles
@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["bfloat16", "bf16x6"])
def test_threads(kind: str) -> None:
    """Many calls in a row, with the rows of one entry dealt to several."""
    dims = {name: ["B", "H", "L", 40] for name in "abc"}
    dtype = TensorProto.BFLOAT16 if kind == "bfloat16" else TensorProto.FLOAT
    word = "auto" if kind == "bfloat16" else kind
    artifact = mhsa.compile(_graph(dtype, dims), without_attention="accept", float32_products=word)
    assert [op.kernel for op in artifact.manifest.ops if op.op == "product"] == [KERNEL.name] * 2
    rng = np.random.default_rng(3)
    inputs = {name: numbers(rng, "bhmk", {"b": 1, "h": 2, "m": 301, "k": 40}, kind) for name in "abc"}
    expected = mhsa.load(artifact, threads=1)(**inputs).tobytes()
    for threads in (1, 2, 3, 8):
        product = mhsa.load(artifact, threads=threads)
        for _ in range(50):
            assert product(**inputs).tobytes() == expected


def test_what_it_takes() -> None:
    op = plain(256, 256, 256)
    for kind in KINDS:
        assert KERNEL.why_not(plain(256, 256, 256, kind), PROFILE) is None
    assert KERNEL.float32_products(op, PROFILE) == tuple(TERM_PRODUCTS)
    assert KERNEL.float32_products(op, load_profile("znver4")) == ()
    assert KERNEL.float32_products(replace(op, dtype="bfloat16"), PROFILE) == ()
    asked = replace(op, float32_products="ieee")
    assert resolve(asked, "auto", PROFILE).op == asked
    assert "in its time" in resolve(asked, "auto", PROFILE).reason
    assert [resolve(asked, word, PROFILE).op.float32_products for word in TERM_PRODUCTS] == list(TERM_PRODUCTS)
    assert "IEEE" in KERNEL.why_not(replace(op, float32_products="ieee"), PROFILE)
    assert "amx_fp16" in KERNEL.why_not(plain(256, 256, 256, "float16"), PROFILE)
    assert KERNEL.why_not(plain(256, 256, 256, "float16"), WITH_FLOAT16) is None
    assert "amx_bf16" in KERNEL.why_not(op, load_profile("znver4"))
    assert "16 terms" in KERNEL.why_not(plain(64, 15, 64), PROFILE)
    assert "multiply-adds" in KERNEL.why_not(plain(16, 16, 16), PROFILE)
    for free_one in (plain("M", 16, 16), plain(16, "K", 16), plain(16, 16, "N")):
        assert KERNEL.why_not(free_one, PROFILE) is None
    apart = operation("mkb,bkn->bmn", {"b": 4, "m": 64, "k": 64, "n": 64}, "bf16x6")
    assert "neighbours" in KERNEL.why_not(apart, PROFILE)
    assert kernels_for(replace(apart, float32_products="ieee"), PROFILE)[0][0].name == "cpu.product"
