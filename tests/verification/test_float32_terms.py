"""Products of float32 by bfloat16 terms: the oracle of kernels, and budgets of what is less exact by choice."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from support.onnx_models import model_of
from support.term_products import products_of_terms

from mhsa_compile.spec.float32_products import FACTOR_BITS, TERM_PRODUCTS, coarsest, is_coarse
from mhsa_compile.verification.error_budget import budget, coarse_budget, max_error
from mhsa_compile.verification.oracle.float32_terms import factor_of_terms, split_terms, term_count
from mhsa_compile.verification.oracle.products_by_terms import products_by_terms
from mhsa_compile.verification.precision import Precision
from mhsa_compile.verification.verify import eager, oracle

RNG = np.random.default_rng(7)
ERRORS = {"bf16x6": 2.0**-22, "bf16x3": 2.0**-14, "bf16": 2.0**-7}
"""What a product of two numbers may be off by, as a share of itself."""


def test_three_terms_are_the_number():
    x = np.float32(RNG.standard_normal(4096) * 10.0 ** RNG.integers(-20, 20, 4096))
    terms = split_terms(x, 3)
    assert all(np.array_equal(term, term.astype(ml_dtypes.bfloat16).astype(np.float32)) for term in terms)
    assert np.array_equal(sum(term.astype(np.float64) for term in terms), x.astype(np.float64))
    assert np.array_equal(terms[0], x.astype(ml_dtypes.bfloat16).astype(np.float32))
    for one, other in pairwise(terms):
        assert (np.abs(other) <= np.abs(one) * 2.0**-8).all()


@pytest.mark.parametrize("word", TERM_PRODUCTS)
def test_products_are_as_exact_as_their_word_says(word):
    a, b = (np.float32(RNG.standard_normal(shape)) for shape in ((64, 1), (1, 64)))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    worst = (np.abs(products_of_terms(a, b, word) - exact) / np.abs(exact)).max()
    assert ERRORS[word] / 64 < worst < ERRORS[word]
    assert np.array_equal(products_of_terms(a, b, "ieee"), exact)


def test_one_hot_rows_select_exactly():
    rows = np.float32(RNG.standard_normal((64, 32)))
    assert np.array_equal(products_of_terms(np.eye(64, dtype=np.float32), rows, "bf16x6"), rows)


@pytest.mark.parametrize("word", TERM_PRODUCTS)
@pytest.mark.parametrize(
    ("x", "y"),
    [(np.inf, 1.0), (np.inf, 1.234567), (-np.inf, 1.0), (np.inf, 0.0), (np.inf, -1.2), (np.nan, 1.0), (np.nan, 0.0),
     (np.inf, np.inf), (np.inf, -np.inf), (3.4e38, 1.0), (3.4e38, 0.3), (1.003e30, 1.003e30), (1.003e20, 1.003e18)],
)  # fmt: skip
def test_what_is_no_ordinary_number_is_where_float32_has_it(word, x, y):
    a, b = np.full((1, 32), 0.5, np.float32), np.zeros((32, 1), np.float32)
    a[0, 0], b[0, 0] = x, y
    with np.errstate(all="ignore"):
        plain, ours = np.float32(x) * np.float32(y), products_of_terms(a, b, word).astype(np.float32)[0, 0]
    assert np.isnan(plain) == np.isnan(ours) and np.isinf(plain) == np.isinf(ours)
    assert np.isnan(plain) or np.sign(plain) == np.sign(ours)


def test_what_a_factor_keeps():
    x = np.float32([1 + 2**-9, np.inf, -np.inf, np.nan, 3.4e38, 0.0])
    assert np.array_equal(factor_of_terms(x, "bf16")[1:4], x[1:4], equal_nan=True)
    assert np.array_equal(factor_of_terms(x, "bf16")[[0, 5]], np.float32([1, 0]))
    assert factor_of_terms(x, "bf16x3")[0] == x[0] and np.isfinite(factor_of_terms(x, "bf16")[4])
    assert factor_of_terms(x, "ieee") is x
    half = np.ones(3, np.float16)
    assert factor_of_terms(half, "bf16") is half
    assert [term_count(word) for word in TERM_PRODUCTS] == [3, 2, 1]


def test_words_by_their_bits():
    assert coarsest("ieee", "bf16x3", "bf16x6") == "bf16x3" and coarsest() == "ieee"
    assert [word for word in FACTOR_BITS if is_coarse(word)] == ["bf16x3", "bf16"]
    ones = np.ones(3)
    assert coarse_budget(ones, "float32") == coarse_budget(ones, "float32", "bf16x6") == 2.0**-11
    assert coarse_budget(ones, "float32", "bf16") == coarse_budget(ones, "bfloat16") == 2.0**-3
    assert coarse_budget(ones, "float16", "bf16x3") == coarse_budget(ones, "float16")


def test_products_of_torch_are_made_by_terms():
    x, w = torch.randn(5, 64), torch.randn(7, 64)
    with products_by_terms("bf16"):
        results = [x @ w.T, torch.matmul(x, w.T), torch.nn.functional.linear(x, w), torch.mm(x, w.T)]
        wide = x.double() @ w.double().T
    expected = x.bfloat16().double() @ w.bfloat16().double().T
    for y in results:
        assert y.dtype == torch.float32 and float((y - expected).abs().max()) < 1e-5
    assert torch.equal(wide, x.double() @ w.double().T)
    assert not torch.equal(results[0], x @ w.T)
    with products_by_terms("bf16x3"):
        three = torch.nn.functional.linear(x, w, torch.ones(7))
    assert np.abs(three.numpy() - 1 - products_of_terms(x.numpy(), w.T.numpy(), "bf16x3")).max() < 1e-5
    with products_by_terms("bf16x6"):
        assert torch.equal(x @ w.T, torch.matmul(x, w.T))


def models() -> dict[str, tuple[onnx.ModelProto, dict[str, np.ndarray]]]:
    def drawn(*shape: int) -> np.ndarray:
        return np.float32(RNG.standard_normal(shape))

    def model(node: onnx.NodeProto, weights: dict[str, np.ndarray], opset: int = 23, **inputs: np.ndarray):
        kinds = {name: (TensorProto.FLOAT, list(array.shape)) for name, array in inputs.items()}
        return model_of([node], kinds, {"y": (TensorProto.FLOAT, None)}, weights, opset=opset), inputs

    einsum = helper.make_node("Einsum", ["x", "z"], ["y"], equation="bik,bjk->bij")
    heads = {name: drawn(2, 3, 17, 16) for name in "qkv"}
    gates = {"w": drawn(1, 32, 24), "r": np.zeros((1, 32, 8), np.float32)}
    return {
        "MatMul": model(helper.make_node("MatMul", ["x", "w"], ["y"]), {"w": drawn(64, 7)}, x=drawn(5, 64)),
        "Gemm": model(helper.make_node("Gemm", ["x", "w"], ["y"], transB=1), {"w": drawn(7, 64)}, x=drawn(5, 64)),
        "Conv": model(helper.make_node("Conv", ["x", "w"], ["y"]), {"w": drawn(7, 16, 3)}, x=drawn(2, 16, 9)),
        "Einsum": model(einsum, {}, x=drawn(2, 5, 64), z=drawn(2, 7, 64)),
        "DFT": model(helper.make_node("DFT", ["x"], ["y"], axis=1), {}, opset=17, x=drawn(2, 64, 1)),
        "LSTM": model(helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=8), gates, x=drawn(3, 2, 24)),
        "Attention": model(helper.make_node("Attention", ["q", "k", "v"], ["y"]), {}, **heads),
    }  # fmt: skip


@pytest.mark.parametrize("word", ["bf16x3", "bf16"])
@pytest.mark.parametrize("name", models())
def test_the_yardstick_errs_by_what_factors_lose(name, word):
    model, inputs = models()[name]
    exact, plain, coarse = (
        oracle(model, inputs)[0], eager(model, inputs)[0], eager(model, inputs, Precision(float32_products=word))[0]
    )  # fmt: skip
    scale = np.abs(exact).max()
    assert coarse.dtype == plain.dtype and max_error(exact, plain) < 3e-6 * scale
    least, most = {"bf16x3": (2.0**-21, 2.0**-14), "bf16": (2.0**-13, 2.0**-6)}[word]
    assert least < max_error(exact, coarse) / scale < most
    assert np.array_equal(eager(model, inputs, Precision(float32_products="bf16x6"))[0], plain)


@pytest.mark.parametrize("word", ["bf16x3", "bf16"])
@pytest.mark.parametrize("draw", ["standard_normal", "random"])
@pytest.mark.parametrize("K", [7, 197, 3072])
def test_products_by_terms_are_within_their_budget(word, draw, K):
    """The oracle's, summed in float32 as well: the budget has room for both, and float32's has not."""
    a, b = (np.float32(getattr(RNG, draw)(shape)) for shape in ((48, K), (K, 48)))
    exact, actual = a.astype(np.float64) @ b.astype(np.float64), np.float32(products_of_terms(a, b, word))
    with products_by_terms(word):
        yardstick = (torch.tensor(a) @ torch.tensor(b)).numpy()
    assert max_error(exact, actual) <= budget(exact, yardstick, "float32")
    assert max_error(exact, actual) > budget(exact, a @ b, "float32") or (draw, word) == ("random", "bf16x3")
