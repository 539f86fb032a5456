"""Refuses operands of dtypes that an operator does not take, and of two where it takes one; and sizes and constants
that contradict each other where ONNX's inference does not say so.

ONNX's checker looks at no dtypes. What nobody knows of a value is not held against a node; nor is a width of an allowed
kind (bfloat16 before the opset that lists it), which exporters write and runtimes take. Of the sizes, a rule for each
operator gives None, or what is expected and what came. A free size is not held against a node: its call sees it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import numpy as np
import onnx
from onnx import TensorProto, defs, helper

from mhsa_compile.frontend.onnx_graph import GraphDim, GraphView, attributes, dims_text, node_error
from mhsa_compile.frontend.reading.row import Mismatch
from mhsa_compile.kernels.interface.ops import GATES

_CAST = "Put a Cast before it, or correct the file."
_CORRECT = "Correct the file: no call can have other sizes there."


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
        if allowed and _kind_of(dtype) not in map(_kind_of, allowed):
            expected = f"{parameter.name!r} of {' or '.join(_shortest(allowed))}"
            raise node_error(node, expected, f"{name!r} of {dtype}", _CAST)
        other, first = bound.setdefault(parameter.type_str, (name, dtype))
        if parameter.is_homogeneous and dtype != first:
            got = f"{other!r} of {first} and {name!r} of {dtype}"
            raise node_error(node, f"operands of one dtype, as {node.op_type} has them", got, _CAST)


@functools.cache
def _dtype(kind: str) -> str | None:
    """NumPy's name of a type as schemas spell it, such as "tensor(float)"; None of texts, and of what is no tensor."""
    name = kind.removeprefix("tensor(").removesuffix(")").upper()
    if f"tensor({name.lower()})" != kind or name == "STRING":
        return None
    return str(helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(name)))


def _kind_of(dtype: str) -> str:
    if dtype.startswith(("float", "bfloat")):
        return "float"
    return "integer" if dtype.startswith(("int", "uint")) else dtype


def _shortest(dtypes: list[str]) -> list[str]:
    """The dtypes, or where those are many, their kinds."""
    return dtypes if len(dtypes) < 4 else sorted(set(map(_kind_of, dtypes)))


def check_sizes(view: GraphView, node: onnx.NodeProto) -> None:
    """Raises ModelError for a node of the standard's that no call can compute."""
    rule = _RULES.get(node.op_type)
    if rule is not None and (mismatch := rule(view, node)) is not None:
        raise node_error(node, *mismatch, _CORRECT)


def _indices(view: GraphView, node: onnx.NodeProto) -> Mismatch:
    """Gather, GatherElements, ScatterElements: constant indices that the axis has."""
    dims, axis = view.shape(node.input[0]), attributes(node).get("axis", 0)
    if dims is None or not -len(dims) <= axis < len(dims):
        return None  # ONNX's inference says so
    return _within(view, node.input[1], [dims[axis]])


def _coordinates(view: GraphView, node: onnx.NodeProto) -> Mismatch:
    """GatherND, ScatterND: constant coordinates that the array has."""
    dims, begin = view.shape(node.input[0]), attributes(node).get("batch_dims", 0)
    return None if dims is None else _within(view, node.input[1], list(dims[begin:]))


def _within(view: GraphView, name: str, sizes: list[GraphDim]) -> Mismatch:
    """Constant indices into axes of these sizes, through which, if they are several, their last axis goes."""
    indices = view.constant(name)
    if indices is None or not indices.size:
        return None
    for column, size in zip(np.atleast_1d(indices).T if len(sizes) > 1 else [indices], sizes, strict=False):
        if not isinstance(size, int):
            continue
        beyond = column[(column < -size) | (column >= size)]
        if beyond.size:
            return f"indices from {-size} to {size - 1}, into an axis of {size}", f"{name!r} with {beyond.flat[0]}"
    return None


def _cumulative(view: GraphView, node: onnx.NodeProto) -> Mismatch:
    """CumSum, CumProd: a constant axis that the operand has."""
    dims, axis = view.shape(node.input[0]), view.constant(node.input[1])
    if dims is None or axis is None or -len(dims) <= int(axis.flat[0]) < len(dims):
        return None
    return f"an axis from {-len(dims)} to {len(dims) - 1}", str(axis.flat[0])


def _split(view: GraphView, node: onnx.NodeProto) -> Mismatch:
    """Split: as many outputs as num_outputs says."""
    count = attributes(node).get("num_outputs", len(node.output))
    return None if count == len(node.output) else (f"num_outputs={len(node.output)}, its outputs", str(count))


def _gemm(view: GraphView, node: onnx.NodeProto) -> Mismatch:
    """Gemm: an addend of two axes at most."""
    dims = view.shape(node.input[2]) if len(node.input) > 2 and node.input[2] else ()
    if dims is None or len(dims) <= 2:
        return None
    return "an addend C of 2 axes at most", _with_dims(node.input[2], dims)


def _normalization(view: GraphView, node: onnx.NodeProto) -> Mismatch:
    """LayerNormalization, RMSNormalization: scale and bias that spread over the axes that are normalised."""
    dims, axis = view.shape(node.input[0]), attributes(node).get("axis", -1)
    if dims is None:
        return None
    if not -len(dims) <= axis < max(len(dims), 1):
        return f"an axis from {-len(dims)} to {len(dims) - 1}", f"axis={axis}"
    for name, factors in _shapes(view, node, 1):
        pairs = zip(reversed(factors), reversed(dims), strict=False)
        if len(factors) > len(dims) or any(factor != 1 and _differ(factor, dim) for factor, dim in pairs):
            return f"{name!r} that spreads over {_with_dims(node.input[0], dims)}", _with_dims(name, factors)
    return None


def _by_channel(view: GraphView, node: onnx.NodeProto) -> Mismatch:
    """InstanceNormalization, GroupNormalization: a factor for each channel, or before opset 21 for each group."""
    dims, groups = view.shape(node.input[0]), attributes(node).get("num_groups")
    if dims is None or len(dims) < 2 or not isinstance(channels := dims[1], int):
        return None
    if groups is not None and channels % groups:
        return f"channels that num_groups={groups} divides", str(channels)
    count = groups if groups is not None and view.opset < 21 else channels
    for name, factors in _shapes(view, node, 1):
        if len(factors) != 1 or _differ(factors[0], count):
            return f"{name!r} of ({count})", _with_dims(name, factors)
    return None


def _convolution(view: GraphView, node: onnx.NodeProto) -> Mismatch:
    """Conv, ConvTranspose: a kernel for the channels that come, and a bias for those that leave."""
    dims, kernel = view.shape(node.input[0]), view.shape(node.input[1])
    groups, transposed = attributes(node).get("group", 1), node.op_type == "ConvTranspose"
    if dims is None or kernel is None:
        return None
    both = f"{_with_dims(node.input[0], dims)} and {_with_dims(node.input[1], kernel)}"
    if len(dims) != len(kernel) or len(dims) < 3:
        return "an input and a kernel of as many axes, 3 or more", both
    in_channels, out_channels = (kernel[0], kernel[1]) if transposed else (kernel[1], kernel[0])
    if isinstance(in_channels, int) and _differ(dims[1], in_channels if transposed else in_channels * groups):
        per_group = "" if groups == 1 else f" in {groups} groups"
        return f"an input of the kernel's {in_channels} channels{per_group}", both
    if not transposed and isinstance(out_channels, int) and out_channels % groups:
        return f"a kernel whose channels group={groups} divides", both
    for name, bias in _shapes(view, node, 2):
        count = out_channels * groups if transposed and isinstance(out_channels, int) else out_channels
        if len(bias) != 1 or _differ(bias[0], count):
            return f"a bias of ({count})", _with_dims(name, bias)
    return None


def _scales(view: GraphView, node: onnx.NodeProto) -> Mismatch:
    """QuantizeLinear, DequantizeLinear: one scale, or one for each place of the axis; zero points of that shape."""
    dims, attrs = view.shape(node.input[0]), attributes(node)
    shapes = list(_shapes(view, node, 1))
    if dims is None or attrs.get("block_size", 0) or not shapes:
        return None
    name, scale = shapes[0]
    axis = attrs.get("axis", 1)
    if len(scale) == 1 and scale[0] != 1 and not -len(dims) <= axis < len(dims):
        return f"an axis of {_with_dims(node.input[0], dims)}", f"axis={axis}"
    if len(scale) == 1 and scale[0] != 1 and -len(dims) <= axis < len(dims) and _differ(scale[0], dims[axis]):
        return f"{name!r} of (), (1) or ({dims[axis]}), as axis {axis} of {node.input[0]!r}", _with_dims(name, scale)
    if len(scale) > 1:
        return f"{name!r} of one axis at most", _with_dims(name, scale)
    for point, other in shapes[1:]:
        if {scale, other} <= {(), (1,)}:  # ONNX Runtime's quantiser writes both for one number, side by side
            continue
        if len(other) != len(scale) or any(map(_differ, scale, other)):
            return f"{point!r} of the shape of {_with_dims(name, scale)}", _with_dims(point, other)
    return None


def _recurrent(view: GraphView, node: onnx.NodeProto) -> Mismatch:
    """LSTM, GRU, RNN: W (directions, gates * hidden, input) and R (directions, gates * hidden, hidden)."""
    dims, w, r = (view.shape(name) for name in node.input[:3])
    gates, axis = GATES[node.op_type], -1
    for name, shape in zip(node.input, (dims, w, r), strict=False):
        if shape is not None and len(shape) != 3:
            return f"{name!r} of 3 axes", _with_dims(name, shape)
    if dims is not None and w is not None and _differ(dims[axis], w[axis]):
        return f"an input of the {w[axis]} columns of {node.input[1]!r}", _with_dims(node.input[0], dims)
    if r is None or not isinstance(r[2], int):
        return None
    for name, shape in ((node.input[1], w), (node.input[2], r)):
        if shape is not None and _differ(shape[1], gates * r[2]):
            return f"{name!r} of {gates} * {r[2]} rows, gates by hidden_size", _with_dims(name, shape)
    return None


def _blocks(view: GraphView, node: onnx.NodeProto) -> Mismatch:
    """DepthToSpace, SpaceToDepth: sizes that the block divides."""
    dims, block = view.shape(node.input[0]), attributes(node)["blocksize"]
    if dims is None or len(dims) != 4:
        return None
    divided = [(dims[1], block * block)] if node.op_type == "DepthToSpace" else [(dim, block) for dim in dims[2:]]
    for dim, factor in divided:
        if isinstance(dim, int) and dim % factor:
            return f"a size that {factor} divides", _with_dims(node.input[0], dims)
    return None


def _reshape(view: GraphView, node: onnx.NodeProto) -> Mismatch:
    """Reshape: to a constant shape of as many numbers."""
    dims, target = view.shape(node.input[0]), view.constant(node.input[1])
    if dims is None or target is None:
        return None
    numbers = [dim for dim in dims if isinstance(dim, int)]
    if len(numbers) < len(dims):
        return None
    sizes = [int(size) for size in target]
    if not attributes(node).get("allowzero", 0):
        if any(size == 0 and place >= len(dims) for place, size in enumerate(sizes)):
            return f"a 0 only for an axis that {_with_dims(node.input[0], dims)} has", str(sizes)
        sizes = [numbers[place] if size == 0 else size for place, size in enumerate(sizes)]
    count, rest = math.prod(numbers), math.prod(size for size in sizes if size != -1)
    fits = count % rest == 0 if rest and -1 in sizes else count == rest
    expected = f"a shape of {count} numbers, as {_with_dims(node.input[0], dims)} has"
    return None if fits else (expected, str(target.tolist()))


def _einsum(view: GraphView, node: onnx.NodeProto) -> Mismatch:
    """Einsum: one size for each letter."""
    equation = str(attributes(node)["equation"])
    terms = equation.replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, tuple[str, GraphDim]] = {}
    for term, (name, dims) in zip(terms, _shapes(view, node, 0), strict=False):
        before, _, behind = term.partition("...")
        pairs = [*zip(before, dims, strict=False), *zip(reversed(behind), reversed(dims), strict=False)]
        for letter, dim in pairs:
            other, size = sizes.setdefault(letter, (name, dim))
            if _differ(size, dim) and 1 not in (size, dim):
                return f"one size of {letter!r} in {equation!r}", f"{size} in {other!r} and {dim} in {name!r}"
    return None


def _shapes(view: GraphView, node: onnx.NodeProto, begin: int) -> Iterator[tuple[str, tuple[GraphDim, ...]]]:
    """The names and shapes of the inputs from place `begin` on, as far as they are known."""
    for name in node.input[begin:]:
        dims = view.shape(name) if name else None
        if dims is not None:
            yield name, dims


def _differ(size: GraphDim, other: GraphDim) -> bool:
    return isinstance(size, int) and isinstance(other, int) and size != other


def _with_dims(name: str, dims: tuple[GraphDim, ...]) -> str:
    return f"{name!r} of {dims_text(dims)}"


_RULES: dict[str, Callable[[GraphView, onnx.NodeProto], Mismatch]] = {
    **dict.fromkeys(("Gather", "GatherElements", "ScatterElements"), _indices),
    **dict.fromkeys(("GatherND", "ScatterND"), _coordinates),
    **dict.fromkeys(("CumSum", "CumProd"), _cumulative),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _normalization),
    **dict.fromkeys(("InstanceNormalization", "GroupNormalization"), _by_channel),
    **dict.fromkeys(("Conv", "ConvTranspose"), _convolution),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _scales),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _blocks),
    "Split": _split,
    "Gemm": _gemm,
    "Reshape": _reshape,
    "Einsum": _einsum,
}
