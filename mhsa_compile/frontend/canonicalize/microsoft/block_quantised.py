"""Weights that a file holds in few bits, by blocks with a scale and a zero point each: (q - z) s. MatMulNBits and
GatherBlockQuantized, as onnxruntime-genai's builder and the converters of hubs write them (q4, q4f16).

A product with weights that the file has is not seen here (`canonicalize.stored_blocks`). Others, and rows of a table,
become float arithmetic, in float32 whatever the dtype; of a table only the rows that a call asks for are computed.
Source: ONNX Runtime's docs/ContribOperators.md. Notation: N out-features, K in-features, n blocks of a row.
"""

from __future__ import annotations

import math

from mhsa_compile.frontend.canonicalize.microsoft.node import MicrosoftNode


def matmul_nbits(node: MicrosoftNode) -> None:
    """x (..., K), q (N, n, bytes of a block) uint8, scales (N, n), zero points (N, n) in bytes or as the scales, bias
    (N,) -> x W^T + bias (..., N)."""
    x, packed, scales, zeros, _, bias = node.inputs[:6]
    write, dtype = node.rewriter, node.dtype(x, scales)
    N, K, bits, block = node.attrs["N"], node.attrs["K"], node.attrs.get("bits", 4), node.attrs["block_size"]
    n = math.ceil(K / block)
    q = _unpacked(node, packed, bits, node.ints(N, n, block))
    z = _zero_points(node, zeros, bits, N, n)
    s = write.node("Reshape", _wide(node, scales, dtype), node.ints(N, n, 1))
    rows = write.node("Reshape", write.node("Mul", write.node("Sub", q, z), s), node.ints(N, n * block))
    if n * block != K:
        rows = write.node("Slice", rows, node.ints(0), node.ints(K), node.ints(1))
    weight = write.node("Transpose", _narrow(node, rows, dtype), perm=[1, 0])
    y = write.node("MatMul", x, weight, output="" if bias else node.outputs[0])
    if bias:
        write.node("Add", y, bias, output=node.outputs[0])


def gather_block_quantized(node: MicrosoftNode) -> None:
    """q (V, bytes of a row) uint8, indices, scales (V, n), zero points (V, n) in bytes -> rows (indices..., D)."""
    table, indices, scales, zeros = node.inputs[:4]
    write, bits, block = node.rewriter, node.attrs.get("bits", 4), node.attrs.get("block_size", 128)
    D, dtype = node.size(table, 1) * 8 // bits, node.dtype(scales)
    n = math.ceil(D / block)
    places = write.node("Shape", indices)

    def rows_of(name: str) -> str:
        return write.node("Gather", name, indices, axis=0)

    def shape(*sizes: int) -> str:
        return write.node("Concat", places, node.ints(*sizes), axis=0)

    if D % block:
        raise node.refused(f"rows of whole blocks of {block}", f"rows of {D}")
    q = _unpacked(node, rows_of(table), bits, shape(n, block))
    z = node.rewriter.constant(float(1 << (bits - 1)), "float32")
    if zeros:
        count = math.ceil(n * bits / 8) * 8 // bits
        z = _unpacked(node, rows_of(zeros), bits, shape(count, 1))
        if count != n:
            z = write.node("Slice", z, node.ints(0), node.ints(n), node.ints(-2))
    s = write.node("Reshape", _wide(node, rows_of(scales), dtype), shape(n, 1))
    rows = write.node("Reshape", write.node("Mul", write.node("Sub", q, z), s), shape(D))
    _narrow(node, rows, dtype, node.outputs[0])


def _zero_points(node: MicrosoftNode, zeros: str, bits: int, N: int, n: int) -> str:
    """(N, n, 1) float32, or the one of all where none are given: the middle."""
    write = node.rewriter
    if not zeros:
        return write.constant(float(1 << (bits - 1)), "float32")
    if node.dtype(zeros) != "uint8":
        return write.node("Reshape", _wide(node, zeros, node.dtype(zeros)), node.ints(N, n, 1))
    count = math.ceil(n * bits / 8) * 8 // bits
    points = _unpacked(node, zeros, bits, node.ints(N, count, 1))
    return points if count == n else write.node("Slice", points, node.ints(0), node.ints(n), node.ints(1))


def _unpacked(node: MicrosoftNode, packed: str, bits: int, shape: str) -> str:
    """The numbers of `bits` bits in bytes, the lowest first, as float32 of that shape."""
    write, rest = node.rewriter, node.rewriter.node("Cast", packed, to=_FLOAT)
    base, digits = write.constant(float(1 << bits), "float32"), []
    for _ in range(8 // bits - 1):
        higher = write.node("Floor", write.node("Div", rest, base))
        digits.append(write.node("Sub", rest, write.node("Mul", higher, base)))
        rest = higher
    if digits:
        apart = [write.node("Unsqueeze", digit, node.ints(-1)) for digit in (*digits, rest)]
        rest = write.node("Concat", *apart, axis=-1)
    return write.node("Reshape", rest, shape)


_FLOAT = 1  # onnx.TensorProto.FLOAT


def _wide(node: MicrosoftNode, name: str, dtype: str) -> str:
    """Numbers of `dtype` as float32."""
    return name if dtype == "float32" else node.rewriter.node("Cast", name, to=_FLOAT)


def _narrow(node: MicrosoftNode, name: str, dtype: str, output: str = "") -> str:
    """As `dtype`, under the name `output`, if any."""
    if dtype == "float32" and not output:
        return name
    return node.rewriter.node("Cast", name, output=output, to=_ELEMENT_TYPES[dtype])


_ELEMENT_TYPES = {"float32": 1, "float16": 10, "bfloat16": 16}  # onnx.TensorProto's
