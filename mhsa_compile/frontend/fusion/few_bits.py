"""ONNX -> ONNX: products with constant weights get weights of few bits, as MatMulNBits of ONNX Runtime has them."""

from __future__ import annotations

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.fusion.linear_pattern import Linear, find_linears
from mhsa_compile.frontend.onnx_graph import GraphView, add_import
from mhsa_compile.frontend.reading import microsoft
from mhsa_compile.nn.weight_blocks import in_blocks
from mhsa_compile.spec.weight_words import BlockForm


def with_block_weights(model: onnx.ModelProto, form: BlockForm) -> onnx.ModelProto:
    """The model with few bits in the place of each weight matrix that only products read as it is.

    Raises ModelError for a model without one, and for weights that are not finite.
    """
    rewriter, stored = Rewriter(model), dict[tuple[str, bool], list[str]]()
    level = microsoft.BYTES_LEVEL if form.rounds_x else 0
    graph = rewriter.graph
    linears = [linear for linear in find_linears(graph).values() if linear.weight in graph.initializers]
    if not linears:
        raise ModelError("weights", f"a model with a linear for {form.bits} bits by blocks", "one without")
    for linear in linears:
        place = linear.weight, linear.transposed
        if place not in stored:
            stored[place] = _stored(rewriter, graph, linear, form)
        numbers, scales, *zeros = stored[place]
        inputs = [linear.x, numbers, scales, *(zeros or [""] * (linear.bias is not None))]
        inputs += ["", linear.bias] if linear.bias is not None else []
        (K, N) = _sizes(graph, linear)
        words = {"K": K, "N": N, "bits": form.bits, "block_size": form.block, "accuracy_level": level}
        name = linear.nodes[0].name or linear.output
        node = helper.make_node("MatMulNBits", inputs, [linear.output], name=name, domain=microsoft.DOMAIN, **words)
        if (shape := graph.shape(linear.output)) is not None:  # nobody infers shapes through an operator of Microsoft's
            rewriter.hint(linear.output, shape)
        rewriter.append(node)
        rewriter.place(linear.nodes[-1])
    result = rewriter.finished()
    add_import(result, microsoft.DOMAIN)
    return result


def _sizes(graph: GraphView, linear: Linear) -> tuple[int, int]:
    """(K, N)"""
    shape = graph.initializers[linear.weight].dims
    return (shape[0], shape[1]) if linear.transposed else (shape[1], shape[0])


def _stored(rewriter: Rewriter, graph: GraphView, linear: Linear, form: BlockForm) -> list[str]:
    """The names of the numbers, scales and zeros of a weight, which are made."""
    array = numpy_helper.to_array(graph.initializers[linear.weight])
    wide = torch.from_numpy(np.ascontiguousarray(array.T if linear.transposed else array).astype(np.float32))
    if not bool(torch.isfinite(wide).all()):
        raise ModelError(
            f"weight {linear.weight!r}", f"finite numbers, for {form.bits} bits of each", "NaN or infinity"
        )
    names = []
    for name, values in in_blocks(wide, form).named(linear.weight).items():
        stored = values.numpy() if values.dtype == torch.uint8 else values.numpy().astype(array.dtype)
        names.append(rewriter.constant(stored, hint=name))
    return names
