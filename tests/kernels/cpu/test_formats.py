"""16-bit storage: widening is exact, narrowing rounds to nearest even, against ml_dtypes and NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from support import this_cpu
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import argument
from mhsa_compile.kernels.cpu.formats.choice import load_wide, store_narrow

NUMPY = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00}  # its bits; below them lie the finite values, in order
# The last has no F16C: there float16 goes through functions that TVM adds to the module. Without AVX-512 the first is
# compiled for this CPU.
MACHINES = [("x86-64-v4", 16), ("x86-64-v3", 8), ("x86-64-v3", 1), ("x86-64-v3", 32), ("x86-64", 4)]


@pytest.fixture(params=MACHINES, ids=str)
def machine(request):
    mcpu, lanes = request.param
    return this_cpu.level(mcpu), lanes


def converted(machine: tuple[str, int], source: str, target: str, values: np.ndarray) -> np.ndarray:
    """`values`, read as `source` and written as `target`, vector by vector."""
    mcpu, lanes = machine
    n = tirx.Var("n", "int64")
    with IRBuilder() as ib, T.prim_func():
        T.func_name("run")
        x = argument("x", [n, T.int64(lanes)], source)
        y = argument("y", [n, T.int64(lanes)], target)
        with T.serial(n) as i:
            at = [i, T.int64(0)]
            store_narrow(y, at, load_wide(x, at, lanes), lanes)
    module = tvm.IRModule({"run": ib.get().with_attr("global_symbol", "run")})
    run = tvm.compile(module, target=tvm.target.Target({"kind": "llvm", "mcpu": mcpu}))["run"]
    rows = np.resize(values, (-(-values.size // lanes), lanes)).astype(NUMPY[source])
    y = tvm.runtime.tensor(np.zeros(rows.shape, NUMPY[target]))
    run(tvm.runtime.tensor(rows), y)
    return y.numpy().reshape(-1)[: values.size]


@pytest.mark.thorough_only("('x86-64-v4', 16)-float16", "('x86-64-v3', 8)-bfloat16")
@pytest.mark.parametrize("dtype", INFINITY)
def test_every_value_is_widened_exactly(machine, dtype):
    every = np.arange(1 << 16, dtype=np.uint16).view(NUMPY[dtype])
    np.testing.assert_array_equal(converted(machine, dtype, "float32", every), every.astype(np.float32))


@pytest.mark.thorough_but(
    "('x86-64-v3', 1)-float16", "('x86-64-v3', 32)-bfloat16", "('x86-64-v3', 32)-float16", "('x86-64', 4)-bfloat16"
)
@pytest.mark.parametrize("dtype", INFINITY)
def test_every_value_survives_the_round_trip(machine, dtype):
    every = np.arange(1 << 16, dtype=np.uint16).view(NUMPY[dtype])
    there_and_back = converted(machine, dtype, dtype, every)
    number = (every.view(np.uint16) & 0x7FFF) <= INFINITY[dtype]
    np.testing.assert_array_equal(there_and_back[number].view(np.uint16), every[number].view(np.uint16))
    assert ((there_and_back[~number].view(np.uint16) & 0x7FFF) > INFINITY[dtype]).all()


def hard_cases(dtype: str) -> np.ndarray:
    """Numbers that are hard to round: between all neighbours of the dtype the midpoint, a float32 to either side of it;
    and random bits."""
    finite = np.arange(INFINITY[dtype], dtype=np.uint16).view(NUMPY[dtype]).astype(np.float64)
    middle = ((finite[:-1] + finite[1:]) / 2).astype(np.float32)
    inf, zero = np.float32(np.inf), np.float32(0)
    largest = np.float32(finite[-1] + (finite[-1] - finite[-2]) / 2)  # from here on it is infinity
    edges = np.array([np.inf, np.finfo(np.float32).max, largest, 0, 1e-45, 1e-40], np.float32)
    near = [middle, np.nextafter(middle, inf), np.nextafter(middle, zero), edges, np.nextafter(edges, zero)]
    random = np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint32).view(np.float32)
    positive = np.concatenate(near)
    return np.concatenate([positive, -positive, random])


@pytest.mark.thorough_but("('x86-64-v3', 8)-bfloat16", "('x86-64', 4)-bfloat16")
@pytest.mark.parametrize("dtype", INFINITY)
def test_narrowing_rounds_to_nearest_even(machine, dtype):
    values = hard_cases(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(NUMPY[dtype])
    actual = converted(machine, "float32", dtype, values)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(actual[number].view(np.uint16), expected[number].view(np.uint16))
    assert np.isnan(actual[~number]).all()


@pytest.mark.thorough_but("('x86-64-v3', 32)")
def test_every_nan_of_float32_stays_one(machine):
    payloads = np.concatenate([1 << np.arange(23, dtype=np.uint32), np.array([0x7FFFFF, 0x7FFF, 0xFFFF], np.uint32)])
    nan = np.concatenate([payloads | 0x7F800000, payloads | 0xFF800000]).astype(np.uint32).view(np.float32)
    for dtype in INFINITY:
        assert np.isnan(converted(machine, "float32", dtype, nan)).all()
