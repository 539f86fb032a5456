"""ONNX models of a few nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

Value = Sequence[int | str] | tuple[int, Sequence[int | str] | None] | None
"""A list of dims, None for any, of floats; or a pair of another type of elements and such dims."""


def model_of(
    nodes: Iterable[NodeProto],
    inputs: Mapping[str, Value],
    outputs: Mapping[str, Value],
    constants: Mapping[str, Any] | None = None,
    *,
    opset: int = 20,
    ir_version: int = 10,
) -> ModelProto:
    """A model of these nodes; values and arrays by name."""
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "g", _infos(inputs), _infos(outputs), tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


def _infos(values: Mapping[str, Value]) -> list[ValueInfoProto]:
    pairs = {name: value if isinstance(value, tuple) else (TensorProto.FLOAT, value) for name, value in values.items()}
    return [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in pairs.items()]
