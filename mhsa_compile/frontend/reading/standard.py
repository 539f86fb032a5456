"""What is understood of ONNX's own operators, as the graph states them when TVM's importer gets it.

Rows are of the opsets from `canonicalize.passes.opset.LEAST` to LAST: older files are raised first, and of a newer
opset an operator that has changed since is refused. A row is added with the converter that gives it its meaning: one
of TVM's that reads everything the row says, or ours (`frontend.relax.op_converters`): the importer converts what has a
row, and nothing else. An attribute that a converter does not read stands in no row, so that it may only say its
default; of one that it reads for some values alone, the row says which. What depends on dtypes or dims is a condition
(`conditions`). An operator that a pass consumes before the importer (Attention, RotaryEmbedding) has no row: that pass
refuses what it does not read.
"""

from __future__ import annotations

from mhsa_compile.frontend.reading import conditions
from mhsa_compile.frontend.reading.row import MANY, Row, row

LAST = 28
"""The last opset whose operators these rows were written for."""

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
_CONVOLUTION = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")

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
    "BitCast": row("to", condition=conditions.of_whole_bytes),
    "BitShift": row("direction", inputs=2),
    "Cast": row("to"),
    "CastLike": row(inputs=2),
    "Clip": row(inputs=3),
    "Compress": row("axis", inputs=2),
    "Concat": row("axis", inputs=MANY),
    "ConcatFromSequence": row("axis", "new_axis"),
    "Constant": row("value", "value_float", "value_floats", "value_int", "value_ints", inputs=0),
    "ConstantOfShape": row("value"),
    "Conv": row(*_CONVOLUTION, inputs=3),
    "ConvInteger": row(*_CONVOLUTION, inputs=4),
    "ConvTranspose": row(*_CONVOLUTION, "output_padding", inputs=3),
    "CumProd": row("exclusive", "reverse", inputs=2),
    "CumSum": row("exclusive", "reverse", inputs=2),
    "DFT": row("inverse", "onesided", inputs=3),
    "DepthToSpace": row("blocksize", "mode"),
    "DequantizeLinear": row("axis", "block_size", "output_dtype", inputs=3, condition=conditions.dequantised),
    "Dropout": row(
        "seed", inputs=3, outputs=2, condition=conditions.not_in_training, hint="Export the model in eval mode."
    ),
    "DynamicQuantizeLinear": row(outputs=3),
    "Einsum": row("equation", inputs=MANY),
    "Elu": row("alpha"),
    "EyeLike": row("dtype", "k"),
    "Flatten": row("axis"),
    "GRU": row(*_RECURRENT, "linear_before_reset", inputs=6, outputs=2, condition=conditions.not_of_doubles),
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
    "LSTM": row(*_RECURRENT, "input_forget", inputs=8, outputs=3, condition=conditions.not_of_doubles),
    "LayerNormalization": row("axis", "epsilon", inputs=3, dtypes=_NOT_DOUBLE),
    "LeakyRelu": row("alpha"),
    "LogSoftmax": row("axis"),
    "LpNormalization": row("axis", "p"),
    "LpPool": row(*_POOL, "p", ceil_mode=(0,)),
    "MatMul": row(inputs=2, condition=conditions.some_numbers),
    "MatMulInteger": row(inputs=4),
    "MaxPool": row(*_POOL, "storage_order", outputs=2),
    "MaxRoiPool": row("pooled_shape", "spatial_scale", inputs=2),
    "MaxUnpool": row("kernel_shape", "pads", "strides", inputs=2),
    "MeanVarianceNormalization": row("axes"),
    "Mod": row("fmod", inputs=2),
    "OneHot": row("axis", inputs=3, constants=(1, 2)),
    "Pad": row("mode", inputs=4, constants=(2,), condition=conditions.no_wrap_inwards),
    "Pow": row(inputs=2),
    "QLinearConv": row(*_CONVOLUTION, inputs=9, condition=conditions.finite_scales),
    "QLinearMatMul": row(inputs=8, dtypes=_QUANTISED, condition=conditions.finite_scales),
    "QuantizeLinear": row("axis", "output_dtype", inputs=3, condition=conditions.finite_scales),
    "RMSNormalization": row("axis", "epsilon", "stash_type", inputs=2, condition=conditions.an_axis_left),
    "RNN": row(*_RECURRENT, inputs=6, outputs=2, condition=conditions.not_of_doubles),
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
        condition=conditions.resized_by_ratio,
    ),
    "ReduceMean": row("keepdims", "noop_with_empty_axes", inputs=2, condition=conditions.floating_mean),
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
    "Split": row("axis", "num_outputs", inputs=2, outputs=MANY, condition=conditions.parts_of_some_length),
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
