"""What a model takes and gives: dtypes that NumPy has, since callers bring and get its arrays."""

from __future__ import annotations

from collections.abc import Container

import onnx
from onnx import helper

from mhsa_compile.errors import ModelError


def refuse_at_edges(model: onnx.ModelProto, codes: Container[int], next_step: str) -> None:
    """Raises ModelError for an input or an output of one of these dtypes of ONNX's."""
    constants = {tensor.name for tensor in model.graph.initializer}
    for role, values in (("input", model.graph.input), ("output", model.graph.output)):
        for value in values:
            code = value.type.tensor_type.elem_type
            if code in codes and value.name not in constants:
                got = f"one of {helper.tensor_dtype_to_np_dtype(code)}"
                raise ModelError(f"{role} {value.name!r}", "a tensor of a dtype that NumPy has", got, next_step)
