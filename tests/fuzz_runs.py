"""Runs a case of fuzz_strategies and says how much of its error budget it used.

Kernels run through TVM's JIT, which takes no linker and no export, against float64 in NumPy; the yardstick is PyTorch
at the case's dtype. A FlowCase goes through `compile` and `verify`, as a user's spec does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import torch
import tvm
from fuzz_strategies import MACHINES, AttentionCase, FlowCase, LinearCase
from kernel_runs import attention, compiled, vector_machine

import mhsa_compile as mhsa
from mhsa_compile import masks
from mhsa_compile.core import to_numpy, to_torch
from mhsa_compile.kernels import KERNELS
from mhsa_compile.kernels.base import Emitted, Kernel
from mhsa_compile.kernels.operations import AttentionOp, Band, LinearOp, MaskInput, Placement, StaticMask
from mhsa_compile.parity import Draw, judge
from mhsa_compile.profile import TargetProfile, detect
from mhsa_compile.reference import product_in_int8

NUMPY = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "int32": np.int32,
    "int8": np.int8,
}
Case = AttentionCase | LinearCase | FlowCase


@dataclass(frozen=True)
class Outcome:
    """What a run found: the worst call's error as a share of its budget, and what the case counts as."""

    share: float
    calls: int
    kind: str
    dtype: str
    features: tuple[str, ...]


class OverBudget(AssertionError):
    """Its text is a program that shows it again."""

    def __init__(self, case: Case, found: str) -> None:
        super().__init__(f"{found}\n\n{program(case)}")
        self.case, self.found = case, found


def run(case: Case) -> Outcome:
    """Raises OverBudget, with a program that shows it again, also where the case does not even run."""
    try:
        outcome = _RUNS[type(case)](case)
    except Exception as error:
        raise OverBudget(case, f"{type(error).__name__}: {error}") from error
    if not outcome.share <= 1:
        raise OverBudget(case, f"error {outcome.share:.3g} of the budget")
    return outcome


def program(case: Case) -> str:
    """A Python program that runs the case; the one of a kernel wants the folder tests/ in PYTHONPATH."""
    if isinstance(case, FlowCase):
        return FLOW_PROGRAM.format(**{name: getattr(case, name) for name in case.__dataclass_fields__})
    name = type(case).__name__
    return f"from fuzz_runs import run\nfrom fuzz_strategies import {name}\n\nprint(run({case!r}))\n"


FLOW_PROGRAM = """\
import torch
import mhsa_compile as mhsa

torch.manual_seed({seed})
module = mhsa.{module}(mhsa.AttentionSpec(**{spec})).eval()
artifact = mhsa.compile(module, {target!r}, dims={dims}, weights={weights!r})
verdict = mhsa.verify(artifact, cases={calls}, seed={seed}, threads=1)
print(verdict.worst, *verdict.checks, sep="\\n")
assert verdict.ok
"""


def _flow(case: FlowCase) -> Outcome:
    torch.manual_seed(case.seed)
    spec = mhsa.AttentionSpec(**case.spec)
    artifact = mhsa.compile(getattr(mhsa, case.module)(spec).eval(), case.target, dims=case.dims, weights=case.weights)
    verdict = mhsa.verify(artifact, cases=case.calls, seed=case.seed, threads=1)
    share = max([verdict.worst.ratio, *(check.ratio for check in verdict.checks)])
    features = [name for name in case.spec if name not in ("embed_dim", "num_heads", "head_dim", "dtype")]
    features += ["int8"] * (case.weights is not None) + ["fixed dims"] * bool(case.dims)
    return Outcome(share, len(case.calls), f"flow {case.module}", spec.dtype, tuple(features))


def _linear(case: LinearCase) -> Outcome:
    rows = case.calls[0] if case.fixed else ("B", "L")
    op = LinearOp(
        rows, case.in_features, case.widths, case.biased, case.transposed, case.dtype, case.int8, case.padding
    )  # type: ignore[arg-type]
    kernel, emitted, library = _built(op, profile(case.machine, case.cores))
    rng, dtype = np.random.default_rng(case.seed), NUMPY[case.dtype]
    weights = [rng.standard_normal((n, op.in_features), np.float32).astype(dtype) for n in op.widths]
    biases = [
        rng.standard_normal(n, np.float32).astype(dtype) * has for n, has in zip(op.widths, op.biased, strict=True)
    ]
    given = [np.ascontiguousarray(w.T) if flip else w for w, flip in zip(weights, op.transposed, strict=True)]
    given += [bias for bias, has in zip(biases, op.biased, strict=True) if has]
    packed = [tvm.runtime.tensor(_garbage(shape, dtype)) for shape, dtype in emitted.packed]
    library["pack"](*map(tvm.runtime.tensor, given), *packed)

    def draw(B: int, L: int) -> list[Draw]:
        x = rng.standard_normal((B, L, op.in_features), np.float32).astype(dtype)
        y = tvm.runtime.tensor(_garbage((B, L, op.pitch), case.dtype))
        library["run"](tvm.runtime.tensor(x), *packed, y)
        return [(*_linear_truth(op, x, weights, biases), y.numpy()[..., : op.out_features])]

    shares = [judge(lambda turn, call=call: draw(*call), {}).ratio for call in case.calls]
    features = [name for name in ("int8", "padding", "fixed") if getattr(case, name)]
    features += ["side by side"] * (len(op.widths) > 1) + [case.machine]
    return Outcome(max(shares), len(shares), kernel.name, case.dtype, tuple(features))


def _linear_truth(
    op: LinearOp, x: np.ndarray, weights: list[np.ndarray], biases: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """In float64, and PyTorch's at the dtype; in eight bits the rounding is the yardstick's, never the truth's."""
    exact = [
        x.astype(np.float64) @ w.T.astype(np.float64) + b.astype(np.float64)
        for w, b in zip(weights, biases, strict=True)
    ]
    product = product_in_int8 if op.int8_weights else torch.matmul
    eager = [product(to_torch(x), to_torch(w).T) + to_torch(b) for w, b in zip(weights, biases, strict=True)]
    return np.concatenate(exact, axis=-1), to_numpy(torch.cat(eager, dim=-1))


def _attention(case: AttentionCase) -> Outcome:
    op = _attention_op(case)
    kernel, emitted, library = _built(op, profile(case.machine, case.cores))
    rng = np.random.default_rng(case.seed)

    def draw(number: int, sizes: tuple[int, int, int]) -> list[Draw]:
        operands = _operands(rng, op, sizes, case.magnitude, number)
        truth, yardstick = (_evaluated(op, operands, dtype) for dtype in (torch.float64, getattr(torch, op.dtype)))
        if case.poison:
            _poison(op, operands)
        y = tvm.runtime.tensor(_garbage(_output_shape(op, sizes), case.dtype))
        library["run"](*map(tvm.runtime.tensor, [*_placed(op, operands), *emitted.constants]), y)
        return [(truth, yardstick.astype(NUMPY[op.dtype]), _rows(y.numpy(), op.output))]

    shares = [judge(lambda turn, call=call: draw(*call), {}).ratio for call in enumerate(case.calls)]
    features = [name for name in ("band", "mask", "static", "poison", "fixed", "softcap") if getattr(case, name)]
    features += ["grouped heads"] * (op.num_heads > op.num_kv_heads) + [*case.extras, case.layout, case.machine]
    return Outcome(max(shares), len(shares), kernel.name, case.dtype, tuple(features))


def _attention_op(case: AttentionCase) -> AttentionOp:
    (H, G), (E, F) = case.heads, case.widths
    first = dict(zip("BLS", case.calls[0], strict=True))
    batch, q_length, kv_length = (first[a] if a in case.fixed else a for a in "BLS")
    if case.layout == "fused":
        kv_length = q_length
    if case.layout == "fused":
        width = H * E + G * (E + F) + 5  # the padding that rows of a fused projection may have
        offsets = (0, H * E, H * E + G * E)
        places = [Placement(0, "rows", width, offset) for offset in offsets]
    else:
        widths = (H * E, G * E, G * F)
        places = [Placement(i, case.layout, width) for i, width in enumerate(widths)]  # type: ignore[arg-type]
    mask = None
    if case.mask is not None:
        kind, axes = case.mask
        full = {"B": batch, "H": H, "L": q_length, "S": kv_length}
        dims = tuple(full.get(axis, axis) for axis in axes)
        mask = MaskInput("bool" if kind == "bool" else case.dtype, dims)  # type: ignore[arg-type]
    return AttentionOp(
        batch, q_length, kv_length, H, G, E, F,
        scale=E**-0.5 if case.scale is None else case.scale,
        band=None if case.band is None else Band(*case.band),  # type: ignore[arg-type]
        mask=mask, query=places[0], key=places[1], value=places[2],
        output=Placement(0, case.output, H * F),  # type: ignore[arg-type]
        dtype=case.dtype,  # type: ignore[arg-type]
        static_mask=None if case.static is None else StaticMask(_static(case)),
        softcap=case.softcap, **dict.fromkeys(case.extras, True),
    )  # fmt: skip


def _static(case: AttentionCase) -> np.ndarray:
    assert case.static is not None
    per_head, what = case.static
    _, L, S = case.calls[0]
    if isinstance(what, str):
        return masks.parse_pattern(what).array(L, S)[np.newaxis]
    return np.random.default_rng(case.seed).random((case.heads[0] if per_head else 1, L, S)) < what


@dataclass
class Operands:
    """The inputs of one call, heads first; what the operation does not have is None."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray | None
    lengths: np.ndarray | None
    sinks: np.ndarray | None
    slopes: np.ndarray | None


def _operands(
    rng: np.random.Generator, op: AttentionOp, sizes: tuple[int, int, int], magnitude: float, turn: int
) -> Operands:
    (B, L, S), H, G = sizes, op.num_heads, op.num_kv_heads
    shapes = ((B, H, L, op.head_dim), (B, G, S, op.head_dim), (B, G, S, op.v_head_dim))
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
    narrow = NUMPY[op.dtype]
    return Operands(
        *(array.astype(narrow) for array in (q * np.float32(magnitude), k, v)),
        mask=_mask(rng, op, sizes, turn),
        lengths=rng.integers(0, S + 1, B) if op.lengths else None,
        sinks=rng.standard_normal(H, np.float32).astype(narrow) if op.sinks else None,
        slopes=rng.random(H, np.float32).astype(narrow) if op.slopes else None,
    )


def _mask(rng: np.random.Generator, op: AttentionOp, sizes: tuple[int, int, int], turn: int) -> np.ndarray | None:
    """Where an axis may be 1 it is in every other call. One row in seven hides everything."""
    if op.mask is None:
        return None
    full = dict(zip("BLS", sizes, strict=True)) | {"H": op.num_heads}
    shape = []
    for axis, dim in zip("BHLS", op.mask.dims, strict=True):
        loose = isinstance(dim, str) and dim.startswith("mask_")
        shape.append(dim if isinstance(dim, int) else 1 if loose and turn % 2 else full[axis])
    visible = rng.random(shape) < 0.7
    visible.reshape(-1, shape[-1])[3::7] = False
    if op.mask.dtype == "bool":
        return visible
    return np.where(visible, rng.standard_normal(shape), -np.inf).astype(NUMPY[op.dtype])


def _evaluated(op: AttentionOp, given: Operands, dtype: torch.dtype) -> np.ndarray:
    return attention(op, given.q, given.k, given.v, given.mask, given.lengths, given.sinks, given.slopes, dtype)


def _poison(op: AttentionOp, given: Operands) -> None:
    """NaN and Inf in the keys and values that no query of their batch entry sees: found by what they can change."""
    B, S = given.k.shape[0], given.k.shape[2]
    ones = np.eye(S)
    flat = replace(op, num_kv_heads=1, head_dim=1, v_head_dim=S, softcap=0.0, slopes=False, sinks=False)
    mask = given.mask if given.mask is None or given.mask.dtype == np.bool_ else ~np.isneginf(given.mask)
    q = np.zeros((B, op.num_heads, given.q.shape[2], 1))
    weights = attention(flat, q, np.zeros((B, 1, S, 1)), np.broadcast_to(ones, (B, 1, S, S)), mask, given.lengths)
    seen = weights.reshape(B, -1, S).any(axis=1)
    for b in range(B):
        given.k[b, :, ~seen[b]], given.v[b, :, ~seen[b]] = np.nan, np.inf
        given.v[b, :, ~seen[b], ::2] = np.nan


def _placed(op: AttentionOp, given: Operands) -> list[np.ndarray]:
    """The inputs of the kernel, in its order: one for each buffer, then the others."""
    heads = (given.q, given.k, given.v)
    others = [array for array in (given.mask, given.lengths, given.sinks, given.slopes) if array is not None]
    if op.query.layout == "heads":
        return [*heads, *others]
    rows = [np.ascontiguousarray(x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)) for x in heads]
    if op.key.buffer != op.query.buffer:
        return [*rows, *others]
    rest = op.query.width - sum(x.shape[2] for x in rows)
    return [np.concatenate([*rows, np.full((*rows[0].shape[:2], rest), np.nan, rows[0].dtype)], axis=2), *others]


def _output_shape(op: AttentionOp, sizes: tuple[int, int, int]) -> tuple[int, ...]:
    B, L, _ = sizes
    return (B, L, op.output.width) if op.output.layout == "rows" else (B, op.num_heads, L, op.v_head_dim)


def _rows(y: np.ndarray, place: Placement) -> np.ndarray:
    return y if place.layout == "rows" else y.transpose(0, 2, 1, 3).reshape(y.shape[0], y.shape[2], -1)


@cache
def profile(machine: str, cores: int) -> TargetProfile:
    facts = MACHINES[machine]
    found = detect() if facts is None else vector_machine(*facts)
    return msgspec.structs.replace(found, hardware=msgspec.structs.replace(found.hardware, cores=cores))


def _built(op: AttentionOp | LinearOp, target: TargetProfile) -> tuple[Kernel, Emitted, Any]:
    """The kernel that the compiler would take, its code and that as functions."""
    kernel = next(kernel for kernel in KERNELS["cpu"] if kernel.applies(op, target) is None)
    emitted = kernel.emit(op, target, kernel.default(op, target))
    return kernel, emitted, compiled(emitted, target)


def _garbage(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Memory as it may come: bytes that are NaN in every floating dtype."""
    array = np.zeros(shape, NUMPY[dtype])
    array.view(np.uint8)[...] = 0xFF
    return array


_RUNS: dict[type, Any] = {AttentionCase: _attention, LinearCase: _linear, FlowCase: _flow}
