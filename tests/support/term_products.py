"""A linear kernel that multiplies float32 by bfloat16 terms, slowly, on any CPU, and one of attention that says so; and
such products in NumPy."""

from __future__ import annotations

import numpy as np
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import SizeVars, argument
from mhsa_compile.kernels.common.op_args import weight_arguments
from mhsa_compile.kernels.cpu.attention.kernel import CpuAttentionKernel
from mhsa_compile.kernels.cpu.simd.vectors import materialize, store
from mhsa_compile.kernels.interface.kernel import Emitted, Fixed
from mhsa_compile.kernels.interface.ops import LinearOp
from mhsa_compile.spec.float32_products import TERM_PRODUCTS, Float32Products
from mhsa_compile.verification.oracle.float32_terms import term_factors

WORDS: tuple[Float32Products, ...] = ("bf16x6", "bf16x3", "bf16")


class Offers:
    """The answers of a kernel that makes products by terms where a target has the unit: where its vectors have so many
    lanes."""

    words, exact, lanes = WORDS, WORDS[:1], 16

    def float32_products(self, op, profile):
        return self.words if profile.vector_lanes("float32") == self.lanes else ()

    def exact_products(self, op, profile):
        return self.exact


class TermLinear(Offers, Fixed):
    """y = x W^T + b of terms, summed in float64; of nothing but float32, with no activation behind it."""

    name = "test.term_linear"
    op_type = LinearOp

    def why_not(self, op, profile):
        if op.float32_products == "ieee":
            return "it is for terms"
        plain = op.dtype == "float32" and not op.int8_weights and op.epilogue is None
        return None if plain else "it is for plain linears"

    def emit(self, op, profile, config):
        return Emitted(_term_linear(op))


class OfferingAttention(Offers, CpuAttentionKernel):
    """Attention as it is, which is more exact than what it offers."""


def _term_linear(op):
    dim, zero = SizeVars(), [T.int64(0)]
    rows = [dim(size) for size in op.rows]
    pairs = TERM_PRODUCTS[op.float32_products]
    with IRBuilder() as builder, T.prim_func():
        T.func_name("term_linear")
        T.func_attr({"tirx.noalias": True})
        x = argument("x", [*rows, T.int64(op.in_features)], op.dtype)
        weights, biases = weight_arguments(op)
        y = argument("y", [*rows, T.int64(op.pitch)], op.dtype)
        first = 0
        for n, (width, weight, bias) in enumerate(zip(op.widths, weights, biases, strict=True)):
            with T.grid(*rows, T.int64(width)) as (*row, o):
                total = T.alloc_buffer((1,), "float64")
                store(total, zero, T.float64(0) if bias is None else T.cast(bias[o], "float64"), 1)
                with T.serial(T.int64(op.in_features)) as k:
                    w = weight[k, o] if op.transposed[n] else weight[o, k]
                    left, right = _terms(x[*row, k]), _terms(w)
                    product = sum(T.cast(left[p], "float64") * T.cast(right[q], "float64") for p, q in pairs)
                    store(total, zero, total[0] + product, 1)
                store(y, [*row, o + first], T.cast(total[0], "float32"), 1)
            first += width
    return builder.get()


def _terms(x):
    """Three terms of a number, each rounded to nearest even."""
    terms = []
    for _ in range(3):
        bits = materialize(T.reinterpret("uint32", x), "uint32")
        odd = T.bitwise_and(T.shift_right(bits, T.uint32(16)), T.uint32(1))
        rounded = T.bitwise_and(bits + odd + T.uint32(0x7FFF), T.uint32(0xFFFF0000))
        terms.append(materialize(T.reinterpret("float32", rounded), "float32"))
        x = materialize(x - terms[-1], "float32")
    return terms


def products_of_terms(a: np.ndarray, b: np.ndarray, word: Float32Products) -> np.ndarray:
    """a (..., M, K) times b (..., K, N), float32, with the products that a word has; sums are float64."""
    pairs = [(a, b)] if word == "ieee" else term_factors(a, b, word)
    with np.errstate(invalid="ignore", over="ignore"):
        products = [np.matmul(left.astype(np.float64), right.astype(np.float64)) for left, right in pairs]
        return np.asarray(sum(products))
