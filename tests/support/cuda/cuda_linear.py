"""Linears for GPUs run by themselves in NumPy, and held against float64."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import torch
from support.simt import interpreter

from mhsa_compile.hardware.profile import CudaProfile, load_profile
from mhsa_compile.kernels.cuda.linear.block_shape import KNOBS
from mhsa_compile.kernels.cuda.linear.kernel import Float32LinearKernel, MmaLinearKernel
from mhsa_compile.kernels.interface.ops import LinearOp
from mhsa_compile.nn.functional import to_numpy, to_torch
from mhsa_compile.verification.parity import Draw, judge

KERNELS = {"bfloat16": MmaLinearKernel(), "float16": MmaLinearKernel(), "float32": Float32LinearKernel()}
NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
Config = dict[str, int]


def gpu(name: str = "cuda-sm80") -> CudaProfile:
    profile = load_profile(name)
    assert isinstance(profile, CudaProfile)
    return profile


DTYPES = tuple(KERNELS)


def linear(rows: Any, depth: int, widths: Any, dtype: str, **fields: Any) -> LinearOp:
    """Linears side by side, biased but for the second, which is stored (in, out), unless `fields` say otherwise."""
    second = [i == 1 for i in range(len(widths))]
    rest = {"biased": tuple(not s for s in second), "transposed": tuple(second), **fields}
    return LinearOp(tuple(rows), depth, tuple(widths), dtype=dtype, **rest)


def config(*sizes: int) -> Config:
    return dict(zip(KNOBS, sizes, strict=True))


@lru_cache(maxsize=4)
def translated(op: LinearOp, sizes: tuple[int, ...]) -> tuple[interpreter.Machine, interpreter.Machine, Any]:
    """(run, pack, shapes of what is packed)"""
    kernel = KERNELS[op.dtype]
    assert kernel.why_not(op, gpu()) is None
    assert kernel.why_not_config(op, gpu(), config(*sizes)) is None
    emitted = kernel.emit(op, gpu(), config(*sizes))
    return interpreter.Machine(emitted.run), interpreter.Machine(emitted.pack), emitted.packed


def drawn(op: LinearOp, rows: tuple[int, ...], turn: int) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """x, weights, biases"""
    rng, K = np.random.default_rng((23, turn)), op.in_features

    def some(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(NUMPY[op.dtype])

    shapes = [(K, n) if transposed else (n, K) for n, transposed in zip(op.widths, op.transposed, strict=True)]
    biases = [some(n) for n, biased in zip(op.widths, op.biased, strict=True) if biased]
    return some(*rows, K), [some(*shape) for shape in shapes], biases


def product(op: LinearOp, x: np.ndarray, weights: Any, biases: Any, dtype: torch.dtype) -> np.ndarray:
    rest, parts = iter(biases), []
    for weight, biased, transposed in zip(weights, op.biased, op.transposed, strict=True):
        w = to_torch(weight.T if transposed else weight).to(dtype)
        bias = to_torch(next(rest)).to(dtype) if biased else None
        parts.append(torch.nn.functional.linear(to_torch(x).to(dtype), w, bias))
    return to_numpy(torch.cat(parts, dim=-1))


def check(op: LinearOp, rows: tuple[int, ...], sizes: Config | None = None) -> None:
    tile = sizes or KERNELS[op.dtype].default_config(op, gpu())
    hold(op, rows, *translated(op, tuple(tile.values())))


def hold(op: LinearOp, rows: tuple[int, ...], run: Any, pack: Any, shapes: Any) -> None:
    """Asserts that a run is within the budget of `parity`: PyTorch's own linear at this dtype is the yardstick."""

    def draw(turn: int) -> list[Draw]:
        x, weights, biases = drawn(op, rows, turn)
        packed = [np.full(shape, 123, NUMPY[dtype]) for shape, dtype in shapes]
        pack(*weights, *biases, *packed)
        y = np.full((*rows, op.pitch), np.nan, NUMPY[op.dtype])
        run(x, *packed, y)
        assert np.isnan(y[..., op.out_features :].astype(np.float32)).all()  # nobody writes the padding
        truth, yardstick = (product(op, x, weights, biases, t) for t in (torch.float64, getattr(torch, op.dtype)))
        return [(truth, yardstick, y[..., : op.out_features])]

    result = judge(draw, {})
    assert result.ok, result
