"""The two products of attention with a dot-product instruction for pairs of bfloat16.

Two neighbours along the sum travel as one int32: two elements of a row of Q and K, which lie side by side already, and
two keys of P and V, which are laid side by side here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.score_scale import score_factor
from mhsa_compile.kernels.cpu.attention.matmuls import KeyBlock, TaskOperands, parts
from mhsa_compile.kernels.cpu.simd import dot_product_aarch64, vector_math, vectors
from mhsa_compile.kernels.cpu.simd.dot_product import Dot
from mhsa_compile.kernels.cpu.simd.dtypes import bfloat16_bits, vector_type
from mhsa_compile.kernels.cpu.simd.vectors import (
    Chunk,
    Expr,
    RegisterTile,
    constant,
    load,
    materialize,
    scratch,
    splat,
    store,
)
from mhsa_compile.kernels.interface.ops import AttentionOp

# Two vectors of float32 become one of int32: the first in the lower halves, the second in the upper ones.
_INTERLEAVE = ", ".join(f"i32 {i // 2 + 16 * (i % 2)}" for i in range(32))
# The instruction's second operand becomes the lower half of its result.
_PAIR = f"""
declare <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float>, <16 x float>)
define <16 x i32> @mhsa_pair_bfloat16_16(<16 x float> %low, <16 x float> %high) alwaysinline nounwind memory(none) {{
  %halves = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float> %high, <16 x float> %low)
  %pairs = shufflevector <32 x bfloat> %halves, <32 x bfloat> poison, <32 x i32> <{_INTERLEAVE}>
  %words = bitcast <32 x bfloat> %pairs to <16 x i32>
  ret <16 x i32> %words
}}
"""


_PAIRS = {16: _PAIR, 4: dot_product_aarch64.PAIR}  # by the lanes of the dot product


def imported(dot: Dot) -> ExitStack:
    """Stands around the body of a PrimFunc that uses `PairedProducts`."""
    stack = ExitStack()
    stack.enter_context(dot.imported())
    stack.enter_context(T.attr(0, "pragma_import_llvm", _PAIRS[dot.lanes]))
    return stack


def pairs_fit(op: AttentionOp, dot: Dot | None, lanes: int, key_tile: int) -> bool:
    """Whether `PairedProducts` can do it: whole pairs along E and the keys, whole vectors along F."""
    if dot is None or dot.group != 2 or op.dtype != dot.dtype or dot.lanes != lanes:
        return False
    return op.head_dim % 2 == 0 and op.v_head_dim % lanes == 0 and key_tile % 2 == 0


class PairedProducts:
    """Both products in pairs of bfloat16, summed in float32.

    q_t (E / 2, queries) is Q^T, not scaled, since that would round it once more: the scores are. In pairs of keys,
    probs ((key_tile + keys) / 2, queries) is P^T from row key_tile / 2 on, and values (keys / 2, F) is V.
    """

    exp2_coefficients: Sequence[float] = vector_math.EXP2_FOR_BFLOAT16
    keys_a_step = 2
    rows_at_once = 1

    def __init__(self, operands: TaskOperands, queries: int, keys: int, key_tile: int, dot: Dot) -> None:
        op = operands.op
        self.operands, self.lead, self.dot, self.lanes = operands, key_tile // 2, dot, dot.lanes
        self.queries = queries
        self.q_t = scratch((op.head_dim // 2, queries), "int32")
        self.probs = scratch((self.lead + keys // 2, queries), "int32")
        self.values = scratch((keys // 2, op.v_head_dim), "int32")

    def pack_queries(self) -> None:
        query, words = self.operands.query, self.operands.op.head_dim // 2

        def pairs(row: Expr, e: Expr, count: int) -> Expr:
            return _words(load(query.buffer, query.at(row, e * 2), 2 * count), count)

        vectors.pack_transposed(self.q_t, self.queries, words, self.lanes, self.operands.query_rows, pairs)

    def score(self, tile: RegisterTile, keys: list[Expr], between: Callable[[int], None] | None = None) -> None:
        op, key = self.operands.op, self.operands.key
        self.operands.prefetch(keys)
        tile.fill(0.0)
        for i, (first, end) in enumerate(parts(op.head_dim // 2, len(keys) // 2 if between else 1)):
            with T.serial(T.int64(first), T.int64(end)) as e:
                tile.outer_product(
                    lambda r: _words(load(key.buffer, key.at(keys[r], e * 2), 2), 1),
                    lambda c: load(self.q_t, [e, T.int64(tile.columns[c][0])], tile.columns[c][1]),
                    self.dot.accumulate,
                )
            if between:
                between(i)
        # Here, in float32; Q itself stays as it was given.
        tile.each(lambda r, c: tile.get(r, c) * constant(score_factor(op), tile.columns[c][1]))

    def keep_probs(self, base: Expr, column: Chunk, probs: list[Expr]) -> None:
        first, lanes = column
        words = T.call_pure_extern(f"int32x{lanes}", f"mhsa_pair_bfloat16_{lanes}", *probs)
        store(self.probs, [T.truncdiv(base + 2 * self.lead, T.int64(2)), T.int64(first)], words, lanes)

    def prob(self, key: Expr, query: Expr) -> Expr:
        word = self.probs[T.truncdiv(key, T.int64(2)) + self.lead, query]
        return T.Select(T.truncmod(key, T.int64(2)) == 0, _half(word, 0, 1), _half(word, 1, 1))

    def rescale_probs(self, count: Expr, factors: Expr) -> None:
        with T.serial(T.truncdiv(count, T.int64(2))) as pair:
            for first, lanes in vectors.chunks(self.queries, self.lanes):
                at = [pair + self.lead, T.int64(first)]
                word = materialize(load(self.probs, at, lanes), "int32", lanes)
                factor = load(factors, [T.int64(first)], lanes)
                low, high = (bfloat16_bits(_half(word, side, lanes) * factor, lanes) for side in (0, 1))
                both = low | (high << splat(T.uint32(16), lanes))
                store(self.probs, at, T.reinterpret(f"int32x{lanes}", both), lanes)

    def take_values(self, first_key: Expr, count: Expr) -> None:
        """values[j] = rows 2 j and 2 j + 1 of the block side by side; beyond the block, zeros."""
        with T.serial(T.truncdiv(count, T.int64(2))) as pair:
            self._take_pair(pair, first_key + pair * 2, True)
        with T.If(T.truncmod(count, T.int64(2)) == 1), T.Then():
            # A neighbour of zeros: what an earlier block left there might be NaN, and 0 * NaN is.
            self._take_pair(T.truncdiv(count, T.int64(2)), first_key + (count - 1), False)

    def _take_pair(self, pair: Expr, key: Expr, both: bool) -> None:
        view = self.operands.value
        for first, lanes in vectors.chunks(self.operands.op.v_head_dim, self.lanes):
            halves = [
                T.cast(
                    T.reinterpret(vector_type("uint16", lanes), load(view.buffer, view.at(row, T.int64(first)), lanes)),
                    vector_type("int32", lanes),
                )
                for row in ([key, key + 1] if both else [key])
            ]
            words = halves[0] | (halves[1] << splat(T.int32(16), lanes)) if both else halves[0]
            store(self.values, [pair, T.int64(first)], words, lanes)

    def add_values(self, tile: RegisterTile, base: Expr, group: list[Chunk], block: KeyBlock) -> None:
        """Adds P V; a pair of which these rows see one key is taken whole: the other one's prob is zero."""
        with T.serial(T.truncdiv(block.first, T.int64(2)), T.truncdiv(block.end + 1, T.int64(2))) as pair:
            tile.outer_product(
                lambda r: self.probs[pair + self.lead, base + r],
                lambda c: load(self.values, [pair, T.int64(group[c][0])], group[c][1]),
                self.dot.accumulate,
            )


def _words(pairs: Expr, count: int) -> Expr:
    return T.reinterpret(vector_type("int32", count), pairs)


def _half(words: Expr, side: int, lanes: int) -> Expr:
    """The lower (0) or upper (1) bfloat16 of each word, as float32."""
    # -65536 is 0xFFFF0000.
    shifted = words << splat(T.int32(16), lanes) if side == 0 else words & splat(T.int32(-65536), lanes)
    return T.reinterpret(vector_type("float32", lanes), shifted)
