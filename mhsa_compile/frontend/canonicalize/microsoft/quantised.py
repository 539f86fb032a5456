"""Operators of quantised numbers, as ONNX Runtime's quantiser and its optimizer write them, in the standard's words.

What takes and gives bytes (QLinearAdd and its like, QGemm) becomes the operator of floats between DequantizeLinear and
QuantizeLinear, as the same quantiser writes it in its other format; what gives floats, a MatMulInteger and what makes
floats of its sums. Products with weights become linears of bytes from either form (`fusion.quantised_pattern`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mhsa_compile.frontend.canonicalize.microsoft import attention, layers
from mhsa_compile.frontend.canonicalize.microsoft.node import MicrosoftNode
from mhsa_compile.frontend.onnx_graph import attributes
from mhsa_compile.frontend.reading.microsoft import Quantised, quantised_values

_FLOAT = 1  # onnx.TensorProto.FLOAT


# ---- Bytes -> bytes


def elementwise(operator: str, *names: str) -> Callable[[MicrosoftNode], None]:
    """The rewriting of a node that is `operator` of its values, with its attributes of these names."""

    def rewrite(node: MicrosoftNode) -> None:
        *values, result = quantised_values(node.node)
        y = node.write(operator, *(_floats(node, one) for one in values), **_attributes(node, names))
        _bytes(node, y, result)

    return rewrite


def softmax(node: MicrosoftNode) -> None:
    """QLinearSoftmax: before opset 13 over all axes from `axis` on, as one."""
    values, result = quantised_values(node.node)
    x, axis = _floats(node, values), node.attrs.get("axis", -1)
    if node.attrs.get("opset", 13) >= 13:
        _bytes(node, node.write("Softmax", x, axis=axis), result)
        return
    rows = node.write("Softmax", node.write("Flatten", x, axis=axis % len(node.dims(node.inputs[0]))), axis=-1)
    _bytes(node, node.write("Reshape", rows, node.write("Shape", node.inputs[0])), result)


def mean(node: MicrosoftNode) -> None:
    """QLinearReduceMean, of all axes where none are named."""
    values, result = quantised_values(node.node)
    axes = node.ints(*node.attrs["axes"]) if node.attrs.get("axes") else ""
    y = node.write("ReduceMean", _floats(node, values), axes, keepdims=node.attrs.get("keepdims", 1))
    _bytes(node, y, result)


def where(node: MicrosoftNode) -> None:
    """QLinearWhere."""
    x, y, result = quantised_values(node.node)
    _bytes(node, node.write("Where", node.inputs[0], _floats(node, x), _floats(node, y)), result)


def pooling(operator: str) -> Callable[[MicrosoftNode], None]:
    """The rewriting of a pooling, whose channels may be last."""

    def rewrite(node: MicrosoftNode) -> None:
        values, result = quantised_values(node.node)
        x, rank = _floats(node, values), len(node.dims(node.inputs[0]))
        last = node.attrs.get("channels_last", 0)
        words = {name: value for name, value in node.attrs.items() if name != "channels_last"}
        if last:
            x = node.write("Transpose", x, perm=[0, rank - 1, *range(1, rank - 1)])
        y = node.write(operator, x, **words)
        _bytes(node, node.write("Transpose", y, perm=[0, *range(2, rank), 1]) if last else y, result)

    return rewrite


def convolution(node: MicrosoftNode) -> None:
    """QLinearConv, as the standard's but for channels that may be last."""
    x, *others = node.inputs[:9]
    words = {name: value for name, value in node.attrs.items() if name != "channels_last"}
    if not node.attrs.get("channels_last", 0):
        node.write("QLinearConv", x, *others, output=node.outputs[0], **words)
        return
    rank = len(node.dims(x))
    first = node.write("Transpose", x, perm=[0, rank - 1, *range(1, rank - 1)])
    y = node.write("QLinearConv", first, *others, **words)
    node.write("Transpose", y, perm=[0, *range(2, rank), 1], output=node.outputs[0])


def gemm(node: MicrosoftNode) -> None:
    """QGemm: alpha (A B + C), C in steps of both scales; bytes, or floats where no scale of the result is given."""
    a, b, result = quantised_values(node.node)
    flags = [node.attrs.get(name, 0) for name in ("transA", "transB")]
    left = _floats(node, a)
    if flags[0]:
        left = node.write("Transpose", left, perm=[1, 0])
    right = _floats(node, b, axis=0 if flags[1] else 1)
    if flags[1]:
        right = node.write("Transpose", right, perm=[1, 0])
    alpha, bias, is_last = node.attrs.get("alpha", 1.0), node.inputs[6], not result.scale

    def named(last: bool) -> str:
        return node.outputs[0] if last and is_last else ""

    y = node.write("MatMul", left, right, output=named(not bias and alpha == 1))
    if bias:
        step = node.array(a.scale).astype(np.float32) * node.array(b.scale).astype(np.float32)
        floats = (node.array(bias).astype(np.float32) * step).astype(np.float32)
        floats = floats.reshape(-1) if floats.ndim == 2 and len(floats) == 1 else floats
        y = node.write("Add", y, node.constant(floats, hint=f"{bias}.floats"), output=named(alpha == 1))
    if alpha != 1:
        y = node.write("Mul", y, node.constant(alpha, "float32"), output=named(True))
    if not is_last:
        _bytes(node, y, result)


def pair(node: MicrosoftNode) -> None:
    """QuantizeLinear and DequantizeLinear, of which theirs are older than the standard's of 16 bits."""
    node.write(node.node.op_type, *node.inputs[:3], output=node.outputs[0], **attributes(node.node))


def _attributes(node: MicrosoftNode, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: node.attrs[name] for name in names if name in node.attrs}


def _floats(node: MicrosoftNode, of: Quantised, axis: int = 1) -> str:
    _check(node, of.value, of.zero)
    return node.write("DequantizeLinear", of.value, of.scale, of.zero, axis=axis)


def _bytes(node: MicrosoftNode, y: str, result: Quantised) -> None:
    """Writes the node's output; without a zero point that is 0, of the dtype of the first value."""
    zero = result.zero or node.constant(0, node.dtype(quantised_values(node.node)[0].value))
    node.write("QuantizeLinear", y, result.scale, zero, output=node.outputs[0])


def _check(node: MicrosoftNode, value: str, zero: str) -> None:
    """Raises ModelError, or NotYet, where a zero point is of another dtype than what it is of."""
    if zero and (kind := node.dtype(zero)) != (own := node.dtype(value)):
        raise node.refused(f"the zero point {zero!r} of {own}, as {value!r}", kind)


# ---- Bytes -> floats


def matmul_integer_to_float(node: MicrosoftNode) -> None:
    """A (..., K), B (K, N), their scales, their zero points, bias (N,) -> floats (..., N)."""
    a, b, a_scale, b_scale, a_zero, b_zero, bias = node.inputs[:7]
    _product(node, (a, a_scale, a_zero), (b, b_scale, b_zero), bias, node.outputs[0])


def dynamic_quantize_matmul(node: MicrosoftNode) -> None:
    """A (..., K) of floats, B (K, N), its scale, its zero point, bias (N,) -> floats (..., N)."""
    a, b, scale, zero, bias = node.inputs[:5]
    if a not in node.shared:
        outputs = [node.rewriter.fresh(f"{a}/{role}") for role in ("bytes", "scale", "zero")]
        node.shared[a] = node.rewriter.nodes("DynamicQuantizeLinear", (a,), outputs)
    _product(node, tuple(node.shared[a]), (b, scale, zero), bias, node.outputs[0])


def dynamic_quantize_lstm(node: MicrosoftNode) -> None:
    """LSTM of X (L, B, I) as bytes, W (D, I, 4H) and R (D, H, 4H) in bytes, a scale and a zero point for each direction
    or for each column. ONNX Runtime also rounds the state of each step to bytes; here it stays in floats."""
    x, w, r, *others, w_scale, w_zero, r_scale, r_zero = node.inputs[:12]
    weights = []
    for name, scale, zero in ((w, w_scale, w_zero), (r, r_scale, r_zero)):
        columns = node.ints(0, 1, -1)
        numbers = node.write("Cast", name, to=_FLOAT)
        if zero:
            _check(node, name, zero)
            points = node.write("Reshape", node.write("Cast", zero, to=_FLOAT), columns)
            numbers = node.write("Sub", numbers, points)
        floats = node.write("Mul", numbers, node.write("Reshape", scale, columns))
        weights.append(node.write("Transpose", floats, perm=[0, 2, 1]))
    rounded = [node.rewriter.fresh(f"{x}/{role}") for role in ("bytes", "scale", "zero")]
    x = node.write("DequantizeLinear", *node.rewriter.nodes("DynamicQuantizeLinear", (x,), rounded))
    outputs = node.outputs[:3]
    while not outputs[-1]:
        outputs.pop()
    node.rewriter.nodes("LSTM", (x, *weights, *others), outputs, **node.attrs)


def _product(
    node: MicrosoftNode, left: tuple[str, ...], right: tuple[str, str, str], bias: str, output: str = ""
) -> str:
    """(A - a zero) (B - b zero) times both scales, plus a bias, if any."""
    a, a_scale, a_zero = left
    b, b_scale, b_zero = right
    sums = node.write("Cast", node.write("MatMulInteger", a, b, a_zero, b_zero), to=_FLOAT)
    scale = node.write("Mul", a_scale, b_scale)
    y = node.write("Mul", sums, scale, output="" if bias else output)
    return node.write("Add", y, bias, output=output) if bias else y


def qattention(node: MicrosoftNode) -> None:
    """x (B, L, D) and weights (D, 3HE) in bytes, bias, their scales, mask, their zero points, past -> y, present."""
    x, weights, bias, x_scale, scale, mask, x_zero, zero, past = node.inputs[:9]
    _check(node, x, x_zero)
    _check(node, weights, zero)
    thirds = [_thirds(node, name) for name in (weights, scale, zero, bias)]
    projections = []
    for i, role in enumerate(("query", "key", "value")):
        matrix, part_scale, part_zero, part_bias = (
            parts if isinstance(parts, str) else node.constant(parts[i], hint=f"{name}.{role}")
            for name, parts in zip((weights, scale, zero, bias), thirds, strict=True)
        )
        projections.append(_product(node, (x, x_scale, x_zero), (matrix, part_scale, part_zero), part_bias))
    attention.of_projections(node, projections, mask, past, "", "float32")


def _thirds(node: MicrosoftNode, name: str) -> list[np.ndarray] | str:
    """The parts of what each column has, or has one of; the name itself of one number of all, or of nothing."""
    array = node.array(name) if name else np.zeros(())
    return name if array.size <= 1 else [np.ascontiguousarray(part) for part in np.split(array, 3, axis=-1)]


def qembed_layer_normalization(node: MicrosoftNode) -> None:
    """LayerNormalization of word + position + segment embeddings, whose tables, gamma and beta are bytes."""
    ids, segments, words, positions, segment_table, gamma, beta, mask, *numbers = node.inputs
    scales = dict(zip((words, positions, segment_table, gamma, beta), numbers[:5], strict=True))
    zeros = dict(zip((words, positions, segment_table, gamma, beta), numbers[5:10], strict=False))

    def floats(name: str, numbers_of: str) -> str:
        _check(node, numbers_of, zeros[numbers_of])
        return node.write("DequantizeLinear", name, scales[numbers_of], zeros[numbers_of])

    tables = layers.Embeddings(ids, segments, words, positions, segment_table)
    norms = floats(gamma, gamma), floats(beta, beta)
    layers.of_embeddings(
        node, tables, lambda table, places: floats(layers.rows_of(node, table, places, ids), table), *norms, mask
    )
