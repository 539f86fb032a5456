"""Attention and linears on matrix tiles, where these are or are emulated: every feature of scores and every tail
against float64, what hidden places hold, scores and values at the ends of their range, and any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from fuzz.cases import AttentionCase, LinearCase, Outcome
from fuzz.kernels import attention_outcome, linear_outcome, profile
from support import this_cpu
from support.attention_ops import attention_of
from support.kernel_runs import attention, call, compiled
from support.score_functions import HEADS, MASKS, SCORES

import mhsa_compile as mhsa
from mhsa_compile.kernels.cpu.tile_attention.kernel import CpuTileAttentionKernel
from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout, TensorInput, WindowSpec
from mhsa_compile.kernels.scores.call_mask import CallMask
from mhsa_compile.nn.score_tracing import trace
from mhsa_compile.verification import repeated_runs
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.self_check_inputs import SelfCheckInputs

KERNEL = CpuTileAttentionKernel()
BFLOAT16 = ml_dtypes.bfloat16
SIZES = (
    (2, 1, 7), (1, 7, 1), (2, 16, 17), (1, 17, 16), (1, 31, 33), (2, 33, 45), (1, 45, 31), (1, 77, 128), (1, 128, 77),
    (1, 197, 257), (1, 257, 197),
)  # fmt: skip
SQUARES = tuple((B, L, L) for B, L, _ in SIZES)
PLAIN = AttentionCase(
    seed=0, machine="tiles", cores=2, dtype="bfloat16", heads=(2, 2), widths=(64, 64), scale=None, layout="heads",
    output="rows", fixed="", band=None, mask=None, static=None, magnitude=1.0, poison=True, extras=(), softcap=0.0,
    calls=SIZES,
)  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "E 32": {"widths": (32, 32), "heads": (3, 3)},
    "E 96": {"widths": (96, 96), "layout": "rows"},
    "E 128": {"widths": (128, 128), "output": "heads"},
    "F less": {"widths": (128, 32)},
    "F more": {"widths": (32, 160), "layout": "rows"},
    "grouped": {"heads": (4, 2)},
    "one key head": {"heads": (5, 1), "layout": "rows"},
    "fused": {"layout": "fused", "heads": (4, 2), "calls": SQUARES},
    "causal": {"band": (None, 0, "top_left")},
    "causal from the end": {"band": (None, 0, "bottom_right"), "widths": (96, 64)},
    "window": {"band": (9, 3, "top_left")},
    "window from the end": {"band": (40, 0, "bottom_right"), "heads": (4, 1)},
    "window, left": {"band": (20, None, "top_left")},
    "window, right": {"band": (None, 30, "bottom_right")},
    "own key": {"band": (0, 0, "top_left")},
    "bool mask": {"mask": ("bool", ("B", "H", "L", "S"))},
    "additive mask": {"mask": ("additive", ("B", "H", "L", "S"))},
    "key padding": {"mask": ("bool", ("B", 1, 1, "S")), "heads": (4, 2)},
    "additive, one for all": {"mask": ("additive", (1, 1, "mask_L", "S")), "band": (None, 0, "bottom_right")},
    "lengths": {"extras": ("lengths",)},
    "lengths, causal": {"extras": ("lengths",), "band": (None, 0, "bottom_right"), "heads": (4, 2)},
    "sinks": {"extras": ("sinks",)},
    "sinks, lengths, mask": {"extras": ("lengths", "sinks"), "mask": ("bool", ("B", "H", "L", "S"))},
    "softcap": {"softcap": 5.0},
    "softcap, all": {
        "softcap": 30.0, "extras": ("lengths", "sinks"), "band": (50, 2, "bottom_right"), "heads": (4, 2),
        "mask": ("additive", ("B", "H", "L", "S")), "magnitude": 8.0,
    },
    "one key wins": {"magnitude": 30.0},
    "all alike": {"magnitude": 0.0},
    "seven tasks": {"cores": 7, "heads": (3, 1)},
    "static": {"static": (False, 0.5), "fixed": "LS", "calls": ((2, 197, 257),)},
    "static, heads": {"static": (True, 0.03), "fixed": "LS", "calls": ((1, 77, 197),), "heads": (4, 2)},
    "static pattern": {
        "static": (False, "longformer:window=30,global_tokens=3"), "fixed": "LS", "calls": ((1, 257, 257),),
    },
    "static, lengths, causal": {
        "static": (False, 0.97), "fixed": "LS", "calls": ((3, 128, 197),), "extras": ("lengths", "sinks"),
        "band": (None, 0, "bottom_right"),
    },
    "fixed": {"fixed": "BLS", "calls": ((2, 64, 96),)},
    "fixed, a tail": {"fixed": "LS", "calls": ((1, 45, 77),), "band": (None, 0, "top_left")},
}  # fmt: skip


def on_tiles(outcome: Outcome, kernel: str) -> None:
    assert outcome.kind == kernel and outcome.share <= 1, f"error {outcome.share:.3g} of the budget by {outcome.kind}"


@pytest.fixture(autouse=True)
def tiles() -> None:
    this_cpu.require(profile("tiles", 1).tvm_config())


@pytest.mark.thorough_but("sinks, lengths, mask")
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    on_tiles(attention_outcome(replace(PLAIN, **CASES[name])), "cpu.attention_on_tiles")


OF_FLOAT16 = ("plain", "E 96", "grouped", "causal from the end", "sinks, lengths, mask", "softcap, all", "one key wins")


@pytest.mark.thorough
@pytest.mark.parametrize("name", OF_FLOAT16)
def test_attention_of_float16(name: str) -> None:
    machine = "tiles of float16"
    this_cpu.require(profile(machine, 1).tvm_config())
    case = replace(PLAIN, **CASES[name], dtype="float16", machine=machine)
    on_tiles(attention_outcome(case), "cpu.attention_on_tiles")


@pytest.mark.thorough_but("33-3")
@pytest.mark.parametrize(("in_features", "padding"), [(1, 0), (31, 3), (32, 0), (33, 3), (40, 0), (197, 3), (256, 0)])
def test_linears(in_features: int, padding: int) -> None:
    case = LinearCase(
        seed=1, machine="tiles", cores=2, dtype="bfloat16", int8=False, in_features=in_features, widths=(31, 64, 197),
        biased=(True, False, True), transposed=(False, True, False), padding=padding, fixed=False,
        calls=((1, 1), (1, 15), (1, 16), (1, 17), (3, 11), (1, 48), (2, 131)),
    )  # fmt: skip
    on_tiles(linear_outcome(case), "cpu.linear_on_tiles")


# Attention by itself, with operands that are written here.


def operation(
    L: int | str = "L", S: int | str = "S", H: int = 2, G: int = 2, E: int = 64, F: int = 64, **fields: Any
) -> AttentionOp:
    places = {role: HeadLayout(i, "heads", 0) for i, role in enumerate(("query", "key", "value"))}
    return attention_of(
        "B", L, S, H, G, E, F, E**-0.5,
        **{"band": None, "mask": None, "output": HeadLayout(0, "rows", H * F), "dtype": "bfloat16", **places, **fields},
    )  # fmt: skip


def function(op: AttentionOp) -> Callable[..., np.ndarray]:
    """The kernel, called with its inputs."""
    target = profile("tiles of float16" if op.dtype == "float16" else "tiles", 2)
    this_cpu.require(target.tvm_config())
    assert KERNEL.why_not(op, target) is None
    emitted = KERNEL.emit(op, target, KERNEL.default_config(op, target))
    run = compiled(emitted, target)["run"]

    def result(q: np.ndarray, *others: np.ndarray) -> np.ndarray:
        y = np.full((len(q), q.shape[2], op.num_heads * op.v_head_dim), np.nan, op.dtype)
        return call(run, q, *others, *emitted.constants, y)

    return result


def operands(op: AttentionOp, B: int, L: int, S: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = ((op.num_heads, L, op.head_dim), (op.num_kv_heads, S, op.head_dim), (op.num_kv_heads, S, op.v_head_dim))
    return [rng.standard_normal((B, *shape), np.float32).astype(op.dtype) for shape in shapes]


def agree(op: AttentionOp, y: np.ndarray, *taken: Any) -> None:
    exact, yardstick = (attention(op, *taken, dtype=dtype) for dtype in (torch.float64, getattr(torch, op.dtype)))
    assert max_error(exact, y) <= budget(exact, yardstick, op.dtype)


FUNCTIONS = {
    "documents": {"mask_mod": MASKS["document"]},
    "by head and entry": {"mask_mod": MASKS["by head and entry"]},
    "T5": {"score_mod": SCORES["T5"]},
    "causal, as a score": {"score_mod": SCORES["causal, as a score"]},
    "all functions": {"score_mod": SCORES["functions"]},
    "both": {"score_mod": SCORES["alibi"], "mask_mod": MASKS["sliding window"]},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_scores(name: str) -> None:
    traced, captured = {}, []
    for word, written in FUNCTIONS[name].items():
        traced[word], tensors = trace(word, written)
        captured += tensors
    inputs = tuple(TensorInput(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in captured)
    op = operation(H=HEADS, tensors=inputs, **traced)
    run = function(op)
    for B, L, S in ((2, 67, 83), (1, 33, 197), (1, 1, 31)):
        q, k, v = operands(op, B, L, S)
        exact, yardstick = (_by_functions(FUNCTIONS[name], dtype, q, k, v) for dtype in (torch.float64, torch.bfloat16))
        y = run(q, k, v, *(tensor.numpy() for tensor in captured))
        assert max_error(exact, y) <= budget(exact, yardstick, "bfloat16"), (B, L, S)


def _by_functions(functions: dict[str, Any], dtype: torch.dtype, *inputs: np.ndarray) -> np.ndarray:
    q, k, v = (torch.from_numpy(array.astype(np.float32)).to(dtype) for array in inputs)
    (B, H, L, E), S = q.shape, k.shape[2]
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (B, H, L, S)), indexing="ij")
    scores = q @ k.transpose(2, 3) * E**-0.5
    if "score_mod" in functions:
        scores = functions["score_mod"](scores, b, h, i, j).to(dtype)
    if "mask_mod" in functions:
        scores = scores.masked_fill(~functions["mask_mod"](b, h, i, j), -torch.inf)
    y = torch.softmax(scores, -1).nan_to_num(0) @ v
    return y.transpose(1, 2).reshape(B, L, -1).double().numpy()


@pytest.mark.thorough
@pytest.mark.parametrize("mask", ["bool", "causal", "lengths"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_only_some_rows_see_reaches_only_these(mask: str, dtype: str) -> None:
    """NaN and infinities in keys and values that some rows see and others do not."""
    B, L, S = 2, 70, 131
    fields = {
        "bool": {"mask": CallMask("bool", (1, 1, "L", "S"))},
        "causal": {"band": WindowSpec(None, 0, "bottom_right")},
        "lengths": {"lengths": True},
    }[mask]
    op = operation(**fields, dtype=dtype)
    q, k, v = operands(op, B, L, S)
    k[0, :, 100], k[1, 0, 5, 3] = np.nan, np.inf
    v[0, 0, 64], v[1, :, 130, 7], v[0, 1, 3, 40] = np.inf, np.nan, -np.inf
    seen = np.random.default_rng(2).random((1, 1, L, S)) < 0.5 if mask == "bool" else None
    lengths = np.array([99, 130], np.int64) if mask == "lengths" else None
    y = function(op)(q, k, v, *(array for array in (seen, lengths) if array is not None))
    agree(op, y, q, k, v, seen, lengths)
    assert np.isnan(y.astype(np.float32)).any() and np.isfinite(y.astype(np.float32)).any()


@pytest.mark.thorough
def test_scores_at_the_ends_of_their_range() -> None:
    """Large negative ones, ones that rise by steps or fall, infinite ones of an additive mask, rows of NaN."""
    op = operation(mask=CallMask("bfloat16", ("B", 1, "L", "S")))
    B, L, S = 1, 40, 150
    run, (q, k, v) = function(op), operands(op, B, L, S)
    for name, bias in {
        "low": np.full((L, S), -1e4),
        "lowest": np.full((L, S), -2e38),
        "rising": np.arange(S) * 30.0 + np.zeros((L, 1)),
        "falling": -np.arange(S) * 30.0 + np.zeros((L, 1)),
        "steps": np.where(np.arange(S) % 64 == 63, 200.0, -1e4) + np.zeros((L, 1)),
        "nothing, then low": np.where(np.arange(S) < 70, -np.inf, -1e4) + np.zeros((L, 1)),
        "some rows see nothing": np.where(np.arange(L)[:, None] % 3 == 0, -np.inf, 0.0) + np.zeros((L, S)),
        "infinite": np.where((np.arange(S) == 77) & (np.arange(L)[:, None] % 5 == 1), np.inf, 0.0),
    }.items():
        mask = bias.astype(BFLOAT16)[None, None]
        y = run(q, k, v, mask)
        exact, yardstick = (attention(op, q, k, v, mask, dtype=dtype) for dtype in (torch.float64, torch.bfloat16))
        assert max_error(exact, y) <= budget(exact, yardstick, "bfloat16"), name
    q[0, 0, 7] = np.nan
    mask = np.zeros((B, 1, L, S), BFLOAT16)
    agree(op, run(q, k, v, mask), q, k, v, mask)


@pytest.mark.thorough
@pytest.mark.parametrize("step", [0.5, 30.0, -30.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scores_that_rise_or_fall_with_the_keys(step: float, dtype: str) -> None:
    op = operation(dtype=dtype)
    q, k, v = operands(op, 1, 70, 300)
    q[...], k[...] = 0, 0
    q[..., 0] = 1
    k[..., 0] = (np.arange(300) * step * (8 if dtype == "bfloat16" else 4)).astype(dtype)
    agree(op, function(op)(q, k, v), q, k, v, None)


@pytest.mark.thorough
def test_the_largest_numbers_do_not_overflow() -> None:
    op = operation()
    q, k, v = operands(op, 1, 40, 300)
    k[:, :, ::-1] = np.sort(np.abs(k.astype(np.float32)), axis=2).astype(BFLOAT16)
    v = (v.astype(np.float32) * np.float32(1e33)).astype(BFLOAT16)
    agree(op, function(op)(q, k, v), q, k, v, None)


@this_cpu.with_tiles
@pytest.mark.thorough
@pytest.mark.parametrize(
    "fields", [{}, {"causal": True, "mask": "key_padding", "num_kv_heads": 2}], ids=["plain", "all"]
)
def test_threads_give_the_same_bits(fields: dict[str, Any]) -> None:
    artifact = mhsa.compile(mhsa.AttentionSpec(embed_dim=256, num_heads=4, dtype="bfloat16", **fields))
    assert {"cpu.attention_on_tiles", "cpu.linear_on_tiles"} <= {op.kernel for op in artifact.manifest.ops}
    subject = SelfCheckInputs(artifact.manifest, 0)
    sizes = subject.sizes | dict.fromkeys(subject.lengths, 331) | {subject.batch: 2}

    def start(threads: int) -> repeated_runs.Run:
        attention = mhsa.load(artifact, threads=threads)
        return lambda inputs: [attention(**inputs)]

    for repeats in repeated_runs.repeat(start, subject.draw_at(sizes), calls=200):
        assert repeats.different == 0, repeats
