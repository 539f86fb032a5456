"""Runs one product of two activations, or one linear of a file's bytes, as `fuzz.kernels` runs the others."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
import tvm
from support.byte_ops import of_bytes, whole_numbers
from support.product_ops import ORDERS, matrices, operation

from fuzz.attention import NUMPY
from fuzz.cases import BytesCase, Outcome, ProductCase
from fuzz.kernels import PLAIN_CLASSES, Controls, built, garbage, profile
from fuzz.numbers import numbers
from mhsa_compile.compiler.selection.float32_products import resolve
from mhsa_compile.kernels.interface.ops import ProductOp
from mhsa_compile.nn.functional import to_torch
from mhsa_compile.verification.oracle.products_by_terms import products_by_terms
from mhsa_compile.verification.parity import Draw, judge


def product_op(case: ProductCase) -> ProductOp:
    first = dict(zip("bhmkn", case.calls[0], strict=True))
    sizes = {axis: first[axis] if axis in case.fixed else axis for axis in "bhmkn"}
    kind = case.dtype if case.dtype != "float32" else "ieee"
    op = operation(ORDERS[case.order], sizes, kind, case.result)
    return resolve(op, case.products, profile(case.machine, case.cores)).op  # type: ignore[return-value]


def product_outcome(case: ProductCase) -> Outcome:
    op, equation = product_op(case), ORDERS[case.order]
    kernel, _, library = built(op, profile(case.machine, case.cores))
    rng, controls = np.random.default_rng(case.seed), Controls()
    left, right, result = equation.replace("->", ",").split(",")
    summed = getattr(torch, op.result)

    def draw(turn: int, sizes: dict[str, int], kind: str) -> list[Draw]:
        a, b = (numbers(rng, tuple(sizes[x] for x in axes), kind, NUMPY[op.dtype]) for axes in (left, right))
        y = tvm.runtime.tensor(garbage(tuple(sizes[x] for x in result), op.result))
        library["run"](tvm.runtime.tensor(a), tvm.runtime.tensor(b), y)
        factors = matrices(equation, a, b)
        with np.errstate(invalid="ignore"):
            exact = np.matmul(*(factor.astype(np.float64) for factor in factors))
        with products_by_terms(op.float32_products):
            eager = torch.matmul(*(to_torch(np.ascontiguousarray(factor)).to(summed) for factor in factors))
        triple = exact, eager.double().numpy().astype(NUMPY[op.result]), y.numpy()
        if not turn and kind in PLAIN_CLASSES:
            _hold(controls, triple, *(factor.astype(np.float64) for factor in factors))
        return [triple]

    calls = [dict(zip("bhmkn", call, strict=True)) for call in case.calls]
    runs = list(product(calls, case.inputs))
    shares = [judge(lambda turn, run=run: draw(turn, *run), {}).ratio for run in runs]
    features = (case.machine, op.float32_products, f"order {case.order}", f"gives {op.result}", *case.inputs)
    features += ("fixed",) * bool(case.fixed)
    return Outcome(max(shares), len(shares), kernel.name, case.dtype, features, controls.outcome())


def _hold(controls: Controls, triple: Draw, a: np.ndarray, b: np.ndarray) -> None:
    controls.hold("sums without their last term", triple, a[..., :-1] @ b[..., :-1, :])
    if b.shape[-1] > 1:
        controls.hold("the next column", triple, a @ np.roll(b, -1, axis=-1))


def bytes_outcome(case: BytesCase) -> Outcome:
    """Sums are exact, so that what is allowed are three roundings of float32."""
    rows = case.calls[0] if case.fixed else ("B", "L")
    op = of_bytes(
        case.in_features, case.widths, case.x_dtype, case.stored, centred=case.centred, padding=case.padding, rows=rows
    )
    kernel, emitted, library = built(op, profile(case.machine, case.cores))
    rng, controls = np.random.default_rng(case.seed), Controls()
    weights = [whole_numbers(rng, d, n, op.in_features) for d, n in zip(op.stored, op.widths, strict=True)]
    zeros = [
        np.full(n, 128 * (d == "uint8"), d) if op.centred else whole_numbers(rng, d, n)
        for d, n in zip(op.stored, op.widths, strict=True)
    ]
    scales = [rng.uniform(0.01, 0.05, n).astype(np.float32) for n in op.widths]
    biases = [rng.standard_normal(n, np.float32) * there for n, there in zip(op.widths, op.biased, strict=True)]
    stored = [np.ascontiguousarray(w.T) if flip else w for w, flip in zip(weights, op.transposed, strict=True)]
    stored += [*zeros, *scales, *(bias for bias, there in zip(biases, op.biased, strict=True) if there)]
    packed = [tvm.runtime.tensor(garbage(shape, dtype)) for shape, dtype in emitted.packed]
    library["pack"](*map(tvm.runtime.tensor, stored), *packed)
    wide = np.concatenate(
        [w.astype(np.int64) - z.astype(np.int64)[:, None] for w, z in zip(weights, zeros, strict=True)]
    )

    def share(B: int, L: int) -> float:
        x, zero = whole_numbers(rng, op.x_dtype, B, L, op.in_features), whole_numbers(rng, op.x_dtype)
        scale = np.float32(rng.uniform(0.01, 0.05))
        y = tvm.runtime.tensor(garbage((B, L, op.pitch), "float32"))
        library["run"](*map(tvm.runtime.tensor, (x, zero, np.array(scale))), *packed, y)
        scaled = (x.astype(np.int64) - int(zero)) @ wide.T * (np.float64(scale) * np.concatenate(scales))
        expected, step = scaled + np.concatenate(biases), np.float64(scale) * np.concatenate(scales)
        allowed = 2.0**-24 * (3 * np.abs(scaled) + np.abs(expected))
        actual, least = y.numpy()[..., : op.out_features], np.maximum(allowed, 2.0**-120)
        controls["sums that are one more"] = float((np.abs(actual - expected - step) / least).max())
        return float((np.abs(actual - expected) / least).max())

    shares = [share(*call) for call in case.calls]
    features = [name for name in ("centred", "padding", "fixed") if getattr(case, name)]
    features += ["side by side"] * (len(op.widths) > 1) + [case.machine, f"x {op.x_dtype}"]
    return Outcome(max(shares), len(shares), kernel.name, op.x_dtype, tuple(features), controls.outcome())
