"""What one Attention node of an ONNX graph asks for: its inputs, outputs and attributes, read and checked.

Whatever the standard forbids, or nothing here can compute, is refused by the node's name.
Source: ONNX Attention-23, -24 and -25 (onnx.ai/onnx/operators/onnx__Attention.html).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import onnx
from onnx import TensorProto

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.onnx_graph import GraphDim, GraphView, attributes
from mhsa_compile.kernels.interface.score_step import NodeScores
from mhsa_compile.kernels.scores.band import Band
from mhsa_compile.kernels.scores.order import STEPS
from mhsa_compile.nn import mhsa_operator
from mhsa_compile.spec.checks import DTYPES
from mhsa_compile.spec.outputs import SoftmaxOutputs

INPUTS = mhsa_operator.INPUTS
OUTPUTS = ("y", "present_key", "present_value", "scores", *mhsa_operator.NAMES)
"""The outputs of an Attention in their order, as INPUTS are its inputs. The last of both are those of our own operator
of this name; see `operators`."""
MASK, LENGTHS = "attn_mask", "nonpad_kv_seqlen"
"""Inputs that are looked through before steps take them."""
_STANDARD_INPUTS = ("past_key", "past_value")  # from number 4 on
_STANDARD_OUTPUTS = ("present_key", "present_value", "qk_matmul_output")  # from number 1 on
_PRECISIONS = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float32",  # asked for less: the kernels compute in float32, which is more exact
    TensorProto.BFLOAT16: "float32",
    TensorProto.DOUBLE: "float64",
}
Axes = tuple[GraphDim, GraphDim, GraphDim, GraphDim]  # batch, heads, length, head dim


@dataclass(frozen=True)
class AttentionNode:
    """One Attention node. Names of tensors that are not there are "".

    `outputs` are the names of those of OUTPUTS that the node has; `softmax_outputs` is what our own operator's say.
    `left` and `right` are the window, -1 unbounded, with causality in it. `keys` is the number of keys that
    attention runs over, those of the past included. `words` are the attributes of the steps of its scores, and
    `roles` the tensors that these take.
    """

    node: onnx.NodeProto
    dtype: str
    q: str
    k: str
    v: str
    mask: str
    past: tuple[str, ...]
    lengths: str
    outputs: dict[str, str]
    heads: tuple[int, int] | None  # of queries and of keys, for operands of three axes
    scale: float | None
    left: int
    right: int
    softmax: Literal["float32", "float64"]
    stage: int
    softmax_outputs: SoftmaxOutputs
    query_length: GraphDim
    keys: GraphDim
    words: dict[str, int | float | str]
    roles: dict[str, tuple[str, ...]]

    def refusal(self, expected: str, got: str, next_step: str = "") -> ModelError:
        return refusal(self.node, expected, got, next_step)


def refusal(node: onnx.NodeProto, expected: str, got: str, next_step: str = "") -> ModelError:
    return ModelError(f"Attention node {node.name or node.output[0]!r}", expected, got, next_step)


def read(graph: GraphView, node: onnx.NodeProto) -> AttentionNode:
    """Reads and checks one Attention node. Raises ModelError."""
    names = dict(zip(INPUTS, [*node.input[: len(INPUTS)], *[""] * (len(INPUTS) - len(node.input))], strict=True))
    attrs = attributes(node)
    _check_company(node, names)
    dtype = _dtype(graph, node, names)
    heads = _heads(graph, node, names, attrs)
    axes = [_axes(graph.shape(names[role]) or (), 0 if heads is None else heads[i > 0]) for i, role in enumerate("QKV")]
    past = tuple(names[role] for role in ("past_key", "past_value") if names[role])
    past_axes = [_axes(_ranked(graph, node, name, (4,)), 0) for name in past]
    _check_shapes(graph, node, names, axes, past_axes)
    words = {kind.attribute: attrs[kind.attribute] for kind in STEPS if attrs.get(kind.attribute)}
    roles = _roles(node, names, words)
    _check_scores(graph, node, attrs, roles, dtype, axes[0])
    left, right = Band.sides(attrs)
    return AttentionNode(
        node=node,
        dtype=dtype,
        q=names["Q"],
        k=names["K"],
        v=names["V"],
        mask=names[MASK],
        past=past,
        lengths=names[LENGTHS],
        outputs={role: name for role, name in zip(OUTPUTS, node.output, strict=False) if name},
        heads=heads,
        scale=_scale(node, attrs),
        left=left,
        right=right,
        softmax=_choice(node, attrs, "softmax_precision", _PRECISIONS, TensorProto.FLOAT),
        stage=_choice(node, attrs, "qk_matmul_output_mode", {mode: mode for mode in range(4)}, 0),
        softmax_outputs=_softmax_outputs(node, attrs, int(axes[0][1] or 0)),
        query_length=axes[0][2],
        keys=_sum(axes[1][2], past_axes[0][2] if past else 0),
        words=words,
        roles=roles,
    )


def _roles(node: onnx.NodeProto, names: dict[str, str], words: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """The tensors that steps of the scores take: those with a place of their own, then those that functions capture."""
    roles: dict[str, tuple[str, ...]] = {kind.role: (name,) for kind in STEPS if (name := names.get(kind.role, ""))}
    tensors = list(node.input[mhsa_operator.FIRST_TENSOR :])
    counts = {kind.role: kind.captured(words[kind.attribute]) for kind in STEPS if kind.attribute in words}
    if len(tensors) != sum(counts.values()):
        raise refusal(node, f"{sum(counts.values())} tensors that its functions of scores capture", str(len(tensors)))
    for role, count in counts.items():
        if count:
            roles[role], tensors = tuple(tensors[:count]), tensors[count:]
    return roles


def _check_scores(
    graph: GraphView,
    node: onnx.NodeProto,
    attrs: dict[str, Any],
    roles: dict[str, tuple[str, ...]],
    dtype: str,
    q: Axes,
) -> None:
    """Asks the steps of scores whether they are attrs rightly."""
    beside = [role for role, name in zip(_STANDARD_INPUTS, node.input[4:], strict=False) if name]
    beside += [role for role, name in zip(_STANDARD_OUTPUTS, node.output[1:], strict=False) if name]
    inputs = {role: [(graph.dtype(name), graph.shape(name)) for name in names] for role, names in roles.items()}
    scores = NodeScores(dtype, q[0], int(q[1] or 0), attrs, inputs, tuple(beside))
    for kind in STEPS:
        if (mistake := kind.mistake(scores)) is not None:
            raise refusal(node, *mistake)


def _softmax_outputs(node: onnx.NodeProto, attrs: dict[str, Any], heads: int) -> SoftmaxOutputs:
    """What our own operator's outputs say of the softmax's rows."""
    softmax_outputs = mhsa_operator.outputs_of(node)
    named = set(zip(OUTPUTS, map(bool, node.output), strict=False))
    if {("top_k_weights", True), ("top_k_keys", True)} & named and not attrs.get("top_k", 0) > 0:
        raise refusal(node, "top_k of 1 or more, the number of keys", f"top_k={attrs.get('top_k', 0)}")
    if any(not 0 <= head < heads for head in softmax_outputs.heads or ()):
        raise refusal(node, f"weights_heads from 0 to {heads - 1}", str(list(softmax_outputs.heads or ())))
    for name, places in (("weights_heads", softmax_outputs.heads), ("weights_rows", softmax_outputs.rows)):
        if places == ():
            raise refusal(node, f"{name} of one number or more", "[]")
    return softmax_outputs


def _check_company(node: onnx.NodeProto, names: dict[str, str]) -> None:
    """Checks what the standard wants used together, or apart."""
    pasts = [role for role in ("past_key", "past_value") if names[role]]
    presents = [role for role, name in zip(OUTPUTS, node.output, strict=False) if name and role.startswith("present")]
    if len(pasts) == 1:
        raise refusal(node, "past_key and past_value together, or neither", f"{pasts[0]} alone")
    if pasts and len(presents) < 2:
        got = f"past_key and past_value with {presents[0] if presents else 'neither'} alone"
        raise refusal(node, "present_key and present_value wherever there is a past", got)


def _dtype(graph: GraphView, node: onnx.NodeProto, names: dict[str, str]) -> str:
    present = {role: names[role] for role in ("Q", "K", "V", "past_key", "past_value") if names[role]}
    dtypes = {role: graph.dtype(name) for role, name in present.items()}
    dtype = dtypes["Q"]
    if dtype not in DTYPES or len(set(dtypes.values())) > 1:
        got = ", ".join(f"{role} of {kind or 'unknown dtype'}" for role, kind in dtypes.items())
        raise refusal(node, f"{_listed(present)} all of {', or all of '.join(DTYPES)}", got)
    return dtype


def _heads(
    graph: GraphView, node: onnx.NodeProto, names: dict[str, str], attrs: dict[str, Any]
) -> tuple[int, int] | None:
    """(query heads, key/value heads) by the attributes, which three axes need; None for four."""
    ranks = {len(_ranked(graph, node, names[role], (3, 4))) for role in "QKV"}
    if len(ranks) > 1:
        got = ", ".join(f"{role} of {len(graph.shape(names[role]) or ())}" for role in "QKV")
        raise refusal(node, "Q, K and V of one rank, 3 or 4", got)
    stated = (attrs.get("q_num_heads"), attrs.get("kv_num_heads"))
    if ranks == {3}:
        q_heads, kv_heads = stated
        if not isinstance(q_heads, int) or not isinstance(kv_heads, int) or min(q_heads, kv_heads) < 1:
            got = f"q_num_heads={q_heads}, kv_num_heads={kv_heads}"
            raise refusal(node, "q_num_heads and kv_num_heads, of 1 or more, as Q, K and V have three axes", got)
        return q_heads, kv_heads
    shapes = [graph.shape(names[role]) or () for role in "QK"]
    for name, count, shape in zip(("q_num_heads", "kv_num_heads"), stated, shapes, strict=True):
        if count is not None and (graph.opset >= 25 or count != shape[1]):
            raise refusal(node, f"no {name}, as Q, K and V have four axes", f"{name}={count}")
    return None


def _ranked(graph: GraphView, node: onnx.NodeProto, name: str, ranks: tuple[int, ...]) -> tuple[GraphDim, ...]:
    shape = graph.shape(name)
    if shape is None or len(shape) not in ranks:
        raise refusal(node, f"{name} of known rank {' or '.join(map(str, ranks))}", str(shape))
    return shape


def _axes(shape: tuple[GraphDim, ...], heads: int) -> Axes:
    """(batch, heads, length, head dim) of an operand of four axes, or of three with `heads` heads."""
    if len(shape) == 4:
        return shape[0], shape[1], shape[2], shape[3]
    width = shape[2]
    return shape[0], heads, shape[1], width // heads if isinstance(width, int) and width % heads == 0 else None


def _check_shapes(
    graph: GraphView, node: onnx.NodeProto, names: dict[str, str], axes: list[Axes], past_axes: list[Axes]
) -> None:
    """Heads and head sizes are fixed, and no two fixed sizes contradict each other."""
    for role, (_, heads, _, size) in zip("QKV", axes, strict=True):
        if not isinstance(heads, int) or not isinstance(size, int):
            shape = graph.shape(names[role]) or ()
            attribute = "q_num_heads" if role == "Q" else "kv_num_heads"
            parts = "heads and head size" if len(shape) == 4 else f"last axis, which {attribute} divides,"
            raise refusal(node, f"a fixed {parts} of {role} ({names[role]})", f"{shape}, {attribute}={heads}")
    q, k, v = axes
    if int(q[1] or 0) % int(k[1] or 1) or k[1] != v[1]:
        got = f"{q[1]} query, {k[1]} key and {v[1]} value heads"
        raise refusal(node, "key and value heads that divide the query heads", got)
    if q[3] != k[3]:
        raise refusal(node, "queries and keys of one head size", f"{q[3]} and {k[3]}")
    pairs = [("batch sizes of Q and K", q[0], k[0]), ("batch sizes of K and V", k[0], v[0])]
    pairs.append(("lengths of K and V", k[2], v[2]))
    for role, past, new in zip("KV", past_axes, (k, v), strict=False):
        past_role = "past_key" if role == "K" else "past_value"
        for axis, what in ((0, "batch sizes"), (1, "heads"), (3, "head sizes")):
            pairs.append((f"{what} of {past_role} and {role}", past[axis], new[axis]))
    if past_axes:
        pairs.append(("lengths of past_key and past_value", past_axes[0][2], past_axes[1][2]))
    for what, one, other in pairs:
        if isinstance(one, int) and isinstance(other, int) and one != other:
            raise refusal(node, f"equal {what}", f"{one} and {other}")


def _scale(node: onnx.NodeProto, attrs: dict[str, Any]) -> float | None:
    scale: float | None = attrs.get("scale")
    if scale is not None and not math.isfinite(scale):
        raise refusal(node, "a scale that is a finite number, or none for 1 / sqrt(head size)", str(scale))
    return scale


def _choice(node: onnx.NodeProto, attrs: dict[str, Any], name: str, choices: dict[int, Any], default: int) -> Any:
    value = attrs.get(name, default)
    if value not in choices:
        raise refusal(node, f"{name} of {', '.join(map(str, choices))}", str(value))
    return choices[value]


def _sum(one: GraphDim, other: GraphDim) -> GraphDim:
    if isinstance(one, int) and isinstance(other, int):
        return one + other
    return one if other == 0 else None


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}"
