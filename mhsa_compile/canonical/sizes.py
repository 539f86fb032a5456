"""Sizes that a graph computes with, rather than reshapes to, as tensors.

TVM's importer keeps what Shape gives as the sizes themselves, which only the operators that make shapes can read.
"""

from __future__ import annotations

import onnx

_MAKE_SHAPES = frozenset(
    ("Reshape", "ConstantOfShape", "Gather", "Slice", "Shape", "Expand", "Concat", "Equal", "Where", "Cast", "CastLike",
     "Squeeze")
)  # fmt: skip
_KEEP_SHAPES = {"Slice": slice(1), "Reshape": slice(1), "Concat": slice(None), "Where": slice(1, 3)}
"""Operators that give a shape where one of these inputs is one."""


def sizes_as_tensors(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a Cast, which makes a tensor, between a list of sizes and whoever computes with it."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    shapes: set[str] = set()
    nodes: list[onnx.NodeProto] = []
    for node in result.graph.node:
        kept = node.input[_KEEP_SHAPES.get(node.op_type, slice(0))]
        if node.op_type == "Shape" or shapes.intersection(kept):
            shapes.update(node.output)
        elif node.op_type not in _MAKE_SHAPES:
            for i, name in enumerate(node.input):
                if name in shapes:
                    tensor = f"{name}/tensor"
                    if not any(tensor in made.output for made in nodes):
                        nodes.append(onnx.helper.make_node("Cast", [name], [tensor], tensor, to=onnx.TensorProto.INT64))
                    node.input[i] = tensor
        nodes.append(node)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del result.graph.node[:]
    result.graph.node.extend(copies)
    return result
