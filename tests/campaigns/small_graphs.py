"""Small graphs, an operator that quantisers know behind a product or a convolution of constant weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser
from onnx.shape_inference import infer_shapes

from campaigns.exported_models import Feeds

ROWS = {
    "Add": "y = Add (h, x)",
    "Add of a constant": "y = Add (h, b)",
    "Mul": "y = Mul (h, x)",
    "Mul of a constant": "y = Mul (h, b)",
    "Relu": "y = Relu (h)",
    "Clip": "a = Constant <value_float = 0.> ()  z = Constant <value_float = 6.> ()  y = Clip (h, a, z)",
    "LeakyRelu": "y = LeakyRelu <alpha = 0.1> (h)",
    "Sigmoid": "y = Sigmoid (h)",
    "SiLU": "s = Sigmoid (h)  y = Mul (h, s)",
    "GELU": "r = Constant <value_float = 0.70710678> ()  o = Constant <value_float = 1.> ()"
    "  q = Mul (h, r)  e = Erf (q)  f = Add (e, o)  y = Mul (h, f)",
    "Tanh": "y = Tanh (h)",
    "Softmax": "y = Softmax (h)",
    "Softmax along L": "y = Softmax <axis = 1> (h)",
    "LayerNormalization": "y = LayerNormalization (h, b, b)",
    "InstanceNormalization": "t = Transpose <perm = [0, 2, 1]> (h)  y = InstanceNormalization (t, b, b)",
    "BatchNormalization": "t = Transpose <perm = [0, 2, 1]> (h)  y = BatchNormalization (t, b, b, b, p)",
    "Where": "r = Greater (x, h)  y = Where (r, h, x)",
    "Concat": "y = Concat <axis = 1> (h, x)",
    "Split": "u, v = Split <axis = 2, num_outputs = 2> (h)  y = Mul (u, v)",
    "Pad": "n = Constant <value_ints = [0, 1, 0, 0, 2, 3]> ()  y = Pad (h, n)",
    "Pad at edges": 'n = Constant <value_ints = [0, 1, 0, 0, 2, 3]> ()  y = Pad <mode = "edge"> (h, n)',
    "Reshape": "n = Constant <value_ints = [0, 0, 4, 8]> ()  g = Reshape (h, n)  y = Relu (g)",
    "Transpose": "t = Transpose <perm = [0, 2, 1]> (h)  y = MatMul (h, t)",
    "Unsqueeze": "n = Constant <value_ints = [1]> ()  g = Unsqueeze (h, n)  r = Squeeze (g, n)  y = MatMul (r, w)",
    "Flatten": "g = Flatten <axis = 2> (h)  y = Gemm (g, w, b)",
    "Slice": "a = Constant <value_ints = [2]> ()  z = Constant <value_ints = [30]> ()  y = Slice (h, a, z, a)",
    "Gather": "n = Constant <value_ints = [3, 0, -1]> ()  y = Gather <axis = 2> (h, n)",
    "Gather of a table": "c = ArgMax <axis = 2, keepdims = 0> (x)  g = Gather (w, c)  y = Add (g, h)",
    "GatherElements": "f = Abs (x)  i = Cast <to = 7> (f)  y = GatherElements <axis = 2> (h, i)",
    "ArgMax": "y = ArgMax <axis = 2, keepdims = 0> (h)",
    "TopK": "n = Constant <value_ints = [3]> ()  y, i = TopK (h, n)",
    "CumSum": "n = Constant <value_int = 1> ()  y = CumSum (h, n)",
    "ReduceMean": "n = Constant <value_ints = [1]> ()  y = ReduceMean <keepdims = 0> (h, n)",
    "activations": "t = Transpose <perm = [0, 2, 1]> (x)  s = MatMul (h, t)  p = Softmax (s)  y = MatMul (p, x)",
    "MatMul, weights first": "t = Transpose <perm = [0, 2, 1]> (h)  y = MatMul (w, t)",
    "LSTM": "t = Transpose <perm = [1, 0, 2]> (h)  y, a, z = LSTM <hidden_size = 8> (t, l, m)",
    "Pow": "n = Constant <value_float = 2.> ()  q = Pow (h, n)  y = Sqrt (q)",
    "an output twice": "y = Relu (h)  u = MatMul (h, w)",
}
"""x (B, L, 32), h = x w."""

PICTURES = {
    "Conv": "y = Conv <pads = [1, 1, 1, 1]> (h, k, c)",
    "Conv, strides": "g = Conv <strides = [2, 2]> (h, k)  y = Relu (g)",
    "Conv, groups": "y = Conv <group = 2, pads = [1, 1, 1, 1]> (h, d, c)",
    "Conv, depthwise": "y = Conv <group = 8, pads = [1, 1, 1, 1]> (h, e, c)",
    "Conv of its sum": "g = Conv <pads = [1, 1, 1, 1]> (h, k, c)  s = Add (g, h)  y = Relu (s)",
    "Conv, dilated": "y = Conv <dilations = [2, 2], pads = [2, 2, 2, 2]> (h, k)",
    "ConvTranspose": "y = ConvTranspose <strides = [2, 2]> (h, k)",
    "MaxPool": "y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (h)",
    "AveragePool": "y = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (h)",
    "GlobalAveragePool": "g = GlobalAveragePool (h)  f = Flatten (g)  y = Gemm <transB = 1> (f, v)",
    "Resize": "s = Constant <value_floats = [1., 1., 2., 2.]> ()"
    '  y = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"> (h, , s)',
    "BatchNormalization of a Conv": "g = Conv <pads = [1, 1, 1, 1]> (h, k)  y = BatchNormalization (g, c, c, c, q)",
    "HardSwish": "y = HardSwish (h)",
}
"""x (B, 8, 12, N), h = Conv (x, k) of the same sizes."""

_WEIGHTS = {
    "w": (32, 32), "b": (32,), "l": (1, 32, 32), "m": (1, 32, 8), "v": (8, 8), "c": (8,),
    "k": (8, 8, 3, 3), "d": (8, 4, 3, 3), "e": (8, 1, 3, 3),
}  # fmt: skip


def write(name: str, path: Path, opset: int) -> None:
    """The graph as a file; its dims are B, and L or N."""
    picture = name in PICTURES
    first = "h = Conv <pads = [1, 1, 1, 1]> (x, k, c)" if picture else "h = MatMul (x, w)"
    body = f"{first}  {PICTURES[name] if picture else ROWS[name]}"
    kind = "int64" if name == "ArgMax" else "float"
    more = ", float u" if name == "an output twice" else ""
    dims = "B, 8, 12, N" if picture else "B, L, 32"
    model = parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : {opset}]> g (float[{dims}] x) => ({kind} y{more}) {{ {body} }}'
    )
    rng = np.random.default_rng(0)
    weights = {key: rng.standard_normal(dims).astype(np.float32) / 4 for key, dims in _WEIGHTS.items()}
    weights |= {key: rng.random(size).astype(np.float32) + 0.5 for key, size in (("p", 32), ("q", 8))}
    read = {value for node in model.graph.node for value in node.input}
    read -= {value for node in model.graph.node for value in node.output}
    model.graph.initializer.extend(numpy_helper.from_array(weights[key], key) for key in sorted(read & weights.keys()))
    for i, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{i}"
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    for output, shaped in zip(model.graph.output, infer_shapes(model).graph.output, strict=True):
        dims = [dim.dim_value or f"{output.name}_{i}" for i, dim in enumerate(shaped.type.tensor_type.shape.dim)]
        output.CopyFrom(helper.make_tensor_value_info(output.name, output.type.tensor_type.elem_type, dims))
    onnx.checker.check_model(model)
    onnx.save(model, path)


def feeds(name: str, rng: np.random.Generator, batch: int, length: int) -> Feeds:
    dims = (batch, 8, 12, length + 3) if name in PICTURES else (batch, length, 32)
    return {"x": rng.standard_normal(dims).astype(np.float32)}
