"""An ONNX model as files of an artifact: weights as safetensors, the model beside them, the signature.

The artifact's model.onnx keeps no weights of its own: its initializers are ONNX external data that point into
weights.safetensors, whose tensors lie there in plain little-endian bytes. So any ONNX tool reads the pair.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import onnx
from msgspec.structs import replace
from onnx import numpy_helper
from safetensors.numpy import save_file

from mhsa_compile.errors import ModelError
from mhsa_compile.kernels.interface.ops import Dim
from mhsa_compile.runtime.artifact.manifest import IDS, TensorDType, TensorInfo

_LEAST_INSIDE, _SHARE_INSIDE = 1 << 20, 16
"""Of its own weights a source may bring a MB, or a sixteenth of what the artifact keeps."""


def write(model: onnx.ModelProto, names: Sequence[str], weights: Path, onnx_file: Path) -> None:
    """Writes the initializers `names` to `weights`, and the model, pointing there, to `onnx_file` beside it."""
    tensors = {
        t.name: np.ascontiguousarray(numpy_helper.to_array(t)) for t in model.graph.initializer if t.name in names
    }
    save_file(tensors, weights)
    begin, offsets = _layout(weights)
    slim = onnx.ModelProto()
    slim.CopyFrom(model)
    for tensor in slim.graph.initializer:
        if tensor.name in tensors:
            _point(tensor, weights.name, begin + offsets[tensor.name][0], tensors[tensor.name].nbytes)
    onnx_file.write_bytes(slim.SerializeToString(deterministic=True))


def write_source(original: onnx.ModelProto, model: onnx.ModelProto, weights: Path, file: Path) -> bool:
    """Writes the file that was compiled, its weights those of `weights` beside it; `model` is what became of it.

    Returns False, and writes nothing, where much of its weights became others (folded, say): they would be kept twice.
    """
    begin, offsets = _layout(weights)
    tensors = {t.name: t for t in model.graph.initializer if t.name in offsets}
    slim = onnx.ModelProto()
    slim.CopyFrom(original)
    inside = 0
    for tensor in slim.graph.initializer:
        other = tensors.get(tensor.name)
        if other is not None and _equal(tensor, other):
            first, end = offsets[tensor.name]
            _point(tensor, weights.name, begin + first, end - first)
        else:
            inside += tensor.ByteSize()
    if inside > max(_LEAST_INSIDE, weights.stat().st_size // _SHARE_INSIDE):
        return False
    file.write_bytes(slim.SerializeToString(deterministic=True))
    return True


def _equal(one: onnx.TensorProto, other: onnx.TensorProto) -> bool:
    if one.data_type != other.data_type or list(one.dims) != list(other.dims):
        return False
    if one.HasField("raw_data") and other.HasField("raw_data"):
        return bytes(one.raw_data) == bytes(other.raw_data)
    ours, theirs = numpy_helper.to_array(one), numpy_helper.to_array(other)
    return bytes(ours.tobytes()) == bytes(theirs.tobytes())


def _layout(weights: Path) -> tuple[int, dict[str, tuple[int, int]]]:
    """(where the data begin, each tensor's offsets from there), from the file's header."""
    with weights.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    return 8 + size, {name: tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__"}


def _point(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    for data in ("raw_data", "float_data", "int32_data", "int64_data", "double_data"):
        tensor.ClearField(data)
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    tensor.data_location = onnx.TensorProto.EXTERNAL


def weight_infos(model: onnx.ModelProto, names: Sequence[str]) -> tuple[TensorInfo, ...]:
    tensors = {t.name: t for t in model.graph.initializer}
    return tuple(TensorInfo(n, _dtype(n, tensors[n].data_type), tuple(tensors[n].dims)) for n in names)


def signature(model: onnx.ModelProto, imported: Any) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    """The inputs and outputs. A mask states what it must broadcast to, numbers of keys how large they may be, ids how
    many rows the table has that they pick from."""
    initializers = {t.name for t in model.graph.initializer}
    inputs = [_info(value) for value in model.graph.input if value.name not in initializers]
    inputs = [_with_bounds(info, imported.masks.get(info.name), imported.limits.get(info.name)) for info in inputs]
    inputs = [
        replace(info, rows=imported.rows[info.name])
        if info.name in imported.rows and info.dtype in IDS and info.most is None
        else info
        for info in inputs
    ]
    outputs = [_info(value) for value in model.graph.output]
    pairs = zip(outputs, imported.outputs, strict=True)
    return tuple(inputs), tuple(info if dims is None else replace(info, dims=dims) for info, dims in pairs)


def _info(value: onnx.ValueInfoProto) -> TensorInfo:
    kind = value.type.tensor_type
    dims = tuple(d.dim_param if d.HasField("dim_param") else d.dim_value for d in kind.shape.dim)
    return TensorInfo(value.name, _dtype(value.name, kind.elem_type), dims)


def _with_bounds(info: TensorInfo, mask: Any | None, most: Dim | None) -> TensorInfo:
    if mask is not None:
        return replace(info, broadcast=mask.full[4 - len(info.dims) :], pads=mask.pads)
    return info if most is None else replace(info, most=most)


def _dtype(name: str, code: int) -> TensorDType:
    """The name of a tensor's dtype. Raises ModelError for a dtype that no array of a call or of a weight has: strings,
    complex numbers, four bits."""
    text = onnx.helper.tensor_dtype_to_string(code).removeprefix("TensorProto.").lower()
    dtype = {"float": "float32", "double": "float64"}.get(text, text)
    if dtype not in get_args(TensorDType):
        raise ModelError(f"tensor {name!r}", f"a dtype among {', '.join(get_args(TensorDType))}", dtype)
    return cast(TensorDType, dtype)
