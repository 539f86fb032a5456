"""ONNX -> ONNX: finds what our kernels compute and writes it as one node each, of the domain `mhsa`.

- A MatMul with a constant weight, and the Add of its bias, become a linear; so does a Gemm, which has both. Linears of
  one input whose outputs only the nodes below read become one, side by side.
- An Attention, a RotaryEmbedding (also one that is spelt out) or a TensorScatter takes its heads from where they lie:
  the Reshape and Transpose around its 4-D form disappear.
- The shape arithmetic that nobody needs any more disappears.

Everything else stays as it is. What an Attention asks for and no kernel here can do is refused with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import numpy_helper

from mhsa_compile.attention_site import AttentionSite
from mhsa_compile.head_views import Site
from mhsa_compile.kernels.base import CACHE_LINE
from mhsa_compile.onnx_graph import Graph, attributes, branches, constant_value, live_nodes
from mhsa_compile.rotary_site import RotarySite
from mhsa_compile.rotated_site import rotations
from mhsa_compile.scatter_site import ScatterSite, in_place
from mhsa_compile.spec import DOMAIN
from mhsa_compile.spec_checks import DTYPES

LINEAR = "MhsaLinear"
SITES: dict[str, Callable[[Graph, onnx.NodeProto], Site]] = {
    "Attention": AttentionSite,
    "RotaryEmbedding": RotarySite,
    "TensorScatter": ScatterSite,
}


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


def fuse(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its projections and attentions as single nodes. Raises ModelError."""
    graph = Graph(model)
    in_place(graph)  # what the metadata say is checked also where no TensorScatter would ask
    standard = [node for node in graph.nodes if node.op_type in SITES and node.domain in ("", "ai.onnx", DOMAIN)]
    place = {id(node): i for i, node in enumerate(graph.nodes)}
    sites: list[Site] = [*(SITES[node.op_type](graph, node) for node in standard), *rotations(graph)]
    sites.sort(key=lambda site: place[id(site.node)])
    linears = _find_linears(graph)
    _merge(graph, linears, sites)
    fused: dict[int, onnx.NodeProto | None] = {}
    placed = set()
    for linear in linears.values():
        fused |= dict.fromkeys(map(id, linear.nodes))
        if linear.leader.output not in placed:  # where the first of a group stood: before whoever reads any of them
            placed.add(linear.leader.output)
            fused[id(linear.nodes[0])] = _linear_node(linear.leader)
    for site in sites:
        fused |= dict.fromkeys(map(id, site.absorbed))
        fused[id(site.node)] = site.fused_node()
    nodes = [fused.get(id(node), node) for node in graph.nodes]
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    result.graph.node.extend(live_nodes((node for node in nodes if node is not None), graph.outputs))
    _make_constants_plain(result.graph)
    result.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    return result


def _make_constants_plain(graph: onnx.GraphProto) -> None:
    """Writes every Constant as a tensor, the one form that TVM's importer reads, in branches, too."""
    for node in graph.node:
        for branch in branches(node):
            _make_constants_plain(branch)
        value = constant_value(node) if node.op_type == "Constant" else None
        if value is not None:
            del node.attribute[:]
            node.attribute.append(onnx.helper.make_attribute("value", numpy_helper.from_array(value)))


def _find_linears(graph: Graph) -> dict[str, Linear]:
    """Every projection with a constant weight, by the name of its output."""
    found = {}
    for node in graph.nodes:
        read = _FORMS.get(node.op_type)
        linear = read(graph, node) if read is not None else None
        if linear is not None:
            found[linear.output] = linear
    return found


def _matmul(graph: Graph, node: onnx.NodeProto) -> Linear | None:
    """MatMul(x, W) or MatMul(x, Transpose(W)) of a constant W, with the constant bias if one is added."""
    x, name = node.input
    transposed = True
    transpose = graph.producer(name, "Transpose")
    if transpose is not None and attributes(transpose).get("perm") == [1, 0]:
        name, transposed = transpose.input[0], False
    width = _width(graph, x, name, transposed)
    if width is None:
        return None
    linear = Linear(x, name, None, transposed, width, node.output[0], [node])
    add = graph.only_consumer(node.output[0], "Add")
    if add is not None:
        bias = next((i for i in add.input if graph.is_weight(i) and graph.shape(i) == (width,)), None)
        if bias is not None:
            linear.bias, linear.output = bias, add.output[0]
            linear.nodes.append(add)
    return linear


def _gemm(graph: Graph, node: onnx.NodeProto) -> Linear | None:
    """x W + b of a constant W and b, neither scaled; x (rows, K)."""
    stated = attributes(node)
    if stated.get("transA", 0) or stated.get("alpha", 1.0) != 1 or stated.get("beta", 1.0) != 1:
        return None
    x, weight, *rest = node.input
    transposed = not stated.get("transB", 0)
    width = _width(graph, x, weight, transposed)
    bias = rest[0] if rest and rest[0] else None
    if width is None or (bias is not None and (not graph.is_weight(bias) or graph.shape(bias) != (width,))):
        return None
    return Linear(x, weight, bias, transposed, width, node.output[0], [node])


_FORMS = {"MatMul": _matmul, "Gemm": _gemm}


def _width(graph: Graph, x: str, weight: str, transposed: bool) -> int | None:
    """How many features a constant matrix makes of rows x; None where that is no product of ours."""
    shape = graph.shape(weight) if graph.is_weight(weight) else None
    if shape is None or len(shape) != 2 or len(graph.shape(x) or ()) < 2:
        return None
    if graph.dtype(x) not in DTYPES or graph.dtype(weight) != graph.dtype(x):
        return None
    return int(shape[1 if transposed else 0] or 0)


def _merge(graph: Graph, linears: dict[str, Linear], sites: list[Site]) -> None:
    """Lays the projections of one input side by side where only sites read them, and points these there."""
    leaders: dict[str, Linear] = {}
    for site in sites:
        for operand in site.operands:
            linear = linears.get(operand.source)
            readers = {id(node) for node in graph.consumers(operand.source)}
            if linear is None or operand.layout != "rows" or operand.source in graph.outputs:
                continue
            if linear.group or linear.shared or not readers <= {id(node) for node in (*site.absorbed, site.node)}:
                continue
            leader = leaders.setdefault(linear.x, linear)
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


def _linear_node(linear: Linear) -> onnx.NodeProto:
    members = linear.group or [linear]
    inputs = [linear.x, *(m.weight for m in members), *(m.bias for m in members if m.bias is not None)]
    return onnx.helper.make_node(
        LINEAR,
        inputs,
        [linear.output],
        name=linear.nodes[0].name,
        domain=DOMAIN,
        widths=[m.width for m in members],
        biased=[int(m.bias is not None) for m in members],
        transposed=[int(m.transposed) for m in members],
        padding=linear.padding or 0,
    )
