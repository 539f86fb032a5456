"""Where the heads of a tensor lie: in it, or in the rows from which a Reshape and a Transpose split them; and the nodes
that read them so.

Notation: B batch, L length, H heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import onnx

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.onnx_graph import GraphDim, GraphView, attributes, node_error
from mhsa_compile.kernels.interface.ops import HeadLayout


@dataclass
class Operand:
    """`heads` heads of `head_dim`, in tensor `source`, laid out as "rows" or as "heads"."""

    source: str
    layout: Literal["rows", "heads"]
    heads: int
    head_dim: int
    offset: int = 0
    width: int = 0

    def as_input(self, number: int) -> HeadLayout:
        """The layout of the heads, for a node whose input of this number is `source`."""
        return HeadLayout(number, self.layout, self.width, self.offset)


class NodePattern:
    """A node of the graph that becomes one of ours, checked, with the views around it. Raises ModelError.

    `operands` are what it reads by heads, in place; `fusion` moves them into the rows of a fused projection.
    """

    operands: Sequence[Operand]

    def __init__(self, graph: GraphView, node: onnx.NodeProto) -> None:
        self.graph, self.node, self.attributes = graph, node, attributes(node)
        self.absorbed: list[onnx.NodeProto] = []

    def fused_node(self) -> onnx.NodeProto:
        raise NotImplementedError

    def refusal(self, expected: str, got: object, next_step: str = "") -> ModelError:
        return node_error(self.node, expected, str(got), next_step)

    def ranked(self, name: str, role: str, *ranks: int) -> tuple[GraphDim, ...]:
        """The dims of a value, of one of these ranks."""
        shape = self.graph.shape(name)
        if shape is None or len(shape) not in ranks:
            raise self.refusal(f"{role} of known rank {' or '.join(map(str, ranks))}", shape)
        return shape

    def split_rows(self, name: str) -> Operand | None:
        """`split_rows` of an operand, whose views the node absorbs."""
        split = split_rows(self.graph, name, [self.node])
        self.absorbed += split[1] if split is not None else []
        return None if split is None else split[0]

    def spoken(self, name: str, role: str) -> str:
        """What to call an operand before somebody who calls the model, who knows its inputs by name."""
        if name in self.graph.inputs:
            return f"input {name!r}"
        return f"{role} of {self.node.op_type} node {self.node.name or self.node.output[0]!r}"


def split_rows(
    graph: GraphView, name: str, readers: Sequence[onnx.NodeProto]
) -> tuple[Operand, list[onnx.NodeProto]] | None:
    """What lies before the Reshape and the Transpose that make `name`, (B, H, L, E), of rows (B, L, H * E).

    With it the nodes among the two that nobody needs but `readers`. None where `name` is made otherwise.
    """
    shape = graph.dims(name)
    transpose = graph.producer(name, "Transpose")
    split = None if transpose is None else graph.producer(transpose.input[0], "Reshape")
    if len(shape) != 4 or transpose is None or split is None or attributes(transpose).get("perm") != [0, 2, 1, 3]:
        return None
    heads, head_dim, rows = shape[1], shape[3], graph.dims(split.input[0])
    if not isinstance(heads, int) or not isinstance(head_dim, int) or len(rows) != 3 or not keeps_rows(graph, split):
        return None
    if rows[2] != heads * head_dim:
        return None
    views = needed_by(graph, [transpose, split], readers)
    return Operand(split.input[0], "rows", heads, head_dim, width=heads * head_dim), views


def needed_by(
    graph: GraphView, nodes: Sequence[onnx.NodeProto], readers: Sequence[onnx.NodeProto]
) -> list[onnx.NodeProto]:
    """The nodes, of `nodes`, each behind all that read it, that nobody needs but `readers`, or what only these need."""
    going, unneeded = {id(reader) for reader in readers}, []
    for node in nodes:
        outside = [n for n in node.output if n in graph.outputs or any(id(r) not in going for r in graph.consumers(n))]
        if not outside:
            going.add(id(node))
            unneeded.append(node)
    return unneeded


def keeps_rows(graph: GraphView, reshape: onnx.NodeProto) -> bool:
    """Whether a Reshape leaves batch and length alone, so that only the heads are split or joined.

    One that cuts the rows into windows looks the same but for these two axes.
    """
    shape = graph.constant(reshape.input[1])
    if shape is not None and list(shape[:2]) == [0, 0] and not attributes(reshape).get("allowzero"):
        return True
    before, after = (graph.dims(name) for name in (reshape.input[0], reshape.output[0]))
    return None not in before[:2] and before[:2] == after[:2] != ()


def contradict(shape: Sequence[GraphDim], other: Sequence[GraphDim]) -> bool:
    """Whether two shapes of one rank differ in an axis that both have fixed."""
    pairs = zip(shape, other, strict=True)
    return any(isinstance(one, int) and isinstance(two, int) and one != two for one, two in pairs)
