"""The decode kernel for GPUs, by itself and where there is no GPU: what it computes, run in NumPy, against float64; and
what nvcc makes of it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from fuzz.attention import NUMPY, Operands, draw_operands, evaluated, output_rows, output_shape, placed
from support.attention_ops import changed
from support.cuda import cuda_code, cuda_tile_kernels
from support.cuda.cuda_tile_kernels import Sizes
from support.kernel_runs import attention
from support.simt import interpreter

import mhsa_compile as mhsa
from mhsa_compile.hardware.profile import CudaProfile, load_profile
from mhsa_compile.kernels.cuda.decode.kernel import KNOBS, CudaDecodeKernel
from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.kernels.scores.static_mask import StaticMask
from mhsa_compile.spec.window import WindowSpec
from mhsa_compile.verification.parity import judge

KERNEL = CudaDecodeKernel()
slow = pytest.mark.cuda  # of `make test-cuda`; a part is in the suite


def gpu(multiprocessors: int) -> CudaProfile:
    """A made-up GPU: with few multiprocessors, blocks have several heads, with many, heads have several blocks."""
    profile = load_profile("cuda-sm80")
    assert isinstance(profile, CudaProfile)
    hardware = msgspec.structs.replace(profile.hardware, multiprocessors=multiprocessors)
    return msgspec.structs.replace(profile, hardware=hardware)


def operation(
    L: Any = 1, heads: tuple[int, int] = (6, 2), widths: tuple[int, int] = (24, 40), **fields: Any
) -> AttentionOp:
    """An attention of L queries, in bfloat16 unless `fields` say otherwise."""
    return replace(cuda_tile_kernels.operation(heads, widths, **fields), q_length=L)


@lru_cache(maxsize=4)
def translated(
    op: AttentionOp, blocks: int, config: tuple[tuple[str, int], ...]
) -> tuple[interpreter.Machine, np.ndarray]:
    profile = gpu(blocks)
    knobs = {**KERNEL.default_config(op, profile), "blocks": 1, **dict(config)}
    assert KERNEL.why_not(op, profile) is None and KERNEL.why_not_config(op, profile, knobs) is None
    emitted = KERNEL.emit(op, profile, knobs)
    return interpreter.Machine(emitted.run), np.empty(emitted.workspace, np.float32)


def run(op: AttentionOp, given: Operands, sizes: tuple[int, int, int], blocks: int, **config: int) -> np.ndarray:
    machine, workspace = translated(op, blocks, tuple(config.items()))
    y = np.full(output_shape(op, sizes), np.nan, NUMPY[op.dtype])
    workspace[...] = np.nan
    machine(*placed(op, given), y, workspace)
    return output_rows(y, op.output)


def check(op: AttentionOp, B: int, S: int, *, blocks: int = 5, poisoned: bool = False, **config: int) -> None:
    assert isinstance(op.q_length, int)

    def of_config(op: AttentionOp, given: Operands, sizes: Sizes) -> np.ndarray:
        return run(op, given, sizes, blocks, **config)

    cuda_tile_kernels.check(of_config, op, (B, op.q_length, S), poisoned=poisoned)


@pytest.mark.thorough_but("3-131-bfloat16", "3-131-float32", "1-1-float16")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=slow), "float32"])
@pytest.mark.parametrize(("B", "S"), [(3, 131), *(pytest.param(*sizes, marks=slow) for sizes in ((1, 1), (2, 1023)))])
def test_any_number_of_keys(dtype, B, S):
    check(operation(dtype=dtype), B, S)


@slow
@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("blocks", [pytest.param(1, marks=pytest.mark.thorough), 23])
def test_blocks_have_many_heads_and_heads_have_many_blocks(dtype, blocks):
    check(operation(heads=(3, 3), widths=(16, 24), dtype=dtype), 3, 197, blocks=blocks)


@pytest.mark.thorough_but("float16-1-(2, 1)-(8, 256)")
@slow
@pytest.mark.parametrize(
    ("dtype", "L", "heads", "widths"),
    [
        ("bfloat16", 3, (5, 1), (72, 8)),  # 15 rows, whose Q stays in registers
        ("bfloat16", 1, (13, 1), (176, 48)),  # 13 rows, whose Q is read again
        ("float16", 1, (2, 1), (8, 256)),
        ("float16", 2, (9, 1), (24, 40)),  # 18 rows: three tiles
        ("float32", 2, (4, 1), (20, 132)),
        ("float32", 1, (3, 1), (12, 12)),
        ("float32", 1, (3, 1), (256, 12)),
    ],
    ids=str,
)
def test_rows_and_heads_of_any_width(dtype, L, heads, widths):
    check(operation(L, heads, widths, dtype=dtype), 2, 131)


@slow
@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        pytest.param("bfloat16", {"keys": 32, "stages": 2, "warps": 2}, marks=pytest.mark.thorough),
        ("bfloat16", {"keys": 16, "stages": 4, "warps": 8}),
        pytest.param("float32", {"keys": 16, "stages": 2, "warps": 2}, marks=pytest.mark.thorough),
        pytest.param("float32", {"keys": 32, "stages": 3, "warps": 4}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_configs(dtype, config):
    check(operation(2, dtype=dtype, band=WindowSpec(None, 0, "bottom_right")), 2, 197, blocks=3, **config)


BANDS = (
    WindowSpec(None, 0, "bottom_right"),
    WindowSpec(40, 3, "bottom_right"),
    WindowSpec(5, 0),
    WindowSpec(0, 0, "bottom_right"),
)


@pytest.mark.thorough_but("WindowSpec(left=40, right=3, alignment='bottom_right')-bfloat16")
@slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_bands(dtype, band):
    check(operation(3, band=band, dtype=dtype), 2, 197, poisoned=True)


@pytest.mark.thorough_but(
    "{'slopes': True, 'sinks': True, 'softcap': 5.0, 'band': WindowSpec(left=30, right=20, alignment='top_left')}-*",
    "{'softcap': 2.0}-bfloat16",
    "{'lengths': True, 'band': WindowSpec(left=30, right=0, alignment='bottom_right')}-float32",
    "{'sinks': True, 'lengths': True}-bfloat16",
    "{'slopes': True, 'band': WindowSpec(left=None, right=0, alignment='bottom_right')}-bfloat16",
)
@slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "fields",
    [
        {"softcap": 2.0},
        {"softclamp": 3.0},
        {"scale": -0.3},
        {"lengths": True},
        {"lengths": True, "band": WindowSpec(30, 0, "bottom_right")},
        {"sinks": True, "lengths": True},
        {"slopes": True, "band": WindowSpec(None, 0, "bottom_right")},
        {"slopes": True, "sinks": True, "softcap": 5.0, "band": WindowSpec(30, 20)},
    ],
    ids=str,
)
def test_scores(dtype, fields):
    check(operation(2, dtype=dtype, **fields), 5, 131, poisoned=True)


@slow
def test_lengths_of_more_entries_than_a_warp_has_lanes():
    check(operation(heads=(2, 1), widths=(8, 8), lengths=True, band=WindowSpec(None, 0, "bottom_right")), 71, 197)


@slow
@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "dims",
    [
        ("B", 6, 3, "S"),
        pytest.param((1, 1, 3, "S"), marks=pytest.mark.thorough),
        pytest.param(("B", 1, 1, "mask_S"), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_masks(dtype, dims):
    of = "float32" if dtype == "float32" else "bfloat16"
    check(operation(3, mask=CallMask(dtype, dims), dtype=of), 2, 131, poisoned=True)


@slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_placements(dtype):
    H, G, E, F = 6, 2, 24, 40
    parts = {"query": 0, "key": H * E, "value": H * E + G * E}
    width = H * E + G * (E + F) + 8  # the padding that rows of a fused projection may have
    fused = operation(5, dtype=dtype, **{role: HeadLayout(0, "rows", width, first) for role, first in parts.items()})
    check(replace(fused, kv_length=5), 2, 5)
    apart = {"query": H * E, "key": G * E, "value": G * F}
    places = {role: HeadLayout(i, "rows", width) for i, (role, width) in enumerate(apart.items())}
    check(operation(dtype=dtype, output=HeadLayout(0, "heads", H * F), **places), 2, 131)


@slow
def test_nothing_to_do():
    for B, S in ((0, 5), (2, 0)):
        y = run(operation(), draw_operands(np.random.default_rng(0), operation(), (B, 1, S), 1.0, 0), (B, 1, S), 5)
        assert not y.any()


@slow
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("bfloat16", marks=pytest.mark.thorough),
        "float16",
        pytest.param("float32", marks=pytest.mark.thorough),
    ],
)
def test_values_that_are_not_finite_reach_only_those_who_see_them(dtype):
    """Infinity of either sign, both, and NaN, each in a column of its own, at keys that the later query sees."""
    op, sizes = operation(2, (2, 1), dtype=dtype, band=WindowSpec(None, 0, "bottom_right")), (1, 2, 67)
    given = draw_operands(np.random.default_rng(3), op, sizes, 1.0, 0)
    given.v[0, 0, 66, :3] = np.inf, -np.inf, np.nan
    given.v[0, 0, 65, 3], given.v[0, 0, 66, 3] = np.inf, -np.inf
    expected, y = attention(op, given.q, given.k, given.v, None), run(op, given, sizes, 3).astype(np.float64)
    np.testing.assert_array_equal(np.isposinf(y), np.isposinf(expected))
    np.testing.assert_array_equal(np.isneginf(y), np.isneginf(expected))
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    assert np.isnan(y).any() and np.isinf(y).any() and np.isfinite(np.delete(y[0, 0], [3, 43])).all()


@slow
@pytest.mark.parametrize("step", [pytest.param(30.0, marks=pytest.mark.thorough), -30.0])
def test_scores_that_rise_or_fall_with_the_keys(step):
    """Every key is `step` above the one before: the maximum is raised again and again, or never."""
    op, sizes = operation(dtype="float32"), (1, 1, 131)
    given = draw_operands(np.random.default_rng(5), op, sizes, 1.0, 0)
    given.q[...], given.k[...] = 0, 0
    given.q[..., 0] = 1
    given.k[..., 0] = (np.arange(131) % 64 * step * 24**0.5)[None, None]
    truth, narrow = evaluated(op, given, torch.float64), evaluated(op, given, torch.float32)
    y = run(op, given, sizes, 5)
    assert judge(lambda _: [(truth, narrow.astype(np.float32), y)], {}).ok


def test_what_it_does_not_take_is_named():
    profile = gpu(108)
    assert KERNEL.op_type is AttentionOp
    refused = [
        (operation("L"), "symbolic"),
        (operation(9), "9"),
        (operation(heads=(40, 1)), "40"),
        (operation(heads=(17, 1), widths=(256, 256)), "room"),
        (operation(widths=(20, 40)), "multiple of 8"),
        (operation(widths=(264, 40)), "up to 256"),
        (operation(query=HeadLayout(0, "rows", 100)), "multiples of 8"),
        (operation(softmax="float64"), "float64"),
        (operation(7, dtype="float32", widths=(128, 128)), "room"),
        (changed(operation(), kv_length=8, static_mask=StaticMask(np.ones((1, 1, 8), np.bool_))), "constant"),
    ]
    for op, words in refused:
        assert words in str(KERNEL.why_not(op, profile))
    op = operation(widths=(128, 128))
    for config, words in (((16, 9, 4, 2), "shared memory"), ((8, 2, 4, 2), "16 or 32"), ((16, 2, 4, 8), "registers")):
        assert words in str(KERNEL.why_not_config(op, profile, dict(zip(KNOBS, config, strict=True))))
    assert all(
        set(values) >= {KERNEL.default_config(op, profile)[knob]}
        for knob, values in KERNEL.search_space(op, profile).items()
    )


@slow
def test_long_sums_are_sums_of_short_ones():
    """All terms alike, so that roundings of one long sum would not cancel: they come to a hundredfold there."""
    op, S = operation(1, (1, 1), (4, 128), dtype="float32"), 2048
    given = draw_operands(np.random.default_rng(0), op, (1, 1, S), 1.0, 0)
    for array in (given.q, given.k, given.v):
        array[...] = 0.1
    exact = np.float64(np.float32(0.1))
    one_sum = abs(np.cumsum(given.v[0, 0, :, 0])[-1] / np.float64(S) - exact)
    assert np.abs(run(op, given, (1, 1, S), 1) - exact).max() <= one_sum / 16


ALL = {
    "softcap": 5.0,
    "lengths": True,
    "sinks": True,
    "slopes": True,
    "band": WindowSpec(100, 0, "bottom_right"),
}


@slow
@pytest.mark.parametrize(
    ("target", "op"),
    [
        ("cuda-sm90a", operation(1, (32, 8), (128, 128))),
        ("cuda-sm80", operation(1, (16, 1), (256, 256), dtype="float16", lengths=True)),
        ("cuda-sm86", operation(2, (32, 8), (64, 64), mask=CallMask("bfloat16", ("B", 32, 2, "S")), **ALL)),
        ("cuda-sm90a", operation(1, (32, 8), (128, 128), dtype="float32")),
        ("cuda-sm80", operation(2, (32, 8), (64, 64), dtype="float32", **ALL)),
        ("cuda-sm86", operation(1, (16, 1), (128, 128), dtype="float32")),
    ],
    ids=["128", "256", "everything", "float32", "float32 of everything", "float32 of 16 rows"],
)
def test_machine_code(target, op, tmp_path):
    """The code is all in registers, blocks at once as are asked for, with our barriers alone; in 16 bits on tensor
    cores."""
    profile = load_profile(target)
    config = KERNEL.default_config(op, profile)
    text, host = cuda_code.source(KERNEL.emit(op, profile, config), profile.tvm.arch)
    code = cuda_code.machine_code(text, profile.tvm.arch, tmp_path)
    assert (code.spilled, code.stack) == (0, 0) and code.instructions["LDL"] == code.instructions["STL"] == 0
    shared = KERNEL.shared_bytes(op, config)
    assert profile.blocks_at_once(32 * config["warps"], code.registers, shared) >= config["blocks"]
    assert f" {shared}" in host  # what it is launched with, no more and no less
    is_wide = op.dtype == "float32"
    assert code.instructions["BAR"] == (5 if is_wide or op.head_dim == 256 else 4)
    assert bool(code.instructions["HMMA"]) == bool(code.instructions["LDSM"]) == (not is_wide)
    copies = (
        config["keys"] * (op.head_dim + op.v_head_dim) * (4 if is_wide else 2) // (16 * 32)
    )  # of a lane, for a tile
    assert code.instructions["LDGSTS"] == config["stages"] * copies


@slow
@pytest.mark.usefixtures("cuda_compiler")
def test_through_the_whole_flow():
    """One query of a cache: two launches, and a workspace that the artifact plans."""
    spec = mhsa.AttentionSpec(embed_dim=256, num_heads=4, num_kv_heads=2, kv_embed_dim=256, dtype="bfloat16")
    artifact = mhsa.compile(mhsa.ScaledDotProductAttention(spec), "cuda-sm80", dims={"L": 1})
    (row,) = artifact.manifest.ops
    assert (row.kernel, row.source) == ("cuda.decode", "default")
    wide = mhsa.AttentionSpec(embed_dim=256, num_heads=4, causal=True)
    (row,) = mhsa.compile(mhsa.ScaledDotProductAttention(wide), "cuda-sm80", dims={"B": 1}).manifest.ops
    assert (row.kernel, row.source) == ("cuda.attention_float32", "default")
