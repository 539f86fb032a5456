"""exp2, tanh and the transposition, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from support.kernel_runs import call
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import argument
from mhsa_compile.kernels.cpu.simd import vector_math, vectors


def elementwise(lanes: int, body) -> object:
    """y[i] = body(x[i]), vector by vector."""
    n = tirx.Var("n", "int64")
    with IRBuilder() as ib, T.prim_func():
        T.func_name("run")
        x, y = (argument(name, [n, T.int64(lanes)], "float32") for name in ("x", "y"))
        with T.serial(n) as i:
            at = [i, T.int64(0)]
            vectors.store(y, at, body(vectors.load(x, at, lanes), lanes), lanes)
    module = tvm.IRModule({"run": ib.get().with_attr("global_symbol", "run")})
    return tvm.compile(module, target=tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"}))["run"]


@pytest.mark.parametrize("lanes", [1, 4, 8, 16])
def test_exp2_is_within_two_roundings(lanes):
    x = -np.geomspace(1e-30, 126.4, 160_000, dtype=np.float32).reshape(-1, lanes)
    y = call(elementwise(lanes, vector_math.exp2), x, np.empty_like(x))
    relative = np.abs(y / np.exp2(x.astype(np.float64)) - 1)
    assert relative.max() < 2 * np.finfo(np.float32).eps


def test_exp2_at_the_edges():
    x = np.array([[0, -1, -127, -128, -1e30, -np.inf, np.nan, -126]], np.float32)
    y = call(elementwise(8, vector_math.exp2), x, np.empty_like(x))[0]
    assert y[:2].tolist() == [1, 0.5]
    assert y[2:6].tolist() == [0, 0, 0, 0]
    assert np.isnan(y[6])
    assert y[7] == np.float32(2.0**-126)
    payload = np.full((1, 8), 0x7FC00001, np.uint32).view(np.float32)  # a NaN whose payload must not become a number
    assert np.isnan(call(elementwise(8, vector_math.exp2), payload, np.empty_like(payload))).all()


@pytest.mark.parametrize(
    "lanes",
    [
        pytest.param(1, marks=pytest.mark.thorough),
        4,
        pytest.param(8, marks=pytest.mark.thorough),
        pytest.param(16, marks=pytest.mark.thorough),
    ],
)
def test_tanh_is_within_four_units_of_its_last_place(lanes):
    """Down to the smallest normal number, and within 1.8 units where it is above one half."""
    x = np.concatenate([np.geomspace(2e-38, 10, 80_000), np.linspace(0.01, 12, 80_000)]).astype(np.float32)
    x = np.stack([x, -x], axis=-1).reshape(-1, lanes)
    y = call(elementwise(lanes, vector_math.tanh), x, np.empty_like(x))
    expected = np.tanh(x.astype(np.float64))
    units = np.abs(y - expected) / np.spacing(np.abs(expected).astype(np.float32))
    assert units.max() < 4
    assert units[np.abs(expected) > 0.5].max() < 1.8
    assert (y.reshape(-1, 2)[:, 0] == -y.reshape(-1, 2)[:, 1]).all()


def test_tanh_at_the_edges():
    x = np.array([[0.0, -0.0, np.inf, -np.inf, 3e38, -9.5, 1e-45, np.nan]], np.float32)
    y = call(elementwise(8, vector_math.tanh), x, np.empty_like(x))[0]
    assert y[:7].tolist() == [0, 0, 1, -1, 1, -1, x[0, 6]] and np.isnan(y[7])
    assert np.signbit(y[:2]).tolist() == [False, True]


@pytest.mark.parametrize("lanes", [2, 4, 8, pytest.param(16, marks=pytest.mark.thorough)])
def test_transpose(lanes):
    with IRBuilder() as ib, T.prim_func():
        T.func_name("run")
        x, y = (argument(name, [T.int64(lanes), T.int64(lanes)], "float32") for name in ("x", "y"))
        rows = [vectors.load(x, [T.int64(i), T.int64(0)], lanes) for i in range(lanes)]
        for i, column in enumerate(vectors.transpose(rows)):
            vectors.store(y, [T.int64(i), T.int64(0)], column, lanes)
    module = tvm.IRModule({"run": ib.get().with_attr("global_symbol", "run")})
    run = tvm.compile(module, target=tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"}))["run"]
    square = np.arange(lanes * lanes, dtype=np.float32).reshape(lanes, lanes)
    assert (call(run, square, np.empty_like(square)) == square.T).all()


def test_chunks_cut_any_width():
    assert vectors.chunks(40, 16) == [(0, 16), (16, 16), (32, 8)]
    assert vectors.chunks(5, 16) == [(0, 4), (4, 1)]
    assert [sum(size for _, size in vectors.chunks(width, 8)) for width in range(1, 99)] == list(range(1, 99))
