"""MatMul, scale, mask, Softmax, MatMul: attention as exporters before opset 23 write it, as the one operator.

From every Softmax back to the product of queries and keys (`scores`), forward to the product with the values, and
through what lies around both (`operands`, `masks`). What does not fit stays as it is, with the reason.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper

from mhsa_compile.frontend.canonicalize.decomposed import masks as mask_rewrite
from mhsa_compile.frontend.canonicalize.decomposed.operands import AttentionOperands, attention_operands
from mhsa_compile.frontend.canonicalize.decomposed.scores import (
    MatchedProbs,
    NotRecognised,
    is_attention,
    scores_before,
    weights_after,
)
from mhsa_compile.frontend.canonicalize.decomposed.softmax_input import softmax_input
from mhsa_compile.frontend.canonicalize.definitions import Definitions
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.onnx_graph import GraphDim, GraphView
from mhsa_compile.runtime.artifact.manifest import AttentionCoverage

FORM = "decomposed"
_WEIGHTS = 3  # the standard's qk_matmul_output_mode for what the softmax gives

_UNROUNDED = "its scores and weights stay floats, which the file rounds to bytes on their way"


def rewrite(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[AttentionCoverage]]:
    """The model with its decomposed attentions as Attention, and one entry for each, rewritten or not."""
    rewriter = Rewriter(model)
    definitions = Definitions(rewriter.graph)
    blocks = []
    for node in rewriter.graph.nodes:
        if node.op_type != "Softmax" or not is_attention(rewriter.graph, node):
            continue
        name = node.name or node.output[0]
        try:
            notes = _rewrite_one(rewriter, node, definitions)
            blocks.append(AttentionCoverage(name, FORM, True, "; ".join(notes)))
        except NotRecognised as reason:
            rewriter.drop()
            blocks.append(AttentionCoverage(name, FORM, False, str(reason)))
    result = rewriter.finished()
    definitions.put_into(result)
    return result, blocks


def _rewrite_one(rewriter: Rewriter, softmax: onnx.NodeProto, definitions: Definitions) -> list[str]:
    source = softmax_input(rewriter.graph, softmax)
    weights = weights_after(rewriter.graph, source.weights)
    product = weights.product
    scores = scores_before(rewriter.graph, source.scores)
    operands = attention_operands(rewriter, scores.product, product.input[1], scores.apart)
    last, output = _result(rewriter.graph, product, scores.apart)
    parts = [
        mask for mask in scores.masks if not source.is_standard or not mask_rewrite.shifts_all(rewriter.graph, mask)
    ]
    masks = mask_rewrite.collect(rewriter, parts, operands)
    scale = float(np.float32(scores.scale * operands.factor))
    if scale <= 0:
        raise NotRecognised(f"the scores are scaled by {scale:g}")
    attrs: dict[str, Any] = {"scale": scale, **scores.limit}
    if masks.causal:
        attrs["is_causal"] = 1
    mask = _broadcastable_mask(rewriter, masks, operands)
    inputs = [operands.query, operands.key, operands.value, *([mask] if mask else [])]
    inputs = source.node_inputs(rewriter, inputs, operands, weights.output)
    probs = _output_probs(rewriter.graph, weights, operands)
    if probs:
        attrs["qk_matmul_output_mode"] = _WEIGHTS
    results = [output, *([probs] if probs else [])]
    node_outputs = results if operands.rank == 4 else [rewriter.fresh(name) for name in results]
    outputs = [node_outputs[0], "", "", node_outputs[1]] if probs else node_outputs
    node = helper.make_node("Attention", inputs, outputs, **attrs)
    if not source.is_standard:
        definitions.define(node, bool_mask=bool(mask) and not masks.added)
    rewriter.append(node)
    if operands.rank == 3:
        axis = rewriter.constant([1], "int64")
        for name, result in zip(node_outputs, results, strict=True):
            rewriter.node("Squeeze", name, axis, output=result)
    rewriter.place(last, attention=softmax.name or softmax.output[0])
    if probs and (maker := rewriter.graph.producer(probs)) is not None:
        rewriter.remove(maker)
    if scores.rounded or weights.rounded:
        masks.notes.append(_UNROUNDED)
    return masks.notes


def _result(graph: GraphView, product: onnx.NodeProto, apart: tuple[GraphDim, ...]) -> tuple[onnx.NodeProto, str]:
    """(the node that gives what the operator gives, its output): the product, or its Reshape to (B, H, L, F)."""
    rank = len(graph.dims(product.output[0]))
    if not apart and rank == len(graph.dims(product.input[0])):
        return product, str(product.output[0])
    split = graph.only_consumer(product.output[0], "Reshape")
    dims = graph.shape(split.output[0]) if split is not None else None
    if split is None or not apart or rank != 3 or dims is None or dims[:3] != apart or len(dims) != 4:
        raise NotRecognised("batch and heads are one axis of some of its products and not of others")
    return split, str(split.output[0])


def _output_probs(graph: GraphView, weights: MatchedProbs, operands: AttentionOperands) -> str:
    """The weights as others read them, or an empty name. Raises NotRecognised where the operator gives others."""
    name = weights.output
    if name and graph.dtype(name) != operands.dtype:
        raise NotRecognised(f"its weights are read as {graph.dtype(name)}, the values are {operands.dtype}")
    if name and len(graph.dims(name)) != operands.rank:
        raise NotRecognised("its weights are read where batch and heads are one axis")
    return name


def _broadcastable_mask(rewriter: Rewriter, masks: mask_rewrite.Masks, operands: AttentionOperands) -> str:
    """One mask whose axes are seen to be 1 or full, or an empty name. It is expanded where they are not."""
    mask = mask_rewrite.one_mask(rewriter, masks, operands.dtype)
    if not mask:
        return ""
    graph, proven = rewriter.graph, True
    rank = 0
    for name in masks.sources:
        dims = graph.shape(name)
        if dims is None or len(dims) > operands.rank:
            raise NotRecognised(f"the mask {name!r} is of rank {'unknown' if dims is None else len(dims)}")
        rank = max(rank, len(dims))
        full = operands.scores if operands.rank == 4 else (operands.scores[0], *operands.scores[2:])
        pairs = zip(reversed(dims), reversed(full), strict=False)
        proven &= all(size == 1 or (size is not None and size == whole) for size, whole in pairs)
    if not rank:
        raise NotRecognised("one number that a call brings is added to all scores")
    if operands.rank == 3 and rank == 3:  # (N, L, S) over (N, 1, L, S)
        mask = rewriter.node("Unsqueeze", mask, rewriter.constant([1], "int64"))
    return mask if proven or mask in graph.inputs else _full_mask(rewriter, mask, operands)


def _full_mask(rewriter: Rewriter, mask: str, operands: AttentionOperands) -> str:
    """The mask at the lengths of queries and keys, measured when it runs."""
    lengths = [rewriter.node("Shape", name, start=2, end=3) for name in (operands.query, operands.key)]
    one = rewriter.constant([1], "int64")
    return rewriter.node("Expand", mask, rewriter.node("Concat", one, one, *lengths, axis=0))
