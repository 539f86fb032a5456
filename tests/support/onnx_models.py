"""ONNX models of a few nodes, as tests write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

Value = Sequence[int | str | None] | tuple[int, Sequence[int | str | None] | None] | None
"""A list of dims, None for any, of floats; or a pair of another type of elements and such dims."""


def model_of(
    nodes: Iterable[onnx.NodeProto],
    inputs: Mapping[str, Value],
    outputs: Mapping[str, Value],
    constants: Mapping[str, object] | None = None,
    *,
    kinds: Mapping[str, str] | None = None,
    opset: int = 23,
    domain: str = "",
    ir_version: int = 10,
) -> onnx.ModelProto:
    """A model of these nodes, of values and arrays by name. `kinds` are dtypes by NumPy's names, of values that do not
    state one; `domain` is imported, too."""

    def infos(values: Mapping[str, Value]) -> list[onnx.ValueInfoProto]:
        codes = {name: helper.np_dtype_to_tensor_dtype(np.dtype((kinds or {}).get(name, "float32"))) for name in values}
        pairs = {
            name: value
            if isinstance(value, tuple)
            and len(value) == 2
            and isinstance(value[0], int)
            and not isinstance(value[1], int | str)
            else (codes[name], value)
            for name, value in values.items()
        }
        return [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in pairs.items()]

    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "g", infos(inputs), infos(outputs), tensors)
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
