"""ONNX -> ONNX: MatMulNBits whose columns belong to blocks in another order (`g_idx`, GPTQ's act-order) become those of
columns in order, and the columns of x are taken in that order.

    y = x W^T,  W[:, k] = (q[:, k] - z[:, g[k]]) s[:, g[k]]   ->   x[..., order] W[:, order]^T,  order = g's stable sort

So the numbers keep their few bits. Notation: N out-features, K in-features, n blocks of b.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from mhsa_compile.frontend import branch_graphs
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.onnx_graph import attributes, inner_nodes
from mhsa_compile.frontend.reading import microsoft

_GROUPS = 4  # the place of g_idx among the inputs


def rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with such products in order; itself where it has none."""
    inner = (inner for node in model.graph.node for inner in inner_nodes(node))
    if any(_has_groups(node) for node in inner):
        model = branch_graphs.rewritten(model, rewrite)
    rewriter, orders = Rewriter(model), dict[tuple[str, bytes], str]()
    for node in model.graph.node:
        if _has_groups(node):
            _in_order(rewriter, node, orders)
            rewriter.place(node)
    return rewriter.finished()


def _has_groups(node: onnx.NodeProto) -> bool:
    own = node.domain == microsoft.DOMAIN and node.op_type == "MatMulNBits"
    return own and len(node.input) > _GROUPS and bool(node.input[_GROUPS])


def _in_order(rewriter: Rewriter, node: onnx.NodeProto, orders: dict[tuple[str, bytes], str]) -> None:
    """`orders`: x and an order -> x in that order, which several products read."""
    graph, words, inputs = rewriter.graph, attributes(node), list(node.input)
    x, packed, groups = inputs[0], inputs[1], microsoft.groups_of(graph, node)
    N, K, block = words["N"], words["K"], words["block_size"]
    order = np.argsort(groups, kind="stable")
    inputs[_GROUPS] = ""
    if (order != np.arange(K)).any():
        place = x, order.tobytes()
        if place not in orders:
            orders[place] = rewriter.node("Gather", x, rewriter.constant(order, "int64"), axis=-1)
        numbers = numpy_helper.to_array(graph.initializers[packed]).reshape(N, -1)
        apart = np.stack([numbers & 15, numbers >> 4], -1).reshape(N, -1)
        apart[:, :K] = apart[:, order]
        pairs = apart.reshape(N, -1, block // 2, 2)
        inputs[0] = orders[place]
        inputs[1] = rewriter.constant(pairs[..., 0] | pairs[..., 1] << 4, hint=f"{packed}_in_order")
    while not inputs[-1]:
        inputs.pop()
    product = helper.make_node(node.op_type, inputs, node.output, name=node.name, domain=node.domain, **words)
    rewriter.append(product)
