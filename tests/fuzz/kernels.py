"""Runs one kernel of `fuzz.cases` by itself, and says how much of its error budget it used.

Through TVM's JIT, which takes no linker and no export, against float64 in NumPy; the yardstick is PyTorch at the case's
dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import msgspec
import numpy as np
import torch
import tvm
from support.kernel_runs import compiled, vector_machine

from fuzz.attention import (
    NUMPY,
    Operands,
    attention_op,
    draw_operands,
    evaluated,
    farthest,
    misread,
    output_rows,
    output_shape,
    placed,
    poison,
    reordered,
    scores_of,
)
from fuzz.cases import MACHINES, AttentionCase, InsideCase, LinearCase, Outcome
from fuzz.numbers import numbers
from mhsa_compile.compiler.selection.float32_products import resolve
from mhsa_compile.compiler.selection.select_kernel import kernels_for
from mhsa_compile.hardware.profile import TargetProfile, detect
from mhsa_compile.kernels.interface.kernel import Emitted, Kernel
from mhsa_compile.kernels.interface.ops import AttentionOp, AttentionProbsOp, LinearOp, Op, SoftmaxStatsOp
from mhsa_compile.nn.functional import softmax_outputs_of_rows, to_numpy, to_torch
from mhsa_compile.spec.outputs import SoftmaxOutputs, inside_of
from mhsa_compile.verification.error_budget import budget, max_error, share_of_budget
from mhsa_compile.verification.oracle import softmax_outputs as reference_inside
from mhsa_compile.verification.oracle.eager_operators import product_in_int8
from mhsa_compile.verification.oracle.products_by_terms import products_by_terms
from mhsa_compile.verification.parity import Draw, judge
from mhsa_compile.verification.top_k_parity import repetitions


class Controls(dict[str, float]):
    """Wrong results on purpose: of each the largest share of its budget that it came to."""

    def hold(self, name: str, draw: Draw, wrong: np.ndarray) -> None:
        """What another result would have been told by, `wrong` being its truth; nothing where that is the same."""
        truth, yardstick, actual = draw
        if max_error(truth, wrong) <= SAME * np.abs(truth).max(initial=0.0):
            return
        allowed = budget(truth, yardstick, str(yardstick.dtype))
        self[name] = max(self.get(name, 0.0), share_of_budget(max_error(wrong, actual), allowed))

    def outcome(self) -> tuple[tuple[str, float], ...]:
        return tuple(self.items())


SAME = 2.0**-40
"""Of the largest number of a result in float64, what two orders of its sums may differ by."""
PLAIN_CLASSES = ("normal", "one sign")
"""Those of whose numbers a wrong one differs from its neighbours."""
ORDERS = 8
"""The number of orders in which PyTorch's sums are taken, where one may be luck."""


def linear_outcome(case: LinearCase) -> Outcome:
    rows = case.calls[0] if case.fixed else ("B", "L")
    op = LinearOp(
        rows, case.in_features, case.widths, case.biased, case.transposed, case.dtype, case.int8, case.padding
    )  # type: ignore[arg-type]
    target = profile(case.machine, case.cores)
    op = resolve(op, case.products, target).op  # type: ignore[assignment]
    kernel, emitted, library = built(op, target)
    rng, dtype, controls = np.random.default_rng(case.seed), NUMPY[case.dtype], Controls()
    weights = [numbers(rng, (n, op.in_features), case.weights, dtype) for n in op.widths]
    biases = [
        rng.standard_normal(n, np.float32).astype(dtype) * has for n, has in zip(op.widths, op.biased, strict=True)
    ]
    given = [np.ascontiguousarray(w.T) if flip else w for w, flip in zip(weights, op.transposed, strict=True)]
    given += [bias for bias, has in zip(biases, op.biased, strict=True) if has]
    packed = [tvm.runtime.tensor(garbage(shape, dtype)) for shape, dtype in emitted.packed]
    library["pack"](*map(tvm.runtime.tensor, given), *packed)

    def draw(turn: int, B: int, L: int, inputs: str) -> list[Draw]:
        x = numbers(rng, (B, L, op.in_features), inputs, dtype)
        y = tvm.runtime.tensor(garbage((B, L, op.pitch), case.dtype))
        library["run"](tvm.runtime.tensor(x), *packed, y)
        triple = (*_linear_truth(op, x, weights, biases), y.numpy()[..., : op.out_features])
        if not turn and inputs in PLAIN_CLASSES and case.weights in PLAIN_CLASSES:
            without = x.copy()
            without[..., -1] = 0
            controls.hold("sums without their last term", triple, _linear_truth(op, without, weights, biases)[0])
            if op.out_features > 1:
                controls.hold("the next feature", triple, np.roll(triple[0], -1, axis=-1))
        return [triple]

    runs = list(product(case.calls, case.inputs))
    shares = [judge(lambda turn, run=run: draw(turn, *run[0], run[1]), {}).ratio for run in runs]
    features = [name for name in ("int8", "padding", "fixed") if getattr(case, name)]
    features += ["side by side"] * (len(op.widths) > 1) + [case.machine, op.float32_products]
    features += [*case.inputs, f"weights {case.weights}"]
    return Outcome(max(shares), len(shares), kernel.name, case.dtype, tuple(features), controls.outcome())


def _linear_truth(
    op: LinearOp, x: np.ndarray, weights: list[np.ndarray], biases: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """(the result in float64, PyTorch's at the dtype); in eight bits the rounding is the yardstick's, never the
    truth's."""
    with np.errstate(invalid="ignore"):
        exact = [
            x.astype(np.float64) @ w.T.astype(np.float64) + b.astype(np.float64)
            for w, b in zip(weights, biases, strict=True)
        ]
    multiply = product_in_int8 if op.int8_weights else torch.matmul
    with products_by_terms(op.float32_products):
        eager = [multiply(to_torch(x), to_torch(w).T) + to_torch(b) for w, b in zip(weights, biases, strict=True)]
    return np.concatenate(exact, axis=-1), to_numpy(torch.cat(eager, dim=-1))


def attention_outcome(case: AttentionCase) -> Outcome:
    target = profile(case.machine, case.cores)
    op: AttentionOp = resolve(attention_op(case), case.products, target).op  # type: ignore[assignment]
    kernel, emitted, library = built(op, target)
    runs, controls = list(product(case.calls, case.inputs)), Controls()

    def draw(rng: np.random.Generator, number: int, orders: int) -> list[Draw]:
        sizes, kind = runs[number]
        operands = draw_operands(rng, op, sizes, case.magnitude, number, kind)
        truth = evaluated(op, operands, torch.float64)
        narrow = getattr(torch, op.dtype)
        every_order = [reordered(operands, order, op.float32_products) for order in range(orders)]
        with products_by_terms(op.float32_products):
            yardstick = farthest(truth, [evaluated(op, one, narrow) for one in every_order])
        wrong = misread(operands) if kind in PLAIN_CLASSES and number not in held else {}
        if case.poison:
            poison(op, operands)
        y = tvm.runtime.tensor(garbage(output_shape(op, sizes), case.dtype))
        library["run"](*map(tvm.runtime.tensor, [*placed(op, operands), *emitted.constants]), y)
        triple = truth, yardstick.astype(NUMPY[op.dtype]), output_rows(y.numpy(), op.output)
        for name, other in wrong.items():
            controls.hold(name, triple, evaluated(op, other, torch.float64))
        held.add(number)
        return [triple]

    held: set[int] = set()
    shares = [_share(case, number, draw) for number in range(len(runs))]
    features = (*_features(case), op.float32_products, *case.inputs)
    return Outcome(max(shares), len(shares), kernel.name, case.dtype, features, controls.outcome())


def _share(case: AttentionCase, number: int, draw: Callable[[np.random.Generator, int, int], list[Draw]]) -> float:
    """The error of a call as a share of its budget; `draw` has the number of the call, and in how many orders the sums
    of the yardstick's products are taken.

    Where scores are large nearly all the error, ours and PyTorch's, comes from the few rows in which two keys are
    nearly equal, and either may be lucky there by any factor. So what is over its budget is held once more, the same
    draws, against PyTorch's error in several orders of its sums: that says what it is in those rows.
    """
    share = 0.0
    for orders in (1, ORDERS):
        rng = np.random.default_rng((case.seed, number))
        share = judge(lambda turn, rng=rng, orders=orders: draw(rng, number, orders), {}).ratio
        if share <= 1:
            break
    return share


def _features(case: AttentionCase) -> tuple[str, ...]:
    features = [name for name in ("band", "mask", "static", "poison", "fixed", "softcap") if getattr(case, name)]
    grouped = ["grouped heads"] * (case.heads[0] > case.heads[1])
    return (*features, *grouped, *case.extras, case.layout, case.machine)


def inside_outcome(case: InsideCase) -> Outcome:
    """Statistics, or weights: whatever the words say."""
    given, wanted = case.attention, inside_of(case.outputs)
    op = attention_op(given)
    asked: SoftmaxStatsOp | AttentionProbsOp = SoftmaxStatsOp(op, wanted.lse, wanted.entropy, wanted.top_k)
    if wanted.weights:
        asked = AttentionProbsOp(op, wanted.heads, wanted.rows)
    kernel, emitted, library = built(asked, profile(given.machine, given.cores))

    def draw(rng: np.random.Generator, number: int, orders: int) -> list[Draw]:
        operands = draw_operands(rng, op, given.calls[number], given.magnitude, number)
        truth, weights = _inside_truth(op, operands, wanted)
        narrow = [_inside_eager(op, reordered(operands, order), wanted) for order in range(orders)]
        yardstick = {name: farthest(truth[name], [one[name] for one in narrow]) for name in narrow[0]}
        if given.poison:
            poison(op, operands)
        dtypes = {"top_k_keys": "int64", "weights": op.dtype}
        found = {name: garbage(array.shape, dtypes.get(name, "float32")) for name, array in truth.items()}
        tensors = {name: tvm.runtime.tensor(array) for name, array in found.items()}
        library["run"](*map(tvm.runtime.tensor, [*placed(op, operands), *emitted.constants]), *tensors.values())
        found = {name: tensor.numpy() for name, tensor in tensors.items()}
        if "top_k_keys" in found:
            found["top_k_keys"] = _weights_of(found["top_k_keys"], truth["top_k_keys"], weights)
            truth["top_k_keys"], yardstick["top_k_keys"] = truth["top_k_weights"], yardstick["top_k_weights"]
        return [(truth[name], yardstick[name], found[name]) for name in truth]

    shares = [_share(given, number, draw) for number in range(len(given.calls))]
    words = [word.partition("=")[0] for word in case.outputs]
    return Outcome(max(shares), len(shares), kernel.name, given.dtype, (*_features(given), *words))


def _inside_truth(op: AttentionOp, given: Operands, wanted: SoftmaxOutputs) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """What is wanted, in float64; and all weights."""
    exact = scores_of(op, given, torch.float64)[0].numpy()
    sinks = None if given.sinks is None else given.sinks.astype(np.float64)

    def look(rows: slice, part: SoftmaxOutputs) -> tuple[dict[str, np.ndarray], int]:
        return reference_inside.softmax_outputs_of_rows(exact[:, :, rows], sinks, part), 0

    L, S = exact.shape[2:]
    every, _ = look(slice(0, L), SoftmaxOutputs(weights=True))
    return reference_inside.collect(look, [slice(0, L)], L, S, wanted), every["weights"]


def _inside_eager(op: AttentionOp, given: Operands, wanted: SoftmaxOutputs) -> dict[str, np.ndarray]:
    """What is wanted, by PyTorch at the dtype."""
    scores, _ = scores_of(op, given, getattr(torch, op.dtype))
    sinks = None if given.sinks is None else to_torch(given.sinks)
    return {name: to_numpy(tensor) for name, tensor in softmax_outputs_of_rows(scores, sinks, wanted).items()}


def _weights_of(keys: np.ndarray, expected: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The weights of keys: NaN for one that is none, or comes twice in a row, or stands where there should be none."""
    S = weights.shape[-1]
    wrong = (keys < -1) | (keys >= S) | ((keys < 0) != (expected < 0)) | repetitions(keys)
    found = np.take_along_axis(weights, keys.clip(0, S - 1), axis=-1)
    return np.where(wrong, np.nan, np.where(keys < 0, 0, found))


@cache
def profile(machine: str, cores: int) -> TargetProfile:
    facts = MACHINES[machine]
    found = detect() if facts is None else vector_machine(*facts)
    return msgspec.structs.replace(found, hardware=msgspec.structs.replace(found.hardware, cores=cores))


def built(op: Op, target: TargetProfile) -> tuple[Kernel[Any], Emitted, Any]:
    """The kernel that the compiler would take, its code and that as functions."""
    (kernel, *_), _ = kernels_for(op, target)
    emitted = kernel.emit(op, target, kernel.default_config(op, target))
    return kernel, emitted, compiled(emitted, target)


def garbage(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Memory as it may come: bytes that are NaN in every floating dtype."""
    array = np.zeros(shape, NUMPY[dtype])
    array.view(np.uint8)[...] = 0xFF
    return array
