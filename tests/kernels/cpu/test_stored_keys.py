"""Keys and values in fewer bits than the queries: kernels alone, against float64 over exactly the numbers that are
stored, so that the budget is that of float32 arithmetic."""

from __future__ import annotations

import ml_dtypes
import msgspec
import numpy as np
import pytest
import tvm
from support import this_cpu
from support.attention_ops import attention_of
from support.kernel_runs import attention, compiled, vector_machine

from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.cpu.attention.kernel import CpuAttentionKernel
from mhsa_compile.kernels.cpu.decode.kernel import CpuDecodeKernel
from mhsa_compile.kernels.cpu.decode.query_key import ScoreLayout
from mhsa_compile.kernels.cpu.decode.tile_scores import takes
from mhsa_compile.kernels.cpu.quantise_rows import CpuQuantiseRowsKernel
from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout, QuantiseRowsOp
from mhsa_compile.spec.window import WindowSpec

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "int8": np.int8}
RTOL = 4e-6  # as in test_decode: float32 sums of up to a thousand terms, in many parts
MACHINES = {"avx2": (256, 16), "avx512": (512, 32), "neon": (128, 32)}


def thorough(*values):
    """Cases that `make test` leaves out."""
    return [pytest.param(value, marks=pytest.mark.thorough) for value in values]


def machine(name: str, cores: int = 1):
    profile = vector_machine(*MACHINES[name], mcpu=this_cpu.level("x86-64-v4" if name == "avx512" else "x86-64-v3"))
    return msgspec.structs.replace(profile, hardware=msgspec.structs.replace(profile.hardware, cores=cores))


def cached(L: int | str, dtype: str, H: int = 4, G: int = 2, E: int = 40, F: int = 24, **fields) -> AttentionOp:
    """An attention over a cache, whose lengths are those of entries."""
    return attention_of(
        batch="B", q_length=L, kv_length="S", num_heads=H, num_kv_heads=G, head_dim=E, v_head_dim=F, scale=0.3,
        query=HeadLayout(0, "rows", H * E), key=HeadLayout(1, "heads", 0), value=HeadLayout(2, "heads", 0),
        output=HeadLayout(0, "rows", H * F), lengths=True, kv_dtype=dtype,
        **{"band": WindowSpec(None, 0, "bottom_right"), **fields},
    )  # fmt: skip


def stored(x: np.ndarray, dtype: str) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """(x as it is stored, its scales if there are any, what is read of it, float64)."""
    if dtype != "int8":
        narrow = x.astype(DTYPES[dtype])
        return narrow, [], narrow.astype(np.float64)
    steps = (np.abs(x).max(-1) / np.float32(127)).astype(np.float32)
    q = np.rint(x / steps[..., None]).astype(np.int8)
    return q, [steps], q * steps[..., None].astype(np.float64)


def function_of(kernel, op, profile, **config):
    assert kernel.why_not(op, profile) is None
    return compiled(kernel.emit(op, profile, {**kernel.default_config(op, profile), **config}), profile)["run"]


def draw(op: AttentionOp, B: int, L: int, S: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(B + 7 * L + 31 * S)
    q = rng.standard_normal((B, L, op.num_heads * op.head_dim), np.float32)
    k, v = (rng.standard_normal((B, op.num_kv_heads, S, n), np.float32) for n in (op.head_dim, op.v_head_dim))
    lengths = rng.integers(min(L, S), S + 1, B)
    lengths[0] = S
    return q, k, v, lengths


def run(function, op, q, k, v, scales, lengths) -> np.ndarray:
    y = np.full((*q.shape[:2], op.num_heads * op.v_head_dim), np.nan, np.float32)
    arrays = [tvm.runtime.tensor(a) for a in (q, k, v, *scales, lengths, y)]
    function(*arrays)
    return arrays[-1].numpy()


def by_heads(q: np.ndarray, heads: int) -> np.ndarray:
    return q.reshape(*q.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def check(op: AttentionOp, function, sizes, poison: float | None = np.nan, wrong: float = 1.0) -> float:
    """The largest error by what is allowed. `poison` is what scales, or elements, behind the lengths are."""
    q, k, v, lengths = draw(op, *sizes)
    (k, ks, wide_k), (v, vs, wide_v) = stored(k, op.kv_dtype), stored(v, op.kv_dtype)
    expected = attention(op, by_heads(q, op.num_heads), wide_k, wide_v, None, lengths)
    for b, length in enumerate(lengths):
        for array in (*ks, *vs) if ks else (k, v):
            array[b, :, length:] = poison
    y = run(function, op, q, k, v, [s * np.float32(wrong) for s in (*ks, *vs)], lengths)
    assert np.isfinite(y).all()
    return float(np.abs(y - expected).max() / (RTOL * np.abs(expected).max()))


SIZES = [(1, 1), (3, 7), (2, 131), (1, 1023)]


@pytest.mark.parametrize("dtype", ["int8", *thorough("bfloat16", "float16")])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("avx512", (1, 4, 1, 128, 128)),
        pytest.param("avx512", (1, 2, 2, 40, 24), marks=pytest.mark.thorough),
        pytest.param("avx512", (7, 6, 2, 33, 7), marks=pytest.mark.thorough),
        pytest.param("avx2", (2, 3, 3, 7, 40), marks=pytest.mark.thorough),
        pytest.param("neon", (1, 16, 1, 64, 80), marks=pytest.mark.thorough),
    ],
)
def test_decode_reads_what_is_stored(name, shape, dtype):
    L, H, G, E, F = shape
    op = cached(L, dtype, H, G, E, F)
    function = function_of(CpuDecodeKernel(), op, machine(name, cores=3), least_keys=16, keys=64)
    assert max(check(op, function, (B, L, max(S, L))) for B, S in SIZES) <= 1


@pytest.mark.parametrize("shape", [(1, 4, 1, 128, 128), *thorough((1, 3, 1, 64, 24), (2, 4, 2, 192, 7))])
def test_scores_on_matrix_tiles(shape):
    """Four rows of a key head and whole rows of tiles; blocks of 64 keys, of which the last is not whole."""
    profile = load_profile("sapphirerapids")
    this_cpu.require(profile.tvm_config())
    L, H, G, E, F = shape
    op = cached(L, "int8", H, G, E, F)
    assert takes(op, ScoreLayout(L * H // G, 16, 32), profile)
    function = function_of(CpuDecodeKernel(), op, profile, least_keys=16, keys=64)
    assert max(check(op, function, (B, L, max(S, L))) for B, S in SIZES) <= 1
    assert check(op, function, (2, L, 131), wrong=1 + 2**-10) > 10
    q, k, v, lengths = draw(op, 2, L, 70)
    (k, ks, _), (v, vs, _) = stored(k, "int8"), stored(v, "int8")
    for poison in (np.nan, np.inf):
        q[0, :, 3] = poison  # of the first head of entry 0
        y = run(function, op, q, k, v, [*ks, *vs], lengths)
        assert np.isnan(y[0, :, :F]).all() and np.isfinite(y[0, :, F:]).all() and np.isfinite(y[1]).all()


@pytest.mark.parametrize("dtype", ["int8", *thorough("bfloat16", "float16")])
@pytest.mark.parametrize("name", [*thorough("avx512"), "avx2"])
def test_tiled_attention_reads_what_is_stored(name, dtype):
    op = cached("L", dtype, E=33, F=24)
    function = function_of(CpuAttentionKernel(), op, machine(name))
    assert max(check(op, function, sizes) for sizes in [(1, 1, 1), (2, 7, 7), (3, 7, 131), (1, 101, 197)]) <= 1


@pytest.mark.parametrize(
    "fields",
    [
        {"softcap": 3.0, "band": WindowSpec(9, 0, "bottom_right")},
        pytest.param({"softclamp": 5.0}, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("L", [3, *thorough("L")])
def test_caps_and_windows_compose(L, fields):
    op = cached(L, "int8", **fields)
    kernel = CpuDecodeKernel() if L == 3 else CpuAttentionKernel()
    function = function_of(kernel, op, machine("avx512"))
    assert max(check(op, function, (2, 3, S)) for S in (3, 131)) <= 1


@pytest.mark.parametrize("kernel", [CpuDecodeKernel(), *thorough(CpuAttentionKernel())], ids=lambda kernel: kernel.name)
def test_a_wrong_scale_is_seen(kernel):
    op = cached(2, "int8")
    assert check(op, function_of(kernel, op, machine("avx512")), (2, 2, 131), wrong=1 + 2**-10) > 10


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", [CpuDecodeKernel(), CpuAttentionKernel()], ids=lambda kernel: kernel.name)
def test_a_scale_that_is_seen_and_nan_comes_through(kernel):
    op = cached(1, "int8", H=2, G=2)
    function = function_of(kernel, op, machine("avx512"))
    q, k, v, lengths = draw(op, 1, 1, 100)
    (k, (ks,), _), (v, (vs,), _) = stored(k, "int8"), stored(v, "int8")
    vs[0, 1, 20] = np.nan
    y = run(function, op, q, k, v, [ks, vs], lengths)
    assert np.isfinite(y[..., :24]).all() and np.isnan(y[..., 24:]).all()


@pytest.mark.parametrize("layout", ["rows", *thorough("heads")])
@pytest.mark.parametrize("E", [40, *thorough(1, 7, 128)])
def test_rows_are_within_half_a_step(layout, E):
    B, G, L = 2, 3, 5
    op = QuantiseRowsOp("B", "L", G, E, HeadLayout(0, layout, G * E))
    profile = machine("avx512")
    x = np.random.default_rng(E).standard_normal((B, G, L, E), np.float32) * np.float32(1e3)
    x[0, 0, 0], x[0, 0, 1], x[0, 0, 2], x[0, 0, 3] = 0, 1e-38, np.nan, np.inf
    given = np.ascontiguousarray(x.transpose(0, 2, 1, 3).reshape(B, L, G * E)) if layout == "rows" else x
    arrays = [tvm.runtime.tensor(a) for a in (given, np.zeros(x.shape, np.int8), np.zeros(x.shape[:3], np.float32))]
    compiled(CpuQuantiseRowsKernel().emit(op, profile, {}), profile)["run"](*arrays)
    q, steps = (array.numpy() for array in arrays[1:])
    assert not np.isfinite(steps[0, 0, 2:4]).any()
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(q[0, 0, 2:4] * steps[0, 0, 2:4, None]).any()
    q, steps, x = (np.delete(a.reshape(B * G * L, -1), (2, 3), axis=0).astype(np.float64) for a in (q, steps, x))
    assert np.isfinite(steps).all() and np.abs(q).max() == 127
    # Half a step, and the rounding of the quotient and of the step; what is below 2^-119 counts as zero.
    assert (np.abs(q * steps - x) <= steps * (0.5 + 127 * 2.0**-22) + 2.0**-119).all()
