"""Two evaluations of an ONNX graph that the compiled one is held against.

`oracle` is the reference evaluator of the `onnx` package in float64, its Attention replaced by one that selects masked
positions away; `eager` is the same graph at its own dtype with PyTorch's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from mhsa_compile.verification.error_budget import in_float64
from mhsa_compile.verification.oracle.attention import Arithmetic, attention_operators
from mhsa_compile.verification.oracle.block_quantised import MatMulNBits, RoundedMatMulNBits
from mhsa_compile.verification.oracle.narrow_weights import WIDENING, narrow_weights
from mhsa_compile.verification.oracle.operators import REPAIRED, quantised_operators
from mhsa_compile.verification.oracle.recurrent import RECURRENT
from mhsa_compile.verification.oracle.scores import Scoring, attend_exactly, look_exactly
from mhsa_compile.verification.oracle.stored_rows import EXACT_ROWS, ROUNDED_ROWS
from mhsa_compile.verification.precision import AS_STATED, Precision
from mhsa_compile.verification.random_inputs import Arrays

LAST_RESULTS = 8
"""Results of so many evaluations: all that the variants of one self-check ask for."""
FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def oracle(model: onnx.ModelProto, inputs: Arrays) -> list[np.ndarray]:
    """The graph's outputs in float64; weights and floating inputs are promoted first, integers stay."""
    return Reference(model).oracle(inputs)


def eager(model: onnx.ModelProto, inputs: Arrays, precision: Precision = AS_STATED) -> list[np.ndarray]:
    """The graph's outputs at its own dtype, matrix products and attention by PyTorch: the yardstick of the budget.

    `precision`: what products round first.
    """
    return Reference(model, precision).eager(inputs)


class Reference:
    """Both evaluations of one graph, each made ready once: of a model of a hundred MB that takes longer than a run.

    Results of the last inputs are kept: a check asks again for what another has asked for. `wide` are arrays in float64
    that some weights may equal: of those that do, no other copy is made.
    """

    def __init__(self, model: onnx.ModelProto, precision: Precision = AS_STATED, *, wide: Arrays | None = None) -> None:
        self.model, self.precision, self._wide = model, precision, wide or {}
        self._results: dict[tuple[str, str], list[np.ndarray]] = {}
        self._filled = False  # whether the last run of the oracle met rows that a finite fill hides whole
        self._with_filled: set[str] = set()

    def oracle(self, inputs: Arrays) -> list[np.ndarray]:
        """The graph's outputs in float64, as the function `oracle` returns them."""
        return self._evaluate("oracle", inputs)

    def eager(self, inputs: Arrays) -> list[np.ndarray]:
        """The graph's outputs at its own dtype, as the function `eager` returns them."""
        return self._evaluate("eager", inputs)

    def blurred(self, inputs: Arrays) -> list[np.ndarray] | None:
        """What depends on rows that a finite fill such as -1e9 hides whole: bool, for each output; None if nothing.

        The fill leaves of their scores what does not round away: in float64 all of it, in float32 nothing or noise. So
        every runtime has another result there.
        """
        self.oracle(inputs)
        if _digest(inputs) not in self._with_filled:
            return None
        with np.errstate(all="ignore"):
            return [~np.isfinite(np.asarray(output)) for output in self._with_nan_rows.run(None, self._feeds(inputs))]

    def _evaluate(self, which: str, inputs: Arrays) -> list[np.ndarray]:
        digest = _digest(inputs)
        results = self._results.pop((which, digest), None)
        if results is None:
            self._filled = False
            with np.errstate(all="ignore"):  # NaN and Inf may come, and are carried as IEEE says
                exact = which == "oracle"
                outputs = self._exact.run(None, self._feeds(inputs)) if exact else self._run_rounded(inputs)
            results = [np.asarray(output) for output in outputs]
            if self._filled:
                self._with_filled.add(digest)
        self._results[which, digest] = results  # the last of them
        if len(self._results) > LAST_RESULTS:
            del self._results[next(iter(self._results))]
        return list(results)

    @cached_property
    def _wide_graph(self) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        return promote(self.model, self._wide)

    def _feeds(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """All that the float64 graph is fed with: its weights, and the inputs."""
        return {**self._wide_graph[1], **{name: in_float64(array) for name, array in inputs.items()}}

    @cached_property
    def _exact(self) -> ReferenceEvaluator:
        def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scoring: Scoring) -> np.ndarray:
            self._filled |= scoring.filled is not None
            return attend_exactly(q, k, v, scoring)

        return self._in_float64(attend)

    @cached_property
    def _with_nan_rows(self) -> ReferenceEvaluator:
        """A float64 evaluator in which rows that a finite fill hides are NaN, and with them what depends on them."""

        def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scoring: Scoring) -> np.ndarray:
            y, rows = attend_exactly(q, k, v, scoring), scoring.filled
            return y if rows is None else np.where(rows, np.nan, y)

        return self._in_float64(attend)

    def _in_float64(self, attend: Callable[..., np.ndarray]) -> ReferenceEvaluator:
        attention = attention_operators(Arithmetic(attend, look_exactly))
        operators = [*_EXACT, *quantised_operators(self.model), *attention]
        return ReferenceEvaluator(self._wide_graph[0], new_ops=operators)

    def _run_rounded(self, inputs: Arrays) -> list[Any]:
        from mhsa_compile.verification.oracle.products_by_terms import products_by_terms

        with products_by_terms(self.precision.float32_products):
            return list(self._rounded.run(None, dict(inputs)))

    @cached_property
    def _rounded(self) -> ReferenceEvaluator:
        from mhsa_compile.verification.oracle.eager_operators import eager_operators  # PyTorch takes a second to load
        from mhsa_compile.verification.oracle.products_by_terms import operators_by_terms

        own = (*REPAIRED, *RECURRENT, *ROUNDED_ROWS, RoundedMatMulNBits, *quantised_operators(self.model))
        operators = [*own, *eager_operators(self.precision.int8_weights)]
        word = self.precision.float32_products
        return ReferenceEvaluator(self.model, new_ops=operators_by_terms(self.model, operators, word))


def _digest(inputs: Arrays) -> str:
    digest = sha256()
    for name, array in sorted(inputs.items()):
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def promote(model: onnx.ModelProto, arrays: Arrays) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """(a copy whose floating constants and casts are float64, its floating weights in float64, or as they are where the
    operators that read them widen them).

    The copy has no floating weights of its own: it is fed with them. As tensors of the file they would be written out
    as bytes and read again, which takes longer than a run. `arrays` has some of them, by name.
    """
    weights, others, narrow = {}, [], narrow_weights(model.graph)
    for tensor in model.graph.initializer:
        if tensor.data_type in FLOATS:
            array, other = numpy_helper.to_array(tensor), arrays.get(tensor.name)
            if other is None or not np.array_equal(array, other):
                other = array if tensor.name in narrow else in_float64(array)
            weights[tensor.name] = other
        else:
            others.append(tensor)
    graph, sparse = model.graph, list(model.graph.sparse_initializer)
    parts = (graph.node, graph.name, graph.input, graph.output, others)
    wide = helper.make_model(
        helper.make_graph(*parts, value_info=graph.value_info, sparse_initializer=sparse),
        opset_imports=model.opset_import,
        functions=model.functions,
        ir_version=model.ir_version,
    )
    for graph in (wide.graph, *wide.functions):
        _promote(graph)
    return wide, weights


def _promote(graph: Any) -> None:
    """Makes every floating constant, cast and input of a graph or function float64."""
    for tensor in getattr(graph, "initializer", ()):
        _promote_tensor(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in ("value_float", "value_floats"):  # of a Constant
                value = np.asarray(helper.get_attribute_value(attribute), np.float64)
                attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(value)))
            elif attribute.type == onnx.AttributeProto.TENSOR:
                _promote_tensor(attribute.t)
            elif attribute.type == onnx.AttributeProto.GRAPH:
                _promote(attribute.g)
            elif node.op_type == "Cast" and attribute.name == "to" and attribute.i in FLOATS:
                attribute.i = onnx.TensorProto.DOUBLE


def _promote_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in FLOATS:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))


_EXACT = (*REPAIRED, MatMulNBits, *WIDENING, *RECURRENT, *EXACT_ROWS)
"""Operators of the float64 evaluation, beside attention."""
