"""Linears of float32 by bfloat16 terms on matrix tiles: as exact as they say, Inf and NaN where float32 has them."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import tvm
from support import this_cpu
from support.kernel_runs import assembly, call, compiled, inner_loops, stack_stores
from support.term_products import products_of_terms

from mhsa_compile.compiler.selection.float32_products import offers_products
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.cpu.linear.float32_on_tiles import CpuFloat32TileLinearKernel
from mhsa_compile.kernels.cpu.linear.rounded_on_tiles import CpuRoundedTileLinearKernel
from mhsa_compile.kernels.cpu.linear.term_factors import WORTH_SPLITTING
from mhsa_compile.kernels.cpu.units.float32_terms import ORDER
from mhsa_compile.kernels.interface.epilogue import Epilogue, EpilogueStep
from mhsa_compile.kernels.interface.ops import LinearOp
from mhsa_compile.spec.float32_products import TERM_PRODUCTS
from mhsa_compile.verification.error_budget import budget, max_error

KERNEL, ROUNDED = CpuFloat32TileLinearKernel(), CpuRoundedTileLinearKernel()
KERNELS = {"bf16x6": KERNEL, "bf16x3": KERNEL, "bf16": ROUNDED}
FEWEST = {**WORTH_SPLITTING, "bf16": 1}
"""Rows from which on a word is kept."""
PROFILE = load_profile("sapphirerapids")
RTOL = 4e-6  # of the largest value: float32 sums of up to 200 terms
LARGE, SMALL = np.float32(2.0**60), np.float32(2.0**-50)


@dataclass
class Linear:
    """One operation, compiled, its weights packed."""

    op: LinearOp
    weight: np.ndarray  # (N, K) of all projections
    bias: np.ndarray
    packed: list[tvm.runtime.Tensor]
    run: object

    def __call__(self, x: np.ndarray) -> np.ndarray:
        y = np.full((1, len(x), self.op.pitch), np.nan, np.float32)
        return call(self.run, x[None], *(array.numpy() for array in self.packed), y)[0, :, : self.op.out_features]

    def exact(self, x: np.ndarray, word: str = "ieee") -> np.ndarray:
        """In float64, of the products of a word."""
        with np.errstate(invalid="ignore", over="ignore"):
            return products_of_terms(x, self.weight.T, word) + self.bias.astype(np.float64)

    def eager(self, x: np.ndarray) -> np.ndarray:
        return torch.nn.functional.linear(*map(torch.from_numpy, (x, self.weight, self.bias))).numpy()

    def check(self, x: np.ndarray) -> None:
        y, word = self(x), self.op.float32_products
        if len(x) < FEWEST[word]:
            word = "ieee"
        exact, terms = self.exact(x), self.exact(x, word)
        assert max_error(terms, y) <= RTOL * np.abs(terms).max()
        model = terms.astype(np.float32) if word in ("bf16x3", "bf16") else self.eager(x)
        assert max_error(exact, y) <= budget(exact, model, "float32")


@functools.cache
def code(op: LinearOp, config: tuple = ()) -> tuple:
    this_cpu.require(PROFILE.tvm_config())
    kernel = KERNELS[op.float32_products]
    emitted = kernel.emit(op, PROFILE, kernel.default_config(op, PROFILE) | dict(config))
    return compiled(emitted, PROFILE), emitted.packed


def linear(op: LinearOp, weight: np.ndarray, bias: np.ndarray, **config: int) -> Linear:
    library, shapes = code(op, tuple(config.items()))
    ends = np.cumsum(op.widths)[:-1]
    parts = [
        np.ascontiguousarray(w.T if flip else w) for w, flip in zip(np.split(weight, ends), op.transposed, strict=True)
    ]
    parts += [b for b, has in zip(np.split(bias, ends), op.biased, strict=True) if has]
    packed = [tvm.runtime.tensor(np.full(shape, 0xFF, np.uint8).view(dtype)) for shape, dtype in _bytes(shapes)]
    library["pack"](*map(tvm.runtime.tensor, parts), *packed)
    bias = np.concatenate([b * has for b, has in zip(np.split(bias, ends), op.biased, strict=True)])
    return Linear(op, weight, bias, packed, library["run"])


def _bytes(shapes: tuple) -> list:
    """Shapes in bytes."""
    return [((*shape[:-1], shape[-1] * 4), dtype) for shape, dtype in shapes]


def plain(in_features: int, out_features: int, word: str = "bf16x6", **fields) -> LinearOp:
    return LinearOp(("B", "L"), in_features, (out_features,), (True,), (False,), float32_products=word, **fields)


def random_linear(op: LinearOp, seed: int = 0, **config: int) -> Linear:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((op.out_features, op.in_features), np.float32)
    return linear(op, weight, rng.standard_normal(op.out_features, np.float32), **config)


def rows(count: int, in_features: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, in_features), np.float32)


def test_its_pairs_of_terms_are_those_of_each_word():
    assert {word: set(pairs) for word, pairs in ORDER.items()} == {w: set(pairs) for w, pairs in TERM_PRODUCTS.items()}
    for pairs in ORDER.values():
        assert all(set(enumerate(one)) & set(enumerate(other)) for one, other in itertools.pairwise(pairs))


def test_what_it_takes():
    op = plain(128, 96)
    assert KERNEL.why_not(op, PROFILE) is None
    assert KERNEL.float32_products(op, PROFILE) == ("bf16x6", "bf16x3")
    assert KERNEL.exact_products(op, PROFILE) == ("bf16x6",)
    assert KERNEL.exact_products(replace(op, rows=(1, 48)), PROFILE) == ("bf16x6",)
    assert KERNEL.exact_products(replace(op, rows=(1, 47)), PROFILE) == ()
    assert KERNEL.exact_products(plain(127, 96), PROFILE) == KERNEL.exact_products(plain(128, 95), PROFILE) == ()
    rounded = replace(op, float32_products="bf16")
    assert ROUNDED.why_not(rounded, PROFILE) is None
    assert ROUNDED.float32_products(op, PROFILE) == ("bf16",) and ROUNDED.exact_products(op, PROFILE) == ()
    for kernel, taken in ((KERNEL, op), (ROUNDED, rounded)):
        assert "ieee" in kernel.why_not(replace(op, float32_products="ieee"), PROFILE)
        assert "bfloat16" in kernel.why_not(replace(taken, dtype="bfloat16"), PROFILE)
        assert "eight bits" in kernel.why_not(replace(taken, int8_weights=True), PROFILE)
        assert "amx_bf16" in kernel.why_not(taken, load_profile("znver4"))
        for other, profile in ((op, load_profile("znver4")), (replace(op, int8_weights=True), PROFILE)):
            assert kernel.float32_products(other, profile) == ()
    assert KERNEL.why_not(rounded, PROFILE) and ROUNDED.why_not(op, PROFILE)
    assert set(offers_products(op, PROFILE)) == set(TERM_PRODUCTS)


@pytest.mark.thorough_but("bf16x6")
@pytest.mark.parametrize("word", TERM_PRODUCTS)
def test_linears_side_by_side(word):
    """Of both layouts, with and without bias; every tail of rows, of features and of K."""
    op = LinearOp(("B", "L"), 197, (5, 11, 200), (True, False, True), (False, True, False), float32_products=word)
    layer = random_linear(op)
    for count in (1, 5, 15, 16, 17, 31, 45, 63, 64, 65, 81, 197):
        layer.check(rows(count, 197))


@pytest.mark.thorough_but("33-bf16", "33-bf16x3")
@pytest.mark.parametrize("word", TERM_PRODUCTS)
@pytest.mark.parametrize("in_features", [1, 2, 33, 64, 1100])
def test_blocks_passes_and_parts(in_features, word):
    group = {"group": 2} if word == "bf16" else {}
    layer = random_linear(plain(in_features, 70, word), block=2, depth=9, **group)
    for count in (1, 33, 63, 64, 150):
        layer.check(rows(count, in_features))


def test_an_epilogue_comes_once_to_each_element_and_padding_is_left_alone():
    steps = (EpilogueStep("mul", (0, 1)), EpilogueStep("add", (2, 0)))
    op = plain(700, 70, epilogue=Epilogue(1, steps), padding=3)
    layer, x = random_linear(op, depth=8), rows(77, 700)
    factor = np.random.default_rng(3).standard_normal((1, 77, 73), np.float32)
    y = call(layer.run, x[None], *(a.numpy() for a in layer.packed), factor, np.full((1, 77, 73), 5, np.float32))[0]
    assert (y[:, 70:] == 5).all()
    exact = layer.exact(x)
    expected = exact * factor[0, :, :70] + exact
    assert max_error(expected, y[:, :70]) <= RTOL * np.abs(expected).max()


def _normal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


INPUTS = {
    "normal": _normal,
    "positive": lambda rng, shape: rng.random(shape, np.float32),
    "outliers": lambda rng, shape: _normal(rng, shape) * np.where(np.arange(shape[1]) == 0, 1e4, 1),
    "rows of zeros": lambda rng, shape: _normal(rng, shape) * (np.arange(shape[0])[:, None] % 3 > 0),
    "scales": lambda rng, shape: _normal(rng, shape) * 10 ** rng.uniform(-8, 8, (shape[0], 1)),
}


@pytest.mark.thorough_but("768")
@pytest.mark.parametrize("in_features", [*range(1, 8), 16, 31, 32, 33, 64, 100, 128, 129, 384, 768, 1000, 3072])
def test_six_products_are_inside_float32s_budget(in_features):
    """In every class of inputs. Few rows are multiplied in float32."""
    rng = np.random.default_rng(in_features)
    weight, bias = rng.standard_normal((49, in_features), np.float32), rng.standard_normal(49, np.float32)
    for signs in (weight, np.abs(weight)):
        layer = linear(plain(in_features, 49), signs, bias)
        for draw in INPUTS.values():
            for count in (64, 101):
                x = draw(rng, (count, in_features)).astype(np.float32)
                exact, eager = layer.exact(x), layer.eager(x)
                assert max_error(exact, layer(x)) <= budget(exact, eager, "float32")


SPECIAL = (np.inf, -np.inf, np.nan, 3.4e38, -3.39e38, 1.003e30, 1e-40, 2e-45)


def assert_as_float32(layer: Linear, x: np.ndarray, rtol: float = RTOL) -> None:
    """Inf and NaN where float32 has them, and no number further off than a sum in float32 may be."""
    y, eager, exact = layer(x), layer.eager(x), layer.exact(x)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(eager))
    np.testing.assert_array_equal(np.where(np.isinf(y), y, 0), np.where(np.isinf(eager), eager, 0))
    finite = np.isfinite(eager)
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.abs(x.astype(np.float64)) @ np.abs(layer.weight.T.astype(np.float64)) + np.abs(layer.bias)
        allowed = rtol * size + layer.op.in_features * np.finfo(np.float32).smallest_subnormal
        if layer.op.float32_products == "bf16":  # of a weight that is smaller than bfloat16's normal numbers
            allowed += np.abs(x.astype(np.float64)).sum(1, keepdims=True) * 2.0**-133
        assert (np.abs(y - exact)[finite] <= allowed[finite]).all()


@pytest.mark.thorough_but("bf16")
@pytest.mark.parametrize("word", ["bf16x6", pytest.param("bf16x3", marks=pytest.mark.thorough), "bf16"])
def test_extraordinary_rows_and_features(word):
    """Every kind in a row of x, in a feature of the weights, and in both."""
    rng = np.random.default_rng(0)
    op = plain(45, 100, word)
    weight, bias = rng.standard_normal((100, 45), np.float32), np.zeros(100, np.float32)
    x = rows(100, 45)
    clean = linear(op, weight, bias)
    expected = clean(x)
    rows_with, weights_with = x.copy(), weight.copy()
    for i, value in enumerate(SPECIAL):
        rows_with[33 + i, i], weights_with[40 + i, 2 * i] = value, value
    rows_with[50], rows_with[51], rows_with[52] = 0, x[52] * 1e-30, x[53] * 1e-42
    weights_with[50], weights_with[51], weights_with[52] = 0, weight[52] * 1e-30, weight[52] * 1e-42
    both = linear(op, weights_with, bias)
    rtol = {"bf16x6": RTOL, "bf16x3": 2.0**-15, "bf16": 2.0**-7}[word]
    alike = functools.partial(assert_as_float32, rtol=rtol)
    for layer, inputs in ((clean, rows_with), (both, x), (both, rows_with)):
        alike(layer, inputs)
    for y in (clean(rows_with), both(x), both(rows_with)):  # what has nothing to do with them is the same, bit for bit
        np.testing.assert_array_equal(y[:32, :32], expected[:32, :32])
        np.testing.assert_array_equal(y[64:, 64:], expected[64:, 64:])
    assert np.isnan(both(x)[:, 42]).all() and np.isnan(clean(rows_with)[35]).all()
    large = linear(op, weight * LARGE, bias)
    alike(large, x * LARGE)  # beyond float32's range in the sum
    alike(linear(op, weight * np.float32(0.99 * 2.0**57), bias), x * np.float32(2.0**56))
    alike(linear(op, weight * SMALL, bias), x)


def test_a_finite_weight_stays_finite():
    """Of those that bfloat16 would round to infinity."""
    weight = np.full((33, 40), 3.4e38, np.float32)
    weight[1], weight[2, 0] = -3.4e38, np.inf
    layer = linear(plain(40, 33, "bf16"), weight, np.zeros(33, np.float32))
    y = layer(rows(20, 40) * np.float32(2.0**-10))
    assert np.isfinite(y[:, :2]).all() and np.isinf(y[:, 2]).all()


def test_few_rows_are_rounded_too():
    """By "bf16", so that one row is what it is beside others."""
    layer, x = random_linear(plain(384, 70, "bf16")), rows(40, 384)
    np.testing.assert_array_equal(np.concatenate([layer(x[i : i + 1]) for i in range(40)]), layer(x))


@pytest.mark.thorough
def test_small_rows_and_features_lose_nothing():
    """Of the smallest that are multiplied by terms, lower terms are normal still."""
    rng = np.random.default_rng(1)
    op = plain(64, 64)
    weight = rng.uniform(1, 2, (64, 64)).astype(np.float32)
    layer, x = (
        linear(op, weight * SMALL, np.zeros(64, np.float32)),
        rng.uniform(1, 2, (64, 64)).astype(np.float32) * SMALL,
    )
    exact = layer.exact(x)
    assert max_error(exact, layer(x)) <= budget(exact, layer.eager(x), "float32")


@pytest.mark.thorough
def test_few_rows_are_multiplied_in_float32():
    """Whether their number is known or not; of three products the others are coarse."""
    x = rows(64, 384)
    for rows_of_op, counts in ((("B", "L"), (1, 31)), ((1, 31), (31,))):
        layer = random_linear(replace(plain(384, 70, "bf16x3"), rows=rows_of_op))
        for count in counts:
            exact = layer.exact(x[:count])
            assert max_error(exact, layer(x[:count])) <= RTOL * np.abs(exact).max()
    layer = random_linear(plain(384, 70, "bf16x3"))
    assert max_error(layer.exact(x[:32]), layer(x[:32])) > RTOL * np.abs(layer.exact(x[:32])).max()


def test_one_hot_rows_select_exactly():
    layer = random_linear(plain(64, 70))
    np.testing.assert_array_equal(layer(np.eye(64, dtype=np.float32)), layer.weight.T + layer.bias)


@pytest.mark.thorough
def test_six_products_at_many_random_shapes():
    """None of 240 beyond float32's budget."""
    rng, shares = np.random.default_rng(5), []
    for seed in range(24):
        K, N = int(2 ** rng.uniform(0, 11)), int(2 ** rng.uniform(3, 9))
        layer = random_linear(plain(K, N), seed)
        for draw in INPUTS.values():
            for count in (int(2 ** rng.uniform(6, 7)), int(2 ** rng.uniform(7, 8))):
                x = draw(rng, (count, K)).astype(np.float32)
                exact = layer.exact(x)
                shares.append(max_error(exact, layer(x)) / budget(exact, layer.eager(x), "float32"))
    assert max(shares) <= 1, max(shares)


def test_the_inner_loop_loads_few_tiles_and_calls_nothing():
    op = plain(768, 768)
    text = assembly(KERNEL.emit(op, PROFILE, KERNEL.default_config(op, PROFILE)), PROFILE)
    counts = set()
    for body in inner_loops(text, "tdpbf16ps"):
        assert not stack_stores(body) and not any("call" in line for line in body)
        counts.add(tuple(sum(word in line for line in body) for word in ("tdpbf16ps", "tileloadd")))
    assert counts == {(12, 13)}
