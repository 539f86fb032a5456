"""Linears for GPUs, by themselves and where there is no GPU: what they compute, run in NumPy, against float64, and how
they choose the sizes of their blocks. More of it, which takes longer, is in test_linear_shapes.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.cuda.cuda_linear import DTYPES, KERNELS, NUMPY, check, config, gpu, linear, translated

TARGETS = ("cuda-sm80", "cuda-sm86", "cuda-sm90a")


@pytest.mark.thorough_only("float16")
@pytest.mark.parametrize("dtype", DTYPES)
def test_projections_side_by_side(dtype):
    """Ragged rows, columns and terms; padded rows; a bias missing, a weight that is stored the other way."""
    op = linear(("B", "L"), 72, (40, 29, 11), dtype, padding=8)
    check(op, (3, 67))
    check(op, (2, 3))  # few rows, of which there is a kernel of its own


@pytest.mark.thorough_only("bfloat16")
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(dtype):
    op = linear(("B", "L"), 72, (40,), dtype)
    run, _, shapes = translated(op, tuple(KERNELS[dtype].default_config(op, gpu()).values()))
    run(np.empty((0, 5, 72), NUMPY[dtype]), *(np.ones(*one) for one in shapes), np.empty((0, 5, 40), NUMPY[dtype]))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_defaults(target, dtype):
    """Every operation has one that fits; few rows take narrow blocks, so that all multiprocessors read weights."""
    kernel, profile = KERNELS[dtype], gpu(target)
    for rows in ((1,), (16,), (100,), ("B", "L"), (1 << 14,)):
        for depth, width in ((8, 1), (768, 2304), (768, 768), (4096, 12288)):
            op = linear(rows, depth, (width,), dtype)
            chosen = kernel.default_config(op, profile)
            assert kernel.why_not_config(op, profile, chosen) is None
            if rows == (1,) and width >= 2304:
                assert chosen["rows"] <= 16 and -(-width // chosen["columns"]) >= profile.hardware.multiprocessors // 2
            if rows == (1 << 14,) and width >= 768:
                assert chosen["rows"] * chosen["columns"] >= (64 * 64 if dtype == "float32" else 128 * 128)


def test_what_they_do_not_take_is_named():
    kernel, op = KERNELS["bfloat16"], linear(("B",), 72, (40,), "bfloat16")
    refused = [
        (replace(op, int8_weights=True), "eight bits"),
        (replace(op, dtype="float32"), "bfloat16 or float16, not float32"),
        (replace(op, in_features=12), "8 features, not 12"),
    ]
    for other, words in refused:
        assert words in str(kernel.why_not(other, gpu()))
    assert "float32, not bfloat16" in str(KERNELS["float32"].why_not(op, gpu()))
    wrong = [
        ((128, 128, 32, 1, 64, 64, 1), "2 stages"),
        ((96, 128, 32, 2, 32, 64, 1), "powers of two"),
        ((128, 128, 32, 2, 8, 64, 1), "parts of 16 x 16"),
        ((32, 32, 32, 2, 64, 32, 1), "in a block of 32 x 32"),
        ((32, 32, 32, 2, 32, 32, 4), "for each of 4 slices"),
        ((128, 256, 32, 2, 128, 64, 1), "registers of 255"),
        ((256, 256, 64, 4, 64, 64, 1), "bytes"),
        ((16, 512, 32, 2, 16, 64, 1), "256 columns"),
        ((32, 32, 128, 5, 16, 16, 8), "1024 threads, about 68 registers each"),
        ((128, 32, 256, 2, 16, 32, 2), "64 terms of a tile for each slice, not 128"),
    ]
    for sizes, words in wrong:
        assert words in str(kernel.why_not_config(op, gpu(), config(*sizes)))
    assert "knobs" in str(kernel.why_not_config(op, gpu(), {"rows": 16}))
    assert "pieces" in str(
        KERNELS["float32"].why_not_config(linear((1,), 3, (8,), "float32"), gpu(), config(4, 32, 64, 2, 4, 32, 1))
    )
