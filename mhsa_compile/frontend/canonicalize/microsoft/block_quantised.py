"""Weights that a file holds in few bits, by blocks with a scale and a zero point each: (q - z) s. MatMulNBits and
GatherBlockQuantized, as onnxruntime-genai's builder and the converters of hubs write them (q4, q4f16); MatMulBnb4,
whose numbers are places in a table of bitsandbytes.

A product with weights that the file has is not seen here (`canonicalize.stored_blocks`). Others, and rows of a table,
become float arithmetic, in float32 whatever the dtype; of a table only the rows that a call asks for are computed.
Source: ONNX Runtime's docs/ContribOperators.md. Notation: N out-features, K in-features, n blocks of a row.
"""

from __future__ import annotations

import math

import numpy as np

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


def matmul_bnb4(node: MicrosoftNode) -> None:
    """x (..., K), q (bytes,) uint8 of all N rows, one behind the other, the first of two numbers in the upper half, and
    the largest magnitude of each block of them -> x W^T (..., N). A number is a place in a table of 16."""
    x, packed, largest = node.inputs[:3]
    write, dtype = node.rewriter, node.dtype(x, largest)
    N, K, block = node.attrs["N"], node.attrs["K"], node.attrs["block_size"]
    n = math.ceil(N * K / block)
    places = write.node("Cast", packed, to=_INT32)
    upper = write.node("Div", places, write.constant(16, "int32"))
    lower = write.node("Sub", places, write.node("Mul", upper, write.constant(16, "int32")))
    apart = [write.node("Unsqueeze", half, node.ints(-1)) for half in (upper, lower)]
    every = write.node("Reshape", write.node("Concat", *apart, axis=-1), node.ints(-1))
    numbers = write.node("Gather", write.constant(_TABLES[node.attrs["quant_type"]], "float32"), every, axis=0)
    of_block = write.constant(np.arange(N * K) // block, "int64")
    scales = write.node("Gather", _wide(node, write.node("Reshape", largest, node.ints(n)), dtype), of_block, axis=0)
    if N * K % 2:
        numbers = write.node("Slice", numbers, node.ints(0), node.ints(N * K))
    rows = write.node("Reshape", write.node("Mul", numbers, scales), node.ints(N, K))
    weight = write.node("Transpose", _narrow(node, rows, dtype), perm=[1, 0])
    write.node("MatMul", x, weight, output=node.outputs[0])


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


_FLOAT, _INT32 = 1, 6  # onnx.TensorProto's

_FP4 = (0.0, 5.208333333e-03, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_TABLES = ((*_FP4, *(-number for number in _FP4)), _NF4)
"""The numbers of bitsandbytes, by quant_type."""


def _wide(node: MicrosoftNode, name: str, dtype: str) -> str:
    """Numbers of `dtype` as float32."""
    return name if dtype == "float32" else node.rewriter.node("Cast", name, to=_FLOAT)


def _narrow(node: MicrosoftNode, name: str, dtype: str, output: str = "") -> str:
    """As `dtype`, under the name `output`, if any."""
    if dtype == "float32" and not output:
        return name
    return node.rewriter.node("Cast", name, output=output, to=_ELEMENT_TYPES[dtype])


_ELEMENT_TYPES = {"float32": 1, "float16": 10, "bfloat16": 16}  # onnx.TensorProto's
