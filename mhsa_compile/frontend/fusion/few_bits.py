"""ONNX -> ONNX: products with constant weights get weights of four bits, as MatMulNBits of ONNX Runtime has them.

Of each block of terms that scale is taken which loses least: a few clips are tried, and for each the scale of least
squares (as llama.cpp's `make_qx_quants` does).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.fusion.block_pattern import BYTES_LEVEL
from mhsa_compile.frontend.fusion.linear_pattern import Linear, find_linears
from mhsa_compile.frontend.onnx_graph import GraphView
from mhsa_compile.frontend.reading import microsoft
from mhsa_compile.spec.weight_words import Int4Weights

MIDDLE, LARGEST = 8, 15
_CLIPS = (0.0, -0.9, -0.7, -0.5, -0.3, -0.15, 0.15, 0.3, 0.5)
"""Of weights without zero points: the number that the largest of a block becomes is MIDDLE + clip."""
_SHRINKS = (1.0, 0.975, 0.95, 0.925, 0.9, 0.85, 0.8)
"""Of weights with zero points: the part of a block's range that is kept."""
_AT_ONCE = 1 << 18  # numbers that are tried together: what a cache holds


def with_int4_weights(model: onnx.ModelProto, form: Int4Weights) -> onnx.ModelProto:
    """The model with four bits in the place of each weight matrix that only products read as it is.

    Raises ModelError for a model without one, and for weights that are not finite.
    """
    rewriter, stored = Rewriter(model), dict[tuple[str, bool], list[str]]()
    graph = rewriter.graph
    linears = [linear for linear in find_linears(graph).values() if linear.weight in graph.initializers]
    if not linears:
        raise ModelError("weights", 'a model with a linear for "int4"', "one without")
    for linear in linears:
        place = linear.weight, linear.transposed
        if place not in stored:
            stored[place] = _stored(rewriter, graph, linear, form)
        numbers, scales, *zeros = stored[place]
        inputs = [linear.x, numbers, scales, *(zeros or [""] * (linear.bias is not None))]
        inputs += ["", linear.bias] if linear.bias is not None else []
        (K, N) = _sizes(graph, linear)
        words = {"K": K, "N": N, "bits": 4, "block_size": form.block, "accuracy_level": BYTES_LEVEL * form.rounds_x}
        name = linear.nodes[0].name or linear.output
        node = helper.make_node("MatMulNBits", inputs, [linear.output], name=name, domain=microsoft.DOMAIN, **words)
        rewriter.append(node)
        rewriter.place(linear.nodes[-1])
    result = rewriter.finished()
    if all(entry.domain != microsoft.DOMAIN for entry in result.opset_import):
        result.opset_import.append(helper.make_opsetid(microsoft.DOMAIN, 1))
    return result


def _sizes(graph: GraphView, linear: Linear) -> tuple[int, int]:
    """(K, N)"""
    shape = graph.initializers[linear.weight].dims
    return (shape[0], shape[1]) if linear.transposed else (shape[1], shape[0])


def _stored(rewriter: Rewriter, graph: GraphView, linear: Linear, form: Int4Weights) -> list[str]:
    """The names of the numbers, scales and zeros of a weight, which are made."""
    array = numpy_helper.to_array(graph.initializers[linear.weight])
    wide = torch.from_numpy(np.ascontiguousarray(array.T if linear.transposed else array).astype(np.float32))
    if not bool(torch.isfinite(wide).all()):
        raise ModelError(f"weight {linear.weight!r}", "finite numbers, for four bits of each", "NaN or infinity")
    numbers, scales, zeros = in_blocks(wide, form)
    arrays = {"numbers": numbers.numpy(), "scales": scales.numpy().astype(array.dtype)}
    if zeros is not None:
        arrays["zeros"] = zeros.numpy()
    return [rewriter.constant(values, hint=f"{linear.weight}.{part}") for part, values in arrays.items()]


def in_blocks(weight: Tensor, form: Int4Weights) -> tuple[Tensor, Tensor, Tensor | None]:
    """weight (N, K) float32 -> numbers (N, n, block / 2) uint8, scales (N, n) float32, zeros (N, ceil(n / 2)) uint8:
    two numbers a byte, the first in its lower bits."""
    N, K = weight.shape
    n = -(-K // form.block)
    blocks = torch.zeros(N * n, form.block)
    blocks.view(N, n * form.block)[:, :K] = weight
    rows = max(1, _AT_ONCE // form.block)
    best = _with_zeros if form.zeros else _around_the_middle
    parts = [best(blocks[first : first + rows]) for first in range(0, len(blocks), rows)]
    numbers, scales, zeros = (torch.cat(values) for values in zip(*parts, strict=True))
    packed = _in_bytes(numbers).view(N, n, form.block // 2)
    return packed, scales.view(N, n), _in_bytes(zeros.view(N, n)) if form.zeros else None


def _in_bytes(numbers: Tensor) -> Tensor:
    """Rows of numbers in uint8, two a byte; the last of an odd row stands alone."""
    even = torch.nn.functional.pad(numbers, (0, numbers.shape[1] % 2))
    return even[:, ::2] | (even[:, 1::2] << 4)


def _around_the_middle(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers, scales, zeros) of blocks (count, block), whose zeros are the middle."""
    place = blocks.abs().argmax(1, keepdim=True)
    largest = blocks.gather(1, place)
    factors = (torch.where(largest == 0, 0.0, -(MIDDLE + clip) / largest) for clip in _CLIPS)
    zeros = torch.full((len(blocks),), MIDDLE, dtype=torch.uint8)
    numbers, scales = _least_loss(blocks, ((factor, torch.full_like(factor, MIDDLE)) for factor in factors))
    return numbers, scales, zeros


def _with_zeros(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the zeros that fit each block's range, of which 0 is a part."""
    low, high = blocks.amin(1, keepdim=True).clamp(max=0), blocks.amax(1, keepdim=True).clamp(min=0)
    candidates = []
    for shrink in _SHRINKS:
        factor = torch.where(high > low, LARGEST / ((high - low) * shrink), 0.0)
        candidates.append((factor, torch.round(-low * shrink * factor).clamp(0, LARGEST)))
    zeros = torch.stack([zero for _, zero in candidates])
    numbers, scales, choice = _choice(blocks, candidates)
    return numbers, scales, zeros.gather(0, choice[None, :, None])[0, :, 0].to(torch.uint8)


def _least_loss(blocks: Tensor, candidates: Any) -> tuple[Tensor, Tensor]:
    numbers, scales, _ = _choice(blocks, list(candidates))
    return numbers, scales


def _choice(blocks: Tensor, candidates: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers, scales, which) of the candidates, (1 / scale, zero) of each block, that lose least: the scale that is
    then best, sum w d / sum d d of d = number - zero, leaves sum w w - (sum w d)^2 / sum d d."""
    gain, which = torch.full((len(blocks),), -1.0), torch.zeros(len(blocks), dtype=torch.long)
    numbers, scales = torch.zeros(blocks.shape, dtype=torch.uint8), torch.zeros(len(blocks))
    for i, (factor, zero) in enumerate(candidates):
        q = torch.round(blocks * factor + zero).clamp(0, LARGEST)
        d = q - zero
        product, square = (blocks * d).sum(1), (d * d).sum(1)
        scale = torch.where(square > 0, product / square, 0.0)
        better = product * scale > gain
        gain, which = torch.where(better, product * scale, gain), torch.where(better, i, which)
        scales = torch.where(better, scale, scales)
        numbers = torch.where(better[:, None], q.to(torch.uint8), numbers)
    return numbers, scales, which
