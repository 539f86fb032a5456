"""What can be compiled, read into one form: a checked ONNX model with its weights in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.spec import SPEC_KEY, AttentionSpec


@dataclass(frozen=True)
class Source:
    """A model, and the spec it was exported from if it is one of ours."""

    model: onnx.ModelProto
    spec: dict[str, Any] | None


def read_source(source: Any, dims: Mapping[str, int] | None, example_inputs: tuple[Any, ...] | None) -> Source:
    """Raises ModelError, SpecError or InputError."""
    if isinstance(source, str | Path):
        model = fix_dims(_named_dims(read_onnx(Path(source))), dims)
    elif isinstance(source, onnx.ModelProto):
        model = fix_dims(_named_dims(source), dims)
    else:
        model = _exported(source, dims, example_inputs)
    said = {entry.key: entry.value for entry in model.metadata_props}
    return Source(model, json.loads(said[SPEC_KEY]) if SPEC_KEY in said else None)


def _exported(source: Any, dims: Mapping[str, int] | None, example_inputs: tuple[Any, ...] | None) -> onnx.ModelProto:
    from torch import nn

    from mhsa_compile.conversion import from_torch
    from mhsa_compile.export import export
    from mhsa_compile.model import MultiHeadAttention

    if isinstance(source, AttentionSpec):
        source = MultiHeadAttention(source).eval()
    if isinstance(source, nn.MultiheadAttention):
        source = from_torch(source)
    if not isinstance(source, nn.Module):
        wanted = "an AttentionSpec, an nn.Module, an onnx.ModelProto or the path of an .onnx file"
        raise ModelError("source", wanted, type(source).__name__)
    return export(source, dims=dict(dims or {}), example_inputs=example_inputs)


def read_onnx(path: Path) -> onnx.ModelProto:
    """An .onnx file, checked, with its external data, which must lie in the file's own folder."""
    name = f"model {str(path)!r}"
    try:
        model = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise ModelError(name, "a readable .onnx file", error.strerror or str(error)) from error
    except Exception as error:  # protobuf's DecodeError has no public home
        raise ModelError(name, "an ONNX model", "a file that does not parse: truncated, or not ONNX") from error
    if not model.graph.node:
        raise ModelError(name, "an ONNX model", "no graph: the file is empty or truncated")
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                _check_inside(name, path.parent, entry.value)
    try:
        onnx.load_external_data_for_model(model, str(path.parent))
        onnx.checker.check_model(model, full_check=False)
        onnx.shape_inference.infer_shapes(model, strict_mode=True)
    except Exception as error:
        raise ModelError(name, "a valid ONNX model", _first_line(error)) from error
    return model


def _check_inside(name: str, folder: Path, location: str) -> None:
    inside = folder.resolve()
    if not (inside / location).resolve().is_relative_to(inside):
        raise ModelError(name, "external data in the model's own folder", repr(location), "Copy the data beside it.")
    if not (inside / location).is_file():
        raise ModelError(name, f"its external data {location!r} beside it", "no such file")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _named_dims(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a name for every dim of an input that has neither name nor size."""
    dims = {(i, axis) for i, value in enumerate(model.graph.input) for axis, dim in enumerate(_dims(value))
            if dim.WhichOneof("value") is None}  # fmt: skip
    if not dims:
        return model
    named = onnx.ModelProto()
    named.CopyFrom(model)
    for i, axis in dims:
        value = named.graph.input[i]
        _dims(value)[axis].dim_param = f"{value.name}_{axis}"
    return named


def _dims(value: onnx.ValueInfoProto) -> Any:
    return value.type.tensor_type.shape.dim


def fix_dims(model: onnx.ModelProto, dims: Mapping[str, int] | None) -> onnx.ModelProto:
    """The model with the named symbols fixed. Raises InputError for a symbol that no input has, or a size below 1."""
    if not dims:
        return model
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    del fixed.graph.value_info[:]  # shapes in between are inferred again
    values = [*fixed.graph.input, *fixed.graph.output]
    known = {d.dim_param for value in values for d in value.type.tensor_type.shape.dim if d.dim_param}
    for symbol, size in dims.items():
        if symbol not in known:
            raise InputError(
                "dims", f"a symbol of the model: {', '.join(sorted(known)) or 'it has none'}", repr(symbol)
            )
        if size < 1:
            raise InputError(f"dims[{symbol!r}]", "a size of at least 1", str(size))
    for value in values:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in dims:
                dim.dim_value = dims[dim.dim_param]
    return fixed
