"""The attention kernel for GPUs, by itself and where there is no GPU: beside what `test_tiled_attention.py` runs, its
widths and sizes, its shared memory, and what nvcc makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz.attention import draw_operands
from support.attention_ops import features, scattered
from support.cuda import cuda_code
from support.cuda.cuda_tile_kernels import MMA, operation
from support.simt.banks import counted

import mhsa_compile as mhsa
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.cuda.attention.block_sparsity import block_plan
from mhsa_compile.kernels.cuda.primitives.simt import MOST_REGISTERS
from mhsa_compile.kernels.interface.ops import AttentionOp
from mhsa_compile.kernels.registry import KERNELS
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.kernels.scores.static_mask import StaticMask
from mhsa_compile.spec.window import WindowSpec

KERNEL, GPU = MMA.kernel, MMA.profile
slow = pytest.mark.cuda  # of `make test-cuda`; a part of each kind of test is in the suite


@slow
@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.thorough), "float16"])
@pytest.mark.parametrize(
    "widths",
    [(24, 40), pytest.param((64, 64), marks=pytest.mark.thorough), pytest.param((8, 256), marks=pytest.mark.thorough)],
    ids=str,
)
def test_heads_of_any_width(dtype, widths):
    MMA.check(operation(widths=widths, dtype=dtype))


@slow
@pytest.mark.parametrize(
    "width", [pytest.param(96, marks=pytest.mark.thorough), pytest.param(128, marks=pytest.mark.thorough), 256]
)
def test_heads_of_usual_widths(width):
    MMA.check(operation((2, 1), (width, width), band=WindowSpec(None, 0)), (1, 131, 131), poisoned=True)


@slow
@pytest.mark.parametrize(
    "config",
    [
        (64, 16, 1),
        pytest.param((64, 48, 3), marks=pytest.mark.thorough),
        pytest.param((128, 32, 2), marks=pytest.mark.thorough),
        pytest.param((64, 96, 1), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_configs(config):
    op = operation(widths=(72, 48), band=WindowSpec(None, 3, "bottom_right"))
    MMA.check(op, (1, 131, 197), config)


def test_a_plan_visits_what_is_seen_and_nothing_else():
    visible = np.zeros((1, 100, 256), np.bool_)
    visible[0, :64, :64] = True  # whole for the first block
    visible[0, 64:, 100:110] = True  # for the second, the middle of a tile
    made = block_plan(visible, None, queries=64, keys=64)
    assert made.index.tolist() == [0, 1, 2] and made.visits.tolist() == [[0, -1], [1, 0]]
    assert made.bits.shape == (64, 2) and not made.bits[36:].any()
    assert (made.bits[:36] == [0, 0x3FF << 4]).all()


def test_what_it_does_not_take_is_named():
    assert "16-bit" in str(KERNEL.why_not(operation(dtype="float32"), GPU))
    op = operation(widths=(256, 256))
    for config, words in (((128, 128, 3), "shared memory"), ((60, 64, 1), "multiples"), ((128, 16, 1), "registers")):
        assert words in str(KERNEL.why_not_config(op, GPU, MMA.config(*config)))


@pytest.mark.thorough_but("32", "64")
@pytest.mark.parametrize("width", [32, 96, *(pytest.param(width, marks=slow) for width in (48, 64, 128, 160, 256))])
def test_shared_memory_without_bank_conflicts(width):
    """Every access of Q, K, V and O takes no more cycles than its bytes do."""
    op, sizes = operation((1, 1), (width, width)), (1, 128, 64)
    given = draw_operands(np.random.default_rng(0), op, sizes, 1.0, 0)
    with counted() as (reads, writes):
        MMA.runner(128 if width <= 128 else 64, 64, 1)(op, given, sizes)
    assert 0 < reads.needed == reads.taken
    assert 0 < writes.needed == writes.taken


WINDOW = {"band": WindowSpec(70, 0, "bottom_right"), "lengths": True, "sinks": True}
EVERYTHING = {
    **{"softcap": 5.0, "lengths": True, "sinks": True, "slopes": True, "band": WindowSpec(None, 0, "bottom_right")},
    "mask": CallMask("bfloat16", ("B", 4, "L", "S")),
}


def test_everything_at_once():
    MMA.check(operation(widths=(40, 24), **EVERYTHING), (2, 67, 131), poisoned=True)


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
    of_profile("cuda-sm86", 256, band=WindowSpec(None, 0)),
    of_profile("cuda-sm90a", 64, **BITS),
    of_profile("cuda-sm90a", 96, **EVERYTHING),
    of_profile("cuda-sm90a", 128, band=WindowSpec(None, 0)),
    of_profile("cuda-sm90a", 256, mask=CallMask("bool", ("B", 1, "L", "S"))),
]


@pytest.mark.thorough_but(
    "cuda-sm80 64 ['dtype', 'softcap', 'lengths', 'sinks', 'slopes', 'band', 'mask']",
    "cuda-sm86 96 ['static_mask']",
    "cuda-sm86 128 ['softcap', 'lengths', 'sinks', 'slopes', 'band', 'mask']",
    "cuda-sm86 256 ['band']",
    "cuda-sm90a 64 ['static_mask']",
)
@slow
@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize(("profile", "op"), COMPILED)
def test_machine_code(profile, op, tmp_path):
    check_code(profile, op, KERNEL.default_config(op, profile), tmp_path)


@slow
@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize("name", [pytest.param("cuda-sm80", marks=pytest.mark.thorough), "cuda-sm90a"])
@pytest.mark.parametrize(
    ("width", "fields", "config"),
    [
        (64, {"slopes": True, "band": WindowSpec(None, 0)}, (128, 64, 2)),
        (128, {"softcap": 30.0, "band": WindowSpec(None, 0)}, (128, 48, 1)),
        pytest.param(96, {"mask": CallMask("bool", ("B", 1, "L", "S"))}, (128, 64, 1), marks=pytest.mark.thorough),
        (96, EVERYTHING, (128, 32, 1)),
        pytest.param(256, WINDOW, (64, 64, 1), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_machine_code_of_the_largest_that_fit(name, width, fields, config, tmp_path):
    """One step more of keys is refused."""
    profile, op = load_profile(name), operation(widths=(width, width), **fields)
    chosen = MMA.config(*config)
    check_code(profile, op, chosen, tmp_path)
    more = next(keys for keys in KERNEL.search_space(op, profile)["keys"] if keys > chosen["keys"])
    assert KERNEL.why_not_config(op, profile, {**chosen, "keys": more, "stages": 1}) is not None


def check_code(profile: Any, op: AttentionOp, config: dict[str, int], folder: Path) -> None:
    """Asserts that the machine code computes on the tensor cores, all in registers, within what the profile has, and
    with our barriers alone."""
    if op.pairs is not None:
        op = replace(op, q_length=512, kv_length=512)
    assert KERNEL.why_not(op, profile) is None and KERNEL.why_not_config(op, profile, config) is None
    text, host = cuda_code.source(KERNEL.emit(op, profile, config), profile.tvm.arch)
    code = cuda_code.machine_code(text, profile.tvm.arch, folder)
    assert (code.spilled, code.stack) == (0, 0) and code.registers <= MOST_REGISTERS
    of_warp, of_product = config["queries"] // 4 * config["keys"] * (op.head_dim + op.v_head_dim), 16 * 8 * 16
    assert code.instructions["HMMA"] == of_warp // of_product  # those of one tile, once
    assert code.instructions["LDSM"] and code.instructions["LDGSTS"]
    hides = op.window is not None or features(op).mask is not None or op.pairs is not None
    assert code.instructions["BAR"] == (6 if hides else 3)
    shared = KERNEL.shape(op, config).shared_bytes
    assert f" {shared}" in host  # what it is launched with, no more and no less
    assert profile.blocks_at_once(128, code.registers, shared) >= 1


@slow
@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize("name", ["cuda-sm80", "cuda-sm86", "cuda-sm90a"])
def test_through_the_whole_flow(name):
    """A core of 16-bit types, with a constant mask on one target, whose plan is among the artifact's constants."""
    fixed = {"static_mask": mhsa.masks.Longformer(window=16)} if name == "cuda-sm86" else {"causal": True}
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
    assert any(isinstance(kernel, type(KERNEL)) for kernel in KERNELS["cuda"])
    op, small = operation(widths=(128, 128)), load_profile("cuda-sm86")
    assert KERNEL.default_config(op, GPU) == {"queries": 128, "keys": 64, "stages": 1}
    assert KERNEL.default_config(op, small) == {"queries": 64, "keys": 32, "stages": 1}
    few = replace(op, batch=1, q_length=512)
    assert KERNEL.default_config(few, GPU) == {"queries": 64, "keys": 64, "stages": 1}
    assert KERNEL.default_config(replace(few, batch=64), GPU) == KERNEL.default_config(op, GPU)
