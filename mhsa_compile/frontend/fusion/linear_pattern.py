"""A product with a constant weight, with its bias, as one linear; those of one input side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import onnx

from mhsa_compile.frontend.fusion.fused_nodes import FusedLinear
from mhsa_compile.frontend.fusion.head_layout import NodePattern
from mhsa_compile.frontend.onnx_graph import GraphView, attributes
from mhsa_compile.kernels.interface.kernel import CACHE_LINE
from mhsa_compile.spec.checks import DTYPES


@dataclass
class Linear:
    """One projection found in the graph: output = x W^T + b."""

    x: str
    weight: str
    bias: str | None
    transposed: bool  # the weight is stored (K, N)
    width: int
    output: str
    nodes: list[onnx.NodeProto]
    padding: int | None = None  # of a row of the output, once it is known
    shared: Linear | None = None  # the first of the group it was merged into
    group: list[Linear] = field(default_factory=list)

    @property
    def leader(self) -> Linear:
        return self.shared or self

    @property
    def source(self) -> tuple[str | None, ...]:
        """What linears have in common that may stand side by side."""
        return (self.x,)

    def node(self) -> onnx.NodeProto:
        """It and those that were merged into it, as one node."""
        members = self.group or [self]
        inputs = [self.x, *(m.weight for m in members), *(m.bias for m in members if m.bias is not None)]
        fused = FusedLinear(
            widths=tuple(m.width for m in members),
            biased=tuple(m.bias is not None for m in members),
            transposed=tuple(m.transposed for m in members),
            padding=self.padding or 0,
        )
        return fused.to_node(self.nodes[0], inputs, [self.output])


LinearT = TypeVar("LinearT", bound=Linear)


def find_linears(graph: GraphView) -> dict[str, Linear]:
    """Every projection with a constant weight, by the name of its output."""
    linears = {}
    for node in graph.nodes:
        read = _FORMS.get(node.op_type)
        linear = read(graph, node) if read is not None else None
        if linear is not None:
            linears[linear.output] = linear
    return linears


def _matmul(graph: GraphView, node: onnx.NodeProto) -> Linear | None:
    """MatMul(x, W) or MatMul(x, Transpose(W)) of a constant W, with the constant bias if one is added."""
    x, name = node.input
    transposed = True
    transpose = graph.producer(name, "Transpose")
    if transpose is not None and attributes(transpose).get("perm") == [1, 0]:
        name, transposed = transpose.input[0], False
    width = _width(graph, x, name, transposed)
    if width is None:
        return None
    return with_bias(graph, Linear(x, name, None, transposed, width, node.output[0], [node]), graph.dtype(x))


def with_bias(graph: GraphView, linear: LinearT, dtype: str | None) -> LinearT:
    """The linear with the bias of that dtype that is added to it, if one is."""
    add = graph.only_consumer(linear.output, "Add")
    if add is not None:
        bias = next((i for i in add.input if graph.is_weight(i) and graph.shape(i) == (linear.width,)), None)
        if bias is not None and graph.dtype(bias) == dtype:
            linear.bias, linear.output = bias, add.output[0]
            linear.nodes.append(add)
    return linear


def _gemm(graph: GraphView, node: onnx.NodeProto) -> Linear | None:
    """x W + b of a constant W and b, neither scaled; x (rows, K)."""
    values = attributes(node)
    if values.get("transA", 0) or values.get("alpha", 1.0) != 1 or values.get("beta", 1.0) != 1:
        return None
    x, weight, *rest = node.input
    transposed = not values.get("transB", 0)
    width = _width(graph, x, weight, transposed)
    bias = rest[0] if rest and rest[0] else None
    if width is None or (bias is not None and (not graph.is_weight(bias) or graph.shape(bias) != (width,))):
        return None
    return Linear(x, weight, bias, transposed, width, node.output[0], [node])


_FORMS = {"MatMul": _matmul, "Gemm": _gemm}


def _width(graph: GraphView, x: str, weight: str, transposed: bool) -> int | None:
    """How many features a constant matrix makes of rows x; None where that is no product of ours."""
    shape = graph.shape(weight) if is_matrix(graph, weight) else None
    if shape is None or len(shape) != 2 or not all(isinstance(size, int) for size in shape):
        return None
    if len(graph.dims(x)) < 2:
        return None
    if graph.dtype(x) not in DTYPES or graph.dtype(weight) != graph.dtype(x):
        return None
    return int(shape[1 if transposed else 0] or 0)


def is_matrix(graph: GraphView, name: str) -> bool:
    """Whether a value is a weight, or one with its axes in another order or joined, as that of a convolution, or some
    of its taps, as those of a transposed one."""
    node = graph.producer(name)
    if node is None or node.op_type not in ("Concat", "Flatten", "Gather", "Reshape", "Transpose"):
        return graph.is_weight(name)
    if node.op_type == "Concat":
        return all(is_matrix(graph, one) for one in node.input)
    is_known = node.op_type != "Gather" or graph.constant(node.input[1]) is not None
    return is_known and is_matrix(graph, node.input[0])


def merge(graph: GraphView, linears: dict[str, Linear], sites: list[NodePattern]) -> None:
    """Lays the projections of one input side by side where only sites read them, and points these there."""
    leaders: dict[tuple[str | None, ...], Linear] = {}
    for site in sites:
        for operand in site.operands:
            linear = linears.get(operand.source)
            readers = {id(node) for node in graph.consumers(operand.source)}
            if linear is None or operand.layout != "rows" or operand.source in graph.outputs:
                continue
            if linear.group or linear.shared or not readers <= {id(node) for node in (*site.absorbed, site.node)}:
                continue
            leader = leaders.setdefault(linear.source, linear)
            leader.group.append(linear)
            linear.shared = None if linear is leader else leader
    for site in sites:
        for operand in site.operands:
            linear = linears.get(operand.source)
            if linear is not None and linear.leader.group:
                group = linear.leader.group
                operand.offset = sum(member.width for member in group[: group.index(linear)])
                width = sum(member.width for member in group)
                if linear.leader.padding is None:
                    item = np.dtype(graph.dtype(linear.x)).itemsize
                    linear.leader.padding = _padding(operand.head_dim * item, width * item) // item
                operand.width = width + linear.leader.padding
                operand.source = linear.leader.output


def _padding(head: int, row: int) -> int:
    """The bytes that a row of `row` bytes lacks to spread the rows of one head, `head` bytes each, over a whole cache.

    A cache's sets go by line. Rows an even number of heads apart meet only some of the sets, and evict one another from
    a cache that is not full; an odd number meets them all.
    """
    step = max(CACHE_LINE, 1 << head.bit_length() - 1)
    steps = -(-row // step)
    return (steps + (steps % 2 == 0)) * step - row
