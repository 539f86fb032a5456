"""ONNX -> ONNX: finds what our kernels compute and writes it as one node each, of the domain `mhsa`.

- A DFT or STFT becomes a MatMul with the matrix of its angles.
- A convolution over all channels becomes patches and a MatMul with a constant weight.
- A product between reshapes takes the rows as they lie; one whose result is cut into parts is one for each part.
- A MatMul with a constant weight, and the Add of its bias, become a linear; so does a Gemm, which has both. Linears of
  one input whose outputs only the nodes below read become one, side by side.
- A MatMulInteger with a constant weight, and what makes floats of its sums, become a linear of bytes likewise, and a
  MatMulNBits one of blocks.
- An Attention, a RotaryEmbedding (also one that is spelt out) or a TensorScatter takes its heads from where they
  lie: the Reshape and Transpose around its 4-D form disappear.
- What makes floats of a cache that is stored in another dtype goes into the attention, and what rounds rows on their
  way into it, into the scatter.
- The shape arithmetic that nobody needs any more disappears.

Everything else stays as it is. What an Attention asks for and no kernel here can do is refused with its reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import onnx
from onnx import numpy_helper

from mhsa_compile.frontend.branch_graphs import rewritten
from mhsa_compile.frontend.fusion import fourier
from mhsa_compile.frontend.fusion.attention_pattern import AttentionPattern
from mhsa_compile.frontend.fusion.block_pattern import find_block_linears
from mhsa_compile.frontend.fusion.convolutions import as_products
from mhsa_compile.frontend.fusion.decomposed_rotary_pattern import rotations
from mhsa_compile.frontend.fusion.head_layout import NodePattern
from mhsa_compile.frontend.fusion.linear_pattern import find_linears, merge
from mhsa_compile.frontend.fusion.quantised_pattern import find_quantised_linears
from mhsa_compile.frontend.fusion.rotary_pattern import RotaryPattern
from mhsa_compile.frontend.fusion.row_products import as_row_products
from mhsa_compile.frontend.fusion.scatter_pattern import ScatterPattern, in_place
from mhsa_compile.frontend.fusion.stored_rows import QuantizeRowsPattern
from mhsa_compile.frontend.onnx_graph import (
    GraphView,
    add_import,
    branches,
    constant_value,
    in_order,
    live_nodes,
    replace,
)
from mhsa_compile.nn.row_operators import QUANTIZE
from mhsa_compile.spec.attention_spec import DOMAIN

SITES: dict[str, Callable[[GraphView, onnx.NodeProto], NodePattern]] = {
    "Attention": AttentionPattern,
    "RotaryEmbedding": RotaryPattern,
    "TensorScatter": ScatterPattern,
    QUANTIZE: QuantizeRowsPattern,
}


def fuse(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its projections and attentions as single nodes, in branches, too. Raises ModelError."""
    model = as_row_products(as_products(fourier.as_products(model)))
    graph = GraphView(model)
    in_place(graph)  # what the metadata say is checked also where no TensorScatter would ask
    standard = [node for node in graph.nodes if node.op_type in SITES and node.domain in ("", "ai.onnx", DOMAIN)]
    place = {id(node): i for i, node in enumerate(graph.nodes)}
    sites: list[NodePattern] = [*(SITES[node.op_type](graph, node) for node in standard), *rotations(graph)]
    sites.sort(key=lambda site: place[id(site.node)])
    linears = find_linears(graph) | find_quantised_linears(graph) | find_block_linears(graph)
    merge(graph, linears, sites)
    fused: dict[int, onnx.NodeProto | None] = {}
    placed = set()
    for linear in linears.values():
        fused |= dict.fromkeys(map(id, linear.nodes))
        if linear.leader.output not in placed:  # where the first of a group stood: before whoever reads any of them
            placed.add(linear.leader.output)
            fused[id(linear.nodes[0])] = linear.leader.node()
    for site in sites:
        fused |= dict.fromkeys(map(id, site.absorbed))
        fused[id(site.node)] = site.fused_node()
    nodes = in_order(node for node in (fused.get(id(node), node) for node in graph.nodes) if node is not None)
    result = copy.deepcopy(model)
    replace(result.graph.node, live_nodes(nodes, graph.outputs))
    _make_constants_plain(result.graph)
    add_import(result, DOMAIN)
    return rewritten(result, fuse, graph)


def _make_constants_plain(graph: onnx.GraphProto) -> None:
    """Writes every Constant as a tensor, the one form that TVM's importer reads, in branches, too."""
    for node in graph.node:
        for branch in branches(node):
            _make_constants_plain(branch)
        value = constant_value(node) if node.op_type == "Constant" else None
        if value is not None:
            replace(node.attribute, [onnx.helper.make_attribute("value", numpy_helper.from_array(value))])
