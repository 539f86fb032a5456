"""MatMul, scale, mask, Softmax, MatMul: attention as exporters before opset 23 write it, as the one operator.

From every Softmax back to the product of queries and keys (`scores`), forward to the product with the values, and
through what lies around both (`operands`, `masks`). What does not fit stays as it is, with the reason.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from mhsa_compile.artifact import AttentionBlock
from mhsa_compile.canonical import masks as masking
from mhsa_compile.canonical.known import Known
from mhsa_compile.canonical.operands import Operands, operands
from mhsa_compile.canonical.rewriter import Rewriter
from mhsa_compile.canonical.scores import NotRecognised, is_attention, scores_before, weights_after

FORM = "decomposed"


def rewrite(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[AttentionBlock]]:
    """The model with its decomposed attentions as Attention, and one entry for each, rewritten or not."""
    rewriter = Rewriter(model)
    known = Known(rewriter.graph)
    blocks = []
    for node in rewriter.graph.nodes:
        if node.op_type != "Softmax" or not is_attention(rewriter.graph, node):
            continue
        name = node.name or node.output[0]
        try:
            notes = _rewrite_one(rewriter, known, node)
            blocks.append(AttentionBlock(name, FORM, True, "; ".join(notes)))
        except NotRecognised as reason:
            rewriter.drop()
            blocks.append(AttentionBlock(name, FORM, False, str(reason)))
    return rewriter.finished(), blocks


def _rewrite_one(rewriter: Rewriter, known: Known, softmax: onnx.NodeProto) -> list[str]:
    product = weights_after(rewriter.graph, softmax)
    scores = scores_before(rewriter.graph, known, softmax.input[0])
    found = operands(rewriter, known, scores.product, product.input[1])
    masks = masking.collect(rewriter, known, scores.masks, found)
    scale = float(np.float32(scores.scale * found.factor))
    if scale <= 0:
        raise NotRecognised(f"the scores are scaled by {scale:g}")
    said: dict[str, Any] = {"scale": scale}
    if scores.softcap:
        said["softcap"] = scores.softcap
    if masks.causal:
        said["is_causal"] = 1
    mask = _fitted(rewriter, masks, found)
    inputs = [found.query, found.key, found.value, *([mask] if mask else [])]
    if found.rank == 4:
        rewriter.node("Attention", *inputs, output=product.output[0], **said)
    else:
        y = rewriter.node("Attention", *inputs, **said)
        rewriter.node("Squeeze", y, rewriter.constant([1], "int64"), output=product.output[0])
    rewriter.place(product)
    return masks.notes


def _fitted(rewriter: Rewriter, masks: masking.Masks, found: Operands) -> str:
    """One mask whose axes are seen to be 1 or full, or an empty name. It is expanded where they are not."""
    mask = masking.joined(rewriter, masks, found.dtype)
    if not mask:
        return ""
    graph, proven = rewriter.graph, True
    rank = 0
    for name in masks.sources:
        dims = graph.shape(name)
        if dims is None or len(dims) > found.rank:
            raise NotRecognised(f"the mask {name!r} is of rank {'unknown' if dims is None else len(dims)}")
        rank = max(rank, len(dims))
        full = found.scores if found.rank == 4 else (found.scores[0], *found.scores[2:])
        proven &= all(
            d == 1 or (d is not None and d == f) for d, f in zip(reversed(dims), reversed(full), strict=False)
        )
    if found.rank == 3 and rank == 3:  # (N, L, S) over (N, 1, L, S)
        mask = rewriter.node("Unsqueeze", mask, rewriter.constant([1], "int64"))
    return mask if proven or mask in graph.inputs else _expanded(rewriter, mask, found)


def _expanded(rewriter: Rewriter, mask: str, found: Operands) -> str:
    """The mask at the lengths of queries and keys, measured when it runs."""
    lengths = [rewriter.node("Shape", name, start=2, end=3) for name in (found.query, found.key)]
    one = rewriter.constant([1], "int64")
    return rewriter.node("Expand", mask, rewriter.node("Concat", one, one, *lengths, axis=0))
