"""ONNX models of a few nodes, as tests write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

Dims = Sequence[int | str | None] | None


def graph_model(
    nodes: Iterable[onnx.NodeProto],
    inputs: Mapping[str, Dims],
    outputs: Mapping[str, Dims],
    constants: Mapping[str, object] | None = None,
    *,
    kinds: Mapping[str, str] | None = None,
    opset: int = 23,
    domain: str = "",
    ir_version: int = 10,
) -> onnx.ModelProto:
    """`kinds`: the dtypes, by NumPy's names, of inputs and outputs that are not float32; `domain` is imported, too."""

    def values(dims_by_name: Mapping[str, Dims]) -> list[onnx.ValueInfoProto]:
        codes = {name: np.dtype((kinds or {}).get(name, "float32")) for name in dims_by_name}
        return [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(codes[name]), dims)
            for name, dims in dims_by_name.items()
        ]

    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "g", values(inputs), values(outputs), tensors)
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
