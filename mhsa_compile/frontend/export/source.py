"""What can be compiled, read into one form: a checked ONNX model with its weights in it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.files import input_files, places
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.files.foreign_files import hint_of
from mhsa_compile.frontend.detach_weights import contents_as_inputs, is_large, stored_elements
from mhsa_compile.frontend.export.input_dims import check_dims, dims_of, with_named_dims, with_symbols
from mhsa_compile.frontend.onnx_graph import metadata_of, tensors_of
from mhsa_compile.frontend.reading.check import check_domains, check_file, check_operands
from mhsa_compile.frontend.reading.contradictions import check_shapes
from mhsa_compile.frontend.reading.dialect import in_one_dialect
from mhsa_compile.frontend.reading.functions import check_functions, inline
from mhsa_compile.frontend.reading.well_formed import CORRECT, check_well_formed
from mhsa_compile.spec.attention_spec import SPEC_KEY, AttentionSpec
from mhsa_compile.spec.outputs import LayerWord, layer_words


@dataclass(frozen=True)
class Source:
    """A model, the spec it was exported from if it is one of ours, and what it was read from: a file as its author
    wrote it, or an exported graph."""

    model: onnx.ModelProto
    spec: AttentionSpec | None
    original: onnx.ModelProto


def read_source(
    source: Any,
    dims: Mapping[str, int] | None,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None = None,
) -> Source:
    """The source as a checked model, its dims fixed as `dims` says, with the spec that it states. Raises ModelError,
    SpecError or InputError."""
    check_dims(dims)
    if isinstance(source, str | Path | onnx.ModelProto) and dynamic_shapes is not None:
        hint = "The symbols of an ONNX model are free as they are; dims fixes them."
        raise InputError("dynamic_shapes", "it with an nn.Module and example_inputs", "it with an ONNX model", hint)
    if isinstance(source, str | Path | onnx.ModelProto):
        original, model = _read(source)
        model = inline(model)
        check_file(model)
        model = with_symbols(fix_dims(with_named_dims(model), dims))
        check_operands(model)
    else:
        original = model = _export(source, dims, example_inputs, dynamic_shapes)
    metadata = metadata_of(model)
    return Source(model, AttentionSpec.from_json(metadata[SPEC_KEY]) if SPEC_KEY in metadata else None, original)


def _read(source: str | Path | onnx.ModelProto) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """(a model as its author wrote it, the same in one dialect and checked). Raises ModelError."""
    if isinstance(source, onnx.ModelProto):
        return source, _checked("model", source)
    original = _load(Path(source))
    return original, _checked_file(Path(source), original)


def _export(
    source: Any,
    dims: Mapping[str, int] | None,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None,
) -> onnx.ModelProto:
    from torch import nn

    from mhsa_compile.frontend.export.export import export

    source = as_module(source, example_inputs)
    if not isinstance(source, nn.Module):
        expected = "an AttentionSpec, an nn.Module, an onnx.ModelProto or the path of an .onnx file"
        raise ModelError("source", expected, type(source).__name__)
    return export(source, dims=dict(dims or {}), example_inputs=example_inputs, dynamic_shapes=dynamic_shapes)


def as_module(source: Any, example_inputs: Sequence[Any] | Mapping[str, Any] | None) -> Any:
    """A spec as a module with weights at random, PyTorch's layer as ours; every other source as it is."""
    if isinstance(source, str | Path | onnx.ModelProto):
        return source  # and PyTorch need not be loaded
    from torch import nn

    from mhsa_compile.conversion.from_torch import from_torch
    from mhsa_compile.nn.modules import MultiHeadAttention

    if isinstance(source, AttentionSpec):
        return MultiHeadAttention(source).eval()
    if isinstance(source, nn.MultiheadAttention) and example_inputs is None:
        return from_torch(source)
    return source


def with_outputs(source: Any, words: Any) -> tuple[Any, tuple[LayerWord, ...]]:
    """(the source, what is to be added to its graph): a module of ours returns `words` by itself, see `spec.outputs`.

    `source` is `as_module`'s. Raises SpecError.
    """
    if words is None:
        return source, ()
    if isinstance(source, str | Path | onnx.ModelProto):
        return source, layer_words(words)
    from mhsa_compile.nn.modules import MultiHeadAttention, ScaledDotProductAttention

    if isinstance(source, MultiHeadAttention | ScaledDotProductAttention):
        outputs = words if isinstance(words, list | tuple) else (words,)
        return source.with_outputs(*outputs), ()
    return source, layer_words(words)


def read_onnx(path: Path) -> onnx.ModelProto:
    """An .onnx file, checked and in one dialect, with its external data, which must lie in the file's own folder."""
    return _checked_file(path, _load(path))


def _load(path: Path) -> onnx.ModelProto:
    """An .onnx file as it is, with its external data."""
    name = f"model {str(path)!r}"
    with input_files.open_file(path, ModelError, name, "a readable .onnx file") as file:
        try:
            model = onnx.load_model_from_string(file.read())
        except Exception as error:  # protobuf's DecodeError has no public home
            got = "a file that does not parse: truncated, or not ONNX"
            raise ModelError(name, "an ONNX model", got, hint_of(path)) from error
    if not model.graph.node:
        raise ModelError(name, "an ONNX model", "no graph: the file is empty or truncated")
    for tensor in tensors_of(model):
        for entry in tensor.external_data:
            if entry.key == "location":
                _check_inside(name, path.parent, entry.value)
    with reading(ModelError, name, "external data that can be read", CORRECT):
        onnx.load_external_data_for_model(model, str(path.parent))
    return model


def _checked_file(path: Path, original: onnx.ModelProto) -> onnx.ModelProto:
    model = _checked(f"model {str(path)!r}", original)
    check_shapes(model)
    return model


def _checked(name: str, original: onnx.ModelProto) -> onnx.ModelProto:
    """A model in one dialect. Raises ModelError, which calls it `name`."""
    _check_dtypes(name, original)
    model = in_one_dialect(original)
    _check(name, model)
    return model


def _check_dtypes(name: str, model: onnx.ModelProto) -> None:
    """Raises ModelError for a tensor of a dtype that ONNX does not have."""
    known = {number for number in onnx.TensorProto.DataType.values() if number}
    for tensor in tensors_of(model):
        if tensor.data_type not in known:
            raise ModelError(
                name, f"weight {tensor.name!r} of a dtype of ONNX's", f"number {tensor.data_type}", CORRECT
            )


def _check(name: str, model: onnx.ModelProto) -> None:
    """Raises ModelError for what ONNX itself does not allow, and for weights that are elsewhere."""
    away = [tensor for tensor in tensors_of(model) if tensor.data_location == onnx.TensorProto.EXTERNAL]
    if away:
        hint = "Load it with its data, onnx.load(path), or compile its path."
        raise ModelError(name, "a model with its weights in it", f"{_title(away[0])} in a file beside it", hint)
    for role, values in (("input", model.graph.input), ("output", model.graph.output)):
        for value in values:
            if (kind := value.type.WhichOneof("value")) not in ("tensor_type", None):
                hint = "Take it apart into tensors in the graph."
                raise ModelError(f"{role} {value.name!r}", "a tensor", f"a {kind.removesuffix('_type')}", hint)
            if value.type.tensor_type.elem_type == onnx.TensorProto.STRING:
                hint = "Cut off what reads texts, and pass what comes of it: a tokenizer's ids, say."
                raise ModelError(f"{role} {value.name!r}", "a tensor of numbers", "one of texts", hint)
    if model.graph.sparse_initializer:
        tensor = model.graph.sparse_initializer[0].values.name
        raise ModelError(name, "weights as dense tensors", f"{tensor!r} as a sparse one", "Write it as a dense one.")
    check_domains(model)
    check_functions(model)
    check_well_formed(model)
    with reading(ModelError, name, "a valid ONNX model", CORRECT):
        onnx.checker.check_model(_with_ranks(contents_as_inputs(model)), full_check=False)
    for tensor in model.graph.initializer:
        if is_large(tensor) and (elements := stored_elements(tensor)) != math.prod(tensor.dims):
            expected = f"{math.prod(tensor.dims)} numbers in weight {tensor.name!r}"
            raise ModelError(name, expected, str(elements), "The file is damaged or cut off: write it again.")


def _with_ranks(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a shape of every output, which the checker alone wants, as it follows from the graph."""
    if all(value.type.tensor_type.HasField("shape") for value in model.graph.output):
        return model
    result = copy.deepcopy(model)
    for value in result.graph.output:
        value.type.tensor_type.shape.SetInParent()
    return result


def symbols_of(path: Path) -> set[str]:
    """The names of free dims of an .onnx file's inputs; those without a name get one. Raises ModelError."""
    model = with_named_dims(read_onnx(path))
    constants = {tensor.name for tensor in model.graph.initializer}
    values = (value for value in model.graph.input if value.name not in constants)
    return {dim.dim_param for value in values for dim in dims_of(value) if dim.dim_param}


def _title(tensor: onnx.TensorProto) -> str:
    place = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
    return repr(tensor.name) if tensor.name else f"a constant, at {place!r},"


def _check_inside(name: str, folder: Path, location: str) -> None:
    inside = folder.resolve()
    with reading(ModelError, name, f"its external data {location!r} beside it"):
        resolved = (inside / location).resolve()
    if not resolved.is_relative_to(inside):
        raise ModelError(name, "external data in the model's own folder", repr(location), "Copy the data beside it.")
    if not places.is_file(resolved):
        hint = "Copy the file there, as it was written with the model."
        raise ModelError(name, f"its external data {location!r} beside it", "no such file", hint)


def fix_dims(model: onnx.ModelProto, dims: Mapping[str, int] | None) -> onnx.ModelProto:
    """The model with the named symbols fixed. Raises InputError for a symbol that no input has."""
    if not dims:
        return model
    fixed = copy.deepcopy(model)
    del fixed.graph.value_info[:]  # shapes in between are inferred again
    values = [*fixed.graph.input, *fixed.graph.output]
    symbols = {d.dim_param for value in values for d in dims_of(value) if d.dim_param}
    for symbol in dims:
        if symbol not in symbols:
            expected = f"a symbol of the model: {', '.join(sorted(symbols)) or 'it has none'}"
            raise InputError("dims", expected, repr(symbol))
    for value in values:
        for dim in dims_of(value):
            if dim.dim_param in dims:
                dim.dim_value = dims[dim.dim_param]
    return fixed
