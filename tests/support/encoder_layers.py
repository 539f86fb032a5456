"""An encoder's layer of float32 as exporters write it: attention in parts, GELU by Erf."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

N = helper.make_node
WIDE, HEADS, HIDDEN = 24, 3, 40


def encoder_layer(
    rng: np.random.Generator, dims: list[int | str], weight: float | None, bias: float
) -> onnx.ModelProto:
    """x -> y, both of `dims`. `weight` and `bias` are the deviations of these; None: of one over the inputs' number."""
    sizes = {**dict.fromkeys(("q", "k", "v", "out"), (WIDE, WIDE)), "up": (WIDE, HIDDEN), "down": (HIDDEN, WIDE)}
    spread = {name: weight or shape[0] ** -0.5 for name, shape in sizes.items()}
    arrays = {f"{name}_weight": rng.standard_normal(shape) * spread[name] for name, shape in sizes.items()}
    arrays |= {f"{name}_bias": rng.standard_normal(shape[1]) * bias for name, shape in sizes.items()}
    arrays |= {"root": np.array(2**0.5), "one": np.array(1.0), "half": np.array(0.5), "factor": np.array(8**-0.5)}
    tensors = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()]
    tensors += [numpy_helper.from_array(np.array([0, 0, HEADS, 8]), "split")]
    tensors += [numpy_helper.from_array(np.array([0, 0, WIDE]), "join")]

    def product(name: str, x: str) -> list[onnx.NodeProto]:
        return [
            N("MatMul", [x, f"{name}_weight"], [f"{name}_product"]),
            N("Add", [f"{name}_product", f"{name}_bias"], [name]),
        ]

    def head(name: str, *perm: int) -> list[onnx.NodeProto]:
        split = N("Reshape", [name, "split"], [f"{name}_split"])
        return [*product(name, "x"), split, N("Transpose", [f"{name}_split"], [f"{name}_heads"], perm=perm)]

    nodes = [
        *head("q", 0, 2, 1, 3), *head("k", 0, 2, 3, 1), *head("v", 0, 2, 1, 3),
        N("MatMul", ["q_heads", "k_heads"], ["scores"]), N("Mul", ["scores", "factor"], ["scaled"]),
        N("Softmax", ["scaled"], ["weights"], axis=-1), N("MatMul", ["weights", "v_heads"], ["heads"]),
        N("Transpose", ["heads"], ["rows"], perm=(0, 2, 1, 3)), N("Reshape", ["rows", "join"], ["joined"]),
        *product("out", "joined"), N("Add", ["x", "out"], ["middle"]), *product("up", "middle"),
        N("Div", ["up", "root"], ["part"]), N("Erf", ["part"], ["erf"]), N("Add", ["erf", "one"], ["shifted"]),
        N("Mul", ["up", "shifted"], ["twice"]), N("Mul", ["twice", "half"], ["gelu"]),
        *product("down", "gelu"), N("Add", ["middle", "down"], ["y"]),
    ]  # fmt: skip
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
