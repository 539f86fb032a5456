"""What one Attention node of an ONNX graph asks for: its inputs, outputs and attributes, read and checked.

Whatever the standard forbids, or nothing here can compute, is refused by the node's name.
Source: ONNX Attention-23, -24 and -25 (onnx.ai/onnx/operators/onnx__Attention.html).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import onnx
from onnx import TensorProto

from mhsa_compile.frontend.fusion.head_layout import NodePattern
from mhsa_compile.frontend.onnx_graph import GraphDim, GraphView
from mhsa_compile.kernels.interface.score_step import NodeScores, first
from mhsa_compile.kernels.scores.order import STEPS
from mhsa_compile.nn import mhsa_operator
from mhsa_compile.spec.checks import DTYPES
from mhsa_compile.spec.outputs import SoftmaxOutputs

INPUTS = mhsa_operator.INPUTS
OUTPUTS = ("y", "present_key", "present_value", "scores", *mhsa_operator.NAMES)
"""The outputs of an Attention in their order, as INPUTS are its inputs. The last of both are those of our own operator
of this name; see `operators`."""
_STANDARD_INPUTS = ("past_key", "past_value")  # from number 4 on
_STANDARD_OUTPUTS = ("present_key", "present_value", "qk_matmul_output")  # from number 1 on
_PRECISIONS: dict[int, Literal["float32", "float64"]] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float32",  # asked for less: the kernels compute in float32, which is more exact
    TensorProto.BFLOAT16: "float32",
    TensorProto.DOUBLE: "float64",
}
Axes = tuple[GraphDim, GraphDim, GraphDim, GraphDim]  # batch, heads, length, head dim


class AttentionNode(NodePattern):
    """One Attention node.

    names            of the tensors by INPUTS, "" of those that are not there; `past` are those of the past
    outputs          the names of those of OUTPUTS that the node has; `softmax_outputs` what our own operator's say
    heads            of queries and of keys, for operands of three axes
    left, right      the window, -1 unbounded, with causality in it
    keys             the number of keys that attention runs over, those of the past included
    words, roles     the attributes of the steps of its scores, and the tensors that these take
    """

    def __init__(self, graph: GraphView, node: onnx.NodeProto) -> None:
        super().__init__(graph, node)
        names = [*node.input[: len(INPUTS)], *[""] * (len(INPUTS) - len(node.input))]
        self.names = dict(zip(INPUTS, names, strict=True))
        self.past = tuple(name for role in _STANDARD_INPUTS if (name := self.names[role]))
        self.outputs = {role: name for role, name in zip(OUTPUTS, node.output, strict=False) if name}
        self._check_company()
        dtype = self._dtype()
        self.heads = self._heads()
        counts = self.heads or (0, 0)
        axes = [_axes(self._shape(role), counts[role != "Q"]) for role in "QKV"]
        past_axes = [_axes(self.ranked(name, name, 4), 0) for name in self.past]
        self._check_shapes(axes, past_axes)
        self.query_length, self.keys = axes[0][2], _sum(axes[1][2], past_axes[0][2] if past_axes else 0)
        values = {kind.attribute: self.attributes.get(kind.attribute) for kind in STEPS}
        self.words: dict[str, int | float | str] = {name: value for name, value in values.items() if value}
        self.roles = self._roles()
        self._check_scores(dtype, axes[0])
        self.left, self.right = first(kind.sides(self.attributes) for kind in STEPS) or (-1, -1)
        self.scale: float | None = self.attributes.get("scale")
        if self.scale is not None and not math.isfinite(self.scale):
            raise self.refusal("a scale that is a finite number, or none for 1 / sqrt(head size)", self.scale)
        self.softmax = self._choice("softmax_precision", _PRECISIONS, TensorProto.FLOAT)
        self.stage = self._choice("qk_matmul_output_mode", {mode: mode for mode in range(4)}, 0)
        self.softmax_outputs = self._softmax_outputs(int(axes[0][1] or 0))

    def _shape(self, role: str) -> tuple[GraphDim, ...]:
        return self.graph.dims(self.names[role])

    def _roles(self) -> dict[str, tuple[str, ...]]:
        """The tensors that steps of the scores take: those with a place of their own, then those that functions
        capture."""
        roles: dict[str, tuple[str, ...]] = {k.role: (name,) for k in STEPS if (name := self.names.get(k.role, ""))}
        tensors = list(self.node.input[mhsa_operator.FIRST_TENSOR :])
        captures = [kind for kind in STEPS if kind.attribute in self.words]
        counts = {kind.role: kind.captured(self.words[kind.attribute]) for kind in captures}
        if len(tensors) != sum(counts.values()):
            expected = f"{sum(counts.values())} tensors that its functions of scores capture"
            raise self.refusal(expected, len(tensors))
        for role, count in counts.items():
            if count:
                roles[role], tensors = tuple(tensors[:count]), tensors[count:]
        return roles

    def _check_scores(self, dtype: str, q: Axes) -> None:
        """Asks the steps of scores whether they are attrs rightly."""
        graph, node = self.graph, self.node
        beside = [role for role, name in zip(_STANDARD_INPUTS, node.input[4:], strict=False) if name]
        beside += [role for role, name in zip(_STANDARD_OUTPUTS, node.output[1:], strict=False) if name]
        inputs = {role: [(graph.dtype(name), graph.shape(name)) for name in own] for role, own in self.roles.items()}
        scores = NodeScores(dtype, q[0], int(q[1] or 0), self.attributes, inputs, tuple(beside))
        for kind in STEPS:
            if (mistake := kind.mistake(scores)) is not None:
                raise self.refusal(*mistake)

    def _softmax_outputs(self, heads: int) -> SoftmaxOutputs:
        """What our own operator's outputs say of the softmax's rows."""
        outputs, top_k = mhsa_operator.outputs_of(self.node), self.attributes.get("top_k", 0)
        if {"top_k_weights", "top_k_keys"} & self.outputs.keys() and not top_k > 0:
            raise self.refusal("top_k of 1 or more, the number of keys", f"top_k={top_k}")
        if any(not 0 <= head < heads for head in outputs.heads or ()):
            raise self.refusal(f"weights_heads from 0 to {heads - 1}", list(outputs.heads or ()))
        for name, places in (("weights_heads", outputs.heads), ("weights_rows", outputs.rows)):
            if places == ():
                raise self.refusal(f"{name} of one number or more", "[]")
        return outputs

    def _check_company(self) -> None:
        """Checks what the standard wants used together, or apart."""
        pasts = [role for role in _STANDARD_INPUTS if self.names[role]]
        presents = [role for role in self.outputs if role.startswith("present")]
        if len(pasts) == 1:
            raise self.refusal("past_key and past_value together, or neither", f"{pasts[0]} alone")
        if pasts and len(presents) < 2:
            got = f"past_key and past_value with {presents[0] if presents else 'neither'} alone"
            raise self.refusal("present_key and present_value wherever there is a past", got)

    def _dtype(self) -> str:
        present = {role: name for role in ("Q", "K", "V", *_STANDARD_INPUTS) if (name := self.names[role])}
        dtypes = {role: self.graph.dtype(name) for role, name in present.items()}
        dtype = dtypes["Q"]
        if dtype not in DTYPES or len(set(dtypes.values())) > 1:
            got = ", ".join(f"{role} of {kind or 'unknown dtype'}" for role, kind in dtypes.items())
            raise self.refusal(f"{_listed(present)} all of {', or all of '.join(DTYPES)}", got)
        return dtype

    def _heads(self) -> tuple[int, int] | None:
        """(query heads, key/value heads) by the attributes, which three axes need; None for four."""
        ranks = {len(self.ranked(self.names[role], self.names[role], 3, 4)) for role in "QKV"}
        if len(ranks) > 1:
            got = ", ".join(f"{role} of {len(self._shape(role))}" for role in "QKV")
            raise self.refusal("Q, K and V of one rank, 3 or 4", got)
        counts = (self.attributes.get("q_num_heads"), self.attributes.get("kv_num_heads"))
        if ranks == {3}:
            q_heads, kv_heads = counts
            if not isinstance(q_heads, int) or not isinstance(kv_heads, int) or min(q_heads, kv_heads) < 1:
                expected = "q_num_heads and kv_num_heads, of 1 or more, as Q, K and V have three axes"
                raise self.refusal(expected, f"q_num_heads={q_heads}, kv_num_heads={kv_heads}")
            return q_heads, kv_heads
        for name, count, role in zip(("q_num_heads", "kv_num_heads"), counts, "QK", strict=True):
            if count is not None and (self.graph.opset >= 25 or count != self._shape(role)[1]):
                raise self.refusal(f"no {name}, as Q, K and V have four axes", f"{name}={count}")
        return None

    def _check_shapes(self, axes: list[Axes], past_axes: list[Axes]) -> None:
        """Heads and head sizes are fixed, and no two fixed sizes contradict each other."""
        for role, (_, heads, _, size) in zip("QKV", axes, strict=True):
            if not isinstance(heads, int) or not isinstance(size, int):
                shape, attribute = self._shape(role), "q_num_heads" if role == "Q" else "kv_num_heads"
                parts = "heads and head size" if len(shape) == 4 else f"last axis, which {attribute} divides,"
                expected = f"a fixed {parts} of {role} ({self.names[role]})"
                raise self.refusal(expected, f"{shape}, {attribute}={heads}")
        q, k, v = axes
        if int(q[1] or 0) % int(k[1] or 1) or k[1] != v[1]:
            got = f"{q[1]} query, {k[1]} key and {v[1]} value heads"
            raise self.refusal("key and value heads that divide the query heads", got)
        if q[3] != k[3]:
            raise self.refusal("queries and keys of one head size", f"{q[3]} and {k[3]}")
        pairs = [("batch sizes of Q and K", q[0], k[0]), ("batch sizes of K and V", k[0], v[0])]
        pairs.append(("lengths of K and V", k[2], v[2]))
        for role, past_role, past, new in zip("KV", _STANDARD_INPUTS, past_axes, (k, v), strict=False):
            for axis, what in ((0, "batch sizes"), (1, "heads"), (3, "head sizes")):
                pairs.append((f"{what} of {past_role} and {role}", past[axis], new[axis]))
        if past_axes:
            pairs.append(("lengths of past_key and past_value", past_axes[0][2], past_axes[1][2]))
        for what, one, other in pairs:
            if isinstance(one, int) and isinstance(other, int) and one != other:
                raise self.refusal(f"equal {what}", f"{one} and {other}")

    def _choice(self, name: str, choices: dict[int, Any], default: int) -> Any:
        value = self.attributes.get(name, default)
        if value not in choices:
            raise self.refusal(f"{name} of {', '.join(map(str, choices))}", value)
        return choices[value]


def _axes(shape: tuple[GraphDim, ...], heads: int) -> Axes:
    """(batch, heads, length, head dim) of an operand of four axes, or of three with `heads` heads."""
    if len(shape) == 4:
        return shape[0], shape[1], shape[2], shape[3]
    width = shape[2]
    return shape[0], heads, shape[1], width // heads if isinstance(width, int) and width % heads == 0 else None


def _sum(one: GraphDim, other: GraphDim) -> GraphDim:
    if isinstance(one, int) and isinstance(other, int):
        return one + other
    return one if other == 0 else None


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}"
