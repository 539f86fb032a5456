"""Weights of a linear in formats that only tests have: the classes are here, and no kernel knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from support import this_cpu
from support.kernel_runs import compiled, vector_machine
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.formats.format import Format
from mhsa_compile.kernels.cpu.formats.int8_rows import largest_magnitude
from mhsa_compile.kernels.cpu.linear.kernel import CpuLinearKernel, linear
from mhsa_compile.kernels.cpu.linear.packed_layout import layout_of
from mhsa_compile.kernels.cpu.simd.vectors import materialize, splat, vector_type
from mhsa_compile.kernels.interface.ops import LinearOp

MACHINES = {"avx2": (256, 16, "x86-64-v3"), "avx512": (512, 32, "x86-64-v4"), "neon": (128, 32, "x86-64-v3")}


class Halves(Format):
    """The upper byte of a float16: five bits of exponent, two of fraction."""

    def widened(self, elements: Any, lanes: int) -> Any:
        upper = T.cast(elements, vector_type("uint16", lanes)) << splat(T.uint16(8), lanes)
        return T.cast(T.reinterpret(vector_type("float16", lanes), upper), vector_type("float32", lanes))

    def narrowed(self, value: Any, lanes: int, factor: Any = None) -> Any:
        bits = T.reinterpret(vector_type("uint32", lanes), value)
        # To nearest even at bit 21 of float32, so that float16 then holds it as it is.
        even = (bits >> splat(T.uint32(21), lanes)) & splat(T.uint32(1), lanes)
        cut = (bits + splat(T.uint32(0xFFFFF), lanes) + even) & splat(T.uint32(0xFFE00000), lanes)
        half = T.cast(T.reinterpret(vector_type("float32", lanes), cut), vector_type("float16", lanes))
        upper = T.reinterpret(vector_type("uint16", lanes), half) >> splat(T.uint16(8), lanes)
        return T.cast(upper, vector_type("uint8", lanes))


class FewSteps(Format):
    """Seven steps to either side of zero, in a byte each, and a step for each row; x stays as it is."""

    def widened(self, elements: Any, lanes: int) -> Any:
        return T.cast(elements, vector_type("float32", lanes))

    def narrowed(self, value: Any, lanes: int, factor: Any = None) -> Any:
        return T.cast(T.nearbyint(value * splat(factor, lanes)), vector_type("int8", lanes))

    def scale(self, read: Callable[[Any, int], Any], count: int, lanes: int, keep: Callable[[Any], None]) -> Any:
        largest = materialize(largest_magnitude(read, count, lanes), "float32")
        keep(largest / T.float32(7))
        return materialize(T.float32(7) / largest, "float32")


def as_halves(weight: np.ndarray) -> np.ndarray:
    return weight.astype(ml_dtypes.float8_e5m2).astype(np.float64)


def in_few_steps(weight: np.ndarray) -> np.ndarray:
    largest = np.abs(weight).max(axis=1, keepdims=True)
    return np.rint(weight * (np.float32(7) / largest)) * (largest / np.float32(7)).astype(np.float64)


FORMATS = {"halves": (Halves("uint8"), as_halves), "few steps": (FewSteps("int8", is_scaled=True), in_few_steps)}


@pytest.mark.thorough_but("avx2-halves-float32", "avx512-few steps-bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_linear_computes_with_the_rounded_weights(machine, name, dtype):
    format, rounded = FORMATS[name]
    bits, registers, mcpu = MACHINES[machine]
    profile = vector_machine(bits, registers, this_cpu.level(mcpu))
    op = LinearOp(("B", "L"), 133, (70, 11), (True, False), (False, True), dtype=dtype)
    config = CpuLinearKernel().default_config(op, profile)
    emitted = linear(layout_of(op, profile, config["columns"], format), profile, config)
    library = compiled(emitted, profile)

    rng, numpy = np.random.default_rng(5), np.dtype(dtype)
    weights = [rng.standard_normal((n, op.in_features), np.float32).astype(numpy) for n in op.widths]
    bias = rng.standard_normal(op.widths[0], np.float32).astype(numpy)
    packed = [tvm.runtime.tensor(np.full(shape, 3, np.dtype(kind))) for shape, kind in emitted.packed]
    assert packed[0].numpy().itemsize == 1 and len(packed) == 2 + format.is_scaled
    library["pack"](*map(tvm.runtime.tensor, (weights[0], np.ascontiguousarray(weights[1].T), bias)), *packed)

    wide = np.concatenate([rounded(weight.astype(np.float32)) for weight in weights])
    assert np.abs(wide - np.concatenate(weights).astype(np.float64)).max() > 0.01  # it rounds
    for B, L in ((1, 1), (1, 7), (3, 37)):
        x = rng.standard_normal((B, L, op.in_features), np.float32).astype(numpy)
        y = tvm.runtime.tensor(np.full((B, L, op.out_features), np.nan, numpy))
        library["run"](tvm.runtime.tensor(x), *packed, y)
        expected = x.astype(np.float64) @ wide.T
        expected[..., : op.widths[0]] += bias.astype(np.float64)
        allowed = 4e-6 * np.abs(expected).max() + (2.0**-8 if dtype == "bfloat16" else 0) * np.abs(expected)
        assert (np.abs(y.numpy().astype(np.float64) - expected) <= allowed).all()
