"""The two products of attention with a matrix product of bfloat16, which multiplies two rows with two columns.

Four neighbours along the sum travel as one int64: four elements of a row of Q and K, which lie side by side already,
and four keys of P and V, which are laid side by side here. A vector holds two such words, of two keys or two queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import ceil_div
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
    let,
    load,
    materialize,
    scratch,
    splat,
    store,
)
from mhsa_compile.kernels.interface.ops import AttentionOp

WORD = 4  # elements in an int64


def imported(dot: Dot) -> ExitStack:
    """Stands around the body of a PrimFunc that uses `MatrixProducts`."""
    stack = ExitStack()
    stack.enter_context(dot.imported())
    stack.enter_context(T.attr(0, "pragma_import_llvm", dot_product_aarch64.WORDS))
    return stack


def words_fit(op: AttentionOp, dot: Dot | None, lanes: int, key_tile: int) -> bool:
    """Whether `MatrixProducts` can do it: whole words along E and the keys, whole vectors along F."""
    if dot is None or op.dtype != dot.dtype or dot.lanes != lanes:
        return False
    return op.head_dim % WORD == 0 and op.v_head_dim % lanes == 0 and key_tile % WORD == 0


class MatrixProducts:
    """Both products in words of four bfloat16, summed in float32.

    q_t (E / 4, queries) is Q^T, not scaled, since that would round it once more: the scores are. In words of four keys,
    probs ((key_tile + keys) / 4, queries) is P^T from row key_tile / 4 on, and values (keys / 4, F) is V.
    """

    exp2_coefficients: Sequence[float] = vector_math.EXP2_FOR_BFLOAT16
    keys_a_step = WORD
    rows_at_once = 2

    def __init__(self, operands: TaskOperands, queries: int, keys: int, key_tile: int, dot: Dot) -> None:
        op = operands.op
        self.operands, self.lead, self.dot, self.lanes = operands, key_tile // WORD, dot, dot.lanes
        self.queries = queries
        self.q_t = scratch((op.head_dim // WORD, queries), "int64")
        self.probs = scratch((self.lead + keys // WORD, queries), "int64")
        self.values = scratch((keys // WORD, op.v_head_dim), "int64")

    def pack_queries(self) -> None:
        query, words = self.operands.query, self.operands.op.head_dim // WORD

        def pack(first: Expr, count: int) -> None:
            rows = self.operands.query_rows(first, count)
            with T.serial(T.int64(words)) as e:
                for i, row in enumerate(rows):
                    store(self.q_t, [e, first + i], _words(load(query.buffer, query.at(row, e * WORD), WORD), 1), 1)

        vectors.each_vector(self.queries, self.lanes, pack)

    def score(self, tile: RegisterTile, keys: list[Expr], between: Callable[[int], None] | None = None) -> None:
        op, key = self.operands.op, self.operands.key
        self.operands.prefetch(keys)
        sums = self._sums(tile)

        def rows(line: int, e: Expr, words: int) -> list[Expr]:
            """The words of two keys, so many from word e on: a vector of both keys' first, one of both keys' second,
            and so on."""
            found = [
                _words(load(key.buffer, key.at(row, e * WORD), words * WORD), words)
                for row in keys[2 * line : 2 * line + 2]
            ]
            found = [let(words) for words in found]
            return [let(T.Shuffle(found, [T.int32(i), T.int32(words + i)])) for i in range(words)]

        def add(e: Expr, words: int) -> None:
            pairs = [rows(line, e, words) for line in range(sums.rows)]
            for i in range(words):
                self._multiply(
                    sums,
                    lambda line: pairs[line][i],
                    lambda c: load(self.q_t, [e + i, T.int64(tile.columns[c][0])], self.lanes),
                )

        for i, (first, end) in enumerate(parts(op.head_dim // WORD, len(keys) // WORD if between else 1)):
            # Two words of a key are one load of 16 bytes; an odd last one comes by itself.
            twice = (end - first) // 2
            with T.serial(T.int64(twice)) as turn:
                add(materialize(first + turn * 2), 2)
            if (end - first) % 2:
                add(T.int64(end - 1), 1)
            if between:
                between(i)
        factor = constant(score_factor(op), self.lanes)
        self._each_row(sums, lambda r, c, part: tile.set(r, c, part * factor))

    def _multiply(self, sums: RegisterTile, lines: Callable[[int], Expr], columns: Callable[[int], Expr]) -> None:
        """sums[l, c] += lines(l) columns(c). Column by column: whole rows of columns would not fit beside the sums."""
        factors = [let(lines(line)) for line in range(sums.rows)]
        for c in range(len(sums.columns)):
            column = let(columns(c))
            for line, factor in enumerate(factors):
                sums.set(line, c, self.dot.accumulate(sums.get(line, c), factor, column))

    def _sums(self, tile: RegisterTile) -> RegisterTile:
        """The tile two rows at a time, all zeros."""
        sums = RegisterTile(tile.rows // 2, [(2 * first, 2 * lanes) for first, lanes in tile.columns])
        sums.fill(0.0)
        return sums

    def _each_row(self, sums: RegisterTile, take: Callable[[int, int, Expr], None]) -> None:
        for line in range(sums.rows):
            for c in range(len(sums.columns)):
                for number, part in enumerate(self.dot.unzipped(let(sums.get(line, c)))):
                    take(2 * line + number, c, part)

    def keep_probs(self, base: Expr, column: Chunk, probs: list[Expr]) -> None:
        words = T.call_pure_extern(f"int64x{self.lanes}", dot_product_aarch64.WORDS_NAME, *probs)
        store(self.probs, [T.truncdiv(base, T.int64(WORD)) + self.lead, T.int64(column[0])], words, self.lanes)

    def prob(self, key: Expr, query: Expr) -> Expr:
        word = self.probs[T.truncdiv(key, T.int64(WORD)) + self.lead, query]
        return _element(word, T.truncmod(key, T.int64(WORD)), 1)

    def rescale_probs(self, count: Expr, factors: Expr) -> None:
        with T.serial(T.truncdiv(count, T.int64(WORD))) as j:
            for first, lanes in vectors.chunks(self.queries, self.lanes):
                at = [j + self.lead, T.int64(first)]
                word = materialize(load(self.probs, at, lanes), "int64", lanes)
                factor = load(factors, [T.int64(first)], lanes)
                new = splat(T.int64(0), lanes)
                for place in range(WORD):
                    bits = bfloat16_bits(_element(word, T.int64(place), lanes) * factor, lanes)
                    wide = T.cast(bits, vector_type("int64", lanes)) << splat(T.int64(16 * place), lanes)
                    new = materialize(new | wide, "int64", lanes)
                store(self.probs, at, new, lanes)

    def take_values(self, first_key: Expr, count: Expr) -> None:
        """values[j] = rows 4 j .. 4 j + 3 of the block side by side; beyond the block, zeros."""
        whole = materialize(T.truncdiv(count, T.int64(WORD)))
        with T.serial(whole) as j:
            self._take_word(j, [(materialize(first_key + (j * WORD + i)), None) for i in range(WORD)])
        with T.If(whole * WORD < count), T.Then():
            keys = [materialize(whole * WORD + i) for i in range(WORD)]
            self._take_word(whole, [(materialize(first_key + T.min(key, count - 1)), key < count) for key in keys])

    def _take_word(self, j: Expr, rows: list[tuple[Expr, Expr | None]]) -> None:
        """Stores word j of four rows of V, each given as (its number, whether it is there; None where it must be)."""
        view = self.operands.value
        for first, lanes in vectors.chunks(self.operands.op.v_head_dim, self.lanes):
            halves = []
            for row, there in rows:
                half = T.reinterpret(f"uint16x{lanes}", load(view.buffer, view.at(row, T.int64(first)), lanes))
                # A row that is not there was read as the last one; its elements must not be NaN.
                zeros = splat(T.uint16(0), lanes)
                halves.append(half if there is None else T.Select(splat(there, lanes), half, zeros))
            # In two rounds: pairs of rows first, then pairs of pairs.
            low, high = (_interleaved(halves[i], halves[i + 1], "int32", lanes) for i in (0, 2))
            store(self.values, [j, T.int64(first)], _interleaved(low, high, "int64", lanes), lanes)

    def add_values(self, tile: RegisterTile, base: Expr, group: list[Chunk], block: KeyBlock) -> None:
        """Adds P V; a word of which these rows see one key is taken whole: the other ones' probs are zero."""
        sums = self._sums(tile)
        with T.serial(T.truncdiv(block.first, T.int64(WORD)), ceil_div(block.end, WORD)) as j:
            self._multiply(
                sums,
                lambda line: load(self.probs, [j + self.lead, base + 2 * line], 2),
                lambda c: load(self.values, [j, T.int64(group[c][0])], self.lanes),
            )
        self._each_row(sums, lambda r, c, part: tile.set(r, c, tile.get(r, c) + part))


def _words(elements: Expr, count: int) -> Expr:
    return T.reinterpret(vector_type("int64", count), elements)


def _element(words: Expr, place: Expr, lanes: int) -> Expr:
    """The bfloat16 at one of the four places of each word, as float32."""
    low = T.cast(words >> splat(place * 16, lanes), vector_type("int32", lanes))
    return T.reinterpret(vector_type("float32", lanes), low << splat(T.int32(16), lanes))


def _interleaved(low: Expr, high: Expr, dtype: str, lanes: int) -> Expr:
    """Elements of both in turn, as `lanes` of twice their width."""
    turns = [T.int32(i // 2 + lanes * (i % 2)) for i in range(2 * lanes)]
    return T.reinterpret(f"{dtype}x{lanes}", T.Shuffle([low, high], turns))
