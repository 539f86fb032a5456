"""The decode kernel alone: few queries against any number of keys, every machine, mask and band, split or not."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from support import this_cpu
from support.attention_ops import changed, three_buffers
from support.kernel_runs import attention, call, compiled, vector_machine

import mhsa_compile as mhsa
from mhsa_compile.compiler.selection.select_kernel import kernels_for
from mhsa_compile.kernels.cpu.decode.kernel import CpuDecodeKernel
from mhsa_compile.kernels.interface.ops import AttentionOp
from mhsa_compile.kernels.registry import KERNELS
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.kernels.scores.static_mask import StaticMask
from mhsa_compile.spec.window import WindowSpec

MACHINES = {"avx2": (256, 16), "avx512": (512, 32), "neon": (128, 32), "scalar": (64, 8)}
RTOL = 4e-6  # of the largest value: float32 sums of up to a thousand terms, in many parts


def machine(name="avx512", cores=1):
    profile = vector_machine(*MACHINES[name])
    return msgspec.structs.replace(profile, hardware=msgspec.structs.replace(profile.hardware, cores=cores))


def decode(L=1, *sizes, layout="heads", **fields) -> AttentionOp:
    return three_buffers(L, *sizes, layout=layout, **fields)


def library(op, profile, **config):
    kernel = CpuDecodeKernel()
    assert kernel.why_not(op, profile) is None
    return compiled(kernel.emit(op, profile, {**kernel.default_config(op, profile), **config}), profile)["run"]


def operands(op, B, S, seed=0):
    rng = np.random.default_rng(seed)
    sizes = (
        (op.num_heads, op.q_length, op.head_dim),
        (op.num_kv_heads, S, op.head_dim),
        (op.num_kv_heads, S, op.v_head_dim),
    )
    return [rng.standard_normal((B, *size), np.float32) for size in sizes]


def run(function, op, q, k, v, mask=None):
    """(B, L, H * F), whatever the layout; every element of the output must be written."""
    B, H, L, _ = q.shape
    if op.query.layout == "rows":
        q, k, v = (np.ascontiguousarray(t.transpose(0, 2, 1, 3).reshape(B, t.shape[2], -1)) for t in (q, k, v))
    shape = (B, L, H * op.v_head_dim) if op.output.layout == "rows" else (B, H, L, op.v_head_dim)
    y = call(function, q, k, v, *([] if mask is None else [mask]), np.full(shape, np.nan, np.float32))
    return y if op.output.layout == "rows" else y.transpose(0, 2, 1, 3).reshape(B, L, -1)


def close(actual, expected):
    assert np.isfinite(actual).all()
    assert np.abs(actual - expected).max() <= RTOL * np.abs(expected).max()


@pytest.mark.thorough_but("shape0-scalar")
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("shape", [(1, 3, 3, 7, 40), (1, 4, 1, 64, 80), (3, 6, 2, 40, 7), (12, 3, 1, 20, 24)])
def test_every_size_on_every_machine(name, shape):
    op = decode(*shape, layout="rows" if shape[0] == 1 else "heads")
    function = library(op, machine(name))
    for B, S in [(1, 1), (3, 7), (2, 197)]:
        q, k, v = operands(op, B, S)
        close(run(function, op, q, k, v), attention(op, q, k, v, None))


@pytest.mark.parametrize("layout", ["rows", pytest.param("heads", marks=pytest.mark.thorough)])
def test_splits_are_combined(layout):
    """Seven cores divide nothing here; S = 1 leaves one split, 1023 leaves an uneven last one."""
    op = decode(E=40, F=128, layout=layout)
    function = library(op, machine(cores=7), least_keys=16)
    for B, S in [(1, 1), (1, 1023), (3, 1023), (1, 130), (7, 33)]:
        q, k, v = operands(op, B, S)
        close(run(function, op, q, k, v), attention(op, q, k, v, None))


def test_long_blocks_are_as_exact_as_short_ones():
    """All terms alike, so that roundings of one long sum would not cancel: its error was six times as large."""
    op = decode(layout="rows")
    q, k, v = (np.full_like(array, 0.1) for array in operands(op, 1, 2039))
    expected = attention(op, q, k, v, None)
    short, long = (np.abs(run(library(op, machine(), keys=n), op, q, k, v) - expected).max() for n in (256, 2048))
    assert 0 < long <= 2 * short


@pytest.mark.thorough_but("40-2-top_left")
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("left", "right"), [(None, 0), (5, 0), (40, 2), (None, None), (300, None)])
def test_bands(left, right, alignment):
    op = decode(L=5, band=WindowSpec(left, right, alignment))
    function = library(op, machine(cores=3), least_keys=16)
    for B, S in [(1, 1), (2, 4), (2, 197), (1, 1023)]:
        q, k, v = operands(op, B, S)
        close(run(function, op, q, k, v), attention(op, q, k, v, None))


@pytest.mark.thorough_but("avx512-5-shape2-float32")
@pytest.mark.parametrize("dtype", ["bool", "float32"])
@pytest.mark.parametrize("shape", [(2, 4, 3, 131), (1, 1, 3, 131), (2, 1, 1, 131), (1, 4, 1, 1)])
@pytest.mark.parametrize(("name", "cores"), [("avx512", 5), ("avx2", 1), ("neon", 1)])
def test_masks_broadcast_and_nothing_masked_leaks(name, cores, shape, dtype):
    """Masked keys hold NaN and Inf, and some queries see no key at all: those give zeros."""
    names = tuple(1 if size == 1 else name for size, name in zip(shape, ("B", "H", 3, "S"), strict=True))
    op = decode(L=3, mask=CallMask(dtype, names))
    function = library(op, machine(name, cores), least_keys=16)
    rng = np.random.default_rng(1)
    q, k, v = operands(op, 2, 131)
    mask = rng.random(shape) < 0.7
    if shape[-1] > 1:
        mask[..., 5] = False
    mask[0, 0, 0] = False
    if dtype == "float32":
        mask = np.where(mask, rng.standard_normal(shape), -np.inf).astype(np.float32)
    expected = attention(op, q, k, v, mask)
    if shape[-1] > 1:
        k[:, :, 5], v[:, :, 5, ::2], v[:, :, 5, 1::2] = np.nan, np.nan, np.inf
    close(run(function, op, q, k, v, mask), expected)


def test_keys_outside_the_band_do_not_leak():
    op = decode(L=2, band=WindowSpec(3, 0, "bottom_right"))
    function = library(op, machine(cores=2))
    q, k, v = operands(op, 1, 40)
    expected = attention(op, q, k, v, None)
    k[:, :, :35], v[:, :, :35] = np.nan, np.inf
    close(run(function, op, q, k, v), expected)


@pytest.mark.parametrize("L", [1, pytest.param(13, marks=pytest.mark.thorough)], ids=["decode", "attention"])
def test_a_hidden_value_in_a_column_of_its_own_does_not_leak(L):
    """17 columns are a vector and one lane, whose products with zero the simplifier would leave out."""
    op, profile = decode(L=L, F=17, mask=CallMask("bool", (1, 1, 1, "S"))), machine()
    (kernel, *_), _ = kernels_for(op, profile)
    function = compiled(kernel.emit(op, profile, kernel.default_config(op, profile)), profile)["run"]
    q, k, v = operands(op, 2, 40)
    mask = np.arange(40).reshape(1, 1, 1, 40) >= 3
    expected = attention(op, q, k, v, mask)
    for poison in (np.nan, np.inf):
        v[:, :, 1, -1] = poison
        close(run(function, op, q, k, v, mask), expected)


def test_nan_in_a_visible_place_comes_through():
    op = decode(H=2, G=2)
    function = library(op, machine(cores=4), least_keys=16)
    q, k, v = operands(op, 1, 100)
    v[0, 1, 20, 3] = np.nan
    y = run(function, op, q, k, v)
    assert np.isnan(y[0, 0, 24 + 3]) and np.isnan(y).sum() == 1
    q, k, v = operands(op, 1, 100)
    k[0, 0, 77, 0] = np.nan
    y = run(function, op, q, k, v)
    assert np.isnan(y[0, 0, :24]).all() and np.isfinite(y[0, 0, 24:]).all()


@pytest.mark.parametrize("dtype", ["bool", "float32"])
def test_nan_of_a_visible_key_without_weight_comes_through(dtype):
    """A score of -inf that Q and K make hides nothing: 0 * NaN; one that a mask makes does."""
    op = decode(H=2, G=2, mask=CallMask(dtype, (1, 1, 1, "S")))
    function = library(op, machine(cores=1))
    q, k, v = operands(op, 1, 40)
    visible = np.arange(40).reshape(1, 1, 1, 40) != 9
    mask = visible if dtype == "bool" else np.where(visible, 0, -np.inf).astype(np.float32)
    k[0, 0, 7, 0], v[0, 0, [7, 9], [3, 4]] = -np.inf * np.sign(q[0, 0, 0, 0]), np.nan
    y = run(function, op, q, k, v, mask)
    assert np.isnan(y[0, 0, 3]) and np.isnan(y).sum() == 1


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.thorough)])
def test_narrow_storage_is_computed_in_float32(dtype):
    """The error is within half a unit of the last place of the result, which is rounded once."""
    import ml_dtypes

    narrow, digits = (ml_dtypes.bfloat16, 8) if dtype == "bfloat16" else (np.float16, 11)
    op = decode(E=40, F=40, dtype=dtype)
    profile = vector_machine(512, 32, mcpu=this_cpu.level("x86-64-v4"))
    q, k, v = (t.astype(narrow) for t in operands(op, 2, 197))
    expected = attention(op, *(t.astype(np.float32) for t in (q, k, v)), None)
    y = call(library(op, profile), q, k, v, np.zeros((2, 4, 1, 40), narrow)).astype(np.float64)
    y = y.transpose(0, 2, 1, 3).reshape(2, 1, -1)
    assert np.abs(y - expected).max() <= (2.0**-digits + RTOL) * np.abs(expected).max()


def test_what_it_refuses_says_why():
    profile, kernel = machine(), CpuDecodeKernel()
    assert "symbolic" in kernel.why_not(replace(decode(), q_length="L"), profile)
    assert "13" in kernel.why_not(decode(L=13), profile)
    narrow = vector_machine(512, 32, features=("avx512_bf16",))
    assert "at most 8 queries" in kernel.why_not(decode(L=9, dtype="bfloat16"), narrow)
    assert kernel.why_not(decode(L=9), narrow) is kernel.why_not(decode(L=9, dtype="bfloat16"), profile) is None
    assert "128" in kernel.why_not(decode(L=8, H=32, G=2), profile)
    visible = np.ones((1, 1, 8), bool)
    assert "constant" in kernel.why_not(changed(decode(), kv_length=8, static_mask=StaticMask(visible)), profile)
    assert [type(k).__name__ for k in KERNELS["cpu"]].index("CpuDecodeKernel") < len(KERNELS["cpu"]) - 1


@pytest.mark.thorough
def test_a_module_with_one_query_is_compiled_to_it():
    spec = mhsa.AttentionSpec(embed_dim=96, num_heads=6, num_kv_heads=2, kv_embed_dim=96)
    artifact = mhsa.compile(mhsa.ScaledDotProductAttention(spec), dims={"L": 1})
    assert [op.kernel for op in artifact.manifest.ops] == ["cpu.decode"]
    assert mhsa.verify(artifact).ok
