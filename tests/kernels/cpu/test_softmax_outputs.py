"""The kernels that look into a softmax, by themselves: sums, largest and weights at every vector width and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import tvm
from support.kernel_runs import compiled, vector_machine
from support.softmax_outputs_cases import ALL, SUMS, Array, Run, asked_of, compare, operands, operation
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import TargetProfile, detect
from mhsa_compile.kernels.common.buffers import argument, prim_func
from mhsa_compile.kernels.cpu.simd.vector_math import natural_log
from mhsa_compile.kernels.cpu.simd.vectors import load, store
from mhsa_compile.kernels.cpu.softmax_outputs.probs_kernel import CpuAttentionProbsKernel
from mhsa_compile.kernels.cpu.softmax_outputs.stats_kernel import CpuSoftmaxStatsKernel
from mhsa_compile.kernels.interface.kernel import Emitted
from mhsa_compile.kernels.interface.ops import AttentionOp, AttentionProbsOp, SoftmaxStatsOp
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.kernels.scores.static_mask import StaticMask
from mhsa_compile.spec.outputs import SoftmaxOutputs
from mhsa_compile.spec.window import WindowSpec

MACHINES = {"avx2": (256, 16), "avx512": (512, 32), "scalar": (64, 8)}
WIDE, NARROW = vector_machine(512, 32), vector_machine(128, 32)


@pytest.fixture(params=MACHINES, scope="module")
def machine(request):
    return vector_machine(*MACHINES[request.param])


def run(emitted: Emitted, library: Any, inputs: Sequence[Array], outputs: Sequence[Array]) -> list[Array]:
    tensors = [tvm.runtime.tensor(array) for array in (*inputs, *emitted.constants, *outputs)]
    library["run"](*tensors)
    return [tensor.numpy() for tensor in tensors[-len(outputs) :]]


def check(
    op: AttentionOp, profile: TargetProfile, shapes: Sequence[tuple[int, int, int]], wanted: SoftmaxOutputs = SUMS
) -> None:
    """Holds what is wanted, by kernels compiled once, against float64 at every shape."""
    runs: list[Run] = []
    for kernel, asked in zip((CpuSoftmaxStatsKernel(), CpuAttentionProbsKernel()), asked_of(op, wanted), strict=False):
        emitted = kernel.emit(asked, profile, kernel.default_config(asked, profile))
        runs.append(partial(run, emitted, compiled(emitted, profile)))
    compare(op, runs, shapes, wanted)


SHAPES = ((97, 1, 1), (2, 37, 131), (1, 131, 37), (29, 7, 3))
"""(B, L, S); short ones with many entries, as the budget wants to see PyTorch's error."""


@pytest.mark.thorough
def test_every_vector_width(machine):
    check(operation(), machine, SHAPES)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("band", "wanted"), [(WindowSpec(None, 0, "bottom_right"), SUMS), (WindowSpec(9, 2), ALL)], ids=str
)
def test_bands(band, wanted):
    check(operation(band=band), WIDE, SHAPES, wanted)


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [(("B", "H", "L", "S"), "float32"), pytest.param(("B", 1, 1, "S"), "bool", marks=pytest.mark.thorough)],
    ids=str,
)
def test_masks_of_the_call(dims, dtype):
    check(operation(mask=CallMask(dtype, dims), band=WindowSpec(None, 0)), WIDE, SHAPES)


@pytest.mark.parametrize(
    ("heads", "wanted"),
    [pytest.param(4, ALL, marks=pytest.mark.thorough), (1, replace(ALL, rows=(5, -1, 66, 67), heads=(3, 1)))],
    ids=["all", "chosen"],
)
def test_constant_masks(heads, wanted):
    visible = np.random.default_rng(3).random((heads, 67, 131)) < 0.5
    visible[:, :, 40:70] = False
    visible[:, 5] = False
    op = operation(
        q_length=67, kv_length=131, static_mask=StaticMask(visible), band=WindowSpec(None, 0, "bottom_right")
    )
    check(op, WIDE, [(2, 67, 131)], wanted)


@pytest.mark.parametrize(
    ("dtype", "profile", "wanted"),
    [pytest.param("bfloat16", detect(), ALL, marks=pytest.mark.thorough), ("float16", NARROW, SUMS)],
    ids=["bfloat16", "float16"],
)
def test_sixteen_bits(dtype, profile, wanted):
    check(operation(dtype=dtype, v_head_dim=16, band=WindowSpec(None, 0)), profile, SHAPES, wanted)


@pytest.mark.thorough
def test_what_else_makes_a_score():
    """Softcap, numbers of keys, sinks and slopes, together and with a bottom-right band; one entry has no key."""
    features = {"softcap": 2.0, "lengths": True, "sinks": True, "slopes": True}
    check(operation(**features, band=WindowSpec(None, 0, "bottom_right")), WIDE, SHAPES)


@pytest.mark.thorough
def test_numbers_of_keys_and_a_constant_mask_far_from_the_last_key():
    """With slopes, the largest scores of most rows are at neither end of the keys, and entries end elsewhere."""
    distance = np.arange(131) - np.arange(67)[:, None]
    visible = (abs(distance) <= 9) | (distance == -30)
    visible[40:, 100:] = True
    op = operation(q_length=67, kv_length=131, static_mask=StaticMask(visible[None]), lengths=True, slopes=True)
    check(op, WIDE, [(5, 67, 131)], ALL)


def test_chosen_heads_and_rows_and_more_keys_than_there_are():
    """Rows that are not there are zeros, and so are the weights of keys that are not."""
    wanted = replace(ALL, heads=(2, 0), rows=(0, -1, 5, -3), top_k=40)
    check(operation(band=WindowSpec(None, 0), lengths=True), NARROW, SHAPES, wanted)


@pytest.mark.thorough
def test_of_equal_scores_the_first_key_comes_first():
    op, kernel = operation(), CpuSoftmaxStatsKernel()
    q, k, v = operands(op, 1, 3, 50)
    k[:, :, [3, 4, 11, 30, 49]] = 4 * q[:, ::2, :1]  # the best of the first query, five times over
    asked = SoftmaxStatsOp(op, top_k=3)
    emitted = kernel.emit(asked, WIDE, kernel.default_config(asked, WIDE))
    outputs = [np.zeros((1, 4, 3, 3), np.float32), np.zeros((1, 4, 3, 3), np.int64)]
    _, keys = run(emitted, compiled(emitted, WIDE), [q, k, v], outputs)
    assert (keys[:, ::2, 0] == [3, 4, 11]).all()


@pytest.mark.thorough
def test_what_is_hidden_reaches_no_output_and_what_is_seen_does():
    op = operation(band=WindowSpec(None, 0))
    q, k, v = operands(op, 1, 60, 60)
    k[:, :, 40] = np.nan
    kernels = (
        (CpuSoftmaxStatsKernel(), SoftmaxStatsOp(op, True, True, 2)),
        (CpuAttentionProbsKernel(), AttentionProbsOp(op)),
    )
    rows = (1, 4, 60)
    outputs = [np.zeros(rows, np.float32), np.zeros(rows, np.float32), np.zeros((*rows, 2), np.float32)]
    found = []
    for (kernel, asked), filled in zip(
        kernels, ([*outputs, np.zeros((*rows, 2), np.int64)], [np.zeros((*rows, 60), np.float32)]), strict=True
    ):
        emitted = kernel.emit(asked, WIDE, kernel.default_config(asked, WIDE))
        found += run(emitted, compiled(emitted, WIDE), [q, k, v], filled)
    lse, entropy, largest, _, weights = found
    for array in (lse, entropy, largest):
        assert np.isfinite(array[:, :, :40]).all() and np.isnan(array[:, :, 40:]).all()
    later = np.triu(np.ones((60, 60), np.bool_), 1)
    assert (weights[:, :, later] == 0).all() and np.isfinite(weights[:, :, :40]).all()
    assert np.isnan(weights[:, :, 40:][..., ~later[40:]]).all()


@pytest.mark.parametrize("lanes", [1, 16])
def test_natural_log(lanes):
    """The logarithm is within 2 ulp of float64's, over every exponent that a sum of weights can have."""
    values = np.exp(np.linspace(-60, 80, 160_000)).astype(np.float32)
    values[:3] = [1, np.nan, 2]
    with prim_func("run") as builder:
        x, y = (argument(name, [T.int64(len(values))], "float32") for name in "xy")
        with T.serial(T.int64(len(values) // lanes)) as i:
            at = [i * lanes]
            store(y, at, natural_log(load(x, at, lanes), lanes), lanes)
    emitted = Emitted(builder.get())
    (found,) = run(emitted, compiled(emitted, WIDE), [values], [np.empty_like(values)])
    expected = np.log(values.astype(np.float64))
    assert np.isnan(found[1]) and found[0] == 0
    error = np.abs(found - expected)[np.isfinite(expected)]
    assert (error <= 2 * np.spacing(np.maximum(np.abs(expected), 1).astype(np.float32))[np.isfinite(expected)]).all()
