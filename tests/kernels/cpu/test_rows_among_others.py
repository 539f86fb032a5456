"""A row of x gives the same bits in a call of many rows, where y is written while the next tile of rows is multiplied,
as among sixteen, where nothing is multiplied beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from support import this_cpu
from support.kernel_runs import assembly, built
from support.tiles.runs import BFLOAT16, BY_TILES, MACHINE, ROUNDED

from mhsa_compile.kernels.interface.kernel import Emitted, Kernel
from mhsa_compile.kernels.interface.ops import LinearOp

KERNELS = {"bfloat16": (BY_TILES, "ieee", BFLOAT16), "float32": (ROUNDED, "bf16", np.float32)}
TILE = 16


def emitted(kernel: Kernel[Any], rows: int | str, K: int, N: int, dtype: str, products: Any, group: int) -> Emitted:
    op = LinearOp((rows,), K, (N,), (True,), (False,), dtype=dtype, float32_products=products)
    return kernel.emit(op, MACHINE, {**kernel.default_config(op, MACHINE), "group": group})


@pytest.mark.thorough_but("1100-32-4-bfloat16", "64-64-1-float32")
@this_cpu.with_tiles
@pytest.mark.parametrize("dtype", KERNELS)
@pytest.mark.parametrize(("K", "N", "group"), [(32, 33, 8), (64, 64, 1), (800, 40, 2), (1100, 32, 4)])
def test_a_row_has_the_bits_that_it_has_among_sixteen(K: int, N: int, group: int, dtype: str) -> None:
    kernel, products, kind = KERNELS[dtype]
    few, many = (emitted(kernel, rows, K, N, dtype, products, group) for rows in (TILE, "M"))
    alone, among = (built(one, MACHINE) for one in (few, many))
    rng = np.random.default_rng(K)
    weights, bias = (rng.standard_normal(shape, np.float32).astype(kind) for shape in ((N, K), (N,)))
    packed = [tvm.runtime.tensor(np.zeros(shape, name)) for shape, name in many.packed]
    among["pack"](tvm.runtime.tensor(weights), tvm.runtime.tensor(bias), *packed)

    def y_of(run: Any, x: np.ndarray) -> np.ndarray:
        y = tvm.runtime.tensor(np.full((len(x), N), np.nan, kind))
        run(tvm.runtime.tensor(x), *packed, y)
        return y.numpy().view(f"uint{8 * y.numpy().itemsize}")

    for M in (16, 17, 31, 48, 130):
        x = rng.standard_normal((M, K), np.float32).astype(kind)
        if dtype == "float32":
            x[M // 2, K // 3] = 1e-39  # a tile of rows that is multiplied in float32
        y = y_of(among["run"], x)
        for first in (*range(0, M - TILE, TILE), M - TILE):
            block = y_of(alone["run"], x[first : first + TILE])
            if dtype == "float32" and first % TILE and abs(M // 2 - first) < 2 * TILE:
                continue  # other rows share a tile with the one that is multiplied in float32
            assert np.array_equal(y[first : first + TILE], block), (M, first)
            assert not np.array_equal(block, np.roll(block, 1, axis=0))


@pytest.mark.thorough_but("16-tileloadd\\t")
@pytest.mark.parametrize(("rows", "loads"), [(TILE, "tileloadd\t"), ("M", "tileloaddt1\t")])
def test_rows_that_the_first_cache_has_for_all_panels_stay_in_it(rows: int | str, loads: str) -> None:
    text = assembly(emitted(BY_TILES, rows, 64, 64, "bfloat16", "ieee", 8), MACHINE)
    into_left = [line for line in text.splitlines() if "tileload" in line and line.endswith("%tmm6")]
    assert into_left and all(loads in line for line in into_left)
