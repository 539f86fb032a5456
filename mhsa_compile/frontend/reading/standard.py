"""What is understood of ONNX's own operators, as the graph states them when TVM's importer gets it.

Rows are of the opsets from `canonicalize.passes.opset.LEAST` to LAST: older files are raised first, and of a newer
opset an operator that has changed since is refused. A row is added with the converter that gives it its meaning: one
of TVM's that reads everything the row says, or ours (`frontend.relax.op_converters`): the importer converts what has a
row, and nothing else. An attribute that a converter does not read stands in no row, so that it may only say its
default; of one that it reads for some values alone, the row says which. What depends on dtypes or dims is a condition:
what nobody knows of a value is not held against a node there, as the converter sees it. An operator that a pass
consumes before the importer (Attention, RotaryEmbedding) has no row: that pass refuses what it does not read.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from mhsa_compile.frontend.onnx_graph import GraphView, attributes
from mhsa_compile.frontend.reading.row import MANY, Mismatch, Row, row

LAST = 28
"""The last opset whose operators these rows were written for."""

PREVIEW = "ai.onnx.preview"
"""The domain of operators that ONNX has as a preview: they are understood by their definition."""
PREVIEWED = ("FlexAttention",)
PREVIEW_VERSION = 1
"""The version of the domain whose definitions are read."""

FOUR_BITS = (onnx.TensorProto.INT4, onnx.TensorProto.UINT4)
_BITS = ("float16", "float32", "float64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))


def some_numbers(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """MatMul: of one number or more."""
    for name in node.input:
        if 0 in (dims := graph.dims(name)):
            return "axes of 1 or more", f"{name!r} of {dims}"
    return None


def floating_mean(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """ReduceMean: of floats, as the mean of whole numbers is rounded."""
    kind = graph.dtype(node.input[0])
    return None if kind is None or kind.startswith(("float", "bfloat")) else ("floating numbers", kind)


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
        pairs = zip(factors, dims, strict=True)
        target = np.array([size * factor if isinstance(size, int) else 2 for factor, size in pairs])
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
        if (mismatch := positive_scales(graph, name)) is not None:
            return mismatch
    return None


def convolved(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """QLinearConv: scales as above, and a bias in whole numbers, one for each output channel."""
    weight, bias = [*node.input, ""][3], [*node.input, ""][8]
    kind, shape, channels = graph.dtype(bias), graph.shape(bias), graph.dims(weight)[:1]
    if bias and kind not in (None, "int32"):
        return f"a bias {bias!r} of int32", str(kind)
    if bias and shape is not None and channels and shape != channels:
        return f"a bias {bias!r} of {channels[0]} numbers", str(shape)
    return finite_scales(graph, node)


def positive_scales(graph: GraphView, name: str) -> Mismatch:
    """Scales, where they are known: finite, and above 0."""
    scales = graph.constant(name)
    if scales is None:
        return None
    wrong = scales.astype(np.float64)[~(np.isfinite(scales) & (scales > 0))]
    return ("scales that are finite and above 0", f"{name!r} with {wrong[0]}") if wrong.size else None


def is_packed(node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto]) -> bool:
    """Whether a DequantizeLinear makes floats of weights by blocks, or of four bits, each block of which is whole."""
    if node.op_type != "DequantizeLinear" or not {name for name in node.input if name} <= weights.keys():
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
    return scales_of_weights(graph, node)


def scales_of_weights(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """DequantizeLinear: scales as of others, but of blocks any that are finite: quantisers give a block of zeros 0, and
    one whose largest number is below 0 a scale below 0."""
    scales = graph.constant(node.input[1])
    if not attributes(node).get("block_size", 0) or scales is None:
        return finite_scales(graph, node)
    wrong = scales.astype(np.float64)[~np.isfinite(scales)]
    return ("scales that are finite", f"{node.input[1]!r} with {wrong.flat[0]}") if wrong.size else None


def not_of_doubles(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """LSTM, GRU, RNN: of float16 or float32."""
    kind = graph.dtype(node.input[0])
    return ("float16 or float32", kind) if kind == "float64" else None


_UNARY = (
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Ceil", "Cos", "Cosh", "Erf", "Exp",
    "Floor", "GlobalAveragePool", "GlobalMaxPool", "HardSwish", "Identity", "IsNaN", "Log", "Mish", "Neg", "NonZero",
    "Not", "Reciprocal", "Relu", "Round", "Sigmoid", "Sin", "Sinh", "Size", "Softplus", "Softsign", "Sqrt",
    "Tan", "Tanh",
)  # fmt: skip
_BINARY = (
    "Add", "And", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Expand", "Greater", "GreaterOrEqual",
    "Less", "LessOrEqual", "Mul", "Or", "PRelu", "Sub", "Tile", "Xor",
)  # fmt: skip
_REDUCTIONS = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare",
)  # fmt: skip
_RECURRENT = ("activation_alpha", "activation_beta", "activations", "clip", "direction", "hidden_size", "layout")
_POOL = ("auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides")
CONVOLUTION = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")

_COORDINATES = ("align_corners", "asymmetric", "half_pixel", "pytorch_half_pixel", "tf_crop_and_resize")
_NOT_DOUBLE = frozenset(("bfloat16", "float16", "float32"))

_QUANTISED = frozenset(("bfloat16", "float16", "float32", "int8", "uint8"))

_SIGNED = frozenset(("bfloat16", "float16", "float32", "float64", "int8", "int16", "int32", "int64"))

RANDOM = frozenset(
    ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
)
"""Operators that draw random numbers: none of them is compiled."""

STANDARD: dict[str, Row] = {
    **dict.fromkeys(_UNARY, row()),
    **dict.fromkeys(_BINARY, row(inputs=2)),
    **dict.fromkeys(_REDUCTIONS, row("keepdims", "noop_with_empty_axes", inputs=2)),
    **dict.fromkeys(("Max", "Mean", "Min", "Sum"), row(inputs=MANY)),
    "AffineGrid": row("align_corners", inputs=2),
    "ArgMax": row("axis", "keepdims", "select_last_index"),
    "ArgMin": row("axis", "keepdims", "select_last_index"),
    "AveragePool": row(*_POOL, "count_include_pad"),
    "BatchNormalization": row("epsilon", "momentum", inputs=5),
    "BitCast": row("to", condition=of_whole_bytes),
    "BitShift": row("direction", inputs=2),
    "Cast": row("to"),
    "CastLike": row(inputs=2),
    "Clip": row(inputs=3),
    "Compress": row("axis", inputs=2),
    "Concat": row("axis", inputs=MANY),
    "ConcatFromSequence": row("axis", "new_axis"),
    "Constant": row("value", "value_float", "value_floats", "value_int", "value_ints", inputs=0),
    "ConstantOfShape": row("value"),
    "Conv": row(*CONVOLUTION, inputs=3),
    "ConvInteger": row(*CONVOLUTION, inputs=4),
    "ConvTranspose": row(
        *CONVOLUTION, "output_padding", inputs=3, hint="An output_shape is read where dims fix the sizes of what comes."
    ),
    "CumProd": row("exclusive", "reverse", inputs=2),
    "CumSum": row("exclusive", "reverse", inputs=2),
    "DFT": row("inverse", "onesided", inputs=3),
    "DepthToSpace": row("blocksize", "mode"),
    "DequantizeLinear": row("axis", "block_size", "output_dtype", inputs=3, condition=dequantised),
    "Dropout": row("seed", inputs=3, outputs=2, condition=not_in_training, hint="Export the model in eval mode."),
    "DynamicQuantizeLinear": row(outputs=3),
    "Einsum": row("equation", inputs=MANY),
    "Elu": row("alpha"),
    "EyeLike": row("dtype", "k"),
    "Flatten": row("axis"),
    "GRU": row(*_RECURRENT, "linear_before_reset", inputs=6, outputs=2, condition=not_of_doubles),
    "Gather": row("axis", inputs=2),
    "GatherElements": row("axis", inputs=2),
    "GatherND": row("batch_dims", inputs=2),
    "Gelu": row("approximate"),
    "Gemm": row("alpha", "beta", "transA", "transB", inputs=3),
    "GlobalLpPool": row("p"),
    "GridSample": row("align_corners", "mode", "padding_mode", inputs=2),
    "GroupNormalization": row("epsilon", "num_groups", inputs=3),
    "HardSigmoid": row("alpha", "beta"),
    "Hardmax": row("axis"),
    "If": row("else_branch", "then_branch", outputs=MANY),
    "InstanceNormalization": row("epsilon", inputs=3),
    "IsInf": row("detect_negative", "detect_positive"),
    "LRN": row("alpha", "beta", "bias", "size"),
    "LSTM": row(*_RECURRENT, "input_forget", inputs=8, outputs=3, condition=not_of_doubles),
    "LayerNormalization": row("axis", "epsilon", inputs=3, dtypes=_NOT_DOUBLE),
    "LeakyRelu": row("alpha"),
    "LogSoftmax": row("axis"),
    "LpNormalization": row("axis", "p"),
    "LpPool": row(*_POOL, "p", ceil_mode=(0,)),
    "MatMul": row(inputs=2, condition=some_numbers),
    "MatMulInteger": row(inputs=4),
    "MaxPool": row(*_POOL, "storage_order", outputs=2),
    "MaxRoiPool": row("pooled_shape", "spatial_scale", inputs=2),
    "MaxUnpool": row("kernel_shape", "pads", "strides", inputs=2),
    "MeanVarianceNormalization": row("axes"),
    "Mod": row("fmod", inputs=2),
    "OneHot": row("axis", inputs=3, constants=(1, 2)),
    "Pad": row("mode", inputs=4, constants=(2,), condition=no_wrap_inwards),
    "Pow": row(inputs=2),
    "QLinearConv": row(*CONVOLUTION, inputs=9, condition=convolved),
    "QLinearMatMul": row(inputs=8, dtypes=_QUANTISED, condition=finite_scales),
    "QuantizeLinear": row("axis", "output_dtype", inputs=3, condition=finite_scales),
    "RMSNormalization": row("axis", "epsilon", "stash_type", inputs=2, condition=an_axis_left),
    "RNN": row(*_RECURRENT, inputs=6, outputs=2, condition=not_of_doubles),
    "Range": row(inputs=3, constants=(0, 1, 2)),
    "Reshape": row("allowzero", inputs=2),
    "Resize": row(
        "cubic_coeff_a",
        "extrapolation_value",
        "mode",
        "nearest_mode",
        coordinate_transformation_mode=_COORDINATES,
        exclude_outside=(0,),
        inputs=4,
        constants=(1, 2),
        condition=resized_by_ratio,
    ),
    "ReduceMean": row("keepdims", "noop_with_empty_axes", inputs=2, condition=floating_mean),
    "STFT": row("onesided", inputs=4),
    "ScatterElements": row("axis", "reduction", inputs=3),
    "ScatterND": row("reduction", inputs=3),
    "Selu": row("alpha", "gamma"),
    "SequenceAt": row(inputs=2),
    "SequenceConstruct": row(inputs=MANY),
    "SequenceEmpty": row("dtype", inputs=0),
    "SequenceErase": row(inputs=2),
    "SequenceInsert": row(inputs=3),
    "SequenceLength": row(),
    "Shape": row("end", "start"),
    "Sign": row(dtypes=_SIGNED),
    "Shrink": row("bias", "lambd"),
    "Slice": row(inputs=5),
    "Softmax": row("axis"),
    "SpaceToDepth": row("blocksize"),
    "Split": row("axis", "num_outputs", inputs=2, outputs=MANY, condition=parts_of_some_length),
    "SplitToSequence": row("axis", "keepdims", inputs=2),
    "Squeeze": row(inputs=2),
    "ThresholdedRelu": row("alpha"),
    "TopK": row("axis", "largest", "sorted", inputs=2, outputs=2),
    "Transpose": row("perm"),
    "Trilu": row("upper", inputs=2),
    "Unique": row("axis", "sorted", outputs=4),
    "Unsqueeze": row(inputs=2),
    "Where": row(inputs=3),
}
