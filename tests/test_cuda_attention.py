"""The attention kernel for GPUs, by itself and where there is no GPU: what it computes, run in NumPy, against float64;
and what nvcc makes of it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import cuda_attention_checks
import cuda_code
import ml_dtypes
import numpy as np
import pytest
import simt
import torch
from cuda_attention_checks import Sizes, operation, scattered
from fuzz_attention import NUMPY, Operands, draw_operands, evaluated, output_rows, output_shape, placed
from kernel_runs import attention
from simt_banks import counted

import mhsa_compile as mhsa
from mhsa_compile.kernels import KERNELS
from mhsa_compile.kernels.cuda.attention import AttentionKernel
from mhsa_compile.kernels.cuda.attention_plan import plan
from mhsa_compile.kernels.cuda.warp import MOST_REGISTERS
from mhsa_compile.kernels.operations import AttentionOp, Band, LinearOp, MaskInput, Placement, StaticMask
from mhsa_compile.parity import judge
from mhsa_compile.profile import load_profile

GPU = load_profile("cuda-sm80")
KERNEL = AttentionKernel()
slow = pytest.mark.cuda  # of `make test-cuda`; a part of each kind of test is in the suite


def run(
    op: AttentionOp, given: Operands, sizes: tuple[int, int, int], config: dict[str, int] | None = None
) -> np.ndarray:
    machine, constants = translated(op, tuple((config or KERNEL.default(op, GPU)).items()))
    y = np.full(output_shape(op, sizes), np.nan, NUMPY[op.dtype])
    machine(*placed(op, given), *constants, y)
    return output_rows(y, op.output)


@lru_cache(maxsize=4)
def translated(op: AttentionOp, config: tuple[tuple[str, int], ...]) -> tuple[simt.Machine, tuple[np.ndarray, ...]]:
    assert KERNEL.applies(op, GPU) is None and KERNEL.unfit(op, GPU, dict(config)) is None
    emitted = KERNEL.emit(op, GPU, dict(config))
    return simt.Machine(emitted.run), emitted.constants


def check(
    op: AttentionOp,
    sizes: Sizes = (2, 67, 131),
    config: dict[str, int] | None = None,
    *,
    magnitude: float = 1.0,
    poisoned: bool = False,
) -> None:
    def of_config(op: AttentionOp, given: Operands, sizes: Sizes) -> np.ndarray:
        return run(op, given, sizes, config)

    cuda_attention_checks.check(of_config, op, sizes, magnitude=magnitude, poisoned=poisoned)


@slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("widths", [(24, 40), (64, 64), (8, 256)], ids=str)
def test_heads_of_any_width(dtype, widths):
    check(operation(widths=widths, dtype=dtype))


@slow
@pytest.mark.parametrize("width", [96, 128, 256])
def test_heads_of_usual_widths(width):
    check(operation((2, 1), (width, width), band=Band(None, 0)), (1, 131, 131), poisoned=True)


@slow
@pytest.mark.parametrize("sizes", [(1, 1, 7), (3, 7, 1), (1, 197, 64)], ids=str)
def test_ragged_lengths(sizes):
    check(operation((5, 1), dtype="float16"), sizes)


@slow
@pytest.mark.parametrize("config", [(64, 16, 1), (64, 48, 3), (128, 32, 2), (64, 96, 1)], ids=str)
def test_configs(config):
    op = operation(widths=(72, 48), band=Band(None, 3, "bottom_right"))
    check(op, (1, 131, 197), dict(zip(("queries", "keys", "stages"), config, strict=True)))


@slow
@pytest.mark.parametrize(
    ("sizes", "band"),
    [
        ((1, 197, 197), Band(5, 0)),
        ((1, 131, 131), Band(None, 20)),
        ((1, 131, 61), Band(None, 0, "bottom_right")),
        ((1, 61, 131), Band(100, 0, "top_left")),
        ((2, 64, 512), Band(40, 3, "bottom_right")),
        ((1, 7, 197), Band(0, 0, "bottom_right")),
    ],
    ids=str,
)
def test_bands(sizes, band):
    check(operation(band=band), sizes, {"queries": 64, "keys": 32, "stages": 2}, poisoned=True)


@slow
@pytest.mark.parametrize(
    "fields",
    [
        {"softcap": 2.0},
        {"scale": -0.3},
        {"scale": 0.0},
        {"lengths": True},
        {"lengths": True, "band": Band(None, 0, "bottom_right")},
        {"sinks": True, "lengths": True},
        {"slopes": True, "band": Band(None, 0, "bottom_right")},
        {"slopes": True, "sinks": True, "softcap": 5.0, "band": Band(30, 20)},
    ],
    ids=str,
)
def test_scores(fields):
    check(operation(**fields), (3, 67, 131), poisoned=True)


@slow
@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32"])
@pytest.mark.parametrize("dims", [("B", 4, "L", "S"), (1, 1, "L", "S"), ("B", 1, 1, "mask_S")], ids=str)
def test_masks(dtype, dims):
    band = Band(None, 0, "bottom_right") if dtype == "bool" else None
    check(operation(mask=MaskInput(dtype, dims), band=band), (2, 67, 131), poisoned=True)


@pytest.mark.parametrize("dtype", ["bool", *(pytest.param(dtype, marks=slow) for dtype in ("float16", "float32"))])
def test_masks_in_pairs(dtype):
    """Where their rows are of an even number of elements; the last tile has keys beyond."""
    mask = MaskInput(dtype, ("B", 4, "L", "S"))
    check(operation(mask=mask, lengths=True, band=Band(90, 0, "bottom_right")), (2, 67, 132), poisoned=True)


@slow
def test_placements():
    H, G, E, F = 4, 2, 24, 40
    parts = {"query": 0, "key": H * E, "value": H * E + G * E}
    width = H * E + G * (E + F) + 8  # the padding that rows of a fused projection may have
    fused = operation(**{role: Placement(0, "rows", width, first) for role, first in parts.items()})
    check(replace(fused, kv_length="L"), (2, 67, 67))
    apart = {"query": H * E, "key": G * E, "value": G * F}
    places = {role: Placement(i, "rows", width) for i, (role, width) in enumerate(apart.items())}
    check(operation(output=Placement(0, "heads", H * F), **places))


@slow
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"band": Band(None, 0, "bottom_right")},
        {"lengths": True, "band": Band(90, 0, "bottom_right"), "slopes": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", [1, 4])
def test_constant_masks(heads, fields):
    B, L, S = 2, 131, 197
    op = replace(operation(static_mask=StaticMask(scattered((heads, L, S))), **fields), q_length=L, kv_length=S)
    check(op, (B, L, S), {"queries": 64, "keys": 32, "stages": 2}, poisoned=True)


def test_a_plan_visits_what_is_seen_and_nothing_else():
    visible = np.zeros((1, 100, 256), np.bool_)
    visible[0, :64, :64] = True  # whole for the first block
    visible[0, 64:, 100:110] = True  # for the second, the middle of a tile
    made = plan(StaticMask(visible), None, queries=64, keys=64)
    assert made.index.tolist() == [0, 1, 2] and made.visits.tolist() == [[0, -1], [1, 0]]
    assert made.bits.shape == (64, 2) and not made.bits[36:].any()
    assert (made.bits[:36] == [0, 0x3FF << 4]).all()


@slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_that_are_not_finite_reach_only_those_who_see_them(dtype):
    """Infinity of either sign, both, and NaN, each in a column of its own, at keys that half of the rows see."""
    op, sizes = operation((2, 1), dtype=dtype, band=Band(None, 0)), (1, 67, 67)
    given = draw_operands(np.random.default_rng(3), op, sizes, 1.0, 0)
    given.v[0, 0, 40, :3] = np.inf, -np.inf, np.nan
    given.v[0, 0, 41:43, 3] = np.inf, -np.inf
    expected, y = attention(op, given.q, given.k, given.v, None), run(op, given, sizes).astype(np.float64)
    np.testing.assert_array_equal(np.isposinf(y), np.isposinf(expected))
    np.testing.assert_array_equal(np.isneginf(y), np.isneginf(expected))
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    assert np.isnan(y).any() and np.isinf(y).any() and np.isfinite(y[0, :40]).all()


@slow
@pytest.mark.parametrize("step", [30.0, -30.0])
def test_scores_that_rise_or_fall_with_the_keys(step):
    """Every key is `step` above the one before: the maximum is raised again and again, or never."""
    op, sizes = operation(), (1, 17, 131)
    given = draw_operands(np.random.default_rng(5), op, sizes, 1.0, 0)
    given.q[...], given.k[...] = 0, 0
    given.q[..., 0] = 1
    given.k[..., 0] = (np.arange(131) % 64 * step * 24**0.5)[None, None]
    truth, narrow = evaluated(op, given, torch.float64), evaluated(op, given, torch.bfloat16)
    y = run(op, given, sizes)
    assert judge(lambda _: [(truth, narrow.astype(ml_dtypes.bfloat16), y)], {}).ok


def test_what_it_does_not_take_is_named():
    assert "not an attention" in str(KERNEL.applies(LinearOp((1, 1), 8, (8,), (False,), (False,)), GPU))
    refused = [
        (operation(dtype="float32"), "16-bit"),
        (operation(widths=(20, 40)), "multiple of 8"),
        (operation(widths=(264, 40)), "up to 256"),
        (operation(query=Placement(0, "rows", 100)), "multiples of 8"),
        (operation(softmax="float64"), "float64"),
    ]
    for op, words in refused:
        assert words in str(KERNEL.applies(op, GPU))
    op = operation(widths=(256, 256))
    for config, words in (((128, 128, 3), "shared memory"), ((60, 64, 1), "multiples"), ((128, 16, 1), "registers")):
        assert words in str(KERNEL.unfit(op, GPU, dict(zip(("queries", "keys", "stages"), config, strict=True))))


@pytest.mark.parametrize("width", [32, 96, *(pytest.param(width, marks=slow) for width in (48, 64, 128, 160, 256))])
def test_shared_memory_without_bank_conflicts(width):
    """Every access of Q, K, V and O takes no more cycles than its bytes do."""
    op, sizes = operation((1, 1), (width, width)), (1, 128, 64)
    given = draw_operands(np.random.default_rng(0), op, sizes, 1.0, 0)
    with counted() as (reads, writes):
        run(op, given, sizes, {"queries": 128 if width <= 128 else 64, "keys": 64, "stages": 1})
    assert 0 < reads.needed == reads.taken
    assert 0 < writes.needed == writes.taken


WINDOW = {"band": Band(70, 0, "bottom_right"), "lengths": True, "sinks": True}
EVERYTHING = {
    **{"softcap": 5.0, "lengths": True, "sinks": True, "slopes": True, "band": Band(None, 0, "bottom_right")},
    "mask": MaskInput("bfloat16", ("B", 4, "L", "S")),
}


def test_everything_at_once():
    check(operation(widths=(40, 24), **EVERYTHING), (2, 67, 131), poisoned=True)


def of_profile(name: str, width: int, **fields: Any) -> Any:
    return pytest.param(
        load_profile(name), operation(widths=(width, width), **fields), id=f"{name} {width} {[*fields]}"
    )


BITS = {"static_mask": StaticMask(scattered((1, 512, 512)))}
COMPILED = [
    of_profile("cuda-sm80", 64, dtype="float16", **EVERYTHING),
    of_profile("cuda-sm80", 96, **WINDOW),
    of_profile("cuda-sm80", 128),
    of_profile("cuda-sm80", 256, softcap=50.0, **WINDOW),
    of_profile("cuda-sm86", 64, **WINDOW),
    of_profile("cuda-sm86", 96, **BITS),
    of_profile("cuda-sm86", 128, **EVERYTHING),
    of_profile("cuda-sm86", 256, band=Band(None, 0)),
    of_profile("cuda-sm90a", 64, **BITS),
    of_profile("cuda-sm90a", 96, **EVERYTHING),
    of_profile("cuda-sm90a", 128, band=Band(None, 0)),
    of_profile("cuda-sm90a", 256, mask=MaskInput("bool", ("B", 1, "L", "S"))),
]


@slow
@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize(("profile", "op"), COMPILED)
def test_machine_code(profile, op, tmp_path):
    check_code(profile, op, KERNEL.default(op, profile), tmp_path)


@slow
@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize("name", ["cuda-sm80", "cuda-sm90a"])
@pytest.mark.parametrize(
    ("width", "fields", "config"),
    [
        (64, {"slopes": True, "band": Band(None, 0)}, (128, 64, 2)),
        (128, {"softcap": 30.0, "band": Band(None, 0)}, (128, 48, 1)),
        (96, {"mask": MaskInput("bool", ("B", 1, "L", "S"))}, (128, 64, 1)),
        (96, EVERYTHING, (128, 32, 1)),
        (256, WINDOW, (64, 64, 1)),
    ],
    ids=str,
)
def test_machine_code_of_the_largest_that_fit(name, width, fields, config, tmp_path):
    """One step more of keys is refused."""
    profile, op = load_profile(name), operation(widths=(width, width), **fields)
    chosen = dict(zip(("queries", "keys", "stages"), config, strict=True))
    check_code(profile, op, chosen, tmp_path)
    more = next(keys for keys in KERNEL.space(op, profile)["keys"] if keys > chosen["keys"])
    assert KERNEL.unfit(op, profile, {**chosen, "keys": more, "stages": 1}) is not None


def check_code(profile: Any, op: AttentionOp, config: dict[str, int], folder: Path) -> None:
    """On the tensor cores, all in registers, within what the profile has, and with our barriers alone."""
    if op.static_mask is not None:
        op = replace(op, q_length=512, kv_length=512)
    assert KERNEL.applies(op, profile) is None and KERNEL.unfit(op, profile, config) is None
    text, host = cuda_code.source(KERNEL.emit(op, profile, config), profile.tvm.arch)
    code = cuda_code.machine_code(text, profile.tvm.arch, folder)
    assert (code.spilled, code.stack) == (0, 0) and code.registers <= MOST_REGISTERS
    of_warp, of_product = config["queries"] // 4 * config["keys"] * (op.head_dim + op.v_head_dim), 16 * 8 * 16
    assert code.instructions["HMMA"] == of_warp // of_product  # those of one tile, once
    assert code.instructions["LDSM"] and code.instructions["LDGSTS"]
    hides = op.band is not None or op.mask is not None or op.static_mask is not None
    assert code.instructions["BAR"] == (6 if hides else 3)
    shared = KERNEL.shape(op, config).shared_bytes
    assert f" {shared}" in host  # what it is launched with, no more and no less
    assert profile.blocks_at_once(128, code.registers, shared) >= 1


@slow
@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize("name", ["cuda-sm80", "cuda-sm86", "cuda-sm90a"])
def test_through_the_whole_flow(name):
    """A core of 16-bit types, with a constant mask on one target, whose plan is among the artifact's constants."""
    fixed = {"static_mask": mhsa.patterns.Longformer(window=16)} if name == "cuda-sm86" else {"causal": True}
    spec = mhsa.AttentionSpec(embed_dim=128, num_heads=2, dtype="float16", **fixed)
    dims = {"B": 1, "L": 131, "S": 131} if name == "cuda-sm86" else {"B": 2}
    core = mhsa.ScaledDotProductAttention(spec)
    artifact, again = (mhsa.compile(core, name, dims=dims) for _ in range(2))
    (row,) = artifact.manifest.ops
    of_target = "cuda.attention_hopper" if name == "cuda-sm90a" else "cuda.attention"
    assert (row.kernel, row.source) == (of_target, "default")
    assert artifact.manifest == again.manifest


def test_defaults_follow_the_machine_and_the_work():
    """Two blocks on a multiprocessor, and blocks for all multiprocessors."""
    assert any(isinstance(kernel, AttentionKernel) for kernel in KERNELS["cuda"])
    op, small = operation(widths=(128, 128)), load_profile("cuda-sm86")
    assert KERNEL.default(op, GPU) == {"queries": 128, "keys": 64, "stages": 1}
    assert KERNEL.default(op, small) == {"queries": 64, "keys": 32, "stages": 1}
    few = replace(op, batch=1, q_length=512)
    assert KERNEL.default(few, GPU) == {"queries": 64, "keys": 64, "stages": 1}
    assert KERNEL.default(replace(few, batch=64), GPU) == KERNEL.default(op, GPU)
