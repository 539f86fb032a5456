"""The linear of weights in few bits alone: sizes of numbers and blocks, both ways of x, machines of each kind."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from support import this_cpu
from support.kernel_runs import assembly, compiled, vector_machine

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.cpu.linear.blocks import CpuBlockLinearKernel
from mhsa_compile.kernels.interface.epilogue import Epilogue, EpilogueStep
from mhsa_compile.kernels.interface.kernel import Config
from mhsa_compile.kernels.interface.ops import BlockLinearOp

KERNEL = CpuBlockLinearKernel()
MACHINES = {  # bits, registers, LLVM's CPU, features beyond it
    "avx2": (256, 16, "x86-64-v3", ()),
    "avx512": (512, 32, "x86-64-v4", ()),
    "neon": (128, 32, "x86-64-v3", ()),
    "dots512": (512, 32, "x86-64-v4", ("avx512_vnni",)),
    "dots256": (256, 16, "x86-64-v3", ("avx_vnni",)),
}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
RTOL = {"float32": 2e-6, "bfloat16": 2.0**-8, "float16": 2.0**-10}  # of the largest value
LENGTHS = (1, 2, 3, 5, 13, 40)


def machine(name: str) -> CpuProfile:
    bits, registers, mcpu, features = MACHINES[name]
    profile = vector_machine(bits, registers, this_cpu.level(mcpu), features)
    this_cpu.require(profile.tvm_config())
    return profile


def in_bytes(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Rows of numbers of so many bits, the first in the lowest bits of a byte; the last byte may have room."""
    together = 8 // bits
    whole = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % together))).astype(np.uint8)
    apart = whole.reshape(len(numbers), -1, together) << (bits * np.arange(together, dtype=np.uint8))
    return np.bitwise_or.reduce(apart, axis=-1)


@dataclass
class PackedBlocks:
    """An operation with random weights packed; `weights` in float64, one row a feature."""

    op: BlockLinearOp
    weights: np.ndarray
    bias: np.ndarray
    packed: list[Any]
    run: Any

    def __call__(self, x: np.ndarray, *operands: np.ndarray) -> np.ndarray:
        y = tvm.runtime.tensor(np.full((*x.shape[:-1], self.op.out_features), np.nan, x.dtype))
        self.run(tvm.runtime.tensor(x), *self.packed, *map(tvm.runtime.tensor, operands), y)
        return y.numpy()

    def expected(self, x: np.ndarray) -> np.ndarray:
        rows = rounded(x, self.op.block) if self.op.rounds_x else x.astype(np.float64)
        return rows @ self.weights.T + self.bias

    def check(self, x: np.ndarray) -> None:
        y, expected = self(x), self.expected(x)
        np.testing.assert_allclose(y.astype(np.float64), expected, rtol=0, atol=self.tolerance(expected))

    def tolerance(self, expected: np.ndarray) -> float:
        return RTOL[self.op.dtype] * float(np.abs(expected).max())


def rounded(x: np.ndarray, block: int) -> np.ndarray:
    """x in 127 steps of the largest magnitude of each block, as the operation promises it; in float64."""
    K = x.shape[-1]
    padded = np.zeros((*x.shape[:-1], -(-K // block) * block), np.float32)
    padded[..., :K] = x
    blocks = padded.reshape(*x.shape[:-1], -1, block)
    largest = np.abs(blocks).max(-1, keepdims=True)
    factor = np.float32(127) / np.where(largest == 0, np.float32(np.inf), largest)
    whole = np.rint(blocks * factor.astype(np.float64))
    return (whole * (largest / np.float32(127)).astype(np.float64)).reshape(padded.shape)[..., :K]


def blocks(op: BlockLinearOp, profile: CpuProfile, config: Config | None = None) -> PackedBlocks:
    emitted = KERNEL.emit(op, profile, config or KERNEL.default_config(op, profile))
    library, rng, n = compiled(emitted, profile), np.random.default_rng(0), op.blocks
    dtype = DTYPES[op.dtype]
    numbers = [rng.integers(0, 1 << op.bits, (N, n * op.block)) for N in op.widths]
    scales = [(rng.random((N, n)) * 0.02 + 0.01).astype(dtype) for N in op.widths]
    zeros = {
        "": lambda N: np.full((N, n), 1 << (op.bits - 1)),
        "bytes": lambda N: rng.integers(0, 1 << op.bits, (N, n)),
        "floats": lambda N: (rng.random((N, n)) * (1 << op.bits)).astype(dtype),
    }
    points = [zeros[kind](N) for N, kind in zip(op.widths, op.zeros, strict=True)]
    biases = [rng.standard_normal(N).astype(dtype) * has for N, has in zip(op.widths, op.biased, strict=True)]
    arrays = [in_bytes(q, op.bits).reshape(len(q), n, -1) for q in numbers]
    arrays += [s.reshape(-1) for s in scales]
    stored = {"bytes": lambda z: in_bytes(z, op.bits).reshape(-1), "floats": lambda z: z.reshape(-1)}
    arrays += [stored[kind](z) for z, kind in zip(points, op.zeros, strict=True) if kind]
    arrays += [bias for bias, has in zip(biases, op.biased, strict=True) if has]
    packed = []
    for shape, name in emitted.packed:
        array = np.zeros(shape, name)
        array.view(np.uint8)[...] = 0xFF  # NaN, or wrong, where packing leaves it
        packed.append(tvm.runtime.tensor(array))
    library["pack"](*map(tvm.runtime.tensor, arrays), *packed)
    triples = zip(numbers, points, scales, strict=True)
    wide = [
        (q.reshape(len(q), n, -1) - z[..., None].astype(np.float64)) * s[..., None].astype(np.float64)
        for q, z, s in triples
    ]
    weights = np.concatenate([w.reshape(len(w), -1)[:, : op.in_features] for w in wide])
    return PackedBlocks(op, weights, np.concatenate(biases).astype(np.float64), packed, library["run"])


def rows(op: BlockLinearOp, length: int) -> np.ndarray:
    x = np.random.default_rng(length).standard_normal((length, op.in_features), np.float32)
    return x.astype(DTYPES[op.dtype])


def operation(bits: int, block: int, K: int, zeros: tuple[Any, ...], *, rounds: bool, **fields: Any) -> BlockLinearOp:
    """Weights of 40, 7, ... features side by side, every second one with a bias."""
    widths = (40, 7, 33)[: len(zeros)]
    biased = tuple(i % 2 == 0 for i in range(len(widths)))
    plain = (False,) * len(widths)
    return BlockLinearOp(
        ("L",), K, widths, biased, plain, bits=bits, block=block, zeros=zeros, rounds_x=rounds, **fields
    )


CASES: dict[str, tuple[int, int, int, tuple[Any, ...], dict[str, Any]]] = {
    "4 by 32": (4, 32, 96, ("",), {}),
    "4 by 16, a block that is not whole, zeros of one": (4, 16, 72, ("bytes", ""), {}),
    "4 by 128": (4, 128, 1000, ("bytes",), {}),
    "8 by 16": (8, 16, 72, ("bytes",), {}),
    "8 by 64": (8, 64, 256, ("",), {}),
    "2 by 16": (2, 16, 72, ("bytes",), {}),
    "zeros of floats beside others": (4, 32, 96, ("floats", "bytes", ""), {}),
    "float16": (4, 32, 96, ("bytes",), {"dtype": "float16"}),
    "bfloat16": (4, 32, 96, ("",), {"dtype": "bfloat16"}),
}


@pytest.mark.thorough_but("True-dots512-4 by 16, a block that is not whole, zeros of one")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("rounds", [False, True])
def test_blocks(rounds: bool, name: str, case: tuple[int, int, int, tuple[Any, ...], dict[str, Any]]) -> None:
    """Every tail of rows, features and blocks; `packed` and y begin as NaN."""
    *sizes, fields = case
    linear = blocks(operation(*sizes, rounds=rounds, **fields), machine(name))
    for length in LENGTHS:
        linear.check(rows(linear.op, length))


@pytest.mark.thorough
@pytest.mark.parametrize("rounds", [False, True])
def test_the_same_bits_for_any_number_of_rows_around(rounds: bool) -> None:
    """A row is the same alone and among others, in a tile, half of one and by itself, widened for a group or not."""
    linear = blocks(operation(4, 32, 320, ("bytes",), rounds=rounds), machine("avx512"))
    x = rows(linear.op, 67)
    whole = linear(x)
    for first, end in ((0, 1), (3, 5), (0, 13), (60, 67)):
        np.testing.assert_array_equal(linear(x[first:end]), whole[first:end])


def test_rows_of_zeros_and_of_what_is_not_finite() -> None:
    """A row does not reach others; one of zeros gives the bias; NaN and infinity do not get lost."""
    linear = blocks(operation(4, 32, 96, ("bytes",), rounds=True), machine("avx512"))
    x = rows(linear.op, 7)
    clean = linear(x)
    x[1], x[3, 40], x[5, 70] = 0, np.nan, np.inf
    y = linear(x)
    np.testing.assert_array_equal(y[[0, 2, 4, 6]], clean[[0, 2, 4, 6]])
    np.testing.assert_array_equal(y[1], linear.bias.astype(np.float32))
    assert not np.isfinite(y[[3, 5]]).any()


def test_an_epilogue_is_applied() -> None:
    steps = (EpilogueStep("add", (0, 1)), EpilogueStep("max", (2, 0.0)))
    op = operation(4, 32, 96, ("",), rounds=True, epilogue=Epilogue(1, steps))
    linear, x = blocks(op, machine("avx512")), rows(op, 13)
    residual = np.random.default_rng(9).standard_normal((13, 40), np.float32)
    expected = np.maximum(linear.expected(x) + residual, 0)
    np.testing.assert_allclose(linear(x, residual), expected, rtol=0, atol=linear.tolerance(expected))


def drawn_config(op: BlockLinearOp, profile: CpuProfile, seed: int) -> Config:
    rng, space = np.random.default_rng(seed), KERNEL.search_space(op, profile)
    while True:
        config = {knob: int(rng.choice(choices)) for knob, choices in space.items()}
        if KERNEL.why_not_config(op, profile, config) is None:
            return config


@pytest.mark.thorough_but("0-True")
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_any_config_of_the_space(seed: int, rounds: bool) -> None:
    op, profile = operation(4, 32, 352, ("bytes",), rounds=rounds), machine("dots512")
    linear = blocks(op, profile, drawn_config(op, profile, zlib.crc32(b"%d" % seed)))
    for length in (1, 7, 40):
        linear.check(rows(op, length))


def test_bytes_are_multiplied_by_the_instruction_and_sums_stay_in_registers() -> None:
    profile = vector_machine(512, 32, "znver4", ("avx512_vnni",))
    op = operation(4, 32, 768, ("",), rounds=True)
    code = assembly(KERNEL.emit(op, profile, KERNEL.default_config(op, profile)), profile)
    assert code.count("vpdpbusd") >= 4 * 2 * 2
    assert "vpmulld" not in code
    assert not [line for line in code.splitlines() if "callq" in line and "mhsa_dot" in line]


def test_blocks_that_have_no_whole_words_are_refused() -> None:
    op = operation(2, 8, 72, ("",), rounds=False)
    assert "blocks of a multiple of 16 terms, not 8" in str(KERNEL.why_not(op, machine("avx2")))
