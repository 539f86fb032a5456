"""The ONNX graph of a whole layer of PyTorch's transformers: attention, linears, norms, activation and residual sums.

Notation: B batch, L query length, S key length, D embed, H heads, F features between the linears.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MaskKind: TypeAlias = Literal["none", "bool", "additive", "causal"]
"""How an attention's mask comes: in a boolean one True takes part; "causal" is an attribute, no input."""
_OPSET = 24


class WholeLayerKind(NamedTuple):
    """What of a layer, and of a call of it, decides on its artifact.

    D, H, F      embed, heads, features between the linears
    activation   between the linears
    norm_first   whether norms stand before attention and linears, or behind the sums
    epsilons     of the norms, in order: three where the layer attends to a memory, else two
    weights      the names of the weights that the layer has: it may lack any bias
    masks        of each attention
    """

    D: int
    H: int
    F: int
    activation: Literal["relu", "gelu"]
    norm_first: bool
    epsilons: tuple[float, ...]
    weights: frozenset[str]
    masks: tuple[MaskKind, ...]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The weights in the order of the layer, and their shapes."""
        D, F = self.D, self.F
        every: dict[str, tuple[int, ...]] = {}
        for name in ATTENTIONS[: len(self.masks)]:
            every |= {f"{name}.in_proj_weight": (3 * D, D), f"{name}.in_proj_bias": (3 * D,)}
            every |= {f"{name}.out_proj.weight": (D, D), f"{name}.out_proj.bias": (D,)}
        every |= {"linear1.weight": (F, D), "linear1.bias": (F,), "linear2.weight": (D, F), "linear2.bias": (D,)}
        every |= {f"norm{i + 1}.{end}": (D,) for i in range(len(self.epsilons)) for end in ("weight", "bias")}
        return {name: shape for name, shape in every.items() if name in self.weights}


ATTENTIONS = ("self_attn", "multihead_attn")
"""What a layer calls its attentions: to itself, to a memory."""
MASKS = ("mask", "memory_mask")
"""The inputs that say what each of them sees, broadcastable to (B, H, L, S)."""


def graph_of(kind: WholeLayerKind) -> onnx.ModelProto:
    """x (B, L, D), memory (B, S, D) where the layer attends to one, masks -> y (B, L, D). Weights have the layer's
    names, and are zeros until they are bound."""
    return _Drawing(kind).model()


class _Drawing:
    """The nodes of one graph, as they come to be."""

    def __init__(self, kind: WholeLayerKind) -> None:
        self._kind = kind
        self._nodes: list[onnx.NodeProto] = []
        self._constants = [numpy_helper.from_array(np.zeros(s, np.float32), name) for name, s in kind.shapes().items()]

    def model(self) -> onnx.ModelProto:
        kind = self._kind
        memories = ["", "memory"][: len(kind.masks)]
        x = "x"
        for i, memory in enumerate(memories):
            x = self._residual(x, i, lambda value, i=i, memory=memory: self._attention(value, i, memory or value))
        y = self._residual(x, len(memories), self._feed_forward)
        self._nodes.append(helper.make_node("Identity", [y], ["y"]))
        inputs = [_rows("x", "L", kind.D), *(_rows(name, "S", kind.D) for name in memories if name)]
        inputs += [_mask(i, mask, kind.H) for i, mask in enumerate(kind.masks) if mask in ("bool", "additive")]
        graph = helper.make_graph(self._nodes, "layer", inputs, [_rows("y", "L", kind.D)], self._constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=11)

    def _residual(self, x: str, number: int, part: Any) -> str:
        """x and a part of the layer, summed; its norm stands before the part or behind the sum."""
        if self._kind.norm_first:
            return self._node("Add", x, part(self._norm(x, number)))
        return self._norm(self._node("Add", x, part(x)), number)

    def _norm(self, x: str, number: int) -> str:
        names = [self._own(f"norm{number + 1}.{end}") for end in ("weight", "bias")]
        return self._node("LayerNormalization", x, *filter(None, names), axis=-1, epsilon=self._kind.epsilons[number])

    def _feed_forward(self, x: str) -> str:
        inner = self._node(
            self._kind.activation.capitalize(), self._linear(x, "linear1.weight", self._own("linear1.bias"))
        )
        return self._linear(inner, "linear2.weight", self._own("linear2.bias"))

    def _attention(self, x: str, number: int, memory: str) -> str:
        kind, name, mask = self._kind, ATTENTIONS[number], self._kind.masks[number]
        weights, biases = self._thirds(f"{name}.in_proj_weight"), self._thirds(f"{name}.in_proj_bias")
        operands = [self._linear(*names) for names in zip((x, memory, memory), weights, biases, strict=True)]
        if mask in ("bool", "additive"):
            operands.append(MASKS[number])
        words = {"q_num_heads": kind.H, "kv_num_heads": kind.H, "is_causal": int(mask == "causal")}
        y = self._node("Attention", *operands, **words)
        return self._linear(y, f"{name}.out_proj.weight", self._own(f"{name}.out_proj.bias"))

    def _thirds(self, name: str) -> list[str]:
        """The parts of a packed weight for queries, keys and values."""
        if not self._own(name):
            return [""] * 3
        parts = [f"{name}_{letter}" for letter in "qkv"]
        self._nodes.append(helper.make_node("Split", [name], parts, axis=0, num_outputs=3))
        return parts

    def _linear(self, x: str, weight: str, bias: str) -> str:
        product = self._node("MatMul", x, self._node("Transpose", weight, perm=[1, 0]))
        return self._node("Add", product, bias) if bias else product

    def _own(self, name: str) -> str:
        """The name of a weight; "" if the layer lacks it."""
        return name if name in self._kind.weights else ""

    def _node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        output = f"{operator.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, list(inputs), [output], name=output, **attributes))
        return output


def _rows(name: str, length: str, D: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ("B", length, D))


def _mask(number: int, kind: MaskKind, H: int) -> onnx.ValueInfoProto:
    name, keys = MASKS[number], "LS"[number]
    axes = (f"{name}_B", f"{name}_H" if H > 1 else 1, f"{name}_L", keys)
    return helper.make_tensor_value_info(name, TensorProto.BOOL if kind == "bool" else TensorProto.FLOAT, axes)
