"""What a row cannot say by names and counts alone: of which nodes an operator is understood.

Each condition gives None, or what is expected and what came. What nobody knows of a value (its dtype, its rank) is not
held against a node here: the converter sees it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from mhsa_compile.frontend.onnx_graph import GraphView, attributes, is_standard

Mismatch = tuple[str, str] | None
FOUR_BITS = (onnx.TensorProto.INT4, onnx.TensorProto.UINT4)

_BITS = ("float16", "float32", "float64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))


def some_numbers(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """MatMul: of one number or more."""
    for name in node.input:
        if 0 in (dims := graph.shape(name) or ()):
            return "axes of 1 or more", f"{name!r} of {dims}"
    return None


def floating_mean(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """ReduceMean: of floats, as the mean of whole numbers is rounded."""
    kind = graph.dtype(node.input[0])
    return None if kind is None or _floating(kind) else ("floating numbers", str(kind))


def parts_of_some_length(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """Split: into parts of 1 or more."""
    sizes = graph.constant(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    return None if sizes is None or (sizes > 0).all() else ("parts of 1 or more", str(sizes.tolist()))


def no_wrap_inwards(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """Pad: by what is wrapped around, outwards only."""
    pads = graph.constant(node.input[1]) if attributes(node).get("mode") == "wrap" else None
    return None if pads is None or (pads >= 0).all() else ("pads of 0 or more to wrap by", str(pads.tolist()))


def resized_by_ratio(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """Resize of fixed sizes: of the axes behind the first two, by scales that are the ratio of the sizes.

    Others have a converter of their own (`frontend.relax.sizes.resizing`).
    """
    _, _, scales, sizes = [*node.input, "", "", ""][:4]
    dims = graph.shape(node.input[0])
    if dims is None or not all(isinstance(size, int) for size in dims):
        return None  # the converter wants a rank, too
    factors = graph.constant(scales) if scales else None
    target = graph.constant(sizes) if sizes else None
    if factors is not None and factors.size == len(dims):
        if any(factor != 1 for factor in factors[:2]):
            return "scales of 1 for batch and channels", str(factors.tolist())
        for factor, size in zip(factors[2:], dims[2:], strict=True):
            whole = float(factor) if not isinstance(size, int) else float(factor) * size
            if not whole.is_integer():
                of = "a free size" if not isinstance(size, int) else str(size)
                return "scales that make whole sizes", f"{factor} of {of}"
        target = np.array(
            [size * factor if isinstance(size, int) else 2 for factor, size in zip(factors, dims, strict=True)]
        )
    if target is not None and target.size == len(dims):
        if any(isinstance(size, int) and size != to for size, to in zip(dims[:2], target[:2], strict=True)):
            return "batch and channels of the size that they have", str(target.tolist())
        mode = attributes(node).get("coordinate_transformation_mode", "half_pixel")
        if mode in ("align_corners", "tf_crop_and_resize") and any(to == 1 for to in target[2:]):
            return f"sizes of 2 or more, by {mode}", str(target.tolist())
    return None


def an_axis_left(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """RMSNormalization: over fewer axes than all."""
    dims, axis = graph.shape(node.input[0]), attributes(node).get("axis", -1)
    if dims is None or axis % max(len(dims), 1) != 0 or not dims:
        return None
    return "an axis before those it is of", f"axis={axis}, of {len(dims)} axes"


def not_in_training(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """Dropout: at inference, where it passes its input on."""
    training = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else False
    if training is None:
        return "training_mode as a constant", "one that is computed or comes by the call"
    return ("training_mode=false", "true") if bool(training) else None


def of_whole_bytes(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """BitCast: between numbers of as many bytes, no flags."""
    kinds = (graph.dtype(node.input[0]), str(onnx.helper.tensor_dtype_to_np_dtype(attributes(node)["to"])))
    wrong = next((kind for kind in kinds if kind is not None and kind not in _BITS), None)
    return ("numbers of 8 bits or more", wrong) if wrong is not None else None


def finite_scales(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """Operators of quantised numbers: scales that are finite, and above 0."""
    for name in [node.input[place] for place in ((1, 4, 6) if node.op_type.startswith("QLinear") else (1,))]:
        scales = graph.constant(name)
        if scales is None:
            continue
        wrong = scales.astype(np.float64)[~(np.isfinite(scales) & (scales > 0))]
        if wrong.size:
            return "scales that are finite and above 0", f"{name!r} with {wrong[0]}"
    return None


def is_packed(node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto]) -> bool:
    """Whether a node makes floats of weights by blocks, or of four bits, each block of which is whole."""
    if not is_standard(node, "DequantizeLinear") or not {name for name in node.input if name} <= weights.keys():
        return False
    tensor, attrs = weights[node.input[0]], attributes(node)
    block, axis = attrs.get("block_size", 0), attrs.get("axis", 1)
    if not block:
        return tensor.data_type in FOUR_BITS
    return -len(tensor.dims) <= axis < len(tensor.dims) and not tensor.dims[axis] % block


def dequantised(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """DequantizeLinear: by blocks that are whole, of weights alone."""
    block = attributes(node).get("block_size", 0)
    if block and not is_packed(node, graph.initializers):
        return "block_size=0, or weights whose axis is a whole number of blocks", f"block_size={block}"
    return finite_scales(graph, node)


def not_of_doubles(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """LSTM, GRU, RNN: of float16 or float32."""
    kind = graph.dtype(node.input[0])
    return ("float16 or float32", kind) if kind == "float64" else None


def _floating(kind: str) -> bool:
    return kind.startswith(("float", "bfloat"))
