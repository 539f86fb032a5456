"""What all attentions in tiles for GPUs compute, each by itself and where there is no GPU: run in NumPy, against
float64. What is special to one is in a file of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fuzz.attention import NUMPY, draw_operands, evaluated
from support.attention_ops import scattered
from support.cuda.cuda_tile_kernels import TILE_KERNELS
from support.kernel_runs import attention

from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.kernels.scores.static_mask import StaticMask
from mhsa_compile.spec.window import WindowSpec
from mhsa_compile.verification.parity import judge

slow = pytest.mark.cuda  # of `make test-cuda`; a part of what these see is in the suite with each kernel
every = pytest.mark.parametrize("kernel", TILE_KERNELS.values(), ids=TILE_KERNELS)
of_each_dtype = pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        pytest.param(kernel, dtype, id=f"{name}-{dtype}")
        for name, kernel in TILE_KERNELS.items()
        for dtype in kernel.dtypes
    ],
)


@pytest.mark.thorough_but("(1, 197, 64)-mma")
@slow
@every
@pytest.mark.parametrize("sizes", [(1, 1, 7), (3, 7, 1), (1, 197, 64), (1, 13, 1031)], ids=str)
def test_ragged_lengths(kernel, sizes):
    kernel.check(kernel.operation((5, 1), dtype=kernel.dtypes[-1]), sizes, kernel.small)


@pytest.mark.thorough_but("(1, 131, 61)-WindowSpec(left=None, right=0, alignment='bottom_right')-mma")
@slow
@every
@pytest.mark.parametrize(
    ("sizes", "band"),
    [
        ((1, 197, 197), WindowSpec(5, 0)),
        ((1, 131, 131), WindowSpec(None, 20)),
        ((1, 131, 61), WindowSpec(None, 0, "bottom_right")),
        ((1, 61, 131), WindowSpec(100, 0, "top_left")),
        ((2, 64, 512), WindowSpec(40, 3, "bottom_right")),
        ((1, 7, 197), WindowSpec(0, 0, "bottom_right")),
    ],
    ids=str,
)
def test_bands(kernel, sizes, band):
    kernel.check(kernel.operation(band=band), sizes, kernel.small, poisoned=True)


@pytest.mark.thorough_but(
    "{'slopes': True, 'sinks': True, 'softcap': 5.0, 'band': WindowSpec(left=30, right=20, alignment='top_left')}-*",
    "{'sinks': True, 'lengths': True}-mma",
    "{'sinks': True, 'lengths': True}-float32",
    "{'slopes': True, 'band': WindowSpec(left=None, right=0, alignment='bottom_right')}-mma",
)
@slow
@every
@pytest.mark.parametrize(
    "fields",
    [
        {"softcap": 2.0},
        {"softclamp": 3.0, "softcap": 5.0},
        {"scale": -0.3},
        {"scale": 0.0},
        {"lengths": True},
        {"lengths": True, "band": WindowSpec(None, 0, "bottom_right")},
        {"sinks": True, "lengths": True},
        {"slopes": True, "band": WindowSpec(None, 0, "bottom_right")},
        {"slopes": True, "sinks": True, "softcap": 5.0, "band": WindowSpec(30, 20)},
    ],
    ids=str,
)
def test_scores(kernel, fields):
    kernel.check(kernel.operation(**fields), (3, 67, 131), kernel.small, poisoned=True)


@pytest.mark.thorough_but(
    "('B', 4, 'L', 'S')-bool-mma",
    "('B', 4, 'L', 'S')-float32-mma",
    "(1, 1, 'L', 'S')-bool-hopper",
    "(1, 1, 'L', 'S')-of the attention-mma",
    "(1, 1, 'L', 'S')-of the attention-hopper",
)
@slow
@every
@pytest.mark.parametrize("dtype", ["bool", "of the attention", "float32"])
@pytest.mark.parametrize("dims", [("B", 4, "L", "S"), (1, 1, "L", "S"), ("B", 1, 1, "mask_S")], ids=str)
def test_masks(kernel, dtype, dims):
    mask = CallMask(kernel.dtypes[0] if dtype == "of the attention" else dtype, dims)
    band = WindowSpec(None, 0, "bottom_right") if dtype == "bool" else None
    kernel.check(kernel.operation(mask=mask, band=band), (2, 67, 131), poisoned=True)


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        pytest.param(kernel, dtype, id=f"{name}-{dtype}", marks=() if (name, dtype) == ("mma", "bool") else slow)
        for name, kernel in TILE_KERNELS.items()
        for dtype in dict.fromkeys(("bool", "float32", kernel.dtypes[0]))
    ],
)
def test_masks_in_pairs(kernel, dtype):
    """Masks are read in pairs where their rows are of an even number of elements; the last tile has keys beyond."""
    op = kernel.operation(
        mask=CallMask(dtype, ("B", 4, "L", "S")), lengths=True, band=WindowSpec(90, 0, "bottom_right")
    )
    kernel.check(op, (2, 67, 132), kernel.small, poisoned=True)


@slow
@every
def test_placements(kernel):
    (H, G), (E, F) = (4, 2), kernel.widths
    parts = {"query": 0, "key": H * E, "value": H * E + G * E}
    width = H * E + G * (E + F) + kernel.chunk  # the padding that rows of a fused projection may have
    fused = kernel.operation(**{role: HeadLayout(0, "rows", width, first) for role, first in parts.items()})
    kernel.check(replace(fused, kv_length="L"), (2, 67, 67))
    apart = {"query": H * E, "key": G * E, "value": G * F}
    places = {role: HeadLayout(i, "rows", width) for i, (role, width) in enumerate(apart.items())}
    kernel.check(kernel.operation(output=HeadLayout(0, "heads", H * F), **places))


@pytest.mark.thorough_but(
    "1-{'lengths': True, 'band': WindowSpec(left=90, right=0, alignment='bottom_right'), 'slopes': True}-mma",
    "1-{'lengths': True, 'band': WindowSpec(left=90, right=0, alignment='bottom_right'), 'slopes': True}-hopper",
    "4-{}-mma",
    "4-{}-hopper",
    "4-{'lengths': True, 'band': WindowSpec(left=90, right=0, alignment='bottom_right'), 'slopes': True}-float32",
)
@slow
@every
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"band": WindowSpec(None, 0, "bottom_right")},
        {"lengths": True, "band": WindowSpec(90, 0, "bottom_right"), "slopes": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", [1, 4])
def test_constant_masks(kernel, heads, fields):
    B, L, S = 2, 131, 197
    mask = StaticMask(scattered((heads, L, S)))
    op = replace(kernel.operation(static_mask=mask, **fields), q_length=L, kv_length=S)
    kernel.check(op, (B, L, S), kernel.small, poisoned=True)


@pytest.mark.thorough_but("mma-float16", "hopper-float16")
@slow
@of_each_dtype
def test_values_that_are_not_finite_reach_only_those_who_see_them(kernel, dtype):
    """Infinity of either sign, both, and NaN, each in a column of its own, at keys that half of the rows see."""
    op, sizes = kernel.operation((2, 1), dtype=dtype, band=WindowSpec(None, 0)), (1, 67, 67)
    given = draw_operands(np.random.default_rng(3), op, sizes, 1.0, 0)
    given.v[0, 0, 40, :3] = np.inf, -np.inf, np.nan
    given.v[0, 0, 41:43, 3] = np.inf, -np.inf
    expected = attention(op, given.q, given.k, given.v, None)
    y = kernel.runner(*kernel.small)(op, given, sizes).astype(np.float64)
    for kind in (np.isposinf, np.isneginf, np.isnan):
        np.testing.assert_array_equal(kind(y), kind(expected))
        assert kind(y).any()
    assert np.isfinite(y[0, :40]).all()


@pytest.mark.thorough_but("-30.0-mma")
@slow
@every
@pytest.mark.parametrize("step", [30.0, -30.0])
def test_scores_that_rise_or_fall_with_the_keys(kernel, step):
    """Every key is `step` above the one before: the maximum is raised again and again, or never."""
    op, sizes = kernel.operation(), (1, 17, 131)
    given = draw_operands(np.random.default_rng(5), op, sizes, 1.0, 0)
    given.q[...], given.k[...] = 0, 0
    given.q[..., 0] = 1
    given.k[..., 0] = (np.arange(131) % 64 * step * op.head_dim**0.5)[None, None]
    truth, narrow = (evaluated(op, given, dtype) for dtype in (torch.float64, getattr(torch, op.dtype)))
    y = kernel.runner(*kernel.small)(op, given, sizes)
    assert judge(lambda _: [(truth, narrow.astype(NUMPY[op.dtype]), y)], {}).ok


@every
def test_what_none_of_them_takes_is_named(kernel):
    profile, chunk = kernel.profile, kernel.chunk
    E, F = 5 * chunk // 2, 5 * chunk
    assert kernel.kernel.op_type is AttentionOp
    mask = {"mask": CallMask("bool", ("B", 1, "L", "S")), "static_mask": StaticMask(scattered((1, 67, 131)))}
    refused = [
        (kernel.operation(widths=(E, F)), f"multiple of {chunk}"),
        (kernel.operation(widths=(256 + chunk, F)), "up to 256"),
        (kernel.operation(query=HeadLayout(0, "rows", 96 + chunk // 2)), f"multiples of {chunk}"),
        (kernel.operation(softmax="float64"), "float64"),
        (replace(kernel.operation(**mask), q_length=67, kv_length=131), "not both"),
    ]
    for op, words in refused:
        assert words in str(kernel.kernel.why_not(op, profile))
