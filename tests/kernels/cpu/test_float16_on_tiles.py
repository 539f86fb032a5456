"""Linears of float16 on matrix tiles, by two bfloat16 terms, which are all of a number, and by tiles of float16: what
is lost are sums of float32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import tvm
from support import this_cpu
from support.kernel_runs import call, compiled

from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.cpu.linear.float32_on_tiles import CpuFloat16TileLinearKernel
from mhsa_compile.kernels.cpu.linear.term_factors import WORTH_SPLITTING_FLOAT16
from mhsa_compile.kernels.cpu.linear.tiles import CpuTileLinearKernel
from mhsa_compile.kernels.interface.ops import LinearOp
from mhsa_compile.verification.error_budget import budget, max_error

KERNEL = CpuFloat16TileLinearKernel()
PROFILE, WITH_FLOAT16 = load_profile("sapphirerapids"), load_profile("graniterapids")
WAYS = {"by terms": (KERNEL, PROFILE), "by tiles_of_float16": (CpuTileLinearKernel(), WITH_FLOAT16)}
BOTH = pytest.mark.parametrize("way", WAYS)
COUNTS = (1, WORTH_SPLITTING_FLOAT16 - 1, WORTH_SPLITTING_FLOAT16, 45, 97)


def operation(in_features: int, *widths: int) -> LinearOp:
    count = len(widths)
    return LinearOp(("B", "L"), in_features, widths, (True,) * count, (False,) * count, dtype="float16")


class Linear:
    """An operation of one weight, compiled, its weights packed."""

    def __init__(self, way: str, weight: np.ndarray, bias: np.ndarray) -> None:
        op, (kernel, profile) = operation(weight.shape[1], len(weight)), WAYS[way]
        this_cpu.require(profile.tvm_config())
        emitted = kernel.emit(op, profile, kernel.default_config(op, profile))
        library = compiled(emitted, profile)
        self.packed = [tvm.runtime.tensor(np.zeros(shape, dtype)) for shape, dtype in emitted.packed]
        library["pack"](tvm.runtime.tensor(weight), tvm.runtime.tensor(bias), *self.packed)
        self.weight, self.bias, self.run = weight, bias, library["run"]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        y = np.full((1, len(x), len(self.weight)), np.nan, np.float16)
        return call(self.run, x[None], *(array.numpy() for array in self.packed), y)[0]

    def exact(self, x: np.ndarray) -> np.ndarray:
        return x.astype(np.float64) @ self.weight.T.astype(np.float64) + self.bias.astype(np.float64)

    def eager(self, x: np.ndarray) -> np.ndarray:
        return torch.nn.functional.linear(*map(torch.from_numpy, (x, self.weight, self.bias))).numpy()


def numbers(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def test_what_it_takes():
    op = operation(64, 64)
    assert KERNEL.why_not(op, PROFILE) is None
    assert KERNEL.why_not(replace(op, rows=(1, WORTH_SPLITTING_FLOAT16)), PROFILE) is None
    assert "rows" in KERNEL.why_not(replace(op, rows=(1, WORTH_SPLITTING_FLOAT16 - 1)), PROFILE)
    assert "float16" in KERNEL.why_not(replace(op, dtype="float32"), PROFILE)
    assert "eight bits" in KERNEL.why_not(replace(op, int8_weights=True), PROFILE)
    assert "amx_bf16" in KERNEL.why_not(op, load_profile("znver4"))


@pytest.mark.thorough_but("by terms-197")
@pytest.mark.parametrize("in_features", [1, 33, 64, 197, 1100, 3072])
@BOTH
def test_any_number_of_rows(in_features, way):
    layer = Linear(way, numbers((70, in_features)), numbers((70,), 1))
    for count in COUNTS:
        x = numbers((count, in_features), 2)
        assert max_error(layer.exact(x), layer(x)) <= budget(layer.exact(x), layer.eager(x), "float16")


@pytest.mark.thorough_but("by terms")
@BOTH
def test_one_number_of_each_row_is_multiplied_exactly(way):
    """Every exponent, denormals too, by factors of all bits."""
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 0x7800, (64, 64), np.uint16) | (rng.integers(0, 2, (64, 64), np.uint16) << 15)
    weight = bits.view(np.float16)
    layer = Linear(way, weight, np.zeros(64, np.float16))
    scales = np.diag((2.0 ** rng.integers(-9, 1, 64)).astype(np.float16) * np.float16(1.999))
    exact = layer.exact(scales)
    np.testing.assert_array_equal(layer(scales), exact.astype(np.float32).astype(np.float16))


@pytest.mark.thorough_but("by terms")
@BOTH
def test_infinity_and_nan_are_where_float32_has_them(way):
    weight, x = numbers((70, 45)), numbers((97, 45), 1)
    weight[3, 5], weight[40, 7], x[30, 2], x[31, 0], x[70, 44] = np.inf, np.nan, np.inf, np.nan, -np.inf
    x[50] = 65504
    layer = Linear(way, weight, np.zeros(70, np.float16))
    y, eager = layer(x), layer.eager(x)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(eager))
    np.testing.assert_array_equal(np.where(np.isinf(y), y, 0), np.where(np.isinf(eager), eager, 0))
    finite = np.isfinite(eager)
    np.testing.assert_allclose(y[finite], eager[finite], rtol=2e-3, atol=2e-2)


def test_tiles_of_float16_take_any_rows():
    kernel, op = CpuTileLinearKernel(), operation(64, 64)
    assert kernel.why_not(replace(op, rows=(1, 1)), WITH_FLOAT16) is None
    assert kernel.why_not(op, PROFILE) == "a CPU with amx_fp16"
