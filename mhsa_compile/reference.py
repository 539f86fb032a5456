"""Two evaluations of an ONNX graph that the compiled one is held against.

`oracle` is the reference evaluator of the `onnx` package in float64, its Attention replaced by one that selects masked
positions away; `eager` is the same graph at its own dtype with PyTorch's arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import Tensor

from mhsa_compile.core import attend, look_inside, to_numpy, to_torch
from mhsa_compile.outputs import Inside
from mhsa_compile.reference_attention import Arithmetic, attention_operators
from mhsa_compile.reference_scores import Scoring, attend_exactly, look_exactly

Array = np.ndarray
Arrays = Mapping[str, Array]
FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def oracle(model: onnx.ModelProto, inputs: Arrays) -> list[Array]:
    """The graph's outputs in float64; weights and floating inputs are promoted first, integers stay."""
    wide = {name: array if array.dtype.kind in "biu" else array.astype(np.float64) for name, array in inputs.items()}
    operators = [_GatherElements, *attention_operators(Arithmetic(attend_exactly, look_exactly))]
    evaluator = ReferenceEvaluator(promoted(model), new_ops=operators)
    with np.errstate(all="ignore"):  # NaN and Inf may come, and are carried as IEEE says
        return [np.asarray(output) for output in evaluator.run(None, wide)]


def eager(model: onnx.ModelProto, inputs: Arrays, *, int8_weights: bool = False) -> list[Array]:
    """The graph's outputs at its own dtype, matrix products and attention by PyTorch: the yardstick of the budget.

    `int8_weights`: products with a weight round it and the activations to eight bits first, see `product_in_int8`.
    """
    operators = [
        _GatherElements,
        *attention_operators(Arithmetic(_attend_in_torch, _look_in_torch)),
        _Int8MatMul if int8_weights else _MatMul,
        _Gemm,
    ]
    evaluator = ReferenceEvaluator(model, new_ops=operators)
    with np.errstate(all="ignore"):
        return [np.asarray(output) for output in evaluator.run(None, dict(inputs))]


def promoted(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose floating constants and casts are float64."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    for graph in (wide.graph, *wide.functions):
        _promote(graph)
    return wide


def _promote(graph: Any) -> None:
    """Makes every floating constant, cast and input of a graph or function float64."""
    for tensor in getattr(graph, "initializer", ()):
        _promote_tensor(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                _promote_tensor(attribute.t)
            elif attribute.type == onnx.AttributeProto.GRAPH:
                _promote(attribute.g)
            elif node.op_type == "Cast" and attribute.name == "to" and attribute.i in FLOATS:
                attribute.i = onnx.TensorProto.DOUBLE


def _promote_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in FLOATS:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))


def _attend_in_torch(q: Array, k: Array, v: Array, scoring: Scoring) -> Array:
    return to_numpy(attend(to_torch(q), to_torch(k), to_torch(v), *_in_torch(scoring)))


def _look_in_torch(q: Array, k: Array, scoring: Scoring, wanted: Inside) -> dict[str, Array]:
    found = look_inside(to_torch(q), to_torch(k), *_in_torch(scoring), wanted)
    return {name: to_numpy(tensor) for name, tensor in found.items()}


def _in_torch(scoring: Scoring) -> tuple[Tensor, Tensor | None, float, float, Tensor | None]:
    """As `core` takes it: visible, bias, scale, softcap, sinks."""
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


class _GatherElements(OpRun):  # type: ignore[misc]  # onnx's own fails on one row of indices
    def _run(self, data: Array, indices: Array, axis: int | None = None) -> tuple[Array]:
        along = axis or 0
        others = tuple(slice(None) if i == along % data.ndim else slice(n) for i, n in enumerate(indices.shape))
        return (np.take_along_axis(data[others], indices, along),)


_GatherElements.__name__ = "GatherElements"
_MatMul.__name__ = _Int8MatMul.__name__ = "MatMul"  # the evaluator goes by these names
_Gemm.__name__ = "Gemm"
