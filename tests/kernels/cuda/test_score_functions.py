"""mask_mod and score_mod in the attention kernels for GPUs, where there is no GPU: each thread's numbers in the SIMT
interpreter, against FlexAttention's meaning in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzz.attention import NUMPY
from support.attention_ops import features
from support.cuda import cuda_code
from support.cuda.cuda_tile_kernels import FLOAT32, HOPPER, MMA, TileKernel, operation
from support.score_functions import HEADS, MASKS, SCORES
from support.simt import interpreter
from torch import Tensor

import mhsa_compile as mhsa
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.cuda.decode.kernel import CudaDecodeKernel
from mhsa_compile.kernels.interface.ops import AttentionOp, TensorInput
from mhsa_compile.nn.score_tracing import trace
from mhsa_compile.spec.window import WindowSpec
from mhsa_compile.verification.error_budget import budget, max_error

E, F, KV_HEADS = 24, 24, 2
SIZES, LENGTHS = (2, 67, 83), (83, 41)
KERNELS = {"mma": MMA, "float32": FLOAT32}
slow = pytest.mark.cuda
Function = Callable[..., Any]


def attention(kernel: TileKernel, functions: dict[str, Function], **fields: Any) -> tuple[AttentionOp, list[Tensor]]:
    """An attention with these functions, and what they capture."""
    made: dict[str, Any] = {}
    captured: list[Tensor] = []
    for name in ("score_mod", "mask_mod"):
        if name in functions:
            made[name], tensors = trace(name, functions[name])
            captured += tensors
    inputs = tuple(TensorInput(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in captured)
    op = operation((HEADS, KV_HEADS), (E, F), dtype=kernel.dtypes[0], tensors=inputs, **made, **fields)
    return op, captured


def drawn(dtype: str, sizes: tuple[int, int, int]) -> list[Tensor]:
    B, L, S = sizes
    generator = torch.Generator().manual_seed(L + S)
    shapes = (B, HEADS, L, E), (B, KV_HEADS, S, E), (B, KV_HEADS, S, F)
    return [torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for shape in shapes]


def expected(op: AttentionOp, inputs: list[Tensor], functions: dict[str, Function], dtype: torch.dtype) -> np.ndarray:
    """Rows (B, L, H * F): softmax(score_mod(scale Q K^T)) V over the keys that mask_mod and the band leave."""
    q, k, v = (x.to(dtype) for x in inputs)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    (B, H, L, _), S = q.shape, k.shape[2]
    shift = S - L if op.window is not None and op.window.alignment == "bottom_right" else 0
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (B, H, L, S)), indexing="ij")
    scores = q @ k.transpose(2, 3) * op.scale
    seen = torch.ones(B, H, L, S, dtype=torch.bool)
    if "score_mod" in functions:
        scores = functions["score_mod"](scores, b, h, i + shift, j).to(dtype)
    if "mask_mod" in functions:
        seen = seen & functions["mask_mod"](b, h, i + shift, j)
    if op.window is not None:
        seen = seen & (j <= i + shift)
    if features(op).lengths:
        seen = seen & (j < torch.tensor(LENGTHS)[b])
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(scores == -torch.inf, 0)
    y = weights.nan_to_num(0) @ torch.where(v.isfinite(), v, 0)
    return y.transpose(1, 2).reshape(B, L, H * F).to(torch.float64).numpy()


def run(kernel: TileKernel, op: AttentionOp, inputs: list[Tensor], captured: list[Tensor]) -> np.ndarray:
    assert kernel.kernel.why_not(op, kernel.profile) is None
    emitted = kernel.kernel.emit(op, kernel.profile, kernel.config(*kernel.small))
    arrays = [x.float().numpy().astype(NUMPY[op.dtype]) for x in inputs]
    arrays += [np.array(LENGTHS)] if features(op).lengths else []
    B, _, L, _ = inputs[0].shape
    y = np.full((B, L, HEADS * F), np.nan, NUMPY[op.dtype])
    interpreter.Machine(emitted.run)(*arrays, *(t.numpy() for t in captured), *emitted.constants, y)
    return y.astype(np.float64)


def check(kernel: TileKernel, functions: dict[str, Function], *, poisoned: bool = False, **fields: Any) -> None:
    op, captured = attention(kernel, functions, **fields)
    inputs = drawn(op.dtype, SIZES)
    exact, yardstick = (expected(op, inputs, functions, t) for t in (torch.float64, getattr(torch, op.dtype)))
    if poisoned:  # what nobody sees
        inputs[1][:, :, -1], inputs[2][:, :, -1] = torch.nan, torch.inf
    y = run(kernel, op, inputs, captured)
    assert max_error(exact, y) <= budget(exact, yardstick, op.dtype)


def some(names: Any, quick: tuple[str, ...]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=slow) for name in names]


@pytest.mark.thorough_but("identity-float32")
@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("name", some(SCORES, (next(iter(SCORES)),)))
def test_score_functions(kind: str, name: str) -> None:
    check(KERNELS[kind], {"score_mod": SCORES[name]})


@pytest.mark.thorough_but("full-mma")
@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("name", some(MASKS, (next(iter(MASKS)),)))
def test_masks(kind: str, name: str) -> None:
    check(KERNELS[kind], {"mask_mod": MASKS[name]})


def beside(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.tanh(score) - 0.1 * (q - k).abs() + 0.5 * h


@pytest.mark.thorough_but("mma")
@pytest.mark.parametrize("kind", KERNELS)
def test_beside_a_band_lengths_and_each_other(kind: str) -> None:
    """Places are counted from the end where the band is; NaN in keys that nobody sees stays there."""
    kernel = KERNELS[kind]
    both = {"score_mod": beside, "mask_mod": MASKS["dilated window"]}
    check(kernel, both, band=WindowSpec(None, 0, "bottom_right"))
    check(kernel, both, lengths=True)
    check(kernel, {"mask_mod": lambda b, h, q, k: k < 80}, poisoned=True)
    check(kernel, {"score_mod": lambda s, b, h, q, k: torch.where(k < 80, s, -torch.inf)}, poisoned=True)


@pytest.mark.parametrize("kind", KERNELS)
def test_rows_that_see_nothing_are_zeros(kind: str) -> None:
    functions = {"mask_mod": lambda b, h, q, k: (q % 3 != 1) & (k > 5)}
    op, captured = attention(KERNELS[kind], functions)
    y = run(KERNELS[kind], op, drawn(op.dtype, SIZES), captured)
    assert np.isfinite(y).all() and not y[:, 1::3].any() and y[:, 0::3].all()


@pytest.mark.thorough_but("mma")
@pytest.mark.parametrize("kind", KERNELS)
def test_an_index_outside_is_nan_and_reads_nothing(kind: str) -> None:
    """Of the rows alone whose places ask for it."""
    table = torch.arange(50.0)
    op, captured = attention(KERNELS[kind], {"score_mod": lambda s, b, h, q, k: s + table[q]})
    y = run(KERNELS[kind], op, drawn(op.dtype, SIZES), captured)
    assert np.isfinite(y[:, :50]).all() and np.isnan(y[:, 50:]).all()


def test_what_other_kernels_say() -> None:
    op = replace(attention(MMA, {"mask_mod": MASKS["causal"]})[0], q_length=1)
    for kernel, profile in ((HOPPER.kernel, HOPPER.profile), (CudaDecodeKernel(), MMA.profile)):
        assert "mask_mod" in str(kernel.why_not(op, profile))


def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return SCORES["relative position, a table"](score, b, h, q, k) * torch.sigmoid(score)


@slow
@pytest.mark.thorough_only(
    "float32-64-cuda-sm90a",
    "float32-128-cuda-sm80",
    "float32-256-cuda-sm90a",
    "mma-64-cuda-sm90a",
    "mma-128-cuda-sm80",
    "mma-256-cuda-sm90a",
)
@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize("target", ["cuda-sm80", "cuda-sm90a"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("kind", KERNELS)
def test_machine_code(kind: str, width: int, target: str, tmp_path: Path) -> None:
    """All in registers, with a function of either kind that reads tensors."""
    kernel, profile = KERNELS[kind], load_profile(target)
    op, _ = attention(kernel, {"score_mod": biased, "mask_mod": MASKS["document, causal"]})
    op = replace(op, head_dim=width, v_head_dim=width, output=replace(op.output, width=HEADS * width))
    config = kernel.kernel.default_config(op, profile)
    text, _ = cuda_code.source(kernel.kernel.emit(op, profile, config), profile.tvm.arch)
    code = cuda_code.machine_code(text, profile.tvm.arch, tmp_path)
    assert (code.spilled, code.stack) == (0, 0)


@slow
@pytest.mark.thorough_only("cuda-sm80")
@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize("target", ["cuda-sm80", "cuda-sm90a"])
def test_through_the_whole_flow(target: str) -> None:
    for dtype, kernel in (("bfloat16", "cuda.attention"), ("float32", "cuda.attention_float32")):
        spec = mhsa.AttentionSpec(
            embed_dim=128, num_heads=HEADS, dtype=dtype, score_mod=SCORES["alibi"], mask_mod=MASKS["document"]
        )
        (op,) = mhsa.compile(mhsa.ScaledDotProductAttention(spec), target).manifest.ops
        assert (op.op, op.kernel) == ("attention", kernel)
