"""Two evaluations of an ONNX graph that the compiled one is held against.

`oracle` is the reference evaluator of the `onnx` package in float64, its Attention replaced by one that selects masked
positions away; `eager` is the same graph at its own dtype with PyTorch's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import Tensor

from mhsa_compile.nn.functional import (
    attend,
    softmax_outputs_of,
    to_numpy,
    to_torch,
)
from mhsa_compile.spec.outputs import SoftmaxOutputs
from mhsa_compile.verification.oracle.attention import Arithmetic, attention_operators
from mhsa_compile.verification.oracle.narrow_weights import WIDENING, narrow_weights
from mhsa_compile.verification.oracle.recurrent import RECURRENT
from mhsa_compile.verification.oracle.scores import Scoring, attend_exactly, look_exactly

Array = np.ndarray
Arrays = Mapping[str, Array]
KEPT = 8
"""Results of so many evaluations: all that the variants of one self-check ask for."""
FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def oracle(model: onnx.ModelProto, inputs: Arrays) -> list[Array]:
    """The graph's outputs in float64; weights and floating inputs are promoted first, integers stay."""
    return Reference(model).oracle(inputs)


def eager(model: onnx.ModelProto, inputs: Arrays, *, int8_weights: bool = False) -> list[Array]:
    """The graph's outputs at its own dtype, matrix products and attention by PyTorch: the yardstick of the budget.

    `int8_weights`: products with a weight round it and the activations to eight bits first, see `product_in_int8`.
    """
    return Reference(model, int8_weights=int8_weights).eager(inputs)


class Reference:
    """Both evaluations of one graph, each made ready once: of a model of a hundred MB that takes longer than a run.

    Results of the last inputs are kept: a check asks again for what another has asked for. `wide` are arrays in float64
    that some weights may equal: of those that do, no other copy is made.
    """

    def __init__(self, model: onnx.ModelProto, *, int8_weights: bool = False, wide: Arrays | None = None) -> None:
        self.model, self._int8_weights, self._wide = model, int8_weights, wide or {}
        self._kept: dict[tuple[str, str], list[Array]] = {}
        self._filled = False  # whether the last run of the oracle met rows that a finite fill hides whole
        self._with_filled: set[str] = set()

    def oracle(self, inputs: Arrays) -> list[Array]:
        """The graph's outputs in float64, as the function `oracle` returns them."""
        return self._evaluated("oracle", inputs)

    def eager(self, inputs: Arrays) -> list[Array]:
        """The graph's outputs at its own dtype, as the function `eager` returns them."""
        return self._evaluated("eager", inputs)

    def blurred(self, inputs: Arrays) -> list[Array] | None:
        """What depends on rows that a finite fill such as -1e9 hides whole: bool, for each output; None if nothing.

        The fill leaves of their scores what does not round away: in float64 all of it, in float32 nothing or noise. So
        every runtime has another result there.
        """
        self.oracle(inputs)
        if _digest(inputs) not in self._with_filled:
            return None
        with np.errstate(all="ignore"):
            return [~np.isfinite(np.asarray(output)) for output in self._spoiled.run(None, self._widened(inputs))]

    def _evaluated(self, which: str, inputs: Arrays) -> list[Array]:
        digest = _digest(inputs)
        found = self._kept.pop((which, digest), None)
        if found is None:
            self._filled = False
            with np.errstate(all="ignore"):  # NaN and Inf may come, and are carried as IEEE says
                if which == "oracle":
                    outputs = self._exact.run(None, self._widened(inputs))
                else:
                    outputs = self._rounded.run(None, dict(inputs))
            found = [np.asarray(output) for output in outputs]
            if self._filled:
                self._with_filled.add(digest)
        self._kept[which, digest] = found  # the last of them
        if len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        return list(found)

    @cached_property
    def _promoted(self) -> tuple[onnx.ModelProto, dict[str, Array]]:
        return promoted(self.model, self._wide)

    def _widened(self, inputs: Arrays) -> dict[str, Array]:
        """All that the float64 graph is fed with: its weights, and the inputs."""
        return {**self._promoted[1], **{name: _wide(array) for name, array in inputs.items()}}

    @cached_property
    def _exact(self) -> ReferenceEvaluator:
        def attend(q: Array, k: Array, v: Array, scoring: Scoring) -> Array:
            self._filled |= scoring.filled is not None
            return attend_exactly(q, k, v, scoring)

        operators = [*_EXACT, *attention_operators(Arithmetic(attend, look_exactly))]
        return ReferenceEvaluator(self._promoted[0], new_ops=operators)

    @cached_property
    def _spoiled(self) -> ReferenceEvaluator:
        """A float64 evaluator in which rows that a finite fill hides are NaN, and with them what depends on them."""

        def attend(q: Array, k: Array, v: Array, scoring: Scoring) -> Array:
            y, rows = attend_exactly(q, k, v, scoring), scoring.filled
            return y if rows is None else np.where(rows, np.nan, y)

        operators = [*_EXACT, *attention_operators(Arithmetic(attend, look_exactly))]
        return ReferenceEvaluator(self._promoted[0], new_ops=operators)

    @cached_property
    def _rounded(self) -> ReferenceEvaluator:
        operators = [
            _GatherElements,
            _Erf,
            *RECURRENT,
            *attention_operators(Arithmetic(_attend_in_torch, _look_in_torch)),
            _Int8MatMul if self._int8_weights else _MatMul,
            _Gemm,
        ]
        return ReferenceEvaluator(self.model, new_ops=operators)


def _wide(array: Array) -> Array:
    return array if array.dtype.kind in "biu" else array.astype(np.float64)


def _digest(inputs: Arrays) -> str:
    digest = sha256()
    for name, array in sorted(inputs.items()):
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def promoted(model: onnx.ModelProto, known: Arrays) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """(a copy whose floating constants and casts are float64, its floating weights in float64, or as they are where the
    operators that read them widen them).

    The copy has no floating weights of its own: it is fed with them. As tensors of the file they would be written out
    as bytes and read again, which takes longer than a run. `known` has some of them, by name.
    """
    weights, others, narrow = {}, [], narrow_weights(model.graph)
    for tensor in model.graph.initializer:
        if tensor.data_type in FLOATS:
            array, other = numpy_helper.to_array(tensor), known.get(tensor.name)
            if other is None or not np.array_equal(array, other):
                other = array if tensor.name in narrow else _wide(array)
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


def _attend_in_torch(q: Array, k: Array, v: Array, scoring: Scoring) -> Array:
    return to_numpy(
        attend(to_torch(q), to_torch(k), to_torch(v), *_in_torch(scoring), score_mod=_score_mod_in_torch(scoring))
    )


def _look_in_torch(q: Array, k: Array, scoring: Scoring, wanted: SoftmaxOutputs) -> dict[str, Array]:
    found = softmax_outputs_of(to_torch(q), to_torch(k), *_in_torch(scoring), wanted, _score_mod_in_torch(scoring))
    return {name: to_numpy(tensor) for name, tensor in found.items()}


def _score_mod_in_torch(scoring: Scoring) -> Callable[[Tensor], Tensor] | None:
    """The score_mod of a scoring, computed in float32 at least, and rounded to the dtype of the scores."""
    score_mod = scoring.score_mod
    return None if score_mod is None else lambda scores: to_torch(score_mod(to_numpy(scores)))


def _in_torch(scoring: Scoring) -> tuple[Tensor, Tensor | None, float, float, Tensor | None]:
    """The scoring as the arguments that `functional` takes: visible, bias, scale, softcap, sinks."""
    bias, sinks = (None if array is None else to_torch(array) for array in (scoring.bias, scoring.sinks))
    return to_torch(scoring.visible), bias, scoring.scale, scoring.softcap, sinks


class _MatMul(OpRun):  # type: ignore[misc]
    def _run(self, a: Array, b: Array) -> tuple[Array]:
        return (to_numpy(to_torch(a) @ to_torch(b)),)


class _Int8MatMul(OpRun):  # type: ignore[misc]
    def _run(self, a: Array, b: Array) -> tuple[Array]:
        x, w = to_torch(a), to_torch(b)
        return (to_numpy(product_in_int8(x, w) if w.ndim == 2 else x @ w),)


def product_in_int8(x: Tensor, w: Tensor) -> Tensor:
    """x (..., K) times w (K, N), each in steps of its largest value / 127: of a row of x, and of a column of w."""
    x_steps, w_steps = _steps(x.float(), -1), _steps(w.float(), 0)
    product = torch.round(x.float() / x_steps) @ torch.round(w.float() / w_steps)
    return (product * x_steps * w_steps).to(x.dtype)


def _steps(values: Tensor, dim: int) -> Tensor:
    steps = values.abs().amax(dim, keepdim=True) / 127
    return torch.where(steps > 0, steps, 1.0)


class _Gemm(OpRun):  # type: ignore[misc]
    def _run(self, a: Array, b: Array, c: Array | None = None, **attributes: Any) -> tuple[Array]:
        left = to_torch(a.T if attributes["transA"] else a)
        right = to_torch(b.T if attributes["transB"] else b)
        product = attributes["alpha"] * (left @ right)
        return (to_numpy(product if c is None else product + attributes["beta"] * to_torch(c)),)


class _Erf(OpRun):  # type: ignore[misc]  # onnx's own calls Python for every number
    def _run(self, x: Array) -> tuple[Array]:
        return (torch.erf(to_torch(np.asarray(x, np.float64))).numpy().astype(x.dtype),)


class _GatherElements(OpRun):  # type: ignore[misc]  # onnx's own fails on one row of indices
    def _run(self, data: Array, indices: Array, axis: int | None = None) -> tuple[Array]:
        along = axis or 0
        others = tuple(slice(None) if i == along % data.ndim else slice(n) for i, n in enumerate(indices.shape))
        return (np.take_along_axis(data[others], indices, along),)


_GatherElements.__name__ = "GatherElements"
_Erf.__name__ = "Erf"
_MatMul.__name__ = _Int8MatMul.__name__ = "MatMul"  # the evaluator goes by these names
_Gemm.__name__ = "Gemm"
_EXACT = (_GatherElements, _Erf, *WIDENING, *RECURRENT)
"""Operators of the float64 evaluation, beside attention."""
