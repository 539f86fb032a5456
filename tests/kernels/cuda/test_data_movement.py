"""The kernels for GPUs that move rows: rotary embeddings, writes into a cache, present keys and values.

Run in NumPy by the interpreter, against the same references as those for CPUs; and what nvcc makes of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.cuda import cuda_code
from support.rope_cases import BASE as ROPE
from support.rope_cases import NUMPY, TABLE, angles, assert_right
from support.rope_cases import SHAPES as ROPE_SHAPES
from support.scatter_cases import BASE as SCATTER
from support.scatter_cases import DTYPES, INT64, drawn, scattered
from support.scatter_cases import SHAPES as SCATTER_SHAPES
from support.simt import interpreter
from support.simt.memory import SimtError

from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.cuda.cache import CudaKvConcatKernel, CudaKvScatterKernel
from mhsa_compile.kernels.cuda.primitives.vector_copy import piece_of
from mhsa_compile.kernels.cuda.rope import CudaRotaryKernel
from mhsa_compile.kernels.interface.kernel import Fixed
from mhsa_compile.kernels.interface.ops import HeadLayout, KvConcatOp, KvScatterOp, Op, RotaryOp

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


def turn(
    op: RotaryOp, machine: interpreter.Machine, rng: np.random.Generator, B: int, L: int, places: np.ndarray
) -> tuple:
    """(y, x, cos, sin): y and x (B, L, H, E), the tables as they were given."""
    H, E, dtype = op.num_heads, op.head_dim, NUMPY[op.dtype]
    columns = op.rotary_dim if op.whole_angles else op.rotary_dim // 2
    tables = angles(rng, *((TABLE,) if op.max_positions else places.shape), columns, dtype=op.dtype)
    x = rng.standard_normal((B, L, H, E)).astype(dtype)
    if op.x.layout == "rows":
        given = np.full((B, L, op.x.width), np.nan, dtype)
        given[:, :, op.x.offset : op.x.offset + H * E] = x.reshape(B, L, H * E)
    else:
        given = np.ascontiguousarray(x.swapaxes(1, 2))
    y = np.full((B, H, L, E) if op.output.layout == "heads" else (B, L, H * E), np.nan, dtype)
    machine(given, *tables, *([places] if op.max_positions else []), y)
    return y.swapaxes(1, 2) if op.output.layout == "heads" else y.reshape(B, L, H, E), x, *tables


@pytest.mark.thorough_only("heads to heads-bfloat16")
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("shape", ALL_ROPE_SHAPES)
def test_rope(shape: str, dtype: str) -> None:
    """What lies between the heads is NaN, and so is the output before: all of it is written, of nothing else."""
    op = replace(ROPE, dtype=dtype, **ALL_ROPE_SHAPES[shape])  # type: ignore[arg-type]
    machine, rng = translated(CudaRotaryKernel(), op), np.random.default_rng(0)
    for B, L in ((1, 1), (3, 37)):
        places = rng.integers(0, TABLE, (1 if op.shared_angles else B, L))
        y, x, *tables = turn(op, machine, rng, B, L, places)
        cos, sin = (table[places] if op.max_positions else table for table in tables)
        assert_right(y, x, cos, sin, op.rotary_dim, op.interleaved)


@pytest.mark.parametrize("shape", ["halves", "pieces", "pieces, interleaved"])
def test_a_position_beyond_the_tables_makes_nan_and_reads_nothing(shape: str) -> None:
    op = replace(ROPE, dtype="bfloat16", **ALL_ROPE_SHAPES[shape])
    places = np.array([[0, TABLE, TABLE - 1], [-1, 5, INT64.min], [INT64.max, 7, 0]])
    y, x, cos, sin = turn(op, translated(CudaRotaryKernel(), op), np.random.default_rng(0), 3, 3, places)
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
        sizes = {"B": B, "S": S, "X": 13}
        shape_of_cache = [sizes[dim] if isinstance(dim, str) else dim for dim in op.cache]
        cache = drawn(rng, np.dtype("f4"), *shape_of_cache)
        update = drawn(rng, np.dtype("f4"), *(L if i == op.axis else size for i, size in enumerate(shape_of_cache)))
        ends = (INT64.min, INT64.max) if circular else (0, S - L)
        indices = rng.integers(*ends, B, endpoint=True) if op.indexed else np.zeros(B, np.int64)
        given = update
        if op.update is not None:
            rows = update.swapaxes(1, 2) if update.ndim == 4 else update
            given = np.full((B, L, op.update.width), np.nan, np.float32)
            given[:, :, op.update.offset :][:, :, : rows[0, 0].size] = rows.reshape(B, L, -1)
        found = write(op, machine, cache, given, *([indices] if op.indexed else []))
        assert np.array_equal(found, scattered(cache, update, indices, op.axis))


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
