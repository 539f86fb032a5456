"""Does an exported graph mean what its module does, and is symbolic what was to be?

Notation: B batch, L query length, S key length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from torch import Tensor, nn

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.export.module_calls import TensorModule
from mhsa_compile.nn.score_features import CONSTANT_MASK
from mhsa_compile.verification import unseen_sizes

Shape = tuple[int | str, ...]


def check_declared(model: onnx.ModelProto, requested: Mapping[str, Shape]) -> None:
    """Whether the graph's inputs have the dims that were asked for. Raises ModelError."""
    declared = {value.name: _dims(value) for value in model.graph.input}
    for name, shape in requested.items():
        if declared.get(name) != shape:
            hint = "The module fixes this size: fix it in dims, or name another symbol in dynamic_shapes."
            raise ModelError(name, f"dims {shape} after the export", str(declared.get(name)), hint)


def check_symbols(model: onnx.ModelProto, module: nn.Module, requested: Mapping[str, Shape]) -> None:
    """Shows that no dim was specialised: by the declared inputs, and by runs at sizes that the export never saw.

    `requested` is input name -> dims. Raises ModelError.
    """
    check_declared(model, requested)
    symbols = {dim for shape in requested.values() for dim in shape if isinstance(dim, str)}
    unseen_sizes.check_unseen_sizes(model, module, symbols, _forward)


def _forward(module: nn.Module, tensors: dict[str, Tensor]) -> Any:
    return module(tensors) if isinstance(module, TensorModule) else module(**tensors)


def check_equal_but_for_sizes(model: onnx.ModelProto, other: onnx.ModelProto) -> None:
    """Shows that two exports of one module differ in nothing but the sizes that were fixed and what is of that size.

    Raises ModelError.
    """
    (one, weights), (two, other_weights) = _sizeless(model), _sizeless(other)
    different = next((a for a, b in zip(one, two, strict=False) if a != b), None)
    if different is not None or len(one) != len(two) or weights != other_weights:
        got = (
            "weights or the number of nodes that differ"
            if different is None
            else f"{different.op_type} nodes that differ"
        )
        raise ModelError("module", "a graph that is the same at every length", got)


def _sizeless(model: onnx.ModelProto) -> tuple[list[Any], dict[str, bytes]]:
    weights = {t.name: t.SerializeToString() for t in model.graph.initializer if t.name != CONSTANT_MASK}
    return list(model.graph.node), weights


def _dims(value: onnx.ValueInfoProto) -> Shape:
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)
