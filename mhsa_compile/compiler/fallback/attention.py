"""Attention written out in tensor expressions, for whatever no kernel takes: right in every case, and slow.

    masked = what the steps of scores make of scale Q K^T, -inf where a key is hidden
    weights = exp(masked - max) / sum;   Y = the sum of weight x value over the visible keys

All of it is float64, so no target's exp or order of summation shows; scores are a (B, H, L, S) array. It means what the
kernels mean: a row without a visible key is zeros, and what is hidden is selected away, never multiplied by zero.
Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import math
from functools import cached_property, partial
from typing import Any

from tvm import relax, te, tirx
from tvm.ir import Expr

from mhsa_compile.kernels.common.plain_parts import EXACT, Pair, PlainPart, PlainTask, exact
from mhsa_compile.kernels.interface.ops import AttentionOp, AttentionProbsOp, HeadLayout, ScoresOp

_WEIGHTS = 3  # the last stage of a ScoresOp
_HIDDEN = tirx.const(-math.inf, EXACT)


def emit(builder: relax.BlockBuilder, op: AttentionOp | ScoresOp | AttentionProbsOp, inputs: list[Any]) -> Any:
    """The value of `op` on its `inputs`, in the order that it says. Weights are those of all heads and rows."""
    if isinstance(op, AttentionProbsOp):
        assert op.whole
        op = ScoresOp(op.attention, _WEIGHTS)
    attention = op.attention if isinstance(op, ScoresOp) else op
    constants = [relax.const(step.pairs) for step in attention.scores if step.pairs is not None]
    compute = partial(_compute, op, attention)
    return builder.emit_te(compute, *inputs, *constants, primfunc_name_hint="plain_attention")


def _compute(op: AttentionOp | ScoresOp, attention: AttentionOp, *tensors: te.Tensor) -> te.Tensor:
    plain = _AttentionForm(attention, list(tensors))
    if isinstance(op, AttentionOp):
        return plain.output()
    stages = (plain.raw, plain.capped, plain.masked, plain.weight)
    return plain.stored(stages[op.stage], "scores")


class _AttentionForm:
    """The stages, each as an expression of (b, h, i, j); what is summed over is an array of its own."""

    def __init__(self, op: AttentionOp, tensors: list[te.Tensor]) -> None:
        self.op = op
        buffers = 1 + max(op.query.buffer, op.key.buffer, op.value.buffer)
        self.buffers, rest = tensors[:buffers], iter(tensors[buffers:])
        self.own = [[next(rest) for _ in step.arguments(op)] for step in op.scores]
        for step, own in zip(op.scores, self.own, strict=True):
            own += [next(rest)] if step.pairs is not None else []
        tasks = [(step, PlainTask(op, own, self._place)) for step, own in zip(op.scores, self.own, strict=True)]
        self.parts = [(step.plain or PlainPart)(step, task) for step, task in tasks]
        query, key = self.buffers[op.query.buffer], self.buffers[op.key.buffer]
        self.batch, self.queries = query.shape[0], _length(query, op.query)
        self.keys = _length(key, op.key)
        self.shape = (self.batch, tirx.const(op.num_heads, "int64"), self.queries, self.keys)
        self.group = op.num_heads // op.num_kv_heads
        self._products = self._all_products()

    def _element(self, place: HeadLayout, size: int, *at: Expr) -> Expr:
        """Element (b, head, row, column) of an operand with heads of `size`."""
        b, head, row, column = at
        buffer = self.buffers[place.buffer]
        if place.layout == "rows":
            return exact(buffer[b, row, place.offset + head * size + column])
        return exact(buffer[b, head, row, column])

    def _all_products(self) -> te.Tensor:
        op = self.op
        axis = te.reduce_axis((0, op.head_dim), "e")

        def product(b: Expr, h: Expr, i: Expr, j: Expr) -> Expr:
            q = self._element(op.query, op.head_dim, b, h, i, axis)
            return te.sum(q * self._element(op.key, op.head_dim, b, h // self.group, j, axis), axis=axis)

        return te.compute(self.shape, product, "products")

    def raw(self, *at: Expr) -> Expr:
        return self._products[at] * tirx.const(self.op.scale, EXACT)

    def capped(self, *at: Expr) -> Expr:
        """After the steps that change scores by themselves."""
        return self._after_steps(self.raw(*at), Pair(*at), elementwise=True)

    def masked(self, *at: Expr) -> Expr:
        score = self._after_steps(self.capped(*at), Pair(*at), elementwise=False)
        return tirx.Select(self._sees(*at), score, _HIDDEN)

    def _after_steps(self, score: Expr, pair: Pair, *, elementwise: bool) -> Expr:
        for part in self.parts:
            if part.step.elementwise == elementwise:
                score = part.score(score, pair)
        return score

    def _place(self, b: Expr, i: Expr) -> Expr:
        """The place of query i among the keys."""
        return i + self._count(b) - self.queries if self.op.from_end else i

    def _count(self, b: Expr) -> Expr:
        """How many keys an entry has."""
        count = self.keys
        for step, own in zip(self.op.scores, self.own, strict=True):
            count = step.keys(own, b, count)
        return count

    def _sees(self, b: Expr, h: Expr, i: Expr, j: Expr) -> Expr:
        conditions = [tirx.const(True, "bool")]
        if (window := self.op.window) is not None:
            conditions += [] if window.left is None else [j >= self._place(b, i) - window.left]
            conditions += [] if window.right is None else [j <= self._place(b, i) + window.right]
        if self.op.any_step("counts_keys"):
            conditions.append(j < self._count(b))
        of_parts = (part.sees(Pair(b, h, i, j)) for part in self.parts)
        return tirx.all(*conditions, *(own for own in of_parts if own is not None))

    def weight(self, *at: Expr) -> Expr:
        """The weight of a key: zero where it is hidden; a row of nothing but hidden keys has no sum to divide by."""
        exponents, sums = self._exponents
        total = sums[at[:3]]
        share = exponents[at] / tirx.Select(total == 0, tirx.const(1, EXACT), total)
        return tirx.Select(self._is_visible(*at), share, tirx.const(0, EXACT))

    def _is_visible(self, *at: Expr) -> Expr:
        """Whether a query sees a key, and nothing that became of its score has hidden it."""
        if not any(part.score_hides for part in self.parts):
            return self._sees(*at)
        return tirx.all(self._sees(*at), self._masked_scores[at] != _HIDDEN)

    @cached_property
    def _masked_scores(self) -> te.Tensor:
        return te.compute(self.shape, self.masked, "masked")

    @property
    def _exponents(self) -> tuple[te.Tensor, te.Tensor]:
        """exp(masked - max), and its sum over the keys, and no key."""
        rows, masked = self.shape[:3], self._masked_scores
        over = te.reduce_axis((0, self.keys), "j")
        largest = te.compute(rows, lambda b, h, i: _maximum(masked[b, h, i, over], over), "largest")

        def top(b: Expr, h: Expr, i: Expr) -> Expr:
            value = largest[b, h, i]
            for score in self._no_keys(h):
                value = tirx.max(value, score)
            return tirx.Select(value == _HIDDEN, tirx.const(0, EXACT), value)

        tops = te.compute(rows, top, "top")
        exponents = te.compute(self.shape, lambda b, h, i, j: te.exp(masked[b, h, i, j] - tops[b, h, i]), "exponents")
        along = te.reduce_axis((0, self.keys), "j")
        sums = te.compute(rows, lambda b, h, i: te.sum(exponents[b, h, i, along], axis=along), "sums")
        if self._no_keys(tirx.const(0, "int64")):
            totals = sums

            def total(b: Expr, h: Expr, i: Expr) -> Expr:
                return sum((te.exp(score - tops[b, h, i]) for score in self._no_keys(h)), start=totals[b, h, i])

            sums = te.compute(rows, total, "total")
        return exponents, sums

    def _no_keys(self, h: Expr) -> list[Expr]:
        """The scores of no key that a head has."""
        return [score for part in self.parts if (score := part.no_key(h)) is not None]

    def output(self) -> te.Tensor:
        """Y, laid out as the operation says."""
        op = self.op
        weights = te.compute(self.shape, self.weight, "weights")
        along = te.reduce_axis((0, self.keys), "j")

        def term(b: Expr, h: Expr, i: Expr, f: Expr) -> Expr:
            value = self._element(op.value, op.v_head_dim, b, h // self.group, along, f)
            visible = self._is_visible(b, h, i, along)
            return te.sum(tirx.Select(visible, weights[b, h, i, along] * value, tirx.const(0, EXACT)), axis=along)

        heads = te.compute((*self.shape[:3], tirx.const(op.v_head_dim, "int64")), term, "heads")
        if op.output.layout == "heads":
            return te.compute(heads.shape, lambda *at: _narrow(heads[at], op.dtype), "y")
        size = op.v_head_dim
        shape = (self.batch, self.queries, tirx.const(op.output.width, "int64"))
        return te.compute(shape, lambda b, i, c: _narrow(heads[b, c // size, i, c % size], op.dtype), "y")

    def stored(self, stage: Any, name: str) -> te.Tensor:
        return te.compute(self.shape, lambda *at: _narrow(stage(*at), self.op.dtype), name)


def _maximum(value: Expr, axis: Any) -> Expr:
    """The maximum along an axis: -inf over nothing, where te.max has the smallest finite number."""
    larger = te.comm_reducer(lambda one, other: tirx.max(one, other), lambda _: _HIDDEN, "maximum")
    return larger(value, axis=axis)


def _length(tensor: te.Tensor, place: HeadLayout) -> Expr:
    return tensor.shape[1 if place.layout == "rows" else 2]


def _narrow(value: Expr, dtype: str) -> Expr:
    value = tirx.Cast("float32", value)
    return value if dtype == "float32" else tirx.Cast(dtype, value)
