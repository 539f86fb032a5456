"""Sizes that a graph computes with, rather than reshapes to, as tensors.

TVM's importer keeps what Shape gives as the sizes themselves, which only the operators that make shapes can read.
"""

from __future__ import annotations

import onnx

from mhsa_compile.frontend.onnx_graph import branches

_MAKE_SHAPES = frozenset(
    ("Reshape", "ConstantOfShape", "Gather", "Slice", "Shape", "Expand", "Concat", "Equal", "Where", "Cast", "CastLike",
     "Squeeze")
)  # fmt: skip
_KEEP_SHAPES = {"Slice": slice(1), "Reshape": slice(1), "Concat": slice(None), "Where": slice(1, 3)}
"""Operators that give a shape where one of these inputs is one."""


_LIST = ("Reshape", "Unsqueeze")  # of one size
_COMPUTE = frozenset(("Add", "Sub", "Mul", "Div", "Max", "Min", "Cast"))


def sizes_as_tensors(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a Cast, which makes a tensor, between a list of sizes and whoever computes with it."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    _as_tensors(result.graph, set(), set())
    return result


def _as_tensors(graph: onnx.GraphProto, outside: set[str], sizes_outside: set[str]) -> None:
    """Puts such Casts into a graph. `outside`: the lists of sizes that it sees around it, and single ones."""
    shapes, sizes = set(outside), set(sizes_outside)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for branch in branches(node):
            _as_tensors(branch, shapes, sizes)
        kept = node.input[_KEEP_SHAPES.get(node.op_type, slice(0))]
        if node.op_type == "Shape" or shapes.intersection(kept) or (node.op_type in _LIST and node.input[0] in sizes):
            shapes.update(node.output)
        elif _is_one_size(node, shapes, sizes):
            sizes.update(node.output)
        elif node.op_type not in _MAKE_SHAPES:
            for i, name in enumerate(node.input):
                if name in shapes:
                    tensor = f"{name}/tensor/{graph.name}" if name in outside else f"{name}/tensor"
                    if not any(tensor in made.output for made in nodes):
                        nodes.append(onnx.helper.make_node("Cast", [name], [tensor], tensor, to=onnx.TensorProto.INT64))
                    node.input[i] = tensor
        nodes.append(node)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _is_one_size(node: onnx.NodeProto, shapes: set[str], sizes: set[str]) -> bool:
    """Whether a node gives one size: taken out of a list of one, or computed from others."""
    return (node.op_type == "Squeeze" and node.input[0] in shapes) or (
        node.op_type in _COMPUTE and bool(sizes.intersection(node.input))
    )
