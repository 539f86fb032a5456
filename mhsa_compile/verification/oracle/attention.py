"""ONNX Attention, and `mhsa.Attention` of our domain, as operators of the `onnx` package's evaluator.

They take a block of queries at a time, and of the keys those between the first and the last that the block sees: no
L x S array is ever made, but for outputs that are one.
Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx.reference.op_run import OpRun

from mhsa_compile.nn import mhsa_operator
from mhsa_compile.nn.mhsa_operator import FIRST_TENSOR
from mhsa_compile.spec.attention_spec import DOMAIN
from mhsa_compile.spec.outputs import SoftmaxOutputs
from mhsa_compile.spec.score_functions import ScoreFunction
from mhsa_compile.verification.oracle import softmax_outputs
from mhsa_compile.verification.oracle.scores import FUNCTIONS, Scoring, View, stages

QUERIES = 256
"""How many queries are evaluated together."""


class Arithmetic(NamedTuple):
    """What evaluates a block: `attend(q, k, v, scoring)` is Y by heads; beside it `softmax_outputs_of(q, k, scoring,
    wanted)`."""

    attend: Callable[[np.ndarray, np.ndarray, np.ndarray, Scoring], np.ndarray]
    softmax_outputs_of: Callable[[np.ndarray, np.ndarray, Scoring, SoftmaxOutputs], dict[str, np.ndarray]]


PROBE = 9
"""The number of an input of evaluations only: keys (B, H, L, n) int64 whose weights are asked for."""


def attention_operators(arithmetic: Arithmetic) -> list[type]:
    """ONNX Attention (23 to 25) and the one of our domain, which has more inputs and outputs.

    Here ours has an input 9, int64 (B, H, L, n), and an output 9: the weights of these keys, 0 for the key -1.
    """

    class Attention(OpRun):  # type: ignore[misc]  # the evaluator goes by this name
        def _run(self, *inputs: Any, **attributes: Any) -> tuple[np.ndarray, ...]:
            evaluation = _Evaluation.of(inputs, attributes, self.run_params["opsets"][""], arithmetic)
            return evaluation.outputs(self.onnx_node)

        def run(self, *inputs: Any, **context: Any) -> tuple[np.ndarray | None, ...]:
            """The evaluator keeps an output without a name under "", which is what later nodes without an input read:
            it must be nothing."""
            outputs = super().run(*inputs, **context)
            return tuple(value if name else None for name, value in zip(self.onnx_node.output, outputs, strict=False))

    return [Attention, type("Attention", (Attention,), {"op_domain": DOMAIN})]


@dataclass(frozen=True)
class _Evaluation:
    """One call of an operator. q, k and v lie by heads, the past before the new keys; Q did not where
    `by_rows`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    by_rows: bool
    probe: np.ndarray | None
    attributes: Mapping[str, Any]
    view: View
    arithmetic: Arithmetic

    @classmethod
    def of(
        cls, inputs: Sequence[np.ndarray | None], attributes: Mapping[str, Any], opset: int, arithmetic: Arithmetic
    ) -> _Evaluation:
        by_name = {name: value for name, value in zip(mhsa_operator.INPUTS, inputs, strict=False) if value is not None}
        q, k, v = by_name["Q"], by_name["K"], by_name["V"]
        if by_rows := q.ndim == 3:
            q = _split_heads(q, attributes["q_num_heads"])
            k, v = (_split_heads(array, attributes["kv_num_heads"]) for array in (k, v))
        if "past_key" in by_name:
            k = np.concatenate((by_name["past_key"], k), axis=2)
            v = np.concatenate((by_name["past_value"], v), axis=2)
        view = View.of(
            by_name, attributes, _tensors_by_function(inputs, attributes), L=q.shape[2], S=k.shape[2], pads=opset >= 24
        )
        return cls(q, k, v, by_rows, inputs[PROBE] if len(inputs) > PROBE else None, attributes, view, arithmetic)

    def outputs(self, node: onnx.NodeProto) -> tuple[np.ndarray, ...]:
        """All that the node names, in the operator's order; an empty array where it names none."""
        standard = self._y(), self.k, self.v
        if len(node.output) < 4:
            return standard
        nothing = np.zeros(0)
        L, blocks = self.q.shape[2], list(self._blocks())
        stage = nothing
        if node.output[3]:
            scores = stages(self.q, self.k, self._scoring(slice(0, L)))
            stage = scores[self.attributes["qk_matmul_output_mode"]]
        request = mhsa_operator.outputs_of(node)
        inside = softmax_outputs.collect(self._look, blocks, L, self.view.S, request)
        if self.probe is not None:
            inside["probe"] = softmax_outputs.probe(self._look, blocks, self.view.S, self.probe)
        extras = (inside.get(name, nothing) for name in (*mhsa_operator.NAMES, "probe"))
        return (*standard, stage, *extras)[: len(node.output)]

    def _y(self) -> np.ndarray:
        """The result Y, (B, H, L, F), or (B, L, H F) where Q came so."""
        parts = []
        for rows in self._blocks():
            keys, scoring = self._of_visible_keys(rows)
            q, k, v = self.q[:, :, rows], self.k[:, :, keys], self.v[:, :, keys]
            parts.append(self.arithmetic.attend(q, k, v, scoring))
        y: np.ndarray = np.concatenate(parts, axis=2)
        return y.swapaxes(1, 2).reshape(*y.shape[0:3:2], -1) if self.by_rows else y

    def _look(self, rows: slice, request: SoftmaxOutputs) -> tuple[dict[str, np.ndarray], int]:
        keys, scoring = self._of_visible_keys(rows)
        arrays = self.arithmetic.softmax_outputs_of(self.q[:, :, rows], self.k[:, :, keys], scoring, request)
        return arrays, keys.start

    def _of_visible_keys(self, rows: slice) -> tuple[slice, Scoring]:
        """(the keys between the first and the last that these queries see, and what makes their weights)."""
        scoring = self._scoring(rows)
        visible = np.flatnonzero(scoring.visible.any(axis=(0, 1, 2)))
        keys = slice(visible[0], visible[-1] + 1) if visible.size else slice(0, 1)
        return keys, scoring.of_keys(keys)

    def _scoring(self, rows: slice) -> Scoring:
        scale = self.attributes.get("scale")
        scale = self.q.shape[3] ** -0.5 if scale is None else scale
        B, H = self.q.shape[:2]
        return self.view.scoring(rows, B, H, scale)

    def _blocks(self) -> Iterator[slice]:
        L = self.q.shape[2]
        for first in range(0, max(L, 1), QUERIES):  # none at all is a block, too: its shape is the result's
            yield slice(first, min(first + QUERIES, L))


def _tensors_by_function(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> dict[str, Sequence[np.ndarray]]:
    """What each function of scores captures, by its name."""
    tensors, rest = {}, inputs[FIRST_TENSOR:]
    for name in FUNCTIONS:
        if text := attributes.get(name):
            count = len(ScoreFunction.from_json(name, text).tensors)
            tensors[name], rest = rest[:count], rest[count:]
    return tensors


def _split_heads(array: np.ndarray, heads: int) -> np.ndarray:
    return array.reshape(*array.shape[:2], heads, -1).swapaxes(1, 2)
