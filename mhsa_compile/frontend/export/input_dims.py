"""The dims of a model's inputs, made ones that every stage reads alike.

ONNX says of a dim's name only that it is a string. TVM computes with it: `c/d` is a division to it, and `-x` a
difference. So a name is kept where it is one, or where it is an expression of the names of other inputs' dims, such as
"P + S"; any other becomes a name of its own.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import onnx

from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.runtime.symbolic_dims import names_of
from mhsa_compile.spec.checks import LARGEST

_READ_ALIKE = re.compile(r"\s*\w+\s*(?:(?:[+-]\s*\w+\s*)+|(?:\*|//)\s*[A-Za-z_1-9]\w*\s*)")
"""Expressions that TVM, which knows no precedence, computes as anyone else does."""


def check_dims(dims: Mapping[str, int] | None) -> None:
    """Checks the sizes that a caller fixes. Raises InputError."""
    if dims is not None and not isinstance(dims, Mapping):
        raise InputError("dims", 'sizes by symbol, such as {"B": 1}', type(dims).__name__)
    for symbol, size in (dims or {}).items():
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= LARGEST:
            raise InputError(f"dims[{symbol!r}]", f"a size of at least 1, and at most {LARGEST}", repr(size))


def with_symbols(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model of `with_named_dims`, changed in place so that all stages read its names alike. Raises ModelError for a
    size that is none."""
    for value in model.graph.input:
        for axis, dim in enumerate(dims_of(value)):
            if dim.HasField("dim_value") and not 0 <= dim.dim_value <= LARGEST:
                expected = f"a size from 0 to {LARGEST}, or a name for any"
                raise ModelError(f"input {value.name!r}, axis {axis}", expected, str(dim.dim_value))
    new_names = _new_names({dim.dim_param for value in model.graph.input for dim in dims_of(value) if dim.dim_param})
    if new_names:
        del model.graph.value_info[:]  # shapes in between are inferred again
    for value in (*model.graph.input, *model.graph.output):
        for dim in dims_of(value):
            if dim.dim_param in new_names:
                dim.dim_param = new_names[dim.dim_param]
    return model


def with_named_dims(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which every dim of an input that has neither a size nor a name has one: "x_0" and the like."""
    result = copy.deepcopy(model)
    for value in result.graph.input:
        for axis, dim in enumerate(dims_of(value)):
            if dim.WhichOneof("value") is None or (dim.dim_param == "" and not dim.HasField("dim_value")):
                dim.dim_param = f"{value.name}_{axis}"
    return result


def dims_of(value: onnx.ValueInfoProto) -> Any:
    return value.type.tensor_type.shape.dim


def _new_names(symbols: set[str]) -> dict[str, str]:
    """Old name -> new name, of the symbols that are neither a name nor an expression which all stages read alike."""
    plain = {symbol for symbol in symbols if symbol.isidentifier()}
    new_names: dict[str, str] = {}
    for symbol in sorted(symbols - plain):
        if _READ_ALIKE.fullmatch(symbol) and names_of(symbol) and names_of(symbol) <= plain:
            continue
        name = re.sub(r"\W+", "_", symbol, flags=re.ASCII).strip("_")
        name = f"dim_{name}".rstrip("_") if not name[:1].isalpha() else name
        while name in plain or name in new_names.values():
            name += "_"
        new_names[symbol] = name
    return new_names
