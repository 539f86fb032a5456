"""Sizes that a graph computes with, rather than reshapes to, as tensors.

TVM's importer keeps what Shape gives as the sizes themselves, which only the operators that make shapes can read.
"""

from __future__ import annotations

import onnx

_MAKE_SHAPES = frozenset(
    ("Reshape", "ConstantOfShape", "Gather", "Slice", "Shape", "Expand", "Concat", "Equal", "Where", "Cast", "CastLike",
     "Squeeze")
)  # fmt: skip
_KEEP_SHAPES = frozenset(("Slice", "Concat", "Reshape", "Where"))


def sizes_as_tensors(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a Cast, which makes a tensor, between a list of sizes and whoever computes with it."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    shapes: set[str] = set()
    nodes: list[onnx.NodeProto] = []
    for node in result.graph.node:
        if node.op_type == "Shape" or (node.op_type in _KEEP_SHAPES and shapes.intersection(node.input)):
            shapes.update(node.output)
        elif node.op_type not in _MAKE_SHAPES:
            for i, name in enumerate(node.input):
                if name in shapes:
                    tensor = f"{name}/tensor"
                    if not any(tensor in made.output for made in nodes):
                        nodes.append(onnx.helper.make_node("Cast", [name], [tensor], tensor, to=onnx.TensorProto.INT64))
                    node.input[i] = tensor
        nodes.append(node)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del result.graph.node[:]
    result.graph.node.extend(kept)
    return result
