"""The attention kernel for Hopper where there is no GPU: beside what `test_tiled_attention.py` runs, its widths, its
warpgroups in any order, and what nvcc makes of it."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
from support.attention_ops import scattered
from support.cuda import cuda_code, cuda_compiler
from support.cuda.cuda_tile_kernels import HOPPER, operation

from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.interface.ops import AttentionOp
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.kernels.scores.static_mask import StaticMask
from mhsa_compile.spec.window import WindowSpec

pytestmark = pytest.mark.cuda
PROFILE = load_profile(HOPPER.target)


@pytest.mark.thorough_but("(24, 40)-bfloat16")
@pytest.mark.parametrize(
    ("widths", "dtype"), [((64, 64), "bfloat16"), ((96, 96), "float16"), ((128, 128), "bfloat16"), ((256, 256),
    "float16"), ((24, 40), "bfloat16"),
     ((8, 256), "bfloat16"), ((192, 128), "bfloat16")],
    ids=str,
)  # fmt: skip
def test_heads_of_any_width(widths, dtype):
    HOPPER.check(operation((2, 1), widths, dtype=dtype, band=WindowSpec(None, 0)), (1, 131, 131), seed=1)


def test_no_keys():
    HOPPER.check(operation(), (1, 7, 0), HOPPER.small)


@pytest.mark.thorough_but("None-(2, 48, 3, 2)")
@pytest.mark.parametrize("config", [(2, 16, 2, 2), (2, 48, 3, 2), (3, 32, 2, 1), (2, 96, 4, 1)], ids=str)
@pytest.mark.parametrize("seed", [None, 2, 3])
def test_configs_in_any_order(config, seed):
    op = operation(widths=(72, 48), band=WindowSpec(None, 3, "bottom_right"))
    HOPPER.check(op, (1, 331, 197), config, seed=seed)


ALL: dict[str, Any] = {"softcap": 5.0, "lengths": True, "sinks": True, "slopes": True}
MASK = CallMask("bfloat16", ("B", 4, "L", "S"))
CONSTANT = StaticMask(scattered((1, 256, 512)))
OPERATIONS = {
    "64 causal": operation(widths=(64, 64), band=WindowSpec(None, 0)),
    "96 causal": operation(widths=(96, 96), band=WindowSpec(None, 0), dtype="float16"),
    "128": operation(widths=(128, 128)),
    "128 causal": operation(widths=(128, 128), band=WindowSpec(None, 0)),
    "256 causal": operation(widths=(256, 256), band=WindowSpec(None, 0)),
    "256 window": operation(widths=(256, 256), band=WindowSpec(40, 3, "bottom_right"), dtype="float16"),
    "256 of everything": operation(widths=(256, 256), band=WindowSpec(30, 0, "bottom_right"), **ALL),
    "256 constant": replace(operation(widths=(256, 256), static_mask=CONSTANT, **ALL), q_length=256, kv_length=512),
    "64 of everything": operation(widths=(64, 64), band=WindowSpec(None, 0, "bottom_right"), mask=MASK, **ALL),
    "64 constant": replace(operation(widths=(64, 64), static_mask=CONSTANT, **ALL), q_length=256, kv_length=512),
}


@pytest.mark.thorough_but("64 causal", "256 window", "64 of everything", "64 constant")
@pytest.mark.parametrize("op", OPERATIONS.values(), ids=OPERATIONS)
def test_machine_code(op: AttentionOp, tmp_path):
    """Products of warpgroups that overlap, nothing spilt, the registers that the roles hand to each other, and softmax
    between the two waits of the loop."""
    config = HOPPER.kernel.default_config(op, PROFILE)
    text, host = cuda_code.source(HOPPER.kernel.emit(op, PROFILE, config), "sm_90a")
    code = cuda_code.machine_code(text, "sm_90a", tmp_path)
    assert (code.spilled, code.stack) == (0, 0)
    assert code.instructions["HMMA"] == 0
    steps = -(-op.head_dim // 16) + config["keys"] // 16
    assert code.instructions["HGMMA"] == 2 * steps  # the first tile and the loop; the loop and the last values
    assert code.instructions["UTMALDG"] and code.instructions["UTMASTG"] and code.instructions["USETMAXREG"] == 2
    assert not re.search(r"C75\d\d|serialized", code.said), code.said
    assert _exponentials_in_flight(code.order, steps) >= 0.8 * config["keys"] / 2
    assert "cuTensorMapEncodeTiled" in host
    # The host's scalars have no arrays: TVM would take their memory from the GPU, and the host would write to it.
    assert not re.search(r"load ptr, ptr @__TVMBackendAllocWorkspace", host)
    threads = 128 * (1 + config["consumers"])
    assert f"__launch_bounds__({threads}, 1)" in text


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["256 causal", "256 of everything", "256 constant"])
def test_nothing_spills_by_nvrtc_either(name, tmp_path):
    cuda_compiler.require_nvrtc()
    op = OPERATIONS[name]
    text, _ = cuda_code.source(HOPPER.kernel.emit(op, PROFILE, HOPPER.kernel.default_config(op, PROFILE)), "sm_90a")
    code = cuda_code.machine_code(text, "sm_90a", tmp_path, by_nvrtc=True)
    assert (code.spilled, code.stack) == (0, 0) and code.instructions["HGMMA"]


def _exponentials_in_flight(order: tuple[str, ...], products: int) -> int:
    """How many there are while the products of the loop are under way: after the wait for the first half of so many."""
    names = [name for name in order if name in ("HGMMA", "WARPGROUP.DEPBAR", "MUFU")]
    runs = [(name, len(list(run))) for name, run in itertools.groupby(names)]
    at = runs.index(("HGMMA", products))
    (waits, _), (takes, count), (waits_again, _) = runs[at + 1 : at + 4]
    assert (waits, takes, waits_again) == ("WARPGROUP.DEPBAR", "MUFU", "WARPGROUP.DEPBAR"), runs
    return count
