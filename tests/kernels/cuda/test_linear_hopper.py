"""Linears by wgmma, by themselves and where there is no GPU: what they compute, run in NumPy, against float64; and what
nvcc makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from support.cuda import cuda_code
from support.cuda.cuda_linear import gpu, hold, linear
from support.simt import interpreter
from support.simt.hopper import HopperMachine

from mhsa_compile.hardware.profile import CudaProfile
from mhsa_compile.kernels.cuda.linear.hopper_kernel import FEW_ROWS, HopperLinearKernel, HopperShape
from mhsa_compile.kernels.interface.ops import LinearOp

pytestmark = pytest.mark.cuda

KERNEL = HopperLinearKernel()
GPU = gpu("cuda-sm90a")


def small(multiprocessors: int) -> CudaProfile:
    """A GPU of few multiprocessors, whose blocks have several parts of y each."""
    return msgspec.structs.replace(GPU, hardware=msgspec.structs.replace(GPU.hardware, multiprocessors=multiprocessors))


def check(op: LinearOp, rows: tuple[int, ...], columns: int, stages: int, seed: int | None = None) -> None:
    config, profile = {"columns": columns, "stages": stages}, small(3)
    assert KERNEL.why_not(op, profile) is None
    assert KERNEL.why_not_config(op, profile, config) is None
    emitted = KERNEL.emit(op, profile, config)
    assert emitted.pack is not None
    hold(op, rows, HopperMachine(emitted.run, seed=seed), interpreter.Machine(emitted.pack), emitted.packed)


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.thorough), "float16"])
def test_projections_side_by_side(dtype):
    """Ragged rows, columns and terms; a row of y that ends where no box does; a bias missing."""
    check(linear(("B", "L"), 72, (40, 29, 11), dtype, padding=8), (3, 67), 64, 2)


@pytest.mark.thorough_but("192-4-None")
@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize(("columns", "stages"), [(64, 2), (128, 5), (192, 4), (256, 3)])
def test_parts_of_one_block_after_another(columns, stages, seed):
    """Copies arrive as late as they may, or at random: sooner or later than others."""
    check(linear((700,), 200, (264,), "bfloat16"), (700,), columns, stages, seed)


def test_one_tile_of_terms():
    check(linear((130,), 8, (64,), "float16"), (130,), 64, 6)


def test_what_it_does_not_take_is_named():
    op = linear((4096,), 768, (768,), "bfloat16")
    assert KERNEL.why_not(op, GPU) is None
    refused: list[tuple[dict[str, Any], str]] = [
        ({"dtype": "float32"}, "bfloat16 or float16"),
        ({"int8_weights": True}, "eight bits"),
        ({"widths": (771,)}, "multiples of 8, not 771"),
        ({"rows": (FEW_ROWS,)}, f"more than {FEW_ROWS} rows"),
        ({"rows": (128,), "widths": (512,)}, "half of the multiprocessors"),
    ]
    for fields, words in refused:
        assert words in str(KERNEL.why_not(replace(op, **fields), GPU))
    assert "wgmma" in str(KERNEL.why_not(op, gpu("cuda-sm80")))
    for config, words in (({"columns": 96, "stages": 2}, "multiples of 64"), ({"columns": 256, "stages": 5}, "bytes")):
        assert words in str(KERNEL.why_not_config(op, GPU, config))


@pytest.mark.parametrize("rows", [(128,), (1024,), (1 << 14,), ("B", "L")])
def test_defaults(rows):
    for depth, width in ((768, 2304), (4096, 4096), (8, 8192)):
        op = linear(rows, depth, (width,), "bfloat16")
        if KERNEL.why_not(op, GPU) is None:
            assert KERNEL.why_not_config(op, GPU, KERNEL.default_config(op, GPU)) is None
            assert rows != (1 << 14,) or KERNEL.default_config(op, GPU)["columns"] >= 192


@pytest.mark.parametrize(("columns", "stages"), [pytest.param(256, 3, marks=pytest.mark.thorough), (64, 6)])
def test_machine_code(columns, stages, tmp_path):
    """Products of warpgroups, none of which waits for the one before; all in registers."""
    op, shape = linear((4096,), 776, (768, 768), "bfloat16"), HopperShape(columns, stages)
    text, host = cuda_code.source(KERNEL.emit(op, GPU, {"columns": columns, "stages": stages}), "sm_90a")
    code = cuda_code.machine_code(text, "sm_90a", tmp_path)
    assert (code.spilled, code.stack) == (0, 0)
    assert code.registers * shape.threads <= GPU.hardware.registers_per_multiprocessor
    assert code.instructions["LDL"] == code.instructions["STL"] == 0
    assert code.instructions["HGMMA"] >= 4 and code.instructions["HMMA"] == 0
    assert f" {shape.shared_bytes}" in host  # what it is launched with, no more and no less
