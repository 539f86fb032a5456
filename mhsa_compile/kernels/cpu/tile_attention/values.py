"""K and V of all heads of a call as tiles take them, by chunks of 32 keys: V^T, 16 features by 32 keys a tile; K, where
it is not bfloat16 as it lies, row by row. Zeros beyond the last key.

A word of two rows of V, side by side, is what a tile of V^T has of two keys; sixteen such rows, transposed, are sixteen
features of it. Whether a tile's keys hold NaN or infinity is kept beside it: where keys are hidden, these must not
count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.attention_args import AttentionArguments
from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.common.head_layout import HeadView, head_view
from mhsa_compile.kernels.cpu.score_parts import keys_of
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import let, materialize, splat, store
from mhsa_compile.kernels.cpu.tile_attention import powers

KEYS, FEATURES = 32, 32
"""Of a square that is turned at once."""
_LOW = [8 * (i // 8) + i % 8 // 2 + 32 * (i % 2) for i in range(32)]
"""The lower four of each eight elements of two vectors, in turn: one instruction."""
_FEATURES = [[8 * (i // 4) + i % 4 + 4 * upper for i in range(16)] for upper in range(2)]
"""The features whose words that leaves, and those of the upper fours."""


@dataclass(frozen=True)
class KeyValueTiles:
    """tiles (B, G, chunks, F / 16, 16, 32) uint16 of V; flags (B, G, chunks) int32, 1 where a chunk of V holds NaN or
    infinity; keys (B, G, chunks, 32, E) uint16, or None where K is read where it lies."""

    tiles: Expr
    flags: Expr
    keys: Expr | None

    @staticmethod
    def of(arguments: AttentionArguments) -> KeyValueTiles:
        """Allocates and writes them, in a loop of its own over heads and chunks."""
        op = arguments.op
        chunks, heads = ceil_div(arguments.kv_length, KEYS), T.int64(op.num_kv_heads)
        sizes = [arguments.batch, heads, chunks]
        values = KeyValueTiles(
            T.alloc_buffer([*sizes, T.int64(op.v_head_dim // 16), T.int64(16), T.int64(32)], "uint16"),
            T.alloc_buffer(sizes, "int32"),
            None if op.dtype == "bfloat16" else T.alloc_buffer([*sizes, T.int64(KEYS), T.int64(op.head_dim)], "uint16"),
        )
        count = materialize(chunks)
        with T.parallel(arguments.batch * heads * count) as index:
            chunk = materialize(T.truncmod(index, count))
            head = materialize(T.truncdiv(index, count))
            b, g = materialize(T.truncdiv(head, heads)), materialize(T.truncmod(head, heads))
            values._write(arguments, b, g, chunk)
        return values

    def _write(self, arguments: AttentionArguments, b: Expr, g: Expr, chunk: Expr) -> None:
        op = arguments.op
        view = head_view(arguments.inputs[op.value.buffer], op.value, op.v_head_dim, b, g)
        end, flag = keys_of(arguments, b), T.alloc_buffer((1,), "int32")
        store(flag, [T.int64(0)], T.int32(0), 1)

        def turn(row: Callable[[int, Expr], Expr]) -> None:
            with T.serial(T.int64(op.v_head_dim // FEATURES)) as square:
                self._turn(lambda key: row(key, square * FEATURES), [b, g, chunk], square, flag)

        first = materialize(chunk * KEYS)
        zeros, last = splat(T.uint16(0), FEATURES), materialize(T.max(end - 1, T.int64(0)))

        def whole(view: HeadView, key: Expr | int, column: Expr) -> Expr:
            return powers.row_of_bfloat16(view.buffer, view.at(first + key, column))

        def cut(view: HeadView, key: Expr | int, column: Expr) -> Expr:
            row = powers.row_of_bfloat16(view.buffer, view.at(T.min(first + key, last), column))
            return T.Select(splat(first + key < end, FEATURES), row, zeros)

        def write(read: Callable[..., Expr]) -> None:
            turn(partial(read, view))
            if self.keys is None:
                return
            key_view = head_view(arguments.inputs[op.key.buffer], op.key, op.head_dim, b, g)
            with T.serial(T.int64(KEYS)) as key, T.serial(T.int64(op.head_dim // 32)) as part:
                store(self.keys, [b, g, chunk, key, part * 32], read(key_view, key, part * 32), 32)

        with T.If(first + KEYS <= end):
            with T.Then():
                write(whole)
            with T.Else():
                write(cut)
        store(self.flags, [b, g, chunk], flag[0], 1)

    def _turn(self, row: Callable[[int], Expr], place: list[Expr], square: Expr, flag: Expr) -> None:
        infinite = splat(T.uint16(0x7F80), FEATURES)
        words: list[list[Expr]] = [[], []]
        largest = None
        for key in range(0, KEYS, 2):
            pair = [let(row(key)), let(row(key + 1))]
            for elements in pair:
                exponents = elements & infinite
                largest = exponents if largest is None else let(T.max(largest, exponents))
            for upper in range(2):
                turns = [T.int32(i + 4 * upper) for i in _LOW]
                words[upper].append(let(T.reinterpret("int32x16", T.Shuffle(pair, turns))))
        with T.If(vectors.any_lane(largest == infinite, FEATURES)), T.Then():
            store(flag, [T.int64(0)], T.int32(1), 1)
        for upper in range(2):
            for feature, column in zip(_FEATURES[upper], vectors.transpose(words[upper]), strict=True):
                at = [*place, square * 2 + feature // 16, T.int64(feature % 16), T.int64(0)]
                store(self.tiles, at, T.reinterpret("uint16x32", column), KEYS)
