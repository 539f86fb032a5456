"""Runs what goes through the whole flow, as a user's spec does: `compile` and `verify`, or a prompt and its steps.

Notation: B batch, L query length, D embed, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import torch

import mhsa_compile as mhsa
from fuzz.cases import DecodeCase, FlowCase, Outcome
from mhsa_compile.frontend.export.export import export
from mhsa_compile.runtime.compiled_attention import CompiledAttention
from mhsa_compile.verification import top_k_parity
from mhsa_compile.verification.oracle.evaluate import eager, oracle
from mhsa_compile.verification.parity import Draw, judge
from mhsa_compile.verification.precision import AS_STATED


def flow_outcome(case: FlowCase) -> Outcome:
    torch.manual_seed(case.seed)
    spec = mhsa.AttentionSpec(**case.spec)
    artifact = mhsa.compile(getattr(mhsa, case.module)(spec).eval(), case.target, dims=case.dims, weights=case.weights)
    verdict = mhsa.verify(artifact, cases=case.calls, seed=case.seed, threads=1)
    share = max([verdict.worst.ratio, *(check.ratio for check in verdict.checks)])
    features = [*_features(case.spec), *["int8"] * (case.weights is not None), *["fixed dims"] * bool(case.dims)]
    return Outcome(share, len(case.calls), f"flow {case.module}", spec.dtype, tuple(features))


def _features(spec: dict[str, Any]) -> tuple[str, ...]:
    words = (word.partition(":")[0] for word in spec.get("outputs", ()))
    fields = (name for name in spec if name not in ("embed_dim", "num_heads", "head_dim", "dtype"))
    return (*fields, *(word for word in words if word != "y"))


def decode_outcome(case: DecodeCase) -> Outcome:
    """Every row of every call against that row of the sequence in one call without a cache, in float64."""
    torch.manual_seed(case.seed)
    module = mhsa.MultiHeadAttention(mhsa.AttentionSpec(**case.spec, kv_cache=True, causal=True)).eval()
    whole = mhsa.MultiHeadAttention(mhsa.AttentionSpec(**case.spec, causal=True)).eval()
    whole.load_state_dict(module.state_dict())
    model = export(whole)
    artifacts = (mhsa.compile(module, case.target, dims=dims) for dims in ({}, {"L": 1}))
    prefill, step = (mhsa.load(artifact, threads=1) for artifact in artifacts)

    def draw(turn: int) -> list[Draw]:
        rng = np.random.default_rng((case.seed, turn))
        longest = max(case.prompts) + sum(case.steps)
        shape = (len(case.prompts), longest, module.spec.embed_dim)
        x = rng.standard_normal(shape, np.float32).astype(module.spec.dtype)
        found = _generated(case, prefill, step, x)
        return _joined([_against_whole(model, x[b], found[b]) for b in range(len(x))])

    features = (*_features(case.spec), *["ragged"] * (len(set(case.prompts)) > 1))
    return Outcome(judge(draw, {}).ratio, 1 + len(case.steps), "flow decode", module.spec.dtype, features)


def _generated(
    case: DecodeCase, prefill: CompiledAttention, step: CompiledAttention, x: np.ndarray
) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """For each entry of the batch: the positions of x (B, L, D) that it is made of, and the rows of each output for
    them."""
    longest = max(case.prompts)
    cache = prefill.new_cache(len(x), x.shape[1] + case.spare)
    y = prefill(x[:, :longest], cache=cache)
    cache.truncate(case.prompts)
    calls = [(np.arange(longest), y)]
    for count in case.steps:
        first = calls[-1][0][-1] + 1
        rows = np.arange(first, first + count)
        calls.append((rows, (step if count == 1 else prefill)(x[:, rows], cache=cache)))
    return [_of_entry(b, length, calls) for b, length in enumerate(case.prompts)]


def _of_entry(b: int, length: int, calls: Sequence[tuple[np.ndarray, Any]]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The positions of entry `b`, and the rows of each output for them; what is padding is left out."""
    kept = [calls[0][0][:length], *(rows for rows, _ in calls[1:])]
    pieces = []
    for (_, results), rows in zip(calls, kept, strict=True):
        y, *others = results if isinstance(results, tuple) else (results,)
        pieces.append((y[b, : len(rows)], *(array[b, :, : len(rows)] for array in others)))
    joined = [np.concatenate(parts, axis=0 if i == 0 else 1) for i, parts in enumerate(zip(*pieces, strict=True))]
    return np.concatenate(kept), joined


def _against_whole(model: onnx.ModelProto, x: np.ndarray, found: tuple[np.ndarray, list[np.ndarray]]) -> list[Draw]:
    """One entry: x (L, D), of which it has some rows, and what the calls gave for them."""
    rows, results = found
    inputs = {"x": np.ascontiguousarray(x[np.newaxis, rows])}
    actual = [np.ascontiguousarray(array[np.newaxis]) for array in results]
    triples = list(zip(oracle(model, inputs), eager(model, inputs), actual, strict=True))
    assert [truth.shape for truth, _, _ in triples] == [array.shape for array in actual]
    return top_k_parity.by_weight(model, inputs, triples, AS_STATED)


def _joined(entries: Sequence[list[Draw]]) -> list[Draw]:
    """One draw of each output, of all entries."""
    return [
        tuple(np.concatenate([draw[i].ravel() for draw in output]) for i in range(3))  # type: ignore[misc]
        for output in zip(*entries, strict=True)
    ]
