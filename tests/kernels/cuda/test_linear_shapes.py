"""Linears for GPUs in blocks of all kinds: what they compute, run in NumPy, against float64; how they use the banks of
shared memory; and what nvcc makes of them."""

from __future__ import annotations

import numpy as np
import pytest
from support.cuda import cuda_code
from support.cuda.cuda_linear import DTYPES, KERNELS, NUMPY, check, config, drawn, gpu, linear, translated
from support.simt.banks import Cycles, counted

from mhsa_compile.kernels.cuda.linear.block_shape import KNOBS
from mhsa_compile.kernels.cuda.linear.kernel import Float32LinearKernel, MmaLinearKernel
from mhsa_compile.kernels.interface.ops import LinearOp

pytestmark = pytest.mark.cuda


@pytest.mark.thorough_but("(1, 7)-float16")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(1, 1), (1, 7), (197,)], ids=str)
def test_fixed_rows(dtype, rows):
    check(linear(rows, 264, (131,), dtype), rows)


@pytest.mark.parametrize(
    "depth", [pytest.param(1, marks=pytest.mark.thorough), 30, pytest.param(199, marks=pytest.mark.thorough)]
)
def test_float32_takes_sums_of_any_length(depth):
    check(linear(("B", "L"), depth, (33,), "float32"), (1, 67))


@pytest.mark.parametrize(
    "width", [pytest.param(34, marks=pytest.mark.thorough), 36, pytest.param(40, marks=pytest.mark.thorough)]
)
def test_rows_of_y_that_begin_anywhere(width):
    """Rows are stored by words, pairs of words, and 16 bytes; elements are in the tests above."""
    for dtype in ("float16", "float32"):
        check(linear((19,), 16, (width,), dtype), (19,))


TENSOR = [
    (128, 32, 32, 2, 32, 32, 1),
    (16, 128, 64, 3, 16, 64, 2),
    (32, 16, 128, 5, 16, 16, 8),
    (64, 16, 16, 2, 16, 16, 1),
]
THREADS = [(32, 64, 8, 2, 32, 32, 1), (4, 64, 64, 5, 4, 64, 4), (64, 32, 16, 3, 16, 32, 2)]


@pytest.mark.thorough_but("(64, 16, 16, 2, 16, 16, 1)")
@pytest.mark.parametrize("sizes", TENSOR, ids=str)
def test_configs_of_tensor_cores(sizes):
    check(linear(("B", "L"), 200, (67, 29), "bfloat16"), (2, 41), config(*sizes))


@pytest.mark.thorough_but("(64, 32, 16, 3, 16, 32, 2)")
@pytest.mark.parametrize("sizes", THREADS, ids=str)
def test_configs_of_cuda_cores(sizes):
    check(linear(("B", "L"), 100, (67, 29), "float32"), (2, 41), config(*sizes))


@pytest.mark.thorough_but("float16")
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sums(dtype):
    """Float32 within twice the error of a library that sums in parts."""
    check(linear((5,), 4096, (64,), dtype), (5,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_in_groups(dtype):
    """Each block of y is computed once, whatever the order: of more rows of blocks than a group has, and a group that
    is not full."""
    least = KERNELS[dtype].shape(*(0,) * len(KNOBS)).least_rows
    rows, sizes = least * 19 - 3, (least, 32, 16, 2, least, 32, 1)
    check(linear((rows,), 8, (67,), dtype), (rows,), config(*sizes))


@pytest.mark.thorough_but("bfloat16")
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_in_its_row(dtype):
    op, rows = linear(("R",), 72, (40,), dtype), 67
    run, pack, shapes = translated(op, tuple(KERNELS[dtype].default_config(op, gpu()).values()))
    x, weights, biases = drawn(op, (rows,), 0)
    x[5, 3], x[66, 71] = np.inf, np.nan
    packed = [np.zeros(shape, NUMPY[kind]) for shape, kind in shapes]
    pack(*weights, *biases, *packed)
    y = np.zeros((rows, 40), NUMPY[dtype])
    run(x, *packed, y)
    finite = np.isfinite(y.astype(np.float32))
    assert not finite[[5, 66]].any()
    assert finite[np.setdiff1d(np.arange(rows), [5, 66])].all()


@pytest.mark.thorough_but("(16, 64, 128, 4, 16, 16, 2)", "(16, 32, 256, 4, 16, 16, 4)")
@pytest.mark.parametrize(
    "sizes", [MmaLinearKernel.defaults[0], MmaLinearKernel.defaults[3], *MmaLinearKernel.defaults[7:10]], ids=str
)
def test_tensor_cores_read_without_bank_conflicts(sizes):
    banks_of(linear((sizes[0],), 2 * sizes[2], (sizes[1],), "bfloat16"), sizes)


@pytest.mark.thorough_but("(16, 64, 64, 4, 16, 64, 4)")
@pytest.mark.parametrize("sizes", [Float32LinearKernel.defaults[1], *Float32LinearKernel.defaults[5:7]], ids=str)
def test_threads_read_without_bank_conflicts(sizes):
    reads = banks_of(linear((sizes[0],), 2 * sizes[2], (sizes[1],), "float32"), sizes)
    assert 0 < reads.wide == reads.paired


def banks_of(op: LinearOp, sizes: tuple[int, ...]) -> Cycles:
    """Every access of shared memory, of x, weights, sums of slices and y, takes no more cycles than its bytes do."""
    run, _, shapes = translated(op, sizes)
    x, *_ = drawn(op, (sizes[0],), 0)
    packed = [np.ones(shape, NUMPY[dtype]) for shape, dtype in shapes]
    with counted() as (reads, writes):
        run(x, *packed, np.zeros((sizes[0], op.pitch), NUMPY[op.dtype]))
    assert reads.needed > 0 and writes.needed > 0
    assert reads.taken == reads.needed and writes.taken == writes.needed, (reads, writes)
    return reads


@pytest.mark.thorough_but("one-sm_80-float32")
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [("sm_80", "bfloat16"), ("sm_86", "float16"), ("sm_90a", "bfloat16"), ("sm_80", "float32"), ("sm_90a", "float32")],
)
@pytest.mark.parametrize("rows", [("B", "L"), (1,)], ids=["any", "one"])
def test_machine_code(arch, dtype, rows, tmp_path):
    """The code is all in registers, as many as estimated at most, and its products are where they belong."""
    profile, kernel = gpu(f"cuda-{arch.replace('_', '')}"), KERNELS[dtype]
    op = linear(rows, 776, (768, 771), dtype)
    chosen = kernel.default_config(op, profile)
    shape = kernel.shape(**chosen)
    text, host = cuda_code.source(kernel.emit(op, profile, chosen), arch)
    code = cuda_code.machine_code(text, arch, tmp_path)
    assert (code.spilled, code.stack) == (0, 0)
    assert profile.blocks_at_once(shape.threads, code.registers, shape.shared_bytes) >= shape.resident(profile) > 0
    assert code.instructions["LDL"] == code.instructions["STL"] == 0
    products, multiplications = ("FFMA", 32) if dtype == "float32" else ("HMMA", 16 * 8 * 16)
    assert (
        code.instructions[products]
        >= shape.rows * shape.columns * shape.depth // (shape.threads // 32) // multiplications
    )
    assert code.instructions["LDGSTS"] and (dtype == "float32") == (code.instructions["HMMA"] == 0)
    assert f" {shape.shared_bytes}" in host  # what it is launched with, no more and no less
