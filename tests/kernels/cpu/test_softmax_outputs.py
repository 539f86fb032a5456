"""The kernels that look into a softmax, by themselves: sums, largest and weights at every vector width and dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm
from support.kernel_runs import compiled, vector_machine
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import argument
from mhsa_compile.kernels.cpu.simd.vector_math import natural_log
from mhsa_compile.kernels.cpu.simd.vectors import load, store
from mhsa_compile.kernels.cpu.softmax_outputs.probs_kernel import CpuAttentionProbsKernel
from mhsa_compile.kernels.cpu.softmax_outputs.stats_kernel import CpuSoftmaxStatsKernel
from mhsa_compile.kernels.interface.kernel import Emitted
from mhsa_compile.kernels.interface.ops import (
    AttentionOp,
    AttentionProbsOp,
    HeadLayout,
    MaskInput,
    SoftmaxStatsOp,
    StaticMask,
    WindowSpec,
)
from mhsa_compile.nn import softmax_outputs
from mhsa_compile.nn.functional import to_numpy, to_torch
from mhsa_compile.spec.outputs import SoftmaxOutputs
from mhsa_compile.target.profile import TargetProfile, detect
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.oracle.softmax_outputs import collected, softmax_outputs_of_rows

MACHINES = {"avx2": (256, 16), "avx512": (512, 32), "scalar": (64, 8)}
WIDE, NARROW = vector_machine(512, 32), vector_machine(128, 32)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ALL = SoftmaxOutputs(lse=True, entropy=True, top_k=5, weights=True)
SUMS = replace(ALL, weights=False)
Array = np.ndarray


@pytest.fixture(params=MACHINES, scope="module")
def machine(request):
    return vector_machine(*MACHINES[request.param])


def operation(**fields: Any) -> AttentionOp:
    """Symbolic B, L and S; three buffers; grouped heads."""
    H, G, E, F = 4, 2, 24, 8
    places = {role: HeadLayout(i, "heads", 0) for i, role in enumerate(("query", "key", "value"))}
    stated = {"band": None, "mask": None, "output": HeadLayout(0, "rows", H * F), "scale": E**-0.5, **places, **fields}
    sizes = {"batch": "B", "q_length": "L", "kv_length": "S", "num_heads": H, "num_kv_heads": G}
    return AttentionOp(**{**sizes, "head_dim": E, "v_head_dim": F, **stated})


def operands(op: AttentionOp, B: int, L: int, S: int, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    shapes = (
        (B, op.num_heads, L, op.head_dim),
        (B, op.num_kv_heads, S, op.head_dim),
        (B, op.num_kv_heads, S, op.v_head_dim),
    )
    return [rng.standard_normal(shape).astype(DTYPES[op.dtype]) for shape in shapes]


def extras(op: AttentionOp, B: int, S: int) -> list[Array]:
    """Lengths, sinks and slopes, those that the operation takes."""
    rng = np.random.default_rng(1)
    made = {
        "lengths": rng.integers(0, S + 1, B),
        "sinks": rng.standard_normal(op.num_heads).astype(DTYPES[op.dtype]),
        "slopes": rng.random(op.num_heads).astype(DTYPES[op.dtype]),
    }
    return [array for name, array in made.items() if getattr(op, name)]


def scores(op: AttentionOp, inputs: Sequence[Array], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(the scores as the softmax takes them, -inf where hidden; the sinks), in PyTorch's arithmetic at `dtype`."""
    q, k = (to_torch(array).to(dtype) for array in inputs[:2])
    rest = list(inputs[3:])
    mask = rest.pop(0) if op.mask is not None else None
    lengths, sinks, slopes = (rest.pop(0) if getattr(op, name) else None for name in ("lengths", "sinks", "slopes"))
    L, S = q.shape[2], k.shape[2]
    value = (q * op.scale) @ k.repeat_interleave(op.num_heads // op.num_kv_heads, dim=1).transpose(-1, -2)
    value = torch.tanh(value / op.softcap) * op.softcap if op.softcap else value
    count = np.full((1, 1, 1, 1), S) if lengths is None else lengths.reshape(-1, 1, 1, 1)
    bottom_right = op.band is not None and op.band.alignment == "bottom_right"
    distance = np.arange(S) - np.arange(L).reshape(1, 1, L, 1) - (count - L if bottom_right else 0)
    visible = np.broadcast_to(np.arange(S) < count, tuple(value.shape))
    if op.band is not None:
        visible = visible & (True if op.band.left is None else -distance <= op.band.left)
        visible = visible & (True if op.band.right is None else distance <= op.band.right)
    if op.static_mask is not None:
        visible = visible & op.static_mask.visible
    if slopes is not None:
        value = value + (to_torch(slopes).double().reshape(-1, 1, 1) * to_torch(distance)).to(dtype)
    if mask is not None and mask.dtype == np.bool_:
        visible = visible & mask
    elif mask is not None:
        value, visible = value + to_torch(mask).to(dtype), visible & ~np.isneginf(mask)
    hidden = value.masked_fill(~to_torch(visible), -torch.inf)
    return hidden, None if sinks is None else to_torch(sinks).to(dtype)


def run(emitted: Emitted, library: Any, inputs: Sequence[Array], outputs: Sequence[Array]) -> list[Array]:
    tensors = [tvm.runtime.tensor(array) for array in (*inputs, *emitted.constants, *outputs)]
    library["run"](*tensors)
    return [tensor.numpy() for tensor in tensors[-len(outputs) :]]


Run = Callable[[Sequence[Array], Sequence[Array]], list[Array]]  # (inputs, outputs to be filled) -> what is in them


def asked_of(op: AttentionOp, wanted: SoftmaxOutputs) -> list[SoftmaxStatsOp | AttentionProbsOp]:
    weights = [AttentionProbsOp(op, wanted.heads, wanted.rows)] if wanted.weights else []
    return [SoftmaxStatsOp(op, wanted.lse, wanted.entropy, wanted.top_k), *weights]


def check(
    op: AttentionOp, profile: TargetProfile, shapes: Sequence[tuple[int, int, int]], wanted: SoftmaxOutputs = SUMS
) -> None:
    """What is wanted, by kernels compiled once, at every shape."""
    runs: list[Run] = []
    for kernel, asked in zip((CpuSoftmaxStatsKernel(), CpuAttentionProbsKernel()), asked_of(op, wanted), strict=False):
        emitted = kernel.emit(asked, profile, kernel.default_config(asked, profile))
        runs.append(partial(run, emitted, compiled(emitted, profile)))
    compare(op, runs, shapes, wanted)


def compare(
    op: AttentionOp, runs: Sequence[Run], shapes: Sequence[tuple[int, int, int]], wanted: SoftmaxOutputs
) -> None:
    """What the runs of `asked_of` give, at every shape: within twice PyTorch's error and a rounding step."""
    for B, L, S in shapes:
        inputs = [*operands(op, B, L, S), *masks(op, B, L, S), *extras(op, B, S)]
        exact, sinks = (None if t is None else t.numpy() for t in scores(op, inputs, torch.float64))

        def look(
            rows: slice, part: SoftmaxOutputs, exact: Any = exact, sinks: Any = sinks
        ) -> tuple[dict[str, Array], int]:
            return softmax_outputs_of_rows(exact[:, :, rows], sinks, part), 0

        expected = collected(look, [slice(0, L)], L, S, wanted)
        narrow, narrow_sinks = scores(op, inputs, getattr(torch, op.dtype))
        # PyTorch's error is that of all rows: that of a few chosen ones says less than the budget takes it for.
        every = replace(wanted, heads=None, rows=None)
        whole = collected(look, [slice(0, L)], L, S, every)
        yardstick = {
            name: to_numpy(t)
            for name, t in softmax_outputs.softmax_outputs_of_rows(narrow, narrow_sinks, every).items()
        }
        rows = (B, op.num_heads, L)
        outputs = [np.full(rows, np.nan, np.float32) for _ in "le"]
        outputs += [np.full((*rows, wanted.top_k), np.nan, np.float32), np.full((*rows, wanted.top_k), -7, np.int64)]
        found = runs[0](inputs, outputs)
        if wanted.weights:
            filled = np.full(expected["weights"].shape, np.nan, DTYPES[op.dtype])
            found += runs[1](inputs, [filled])
        actual = dict(zip(wanted.names, found, strict=True))
        for name in actual.keys() - {"top_k_keys"}:
            allowed = budget(whole[name], yardstick[name], str(yardstick[name].dtype))
            assert max_error(expected[name], actual[name]) <= allowed, (name, B, L, S)
        check_keys(actual["top_k_keys"], expected, exact, sinks)


def check_keys(keys: Array, expected: dict[str, Array], exact: Array, sinks: Array | None) -> None:
    """Where scores are no closer than rounding, the very keys; else others of the same weight, each once."""
    weights = softmax_outputs_of_rows(exact, sinks, SoftmaxOutputs(weights=True))["weights"]
    assert ((keys < 0) == (expected["top_k_keys"] < 0)).all()
    chosen = np.where(keys < 0, 0, np.take_along_axis(weights, np.maximum(keys, 0), axis=-1))
    assert np.abs(chosen - expected["top_k_weights"]).max() <= 2**-20
    ordered = np.sort(keys, axis=-1)
    assert ((np.diff(ordered, axis=-1) > 0) | (ordered[..., 1:] < 0)).all()


def masks(op: AttentionOp, B: int, L: int, S: int) -> list[Array]:
    """A mask for each axis as the operation says: 1, or full; some queries see nothing."""
    if op.mask is None:
        return []
    rng = np.random.default_rng(2)
    shape = [1 if dim == 1 else {"B": B, "H": op.num_heads, "L": L, "S": S}[str(dim)] for dim in op.mask.dims]
    mask = rng.random(shape) < 0.7
    mask[:, :, -1] = mask[:, :, -1] if shape[2] == 1 else False
    if op.mask.dtype == "bool":
        return [mask]
    return [np.where(mask, rng.standard_normal(shape), -np.inf).astype(DTYPES[op.mask.dtype])]


SHAPES = ((97, 1, 1), (2, 37, 131), (1, 131, 37), (29, 7, 3))
"""(B, L, S); short ones with many entries, as the budget wants to see PyTorch's error."""


def test_every_vector_width(machine):
    check(operation(), machine, SHAPES)


@pytest.mark.parametrize(
    ("band", "wanted"), [(WindowSpec(None, 0, "bottom_right"), SUMS), (WindowSpec(9, 2), ALL)], ids=str
)
def test_bands(band, wanted):
    check(operation(band=band), WIDE, SHAPES, wanted)


@pytest.mark.parametrize(("dims", "dtype"), [(("B", "H", "L", "S"), "float32"), (("B", 1, 1, "S"), "bool")], ids=str)
def test_masks_of_the_call(dims, dtype):
    check(operation(mask=MaskInput(dtype, dims), band=WindowSpec(None, 0)), WIDE, SHAPES)


@pytest.mark.parametrize(
    ("heads", "wanted"), [(4, ALL), (1, replace(ALL, rows=(5, -1, 66, 67), heads=(3, 1)))], ids=["all", "chosen"]
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
    [("bfloat16", detect(), ALL), ("float16", NARROW, SUMS)],
    ids=["bfloat16", "float16"],
)
def test_sixteen_bits(dtype, profile, wanted):
    check(operation(dtype=dtype, v_head_dim=16, band=WindowSpec(None, 0)), profile, SHAPES, wanted)


def test_what_else_makes_a_score():
    """Softcap, numbers of keys, sinks and slopes, together and with a bottom-right band; one entry has no key."""
    features = {"softcap": 2.0, "lengths": True, "sinks": True, "slopes": True}
    check(operation(**features, band=WindowSpec(None, 0, "bottom_right")), WIDE, SHAPES)


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


def test_of_equal_scores_the_first_key_comes_first():
    op, kernel = operation(), CpuSoftmaxStatsKernel()
    q, k, v = operands(op, 1, 3, 50)
    k[:, :, [3, 4, 11, 30, 49]] = 4 * q[:, ::2, :1]  # the best of the first query, five times over
    asked = SoftmaxStatsOp(op, top_k=3)
    emitted = kernel.emit(asked, WIDE, kernel.default_config(asked, WIDE))
    outputs = [np.zeros((1, 4, 3, 3), np.float32), np.zeros((1, 4, 3, 3), np.int64)]
    _, keys = run(emitted, compiled(emitted, WIDE), [q, k, v], outputs)
    assert (keys[:, ::2, 0] == [3, 4, 11]).all()


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
    """Against float64, over every exponent that a sum of weights can have, within 2 ulp."""
    values = np.exp(np.linspace(-60, 80, 160_000)).astype(np.float32)
    values[:3] = [1, np.nan, 2]
    with IRBuilder() as builder, T.prim_func():
        T.func_name("run")
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
