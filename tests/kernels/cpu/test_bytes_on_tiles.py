"""Linears in eight bits on tiles: bit for bit as the kernels for any vector CPU have them; the sums also in NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from support import this_cpu
from support.byte_ops import of_bytes, whole_numbers
from support.kernel_runs import assembly, compiled
from support.tiles.tile_flow import tile_functions

from mhsa_compile.hardware.profile import CpuProfile, load_profile
from mhsa_compile.kernels.cpu.linear.bytes_on_tiles import CpuTileInt8LinearKernel, CpuTileQuantisedLinearKernel
from mhsa_compile.kernels.cpu.linear.kernel import MOST_INT8_TERMS, CpuLinearKernel
from mhsa_compile.kernels.cpu.linear.quantised import MOST_TERMS, CpuQuantisedLinearKernel
from mhsa_compile.kernels.interface.epilogue import Epilogue, EpilogueStep
from mhsa_compile.kernels.interface.kernel import Config, Emitted
from mhsa_compile.kernels.interface.ops import LinearOp, QuantisedLinearOp

Array = np.ndarray[Any, Any]
OF_BYTES = CpuTileQuantisedLinearKernel(), CpuQuantisedLinearKernel()
ROUNDED = CpuTileInt8LinearKernel(), CpuLinearKernel()
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "int32": np.int32}
ROWS = ((1, 0), (1, 1), (1, 5), (1, 16), (1, 17), (1, 31), (3, 15), (1, 130))


def profile() -> CpuProfile:
    profile = load_profile("sapphirerapids")
    assert isinstance(profile, CpuProfile)
    return profile


@pytest.fixture
def machine() -> CpuProfile:
    this_cpu.require(profile().tvm_config())
    return profile()


class Call:
    """An operation as one kernel compiles it, with its weights packed."""

    def __init__(self, emitted: Emitted, machine: CpuProfile, given: list[Array]) -> None:
        library = compiled(emitted, machine)
        self.packed = [tvm.runtime.tensor(np.full(shape, -1, DTYPES[dtype])) for shape, dtype in emitted.packed]
        library["pack"](*map(tvm.runtime.tensor, given), *self.packed)
        self._run = library["run"]

    def __call__(self, x: Array, numbers: list[Array], operands: list[Array], y: Array) -> Array:
        result = tvm.runtime.tensor(y)
        self._run(*map(tvm.runtime.tensor, (x, *numbers)), *self.packed, *map(tvm.runtime.tensor, operands), result)
        return result.numpy()


class Pair:
    """One operation by both kernels."""

    def __init__(self, op: LinearOp, kernels: Any, machine: CpuProfile, given: list[Array], config: Config) -> None:
        tiles, vectors = kernels
        self._op = op
        assert tiles.why_not(op, machine) is None
        wide = {**vectors.default_config(op, machine)}
        self._calls = [
            Call(tiles.emit(op, machine, {**tiles.default_config(op, machine), **config}), machine, given),
            Call(vectors.emit(op, machine, wide), machine, given),
        ]

    def check(self, x: Array, *numbers: Array, operands: list[Array] | None = None) -> Array:
        shape = (*x.shape[:-1], self._op.out_features)
        ours, other = (
            call(x, list(numbers), operands or [], np.full(shape, np.nan, DTYPES[self._op.dtype]))
            for call in self._calls
        )
        assert not np.isnan(other.astype(np.float32)).any()
        np.testing.assert_array_equal(ours.view(np.uint8), other.view(np.uint8))
        return ours


def sides(op: LinearOp, weights: list[Array]) -> list[Array]:
    return [np.ascontiguousarray(w.T) if t else w for w, t in zip(weights, op.transposed, strict=True)]


def check_bytes(op: QuantisedLinearOp, machine: CpuProfile, config: Config, *, rows: Any = ROWS) -> None:
    """Both kernels, and the sums in NumPy: with scales of 1 and sums below 2^24 float32 is exact."""
    rng = np.random.default_rng(1)
    weights = [whole_numbers(rng, d, n, op.in_features) for d, n in zip(op.stored, op.widths, strict=True)]
    zeros = [
        np.full(n, 128 * (d == "uint8"), d) if op.centred else whole_numbers(rng, d, n)
        for d, n in zip(op.stored, op.widths, strict=True)
    ]
    scales = [rng.choice(np.float32([0.5, 1, 2]), n) for n in op.widths]
    biases = [
        rng.integers(-99, 99, n).astype(np.float32) for n, there in zip(op.widths, op.biased, strict=True) if there
    ]
    pair = Pair(op, OF_BYTES, machine, [*sides(op, weights), *zeros, *scales, *biases], config)
    wide = np.concatenate(
        [w.astype(np.int64) - z.astype(np.int64)[:, None] for w, z in zip(weights, zeros, strict=True)]
    )
    left = iter(biases)
    bias = np.concatenate([next(left) if there else np.zeros(n) for n, there in zip(op.widths, op.biased, strict=True)])
    for B, L in rows:
        x = whole_numbers(rng, op.x_dtype, B, L, op.in_features)
        for zero in (-128, 3) if op.x_dtype == "int8" else (0, 128, 255):
            y = pair.check(x, np.array(zero, op.x_dtype), np.array(0.25, np.float32))
            expected = (x.astype(np.int64) - zero) @ wide.T * 0.25 * np.concatenate(scales) + bias
            np.testing.assert_allclose(y, expected, rtol=2**-22)


CASES = [
    (7, (1,), "uint8", ("int8",)),
    (33, (7, 33), "uint8", ("uint8", "int8")),
    (200, (33, 1, 50), "int8", ("int8", "uint8", "uint8")),
    (128, (96,), "uint8", ("int8",)),
    (64, (49,), "int8", ("int8",)),
    (65, (40,), "int8", ("uint8",)),
]


@pytest.mark.thorough_but("1")
@pytest.mark.parametrize("case", CASES, ids=map(str, range(len(CASES))))
def test_bytes_of_a_file(case: Any, machine: CpuProfile) -> None:
    """Zeros of each feature; tails of rows, of features and of K; rows in place and copied."""
    check_bytes(of_bytes(*case), machine, {})


@pytest.mark.thorough
@pytest.mark.parametrize(("stored", "zero"), [("int8", 0), pytest.param("uint8", 128, marks=pytest.mark.thorough)])
def test_zeros_that_need_no_sums_of_rows(stored: str, zero: int, machine: CpuProfile) -> None:
    """Rows of x stay where they are."""
    check_bytes(of_bytes(192, (100,), "uint8", (stored,), centred=True), machine, {})


@pytest.mark.thorough
@pytest.mark.parametrize(
    "config",
    [{"height": 3, "blocks": 4}, pytest.param({"height": 1, "blocks": 1}, marks=pytest.mark.thorough)],
    ids=str,
)
def test_panels_and_blocks_of_a_task(config: Config, machine: CpuProfile) -> None:
    """Blocks whose y is written behind the products of the next, of the same panel and of another."""
    check_bytes(of_bytes(310, (97,), "uint8", ("uint8",)), machine, config, rows=((1, 300), (1, 17)))


def test_sums_of_extremes(machine: CpuProfile) -> None:
    """Numbers of one sign, whose sum comes near to 31 bits."""
    op = of_bytes(MOST_TERMS // 1000 * 1000, (17,), "uint8", ("int8",))
    weights, zeros = np.full((17, op.in_features), -128, np.int8), np.full(17, 127, np.int8)
    given = [weights.T.copy(), zeros, np.ones(17, np.float32), np.zeros(17, np.float32)]
    pair = Pair(op, OF_BYTES, machine, given, {})
    for zero in (0, 255):
        y = pair.check(np.full((1, 3, op.in_features), 255 - zero, np.uint8), np.array(zero, np.uint8), np.float32(1))
        assert (np.abs(y) == op.in_features * 255 * 255).all()


def test_an_epilogue_behind_bytes(machine: CpuProfile) -> None:
    rng = np.random.default_rng(3)
    steps = Epilogue(1, (EpilogueStep("max", (0, 0.0)), EpilogueStep("add", (2, 1))))
    op = of_bytes(64, (50,), "uint8", ("int8",), centred=True, epilogue=steps)
    given = [whole_numbers(rng, "int8", 64, 50), np.zeros(50, np.int8), *rng.random((2, 50), np.float32)]
    pair = Pair(op, OF_BYTES, machine, given, {})
    for rows in (5, 45):
        residual = rng.standard_normal((1, rows, 50), np.float32)
        x, numbers = whole_numbers(rng, "uint8", 1, rows, 64), (np.array(3, np.uint8), np.array(0.25, np.float32))
        pair.check(x, *numbers, operands=[residual])


def check_rounded(op: LinearOp, machine: CpuProfile, config: Config, *, rows: Any = ROWS) -> None:
    rng, dtype = np.random.default_rng(4), DTYPES[op.dtype]
    weights = [rng.standard_normal((n, op.in_features), np.float32).astype(dtype) for n in op.widths]
    biases = [rng.random(n, np.float32).astype(dtype) for n, there in zip(op.widths, op.biased, strict=True) if there]
    pair = Pair(op, ROUNDED, machine, [*sides(op, weights), *biases], config)
    for B, L in rows:
        pair.check(rng.standard_normal((B, L, op.in_features), np.float32).astype(dtype))


@pytest.mark.thorough_but("bfloat16-200")
@pytest.mark.parametrize("in_features", [5, 64, 200])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_rounded_by_their_own_scale(dtype: Any, in_features: int, machine: CpuProfile) -> None:
    transposed, biased = (True, False, True), (True, False, True)
    op = LinearOp(("B", "L"), in_features, (33, 1, 50), biased, transposed, dtype=dtype, int8_weights=True)
    check_rounded(op, machine, {})


def test_rows_that_are_known(machine: CpuProfile) -> None:
    op = LinearOp((1, 33), 128, (96,), (False,), (False,), dtype="float32", int8_weights=True)
    check_rounded(op, machine, {"blocks": 1}, rows=((1, 33),))


def test_which_operations_it_takes() -> None:
    here, other = profile(), load_profile("x86-64-v4")
    assert isinstance(other, CpuProfile)
    plain = of_bytes(64, (8,), "uint8", ("int8",))
    rounded = LinearOp(("B", "L"), 64, (8,), (True,), (False,), int8_weights=True)
    for (kernel, _), op, terms in ((OF_BYTES, plain, MOST_TERMS), (ROUNDED, rounded, MOST_INT8_TERMS)):
        assert kernel.why_not(op, here) is None
        assert kernel.why_not(op, other) == "a CPU with amx_int8"
        assert kernel.why_not(replace(op, rows=(1, 4)), here) == "rows from 5 on, not 4"
        assert kernel.why_not(replace(op, rows=(1, 5)), here) is None
        assert "terms" in str(kernel.why_not(replace(op, in_features=terms + 1), here))
    assert ROUNDED[0].why_not(replace(rounded, int8_weights=False), here) == "weights in eight bits, not float32"


@pytest.mark.parametrize(("x", "instruction"), [("uint8", "tdpbusd"), ("int8", "tdpbssd")])
def test_loads_and_products_of_a_step(x: str, instruction: str) -> None:
    """Of one tile by two: every sum is stored once, behind all of K, and nothing is called while sums are in tiles, nor
    by an epilogue."""
    gelu = Epilogue(0, (EpilogueStep("erf", (0,)), EpilogueStep("mul", (1, 0))))
    op = replace(of_bytes(768, (768,), x, ("int8",)), biased=(True,), epilogue=gelu)
    (function,) = tile_functions(
        assembly(OF_BYTES[0].emit(op, profile(), OF_BYTES[0].default_config(op, profile())), profile())
    )
    code = "\n".join(line for block in function.blocks for line in block.lines)
    assert [code.count(name) for name in (instruction, "tileloadd", "tilezero", "tilestored")] == [2, 3, 2, 2]
    assert not function.calls_across_tiles and not function.returns_configured
