"""The kernels for GPUs that move rows: rotary embeddings, writes into a cache, present keys and values.

Run in NumPy by the interpreter, against the same references as those for CPUs; and what nvcc makes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.cuda import cuda_code
from support.rope_cases import BASE as ROPE
from support.rope_cases import NUMPY, TABLE, assert_right, check, turn
from support.rope_cases import SHAPES as ROPE_SHAPES
from support.scatter_cases import BASE as SCATTER
from support.scatter_cases import DTYPES, INT64, call_of, drawn, scattered
from support.scatter_cases import SHAPES as SCATTER_SHAPES
from support.simt import interpreter
from support.simt.memory import SimtError

from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.cuda.cache import CudaKvConcatKernel, CudaKvScatterKernel
from mhsa_compile.kernels.cuda.primitives.vector_copy import piece_of
from mhsa_compile.kernels.cuda.rope import CudaRotaryKernel
from mhsa_compile.kernels.interface.kernel import Fixed
from mhsa_compile.kernels.interface.ops import HeadLayout, KvConcatOp, KvScatterOp, Op

GPU = load_profile("cuda-sm80")
WIDE: dict[str, Any] = {"head_dim": 128, "x": HeadLayout(0, "rows", 384), "output": HeadLayout(0, "rows", 384)}
MORE_ROPE_SHAPES = {
    "pieces": {**WIDE, "rotary_dim": 64},
    "pieces, interleaved": {**WIDE, "rotary_dim": 64, "interleaved": True},
    "pieces, whole": {**WIDE, "rotary_dim": 128, "interleaved": True, "whole_angles": True},
}
ALL_ROPE_SHAPES: dict[str, dict[str, Any]] = {**ROPE_SHAPES, **MORE_ROPE_SHAPES}


def translated(kernel: Any, op: Op) -> interpreter.Machine:
    assert isinstance(kernel, Fixed) and kernel.why_not(op, GPU) is None
    return interpreter.Machine(kernel.emit(op, GPU, kernel.default_config(op, GPU)).run)


def test_pieces_fit_all_that_they_must_begin_at():
    assert [piece_of("bfloat16", n) for n in (8, 24, 12, 6, 3)] == [8, 8, 4, 2, 1]
    assert piece_of("float32", 128, 6) == 2 and piece_of("float64", 7) == 1 and piece_of("float64", 2) == 2
    assert piece_of("int8", 16) == 16 and piece_of("int8", 6) == 1  # less than a word
    assert piece_of("bfloat16", 64, 0) == 8


# Rotary embeddings.


def run_of(kernel: Any, op: Op) -> Callable[..., np.ndarray]:
    """A run of arrays, of which the last is the output."""
    machine = translated(kernel, op)

    def run(*arrays: np.ndarray) -> np.ndarray:
        machine(*arrays)
        return arrays[-1]

    return run


@pytest.mark.thorough_only("heads to heads-bfloat16")
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("shape", ALL_ROPE_SHAPES)
def test_rope(shape: str, dtype: str) -> None:
    """What lies between the heads is NaN, and so is the output before: all of it is written, of nothing else."""
    op = replace(ROPE, dtype=dtype, **ALL_ROPE_SHAPES[shape])  # type: ignore[arg-type]
    check(op, run_of(CudaRotaryKernel(), op), ((1, 1), (3, 37)))


@pytest.mark.parametrize("shape", ["halves", "pieces", "pieces, interleaved"])
def test_a_position_beyond_the_tables_makes_nan_and_reads_nothing(shape: str) -> None:
    op = replace(ROPE, dtype="bfloat16", **ALL_ROPE_SHAPES[shape])
    places = np.array([[0, TABLE, TABLE - 1], [-1, 5, INT64.min], [INT64.max, 7, 0]])
    y, x, cos, sin = turn(op, run_of(CudaRotaryKernel(), op), np.random.default_rng(0), 3, 3, places)
    wrong = (places < 0) | (places >= TABLE)
    assert np.isnan(y[wrong][..., : op.rotary_dim].astype(np.float32)).all()
    at = np.where(wrong, 0, places)
    right = [(a * ~wrong[(..., *[None] * (a.ndim - 2))]).astype(x.dtype) for a in (y, x)]
    right[0][wrong] = x[wrong] = 0
    right[1][wrong] = 0
    assert_right(right[0], right[1], cos[at], sin[at], op.rotary_dim, op.interleaved)


# Writes into a cache.


def write(
    op: KvScatterOp, machine: interpreter.Machine, cache: np.ndarray, update: np.ndarray, *indices: np.ndarray
) -> Any:
    """The result, as a copy or in place; what was in the result before is of no account."""
    if op.in_place:
        result = cache.copy()
        machine(result, update, *indices)
        return result
    result = drawn(np.random.default_rng(9), cache.dtype, *cache.shape)
    machine(cache, update, *indices, result)
    return result


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("circular", [False, True])
@pytest.mark.parametrize("shape", SCATTER_SHAPES)
def test_scatter(shape: str, circular: bool, in_place: bool) -> None:
    op = replace(SCATTER, circular=circular, in_place=in_place, **SCATTER_SHAPES[shape])  # type: ignore[arg-type]
    machine, rng = translated(CudaKvScatterKernel(), op), np.random.default_rng(0)
    for B, L, S in ((1, 1, 1), (3, 4, 29), (2, 5, 5)):
        arrays, expected = call_of(op, rng, B, L, S)
        assert np.array_equal(write(op, machine, *arrays), expected)


@pytest.mark.parametrize("row", [10, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter_of_every_dtype(dtype: np.dtype, row: int) -> None:
    rng = np.random.default_rng(0)
    for in_place in (False, True):
        op = replace(SCATTER, cache=("B", 3, "S", row), dtype=str(dtype), in_place=in_place)
        cache, update, indices = drawn(rng, dtype, 2, 3, 11, row), drawn(rng, dtype, 2, 3, 4, row), np.array([7, 0])
        found = write(op, translated(CudaKvScatterKernel(), op), cache, update, indices)
        assert np.array_equal(found, scattered(cache, update, indices, 2))


@pytest.mark.parametrize("in_place", [False, True])
def test_of_an_index_beyond_the_cache_no_row_is_written(in_place: bool) -> None:
    op, rng = replace(SCATTER, in_place=in_place), np.random.default_rng(0)
    cache, update = drawn(rng, np.dtype("f4"), 6, 3, 11, 10), drawn(rng, np.dtype("f4"), 6, 3, 4, 10)
    indices = np.array([7, 8, -1, INT64.min, 0, INT64.max])
    found = write(op, translated(CudaKvScatterKernel(), op), cache, update, indices)
    expected = scattered(cache, update, np.where((indices < 0) | (indices > 7), 0, indices), 2)
    expected[[1, 2, 3, 5]] = cache[[1, 2, 3, 5]]
    assert np.array_equal(found, expected)


def test_more_rows_than_the_cache_has_are_refused_before_the_launch() -> None:
    for circular in (False, True):
        op = replace(SCATTER, in_place=True, circular=circular)
        cache, update = np.zeros((1, 3, 4, 10), np.float32), np.ones((1, 3, 5, 10), np.float32)
        with pytest.raises(SimtError, match="rows, as the cache has"):
            write(op, translated(CudaKvScatterKernel(), op), cache, update, np.zeros(1, np.int64))


# Present keys and values.


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize(("head_dim", "new"), [(10, "rows"), (64, "rows"), (7, "heads"), (64, "heads")])
def test_present(head_dim: int, new: Any, dtype: str) -> None:
    H, rng = 3, np.random.default_rng(0)
    place = HeadLayout(0, new, H * head_dim + 16, 8)
    for past in ("P", None):
        op = KvConcatOp("B", past, "L", H, head_dim, place, dtype)  # type: ignore[arg-type]
        machine = translated(CudaKvConcatKernel(), op)
        for B, P, L in ((1, 1, 1), (2, 0, 5), (3, 13, 7)):
            before = rng.standard_normal((B, H, P, head_dim)).astype(NUMPY[dtype])
            rows = rng.standard_normal((B, H, L, head_dim)).astype(NUMPY[dtype])
            given = rows
            if new == "rows":
                given = np.full((B, L, place.width), np.nan, NUMPY[dtype])
                given[:, :, 8 : 8 + H * head_dim] = rows.swapaxes(1, 2).reshape(B, L, -1)
            expected = rows if past is None else np.concatenate((before, rows), axis=2)
            result = np.full(expected.shape, np.nan, NUMPY[dtype])
            machine(given, *([] if past is None else [before]), result)
            assert np.array_equal(result, expected)


MACHINE_CODE: dict[str, tuple[Fixed, Op]] = {
    "rope": (CudaRotaryKernel(), replace(ROPE, dtype="bfloat16", **ALL_ROPE_SHAPES["pieces"])),
    "rope, interleaved": (CudaRotaryKernel(), replace(ROPE, dtype="float16", **ALL_ROPE_SHAPES["pieces, interleaved"])),
    "rope, odd": (CudaRotaryKernel(), replace(ROPE, dtype="bfloat16", **ALL_ROPE_SHAPES["least"])),
    "scatter": (CudaKvScatterKernel(), replace(SCATTER, cache=("B", 3, "S", 64), dtype="bfloat16", in_place=True)),
    "scatter, bool": (CudaKvScatterKernel(), replace(SCATTER, dtype="bool", circular=True)),
    "present": (CudaKvConcatKernel(), KvConcatOp("B", "P", "L", 3, 64, HeadLayout(0, "rows", 192), "float16")),
    "present, odd": (CudaKvConcatKernel(), KvConcatOp("B", "P", "L", 3, 7, HeadLayout(0, "rows", 21), "bfloat16")),
}


@pytest.mark.thorough_but("rope, interleaved", "rope, odd", "scatter, bool")
@pytest.mark.cuda
@pytest.mark.parametrize("case", MACHINE_CODE)
def test_machine_code(case: str, tmp_path: Any) -> None:
    kernel, op = MACHINE_CODE[case]
    text, host = cuda_code.source(kernel.emit(op, GPU, {}), "sm_80")  # type: ignore[attr-defined]
    assert ("rows, as the cache has" in host) == case.startswith("scatter")  # refused by the host
    code = cuda_code.machine_code(text, "sm_80", tmp_path)
    assert (code.spilled, code.stack) == (0, 0) and code.registers <= 64
