"""Operations as something to measure: random inputs, what must come out of them, and code for one config.

Of long outputs some rows are held against float64, computed in full: a row of attention depends on its own query and on
all the keys, so a few of them judge every tile's tail. Notation: B batch, L query length, S key length, H heads,
G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mhsa_compile.bench.timing import INPUT_SETS
from mhsa_compile.compiler.codegen import build
from mhsa_compile.compiler.kernel_code import code_of
from mhsa_compile.compiler.selection.op_key import size_in, symbols
from mhsa_compile.errors import BuildError, MhsaError, ModelError
from mhsa_compile.hardware.profile import TargetProfile
from mhsa_compile.kernels.common.decode_limits import MOST_QUERIES
from mhsa_compile.kernels.interface.kernel import Config, Kernel
from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout, LinearOp, Op
from mhsa_compile.kernels.interface.score_step import SomeRows
from mhsa_compile.nn.functional import attend, to_numpy, to_torch
from mhsa_compile.nn.score_features import EagerScoring
from mhsa_compile.tuning.measure.job import Candidate, MeasureJob
from mhsa_compile.verification.error_budget import budget
from mhsa_compile.verification.oracle.eager_operators import product_in_int8
from mhsa_compile.verification.oracle.products_by_terms import products_by_terms

ROWS = 64
"""Rows of the output that are checked; the first and the last are among them."""
MOST_SCORES = 1 << 23
"""Scores of the checked rows that are held at once, in each of two precisions: fewer rows where S is long."""


def job_of(op: Op, sizes: Mapping[str, int], seed: int = 0) -> MeasureJob:
    """An exercise for an operation that has a key, at these sizes of its symbols.

    Raises ModelError for a symbol without a size. Axes of a mask are full where no size says otherwise, but for batch
    and heads, which are 1.
    """
    dims = {
        "mask_B": 1,
        "mask_H": 1,
        "mask_L": sizes.get("L", 0),
        "mask_S": sizes.get("S", sizes.get("L", 0)),
        **sizes,
    }
    if missing := sorted(symbol for symbol in symbols(op) if not dims.get(symbol)):
        hint = "Fix it, such as with --batch, --length and --kv-length."
        raise ModelError("sizes", f"one for each of {', '.join(sorted(symbols(op)))}", f"none for {missing[0]}", hint)
    rng = np.random.default_rng(seed)
    if isinstance(op, LinearOp):
        return _linear(op, dims, rng)
    assert isinstance(op, AttentionOp), "only operations with a key are measured"
    return _AttentionJob(op, dims).job(rng)


def candidate_of(op: Op, kernel: Kernel[Any], config: Config, profile: TargetProfile) -> Candidate:
    """Emits, compiles and links one config. Raises BuildError."""
    try:
        emitted = code_of(op, kernel, config, profile)
        packing = {} if emitted.pack is None else {"pack": emitted.pack}
        code = build.library({"run": emitted.run, **packing}, profile)
        return Candidate(code, emitted.packed, emitted.constants, emitted.workspace, profile.family)
    except MhsaError:
        raise
    except Exception as error:  # whatever TVM's passes and LLVM trip over
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise BuildError(f"{kernel.name} {dict(config)}", "code", lines[-1][:300]) from error


def _draw(rng: np.random.Generator, shape: Sequence[int], dtype: str, factor: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(tuple(shape)) * factor).astype(np.dtype(dtype))


def _some(count: int, most: int) -> np.ndarray:
    """Up to `most` of range(count), spread evenly, both ends among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def _linear(op: LinearOp, sizes: Mapping[str, int], rng: np.random.Generator) -> MeasureJob:
    rows = [size_in(dim, sizes) for dim in op.rows]
    K, N, count = op.in_features, op.out_features, prod(rows)
    x = _draw(rng, (*rows, K), op.dtype)
    shapes = [(K, n) if transposed else (n, K) for n, transposed in zip(op.widths, op.transposed, strict=True)]
    weights = [_draw(rng, shape, op.dtype, K**-0.5) for shape in shapes]
    biases = [_draw(rng, (n,), op.dtype) if biased else None for n, biased in zip(op.widths, op.biased, strict=True)]
    checked_rows = _some(count, ROWS)

    def product(dtype: torch.dtype, rounded: bool) -> np.ndarray:
        factor = to_torch(x.reshape(count, K)[checked_rows]).to(dtype)
        results = []
        for weight, bias, transposed in zip(weights, biases, op.transposed, strict=True):
            w = to_torch(weight if transposed else weight.T).to(dtype)
            y = product_in_int8(factor, w) if rounded else factor @ w
            results.append(y if bias is None else y + to_torch(bias).to(dtype))
        return to_numpy(torch.cat(results, dim=-1))

    expected = product(torch.float64, False)
    with products_by_terms(op.float32_products):
        yardstick = product(to_torch(x).dtype, op.int8_weights)
    most = budget(expected, yardstick, op.dtype)
    places = checked_rows[:, None] * op.pitch + np.arange(N)
    present = [bias for bias in biases if bias is not None]
    return MeasureJob(
        inputs=(x,),
        weights=(*weights, *present),
        output=((*rows, op.pitch), op.dtype),
        checked=places.reshape(-1),
        expected=expected.reshape(-1),
        budget=most,
        flops=2 * count * K * N,
    )


class _AttentionJob:
    """One attention at fixed sizes."""

    def __init__(self, op: AttentionOp, sizes: Mapping[str, int]) -> None:
        self.op = op
        self.B, self.L, self.S = (size_in(dim, sizes) for dim in (op.batch, op.q_length, op.kv_length))
        kinds = ([kind for _, kind in step.arguments(op)] for step in op.scores)
        self.kinds = [[(kind.dtype, tuple(size_in(dim, sizes) for dim in kind.dims)) for kind in own] for own in kinds]

    def job(self, rng: np.random.Generator) -> MeasureJob:
        op = self.op
        inputs = self._inputs(rng)
        q, k, v = self._heads(inputs)
        entries = _some(self.B, 2)
        rows = _some(self.L, max(2, min(ROWS, MOST_SCORES // (op.num_heads * self.S * len(entries)))))
        extras = [step.random_inputs(rng, kinds) for step, kinds in zip(op.scores, self.kinds, strict=True)]
        some = SomeRows(entries, rows, self._distance(rows))
        meanings = [step.meaning(own, some) for step, own in zip(op.scores, extras, strict=True)]
        visible = _visible([meaning.visible for meaning in meanings if meaning.visible is not None])
        biases = [to_torch(np.ascontiguousarray(m.bias)) for m in meanings if m.bias is not None]
        scores = sum(biases[1:], start=biases[0]) if biases else None
        limits = {name: limit for meaning in meanings for name, limit in meaning.limits.items()}
        no_key = next((to_torch(meaning.no_key) for meaning in meanings if meaning.no_key is not None), None)

        def at(dtype: torch.dtype) -> np.ndarray:
            operands = [to_torch(np.ascontiguousarray(x[entries])).to(dtype) for x in (q[:, :, rows], k, v)]
            bias = None if scores is None else scores.to(dtype)
            extra = None if no_key is None else no_key.to(dtype)
            scoring = EagerScoring(visible, bias, limits, no_key=extra)
            return to_numpy(attend(operands[0], operands[1], operands[2], scoring, op.scale))

        expected = at(torch.float64)
        with products_by_terms(op.float32_products):
            yardstick = at(to_torch(q[:1, :1, :1]).dtype)
        shape, places = self._places(entries, rows)
        return MeasureJob(
            inputs=(*inputs, *(array for own in extras for array in own)),
            weights=(),
            output=(shape, op.dtype),
            checked=places.reshape(-1),
            expected=expected.reshape(-1),
            budget=budget(expected, yardstick, op.dtype),
            flops=2 * (op.head_dim + op.v_head_dim) * op.num_heads * self._pairs(),
            # A few queries read each key once; a benchmark of the whole takes as many sets in turn.
            sets=INPUT_SETS if self.L <= MOST_QUERIES else 1,
        )

    def _roles(self) -> list[tuple[HeadLayout, int, int, int]]:
        """(where it lies, its length, heads, width) of Q, K and V."""
        op = self.op
        return [
            (op.query, self.L, op.num_heads, op.head_dim),
            (op.key, self.S, op.num_kv_heads, op.head_dim),
            (op.value, self.S, op.num_kv_heads, op.v_head_dim),
        ]

    def _inputs(self, rng: np.random.Generator) -> list[np.ndarray]:
        """One array for each distinct buffer, in their order."""
        shapes: dict[int, tuple[int, ...]] = {}
        for place, length, heads, width in self._roles():
            rows = (self.B, length, place.width)
            shapes[place.buffer] = rows if place.layout == "rows" else (self.B, heads, length, width)
        return [_draw(rng, shapes[buffer], self.op.dtype) for buffer in sorted(shapes)]

    def _heads(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Q, K and V as (B, heads, length, width), views."""
        order = {buffer: i for i, buffer in enumerate(sorted({place.buffer for place, *_ in self._roles()}))}
        by_heads = []
        for place, length, heads, width in self._roles():
            array = inputs[order[place.buffer]]
            if place.layout == "rows":
                columns = array[..., place.offset : place.offset + heads * width]
                array = columns.reshape(self.B, length, heads, width).transpose(0, 2, 1, 3)
            by_heads.append(array)
        return by_heads

    def _distance(self, rows: np.ndarray) -> np.ndarray:
        """(rows, S): key - place of the query."""
        shift = self.S - self.L if self.op.from_end else 0
        return np.asarray(np.arange(self.S) - (rows + shift)[:, None])

    def _places(self, entries: np.ndarray, rows: np.ndarray) -> tuple[tuple[int, ...], np.ndarray]:
        """(shape of the output, flat places of the checked rows as (entries, H, rows, F))."""
        op, place = self.op, self.op.output
        b, h, row, f = np.ix_(entries, np.arange(op.num_heads), rows, np.arange(op.v_head_dim))
        if place.layout == "heads":
            shape: tuple[int, ...] = (self.B, op.num_heads, self.L, op.v_head_dim)
            return shape, np.ravel_multi_index(np.broadcast_arrays(b, h, row, f), shape)
        shape = (self.B, self.L, place.width)
        return shape, (b * self.L + row) * place.width + place.offset + h * op.v_head_dim + f

    def _pairs(self) -> int:
        """Visible pairs of a head, over the batch, as far as they are known when it is compiled."""
        pairs = self.op.pairs
        count = self.op.semantics("").visible_pairs(self.L, self.S) if pairs is None else pairs.mean(axis=0).sum()
        return int(count) * self.B


def _visible(masks: list[np.ndarray]) -> Tensor | None:
    """(1 or entries, 1 or H, rows, S), or None: all are."""
    return to_torch(np.ascontiguousarray(np.logical_and.reduce(np.broadcast_arrays(*masks)))) if masks else None
