"""From a Softmax back to the product of queries and keys: what was done to the scores on the way.

The steps between come in any order and number: factors, masks that are added, masks that select, a soft cap, casts.
They are read from the Softmax backwards, each as a statement about `factor * scores`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx

from mhsa_compile.frontend.canonicalize.rewriting.constant_values import KnownGraph
from mhsa_compile.frontend.onnx_graph import GraphDim, GraphView, attributes

PRODUCTS = ("MatMul", "Einsum", "Gemm", "FusedMatMul")
_THROUGH = frozenset(
    ("Add", "Sub", "Mul", "Div", "Where", "Cast", "Identity", "Dropout", "Tanh", "Reshape", "Transpose", "Squeeze",
     "Unsqueeze", "Slice", "Concat", "Expand", "Max", "Min", "Clip", "Neg", "IsNaN", "QuantizeLinear",
     "DequantizeLinear")
)  # fmt: skip
SAME = ("Cast", "Identity", "Dropout")
"""Operators whose result is their operand, as a graph of inference has it."""
ROUNDS = ("DequantizeLinear", "QuantizeLinear")
"""Operators, in pairs, whose result is their operand rounded to bytes, which attention in floats leaves out."""
_FAR = 36  # nodes between a product and its softmax, at most


class NotRecognised(Exception):
    """Why a block that is attention cannot be written as the operator. The message is for a user."""


@dataclass(frozen=True)
class AdditiveMask:
    """A mask that is added to the scores, after it was multiplied by `factor`.

    With `windows` W it is one for each of W windows, which take turns in the batch, (1, W, 1 or H, L, S), as Swin's.
    `flat`: it is added where batch and heads are one axis, (B * H or 1, 1 or L, S), as BLOOM's.
    """

    name: str
    factor: float
    windows: int = 0
    flat: bool = False


@dataclass(frozen=True)
class SelectiveMask:
    """Scores stay where `name` is `positive`, and are `fill` elsewhere."""

    name: str
    positive: bool
    fill: float


@dataclass
class MatchedScores:
    """softmax(scale * Q K^T, capped at softcap, then masked), the product being `product`.

    Where that has batch and heads as one axis, `apart` is (B, H, L) of what it was reshaped to. `rounded`: whether
    scores are rounded to bytes on the way.
    """

    product: onnx.NodeProto
    scale: float = 1.0
    softcap: float = 0.0
    masks: list[AdditiveMask | SelectiveMask] = field(default_factory=list)
    apart: tuple[GraphDim, ...] = ()
    rounded: bool = False

    @property
    def limit(self) -> dict[str, float]:
        """The attribute of Attention that says how scores are limited, where they are."""
        return {"softcap": self.softcap} if self.softcap else {}


def scores_before(graph: KnownGraph, value: str) -> MatchedScores:
    """What `value`, the input of a Softmax, is of a product of two activations. Raises NotRecognised."""
    masks: list[AdditiveMask | SelectiveMask] = []
    factor, softcap, windows, rounded = 1.0, 0.0, 0, False
    apart: tuple[GraphDim, ...] = ()
    for _ in range(_FAR):
        node = graph.producer(value)
        if node is None:
            break
        if node.op_type == "MatMul" and not windows:
            return MatchedScores(node, factor, softcap, masks, apart, rounded)
        if node.op_type == "Reshape" and not (windows or apart) and (apart := _heads_apart(graph, node)):
            value = node.input[0]
            continue
        if node.op_type == "Reshape" and (count := _windows(graph, node, apart=bool(windows))):
            value, windows = node.input[0], 0 if windows else count
            continue
        if node.op_type in (*SAME, *ROUNDS):
            value, rounded = node.input[0], rounded or node.op_type in ROUNDS
        elif node.op_type in ("Mul", "Div"):
            value, multiplier = scalar_factor(graph, node)
            factor *= multiplier
        elif node.op_type in ("Add", "Where"):
            if windows and node.op_type == "Where":
                raise NotRecognised(f"{_title(node)} selects by windows; a mask of windows is taken where it is added")
            if softcap:
                raise NotRecognised(f"{_title(node)} masks scores before they are capped")
            if apart and node.op_type == "Where":
                raise NotRecognised(f"{_title(node)} selects where batch and heads are one axis; a mask is added there")
            mask: AdditiveMask | SelectiveMask
            value, mask = (
                _additive_mask(graph, node, factor, windows, bool(apart))
                if node.op_type == "Add"
                else _selective_mask(graph, node, factor)
            )
            masks.append(mask)
        elif node.op_type == "Tanh" and not softcap and factor > 0:
            softcap, value = factor, node.input[0]
        else:
            raise NotRecognised(f"{_title(node)} stands between the product of queries and keys and the Softmax")
    raise NotRecognised("no product of queries and keys was found before the Softmax")


def scalar_factor(graph: KnownGraph, node: onnx.NodeProto) -> tuple[str, float]:
    """A Mul or Div by a constant of one element, taken apart: (the other operand, the factor). Raises NotRecognised."""
    left, right = (graph.scalar(name) for name in node.input)
    if right is not None and right != 0:
        return node.input[0], right if node.op_type == "Mul" else 1 / right
    if left is not None and node.op_type == "Mul":
        return node.input[1], left
    raise NotRecognised(f"{_title(node)} scales by something that is not one constant number")


def _windows(graph: GraphView, node: onnx.NodeProto, apart: bool) -> int:
    """W of a Reshape (n, W, H, L, S) -> (n * W, H, L, S), or where `apart` of its opposite; 0 of any other."""
    shapes = [graph.dims(name) for name in (node.output[0], node.input[0])]
    whole, split = reversed(shapes) if apart else shapes
    same = len(whole) == 4 and len(split) == 5 and whole[1:] == split[2:] and None not in whole[1:]
    return split[1] if same and isinstance(split[1], int) else 0


def _heads_apart(graph: GraphView, node: onnx.NodeProto) -> tuple[GraphDim, ...]:
    """(B, H, L) of a Reshape (B * H, L, S) -> (B, H, L, S); empty of any other."""
    before, after = (graph.dims(name) for name in (node.input[0], node.output[0]))
    whole = len(before) == 3 and len(after) == 4 and None not in after and before[1] == after[2]
    return after[:3] if whole and isinstance(after[1], int) else ()


def _additive_mask(
    graph: GraphView, node: onnx.NodeProto, factor: float, windows: int, flat: bool
) -> tuple[str, AdditiveMask]:
    scores, mask = _scores_and_other(graph, node, list(node.input))
    if factor <= 0:
        raise NotRecognised(f"{_title(node)} adds a mask that is then multiplied by {factor:g}")
    return scores, AdditiveMask(mask, factor, windows if len(graph.dims(mask)) > 3 else 0, flat)


def _selective_mask(graph: KnownGraph, node: onnx.NodeProto, factor: float) -> tuple[str, SelectiveMask]:
    condition, *branches = node.input
    scores, fill = _scores_and_other(graph, node, branches)
    value = graph.scalar(fill)
    if value is None:
        raise NotRecognised(f"{_title(node)} puts something in the masked places that is not one constant number")
    if factor <= 0:
        raise NotRecognised(f"{_title(node)} masks scores that are then multiplied by {factor:g}")
    return scores, SelectiveMask(condition, scores == branches[0], value * factor)


def _scores_and_other(graph: GraphView, node: onnx.NodeProto, operands: list[str]) -> tuple[str, str]:
    """Which of two operands comes from a product of activations."""
    ours = [name for name in operands if product_before(graph, name) is not None]
    if len(ours) != 1:
        products = "several products of activations" if ours else "no product of activations"
        raise NotRecognised(f"{_title(node)} joins {products}")
    return ours[0], next(name for name in operands if name != ours[0])


def product_before(graph: GraphView, value: str) -> onnx.NodeProto | None:
    """The nearest product of two activations that `value` is computed from, through what may stand between."""
    queue, steps = [value], 0
    while queue and steps < 4 * _FAR:
        steps += 1
        node = graph.producer(queue.pop(0))
        if node is None:
            continue
        if node.op_type in PRODUCTS:
            if not any(_is_weight(graph, name) for name in node.input[:2]):
                return node
        elif node.op_type in _THROUGH:
            first_only = ("Reshape", "Expand", "Slice", "Clip", *ROUNDS)
            queue += node.input[:1] if node.op_type in first_only else node.input
    return None


def _is_weight(graph: GraphView, name: str) -> bool:
    for step in ("Transpose", "DequantizeLinear", "Transpose"):
        node = graph.producer(name, step)
        name = name if node is None else node.input[0]
    return graph.is_weight(name)


@dataclass(frozen=True)
class MatchedProbs:
    """Where the result of a Softmax goes: into `product` with the values, and, as `output`, to somebody else.
    `rounded`: whether it is rounded to bytes on the way."""

    product: onnx.NodeProto
    output: str = ""
    rounded: bool = False


def weights_after(graph: GraphView, value: str) -> MatchedProbs:
    """The MatMul(weights, values) that `value`, weights of a Softmax, goes into, and the weights as others see them.

    Raises NotRecognised.
    """
    output, rounded = "", False
    for _ in range(_FAR):
        readers = graph.consumers(value)
        products = [node for node in readers if node.op_type == "MatMul" and node.input[0] == value]
        if len(products) == 1:
            alone = len(readers) == 1 and value not in graph.outputs
            return MatchedProbs(products[0], output or ("" if alone else value), rounded)
        same = (node for node in readers if _leaves_weights(graph, node, value))
        onwards = [node for node in same if _meets_product(graph, node.output[0])]
        if len(onwards) != 1:
            raise NotRecognised(_why_lost(graph, readers, products))
        tests = sum(node.op_type == "IsNaN" for node in readers)
        if value in graph.outputs or len(readers) > 1 + tests:
            output = output or value
        value, rounded = onwards[0].output[0], rounded or onwards[0].op_type in ROUNDS
    raise NotRecognised("no product with values was found after the Softmax")


def _leaves_weights(graph: GraphView, node: onnx.NodeProto, value: str) -> bool:
    """Whether what `node` makes of weights are the same weights. A row without a visible key has no NaN here."""
    if node.op_type in (*SAME, *ROUNDS) or _joins_heads(graph, node):
        return True
    replaces_nan = node.op_type == "Where" and graph.producer(node.input[0], "IsNaN") is not None
    return replaces_nan and node.input[2] == value


def _joins_heads(graph: GraphView, node: onnx.NodeProto) -> bool:
    """Whether a node is a Reshape (B, H, L, S) -> (B * H, L, S)."""
    if node.op_type != "Reshape":
        return False
    before, after = (graph.dims(name) for name in (node.input[0], node.output[0]))
    return len(before) == 4 and len(after) == 3 and None not in before and before[2:] == after[1:]


def _why_lost(graph: GraphView, readers: list[onnx.NodeProto], products: list[onnx.NodeProto]) -> str:
    lead = [node for node in readers if node.op_type != "IsNaN" and _leads(graph, node)]
    if products or any(node is not lead[0] for node in lead):
        return "its weights go into several products"
    if not lead:
        return "no product with values was found after the Softmax"
    return f"{_title(lead[0])} stands between the Softmax and the product with the values"


def _leads(graph: GraphView, node: onnx.NodeProto) -> bool:
    """Whether a node is a product or leads on to one."""
    return node.op_type in PRODUCTS or _meets_product(graph, node.output[0])


def is_attention(graph: GraphView, softmax: onnx.NodeProto) -> bool:
    """Whether a Softmax stands between two products of activations, whatever else there is."""
    rank = len(graph.dims(softmax.input[0]))
    axis = attributes(softmax).get("axis", -1)
    if rank and axis not in (-1, rank - 1):
        return False
    return product_before(graph, softmax.input[0]) is not None and _meets_product(graph, softmax.output[0])


def _meets_product(graph: GraphView, value: str) -> bool:
    queue = [value]
    for _ in range(_FAR):
        if not queue:
            break
        for node in graph.consumers(queue.pop(0)):
            if node.op_type in PRODUCTS:
                return True
            if node.op_type in (*SAME, *ROUNDS, "Where", "Reshape", "Transpose", "Mul", "Slice"):
                queue += node.output[:1]
    return False


def _title(node: onnx.NodeProto) -> str:
    title = f"{node.op_type} {node.name or node.output[0]!r}"
    if node.op_type == "Einsum":  # those that are a product of two matrices a head are MatMul by now
        return f"{title} of {attributes(node)['equation']!r}, which is no batch of products of two matrices,"
    return title
