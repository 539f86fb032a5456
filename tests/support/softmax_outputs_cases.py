"""What a softmax is like: operations, inputs, and how the outputs of kernels are judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import torch

from mhsa_compile.kernels.interface.ops import AttentionOp, AttentionProbsOp, HeadLayout, SoftmaxStatsOp
from mhsa_compile.nn import functional
from mhsa_compile.nn.functional import to_numpy, to_torch
from mhsa_compile.spec.outputs import SoftmaxOutputs
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.oracle.softmax_outputs import collect, softmax_outputs_of_rows
from support.attention_ops import attention_of, features
from support.kernel_runs import masked_scores

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

ALL = SoftmaxOutputs(lse=True, entropy=True, top_k=5, weights=True)

SUMS = replace(ALL, weights=False)

Array = np.ndarray


def operation(**fields: Any) -> AttentionOp:
    """An attention with symbolic B, L and S, three buffers and grouped heads."""
    H, G, E, F = 4, 2, 24, 8
    places = {role: HeadLayout(i, "heads", 0) for i, role in enumerate(("query", "key", "value"))}
    stated = {"band": None, "mask": None, "output": HeadLayout(0, "rows", H * F), "scale": E**-0.5, **places, **fields}
    sizes = {"batch": "B", "q_length": "L", "kv_length": "S", "num_heads": H, "num_kv_heads": G}
    return attention_of(**{**sizes, "head_dim": E, "v_head_dim": F, **stated})


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
    arrays = {
        "lengths": rng.integers(0, S + 1, B),
        "sinks": rng.standard_normal(op.num_heads).astype(DTYPES[op.dtype]),
        "slopes": rng.random(op.num_heads).astype(DTYPES[op.dtype]),
    }
    return [array for name, array in arrays.items() if getattr(features(op), name)]


def scores(op: AttentionOp, inputs: Sequence[Array], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(the scores as the softmax takes them, -inf where hidden; the sinks), in PyTorch's arithmetic at `dtype`."""
    q, k, _, *rest = inputs
    mask = rest.pop(0) if features(op).mask is not None else None
    lengths, sinks, slopes = (
        rest.pop(0) if getattr(features(op), name) else None for name in ("lengths", "sinks", "slopes")
    )
    hidden, _ = masked_scores(op, q, k, mask, lengths, slopes, dtype)
    return hidden, None if sinks is None else to_torch(sinks).to(dtype)


Run = Callable[[Sequence[Array], Sequence[Array]], list[Array]]  # (inputs, outputs to be filled) -> what is in them


def asked_of(op: AttentionOp, outputs: SoftmaxOutputs) -> list[SoftmaxStatsOp | AttentionProbsOp]:
    weights = [AttentionProbsOp(op, outputs.heads, outputs.rows)] if outputs.weights else []
    return [SoftmaxStatsOp(op, outputs.lse, outputs.entropy, outputs.top_k), *weights]


def compare(
    op: AttentionOp, runs: Sequence[Run], shapes: Sequence[tuple[int, int, int]], which: SoftmaxOutputs
) -> None:
    """Asserts that what the runs of `asked_of` give is within twice PyTorch's error and a rounding step, at every
    shape."""
    for B, L, S in shapes:
        inputs = [*operands(op, B, L, S), *masks(op, B, L, S), *extras(op, B, S)]
        exact, sinks = (None if t is None else t.numpy() for t in scores(op, inputs, torch.float64))

        def look(
            rows: slice, part: SoftmaxOutputs, exact: Any = exact, sinks: Any = sinks
        ) -> tuple[dict[str, Array], int]:
            return softmax_outputs_of_rows(exact[:, :, rows], sinks, part), 0

        expected = collect(look, [slice(0, L)], L, S, which)
        narrow, narrow_sinks = scores(op, inputs, getattr(torch, op.dtype))
        # PyTorch's error is that of all rows: that of a few chosen ones says less than the budget takes it for.
        every = replace(which, heads=None, rows=None)
        whole = collect(look, [slice(0, L)], L, S, every)
        arrays = functional.softmax_outputs_of_rows(narrow, narrow_sinks, every)
        yardstick = {name: to_numpy(tensor) for name, tensor in arrays.items()}
        rows = (B, op.num_heads, L)
        outputs = [np.full(rows, np.nan, np.float32) for _ in "le"]
        outputs += [np.full((*rows, which.top_k), np.nan, np.float32), np.full((*rows, which.top_k), -7, np.int64)]
        found = runs[0](inputs, outputs)
        if which.weights:
            filled = np.full(expected["weights"].shape, np.nan, DTYPES[op.dtype])
            found += runs[1](inputs, [filled])
        actual = dict(zip(which.names, found, strict=True))
        for name in actual.keys() - {"top_k_keys"}:
            budgets = budget(whole[name], yardstick[name], str(yardstick[name].dtype))
            assert max_error(expected[name], actual[name]) <= budgets, (name, B, L, S)
        check_keys(actual["top_k_keys"], expected, exact, sinks)


def check_keys(keys: Array, expected: dict[str, Array], exact: Array, sinks: Array | None) -> None:
    """Asserts that the keys are the very ones where scores are no closer than rounding; else others of the same weight,
    each once."""
    weights = softmax_outputs_of_rows(exact, sinks, SoftmaxOutputs(weights=True))["weights"]
    assert ((keys < 0) == (expected["top_k_keys"] < 0)).all()
    picks = np.where(keys < 0, 0, np.take_along_axis(weights, np.maximum(keys, 0), axis=-1))
    assert np.abs(picks - expected["top_k_weights"]).max() <= 2**-20
    ordered = np.sort(keys, axis=-1)
    assert ((np.diff(ordered, axis=-1) > 0) | (ordered[..., 1:] < 0)).all()


def masks(op: AttentionOp, B: int, L: int, S: int) -> list[Array]:
    """A mask for each axis as the operation says: 1, or full; some queries see nothing."""
    if features(op).mask is None:
        return []
    rng = np.random.default_rng(2)
    shape = [1 if dim == 1 else {"B": B, "H": op.num_heads, "L": L, "S": S}[str(dim)] for dim in features(op).mask.dims]
    mask = rng.random(shape) < 0.7
    mask[:, :, -1] = mask[:, :, -1] if shape[2] == 1 else False
    if features(op).mask.dtype == "bool":
        return [mask]
    return [np.where(mask, rng.standard_normal(shape), -np.inf).astype(DTYPES[features(op).mask.dtype])]
