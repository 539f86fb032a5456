"""Refuses operands of dtypes that an operator does not take, and of two where it takes one.

ONNX's checker looks at neither. What nobody knows of a value is not held against a node; nor is a width of an allowed
kind (bfloat16 before the opset that lists it), which exporters write and runtimes take.
"""

from __future__ import annotations

import functools

import onnx
from onnx import TensorProto, defs, helper

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.onnx_graph import GraphView, title

_CAST = "Put a Cast before it, or correct the file."


def check_dtypes(view: GraphView, node: onnx.NodeProto) -> None:
    """Raises ModelError for a node of the standard's whose inputs its operator cannot have, by their dtypes."""
    schema = defs.get_schema(node.op_type, view.opset, "")
    bound: dict[str, tuple[str, str]] = {}
    for place, name in enumerate(node.input):
        parameter = schema.inputs[min(place, len(schema.inputs) - 1)]
        dtype = view.dtype(name) if name else None
        if dtype is None:
            continue
        allowed = sorted(filter(None, map(_dtype, parameter.types)))
        if allowed and _kind(dtype) not in map(_kind, allowed):
            expected = f"{parameter.name!r} of {' or '.join(_shortest(allowed))}"
            raise ModelError(title(node), expected, f"{name!r} of {dtype}", _CAST)
        other, first = bound.setdefault(parameter.type_str, (name, dtype))
        if parameter.is_homogeneous and dtype != first:
            got = f"{other!r} of {first} and {name!r} of {dtype}"
            raise ModelError(title(node), f"operands of one dtype, as {node.op_type} has them", got, _CAST)


@functools.cache
def _dtype(kind: str) -> str | None:
    """NumPy's name of a type as schemas spell it, such as "tensor(float)"; None of texts, and of what is no tensor."""
    name = kind.removeprefix("tensor(").removesuffix(")").upper()
    if f"tensor({name.lower()})" != kind or name == "STRING":
        return None
    return str(helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(name)))


def _kind(dtype: str) -> str:
    if dtype.startswith(("float", "bfloat")):
        return "float"
    return "integer" if dtype.startswith(("int", "uint")) else dtype


def _shortest(dtypes: list[str]) -> list[str]:
    """The dtypes, or where those are many, their kinds."""
    return dtypes if len(dtypes) < 4 else sorted(set(map(_kind, dtypes)))
