"""Attention of float32 by bfloat16 terms on matrix tiles: as exact as its word says, Inf and NaN where float32 has
them, whatever hidden places hold."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import fuzz.kernels
import numpy as np
import pytest
import torch
from fuzz.attention import attention_op
from fuzz.kernels import attention_outcome, profile
from kernels.cpu.test_tile_attention import CASES, PLAIN, operation
from support import this_cpu
from support.kernel_runs import attention, call, compiled
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

import mhsa_compile as mhsa
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.common.buffers import argument
from mhsa_compile.kernels.cpu.simd.vectors import load, materialize, store
from mhsa_compile.kernels.cpu.tile_attention import powers
from mhsa_compile.kernels.cpu.tile_attention.kernel import CpuTileAttentionKernel
from mhsa_compile.kernels.interface.kernel import Emitted
from mhsa_compile.kernels.interface.ops import AttentionOp, WindowSpec
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.spec.float32_products import TERM_PRODUCTS
from mhsa_compile.verification import repeated_runs
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.oracle.products_by_terms import products_by_terms
from mhsa_compile.verification.self_check_inputs import SelfCheckInputs

KERNEL, TARGET = CpuTileAttentionKernel(), load_profile("sapphirerapids")
WORDS = ("bf16x6", "bf16x3")
FLOAT32 = replace(PLAIN, dtype="float32")


@pytest.fixture(autouse=True)
def tiles() -> None:
    this_cpu.require(profile("tiles", 1).tvm_config())


def of_float32(*sizes: Any, word: str = "bf16x6", **fields: Any) -> AttentionOp:
    return operation(*sizes, **{"dtype": "float32", "float32_products": word, **fields})


@functools.cache
def code(op: AttentionOp) -> Any:
    assert KERNEL.why_not(op, profile("tiles", 2)) is None
    return compiled(KERNEL.emit(op, TARGET, KERNEL.default_config(op, TARGET)), TARGET)["run"]


def result(op: AttentionOp, q: np.ndarray, *others: np.ndarray) -> np.ndarray:
    y = np.full((len(q), q.shape[2], op.num_heads * op.v_head_dim), np.nan, np.float32)
    return call(code(op), q, *others, y)


def operands(op: AttentionOp, B: int, L: int, S: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = ((op.num_heads, L, op.head_dim), (op.num_kv_heads, S, op.head_dim), (op.num_kv_heads, S, op.v_head_dim))
    return [rng.standard_normal((B, *shape), np.float32) for shape in shapes]


def share(op: AttentionOp, y: np.ndarray, *inputs: np.ndarray, word: str = "ieee") -> float:
    """The error by the budget of float32, or of a coarse word."""
    mask = None
    exact = attention(op, *inputs, mask)
    with products_by_terms(word):
        eager = attention(op, *inputs, mask, dtype=torch.float32)
    return max_error(exact, y) / budget(exact, eager, "float32")


def test_what_it_takes() -> None:
    op = of_float32(256, 256)
    assert KERNEL.float32_products(op, TARGET) == tuple(TERM_PRODUCTS)
    assert KERNEL.exact_products(op, TARGET) == ("bf16x6",)
    for other in (of_float32(), of_float32(255, 512), of_float32(512, 255), of_float32(512, 512, E=160)):
        assert KERNEL.exact_products(other, TARGET) == ()
    assert "float32 by bfloat16 terms" in str(KERNEL.why_not(replace(op, float32_products="ieee"), TARGET))
    of_float16 = replace(op, dtype="float16", float32_products="ieee")
    assert "amx_fp16" in str(KERNEL.why_not(of_float16, TARGET))
    assert KERNEL.why_not(of_float16, load_profile("graniterapids")) is None
    assert "amx_bf16" in str(KERNEL.why_not(op, load_profile("znver4")))


@pytest.mark.thorough
def test_six_products_are_as_exact_as_float32_and_three_are_not() -> None:
    sizes = (16, 64, 1, 1, 32, 32)
    inputs = operands(of_float32(*sizes), 1, 16, 64)
    shares = [share(op, result(op, *inputs), *inputs) for op in (of_float32(*sizes, word=word) for word in WORDS)]
    assert shares[0] <= 1 < shares[1]
    three = of_float32(*sizes, word="bf16x3")
    assert share(three, result(three, *inputs), *inputs, word="bf16x3") <= 1


def test_powers_of_two_are_within_an_ulp() -> None:
    with IRBuilder() as builder, T.prim_func():
        T.func_name("run")
        size = T.int64(1 << 20)
        x, y = (argument(name, [size], "float32") for name in "xy")
        with T.attr(0, "pragma_import_llvm", powers.TEXT), T.serial(T.int64(1 << 16)) as i:
            value = materialize(load(x, [i * 16], 16), "float32", 16)
            store(y, [i * 16], powers.exp2(value, 3), 16)
    run = compiled(Emitted(builder.get()), TARGET)["run"]
    # Every 620th float32 from 2^-30 to 125, of both signs.
    least, most = (int(np.float32(v).view(np.uint32)) for v in (2.0**-30, 125))
    numbers = np.arange(least, most, 620).astype(np.uint32).view(np.float32)
    x = np.zeros(1 << 20, np.float32)
    x[: 2 * len(numbers)] = np.concatenate([numbers, -numbers])
    y = call(run, x, np.empty_like(x))
    true = np.exp2(x.astype(np.float64))
    ulp = np.exp2(np.floor(x.astype(np.float64)) - 23)
    assert (np.abs(y - true) / ulp).max() < 1
    special = np.zeros_like(x)
    special[:4] = -np.inf, -1e4, np.nan, np.inf
    assert np.array_equal(call(run, special, np.empty_like(x))[:4], [0, 0, np.nan, np.inf], equal_nan=True)


SOME = ("causal", "window from the end", "bool mask", "additive mask", "lengths, causal", "softcap, all",
        "one key wins", "static, heads", "F more", "fused")  # fmt: skip


@pytest.mark.thorough_but("causal-bf16x3")
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", SOME)
def test_features_of_scores(name: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz.kernels, "attention_op", lambda case: replace(attention_op(case), float32_products=word))
    with products_by_terms(word):
        outcome = attention_outcome(replace(FLOAT32, **CASES[name]))
    assert outcome.kind == "cpu.attention_on_tiles" and outcome.share <= 1, outcome


def _spread(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    return x * 10 ** rng.uniform(-8, 8, (*x.shape[:3], 1)).astype(np.float32)


INPUTS = {
    "normal": lambda rng, q, k, v: (q, k, v),
    "of one sign": lambda rng, q, k, v: (np.abs(q), np.abs(k), np.abs(v)),
    "outliers": lambda rng, q, k, v: (q, k * np.where(np.arange(k.shape[3]) == 5, 30, 1), v * np.where(v > 2, 1e4, 1)),
    "large scores": lambda rng, q, k, v: (q * 8, k * 8, v),
    "one key wins": lambda rng, q, k, v: (q * 50, k * 50, v),
    "equal scores": lambda rng, q, k, v: (q * 0, k, np.abs(v)),
    "values of many scales": lambda rng, q, k, v: (q, k, _spread(rng, v)),
    "values of zeros": lambda rng, q, k, v: (q, k, v * (np.arange(v.shape[2])[:, None] % 3 > 0)),
    "small values": lambda rng, q, k, v: (q, k, v * np.float32(1e-25)),
    "large values": lambda rng, q, k, v: (q, k, v * np.float32(1e30)),
    "tiny keys": lambda rng, q, k, v: (q, k * np.float32(1e-37), v),
}


@pytest.mark.thorough
@pytest.mark.parametrize("E", [64, 128])
def test_six_products_are_inside_float32s_budget(E: int) -> None:
    """In every class of inputs, for few and many keys. (One draw of a row where two keys are nearly equal may be lucky
    for PyTorch: eight are held against the largest of its errors.)"""
    op, rng = of_float32(E=E, F=E), np.random.default_rng(E)
    shares = {}
    for name, draw in INPUTS.items():
        for L, S in ((33, 17), (70, 131), (64, 512), (40, 2000)):
            draws = [draw(rng, *operands(op, 1, L, S, seed)) for seed in range(8)]
            draws = [[np.ascontiguousarray(x, np.float32) for x in inputs] for inputs in draws]
            exact = [attention(op, *inputs, None) for inputs in draws]
            eager = [attention(op, *inputs, None, dtype=torch.float32) for inputs in draws]
            errors = [max_error(one, result(op, *inputs)) for one, inputs in zip(exact, draws, strict=True)]
            shares[name, L, S] = max(errors) / max(budget(*pair, "float32") for pair in zip(exact, eager, strict=True))
    assert max(shares.values()) <= 1, {key: value for key, value in shares.items() if value > 1}


SPECIAL = {
    "NaN": np.nan, "Inf": np.inf, "-Inf": -np.inf, "huge": 2.0**70, "just too large": 2.0**60,
    "of large scores": 2.0**20, "denormal": 1e-42,
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("word", WORDS)
def test_what_no_terms_carry_is_as_in_float32(word: str) -> None:
    """In Q, in K and in V, in a key that all rows see, that some see and that none sees."""
    op = of_float32(word=word, band=WindowSpec(None, 0, "top_left"))
    L, S = 70, 131
    for name, value in SPECIAL.items():
        for place in range(3):
            inputs = operands(op, 2, L, S)
            inputs[place][0, 0, 3, 5], inputs[place][1, 1, 40, 7] = value, value
            inputs[place][0, 1, 69] = value
            if place:
                inputs[place][:, 0, 101:] = value
            y = result(op, *inputs)
            assert share(op, y, *inputs, word=word if word == "bf16x3" else "ieee") <= 1, (name, "QKV"[place])
            if place and not np.isfinite(value):
                assert np.isfinite(y[:, :3]).all() and not np.isfinite(y[0, 3:]).all()


@pytest.mark.thorough
def test_rows_that_see_nothing_are_zeros_and_minus_infinity_hides() -> None:
    op = of_float32(mask=CallMask("float32", ("B", 1, "L", "S")))
    L, S = 40, 150
    q, k, v = operands(op, 1, L, S)
    k[0, 0, 70], v[0, 1, 71] = np.nan, np.inf
    for bias in (
        np.where(np.arange(L)[:, None] % 3 == 0, -np.inf, 0.0) + np.where((np.arange(S) // 2) == 35, -np.inf, 0.0),
        np.where(np.arange(S) < 80, -np.inf, -1e4) + np.zeros((L, 1)),
        np.where(np.arange(S) == 149, 1e4, -1e4) + np.where((np.arange(S) // 2) == 35, -np.inf, np.zeros((L, 1))),
    ):
        mask = bias.astype(np.float32)[None, None]
        y = result(op, q, k, v, mask)
        exact, eager = (attention(op, q, k, v, mask, dtype=dtype) for dtype in (torch.float64, torch.float32))
        assert np.isfinite(y).all() and max_error(exact, y) <= budget(exact, eager, "float32")
    assert (result(op, q, k, v, np.full((1, 1, L, S), -np.inf, np.float32)) == 0).all()


@this_cpu.with_tiles
@pytest.mark.thorough
@pytest.mark.parametrize(
    "fields", [{}, {"causal": True, "mask": "key_padding", "num_kv_heads": 2}], ids=["plain", "all"]
)
def test_threads_give_the_same_bits(fields: dict[str, Any]) -> None:
    spec = mhsa.AttentionSpec(embed_dim=256, num_heads=4, **fields)
    artifact = mhsa.compile(spec, float32_products="bf16x6")
    assert "cpu.attention_on_tiles" in {op.kernel for op in artifact.manifest.ops}
    subject = SelfCheckInputs(artifact.manifest, 0)
    sizes = subject.sizes | dict.fromkeys(subject.lengths, 331) | {subject.batch: 2}

    def start(threads: int) -> repeated_runs.Run:
        attention = mhsa.load(artifact, threads=threads)
        return lambda inputs: [attention(**inputs)]

    for repeats in repeated_runs.repeat(start, subject.draw_at(sizes), calls=100):
        assert repeats.different == 0, repeats
