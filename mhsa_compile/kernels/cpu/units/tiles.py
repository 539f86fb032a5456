"""Matrix tiles (AMX): eight registers of 16 rows of 64 bytes, and an instruction that multiplies two of them.

    C (16, 16) += A (16, K) B (K, 16)        K = 32 of bfloat16 and float16, 64 of bytes; C float32 or int32

A lies row by row as it is in memory, at any pitch. A row of B's tile has for each column a word: `group` neighbours
along K. The numbers of tiles are immediates, so each has a function of its own, inlined from a few lines of LLVM IR.

What the eight look like is state of a thread: each task writes it (`ldtilecfg`) and leaves none behind. LLVM does not
know which tiles live: between a load and its last use nothing may be called. It takes every one of these instructions
for one that reads and writes memory, so they stay in the order of the program.

Order of the sums, bfloat16 and float16: two chains of 16 fused multiply-adds, over even and over odd terms, their sum,
then C; to nearest even, denormals of bfloat16 and of float32 are zero, those of float16 are numbers. Source: Intel SDM,
TDPBF16PS, TDPFP16PS; the permission to use tiles: hardware/tile_permission.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import DTYPE_BYTES
from mhsa_compile.kernels.cpu.units.unit import Unit

ROWS, ROW_BYTES, WORDS = 16, 64, 16
"""Of a tile: rows, bytes of a row, and words along K."""
LEFT, RIGHT = 6, 7
"""Where a tile of A and one of B are: one that is loaded anew gets other registers while products of the one before
still wait."""
LEFTS, RIGHTS = (4, LEFT), (5, RIGHT)
"""Two of each, beside four of C."""


@dataclass(frozen=True)
class Tiles(Unit):
    """A product of tiles, by `instruction`. A step is a word along K."""

    instruction: str = ""

    def is_on(self, profile: CpuProfile) -> bool:
        features = {"amx_tile", "avx512_bf16"}  # the second rounds what tiles leave
        return features <= set(profile.hardware.features) and super().is_on(profile)

    @property
    def word(self) -> str:
        return "int32"

    @property
    def depth(self) -> int:
        """Terms along K of one tile."""
        return WORDS * self.group

    def imported(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = T.attr(0, "pragma_import_llvm", _text(self.instruction))
        return context

    def product(self, c: int, a: int, b: int) -> None:
        """Tile c += a b."""
        _call(f"{self.instruction}_{c}_{a}_{b}")


def configure(rows: Expr | None = None, *, right: Sequence[int] = (RIGHT,)) -> None:
    """Gives a thread's tiles their shapes, from here to `release`: 16 rows of 64 bytes, fewer of A and C if `rows` are.
    `right` are tiles of B."""
    state = T.alloc_buffer((64,), "uint8")
    block = [1] + [0] * 63  # the palette, then the first row
    for tile in range(8):
        block[16 + 2 * tile], block[48 + tile] = ROW_BYTES, ROWS
    for at, byte in enumerate(block):
        T.buffer_store(state, T.uint8(byte), [T.int64(at)])
    for tile in () if rows is None else (tile for tile in range(8) if tile not in right):
        T.buffer_store(state, T.cast(rows, "uint8"), [T.int64(48 + tile)])
    _call("ldtilecfg", T.address_of(state[T.int64(0)]))


def release() -> None:
    _call("tilerelease")


def zero(tile: int) -> None:
    _call(f"tilezero_{tile}")


def load_tile(tile: int, buffer: Expr, index: Sequence[Expr], pitch: Expr | int) -> None:
    """Rows of 64 bytes from an element on, `pitch` elements apart."""
    _move("tileloadd", tile, buffer, index, pitch)


def stream_tile(tile: int, buffer: Expr, index: Sequence[Expr], pitch: Expr | int) -> None:
    """As `load_tile`, of what is not asked for again before the first cache has forgotten it: it then stays out of the
    way of what is."""
    _move("tileloaddt1", tile, buffer, index, pitch)


def crosses_lines(buffer: Expr, index: Sequence[Expr]) -> Expr:
    """Whether rows of 64 bytes that begin with an element lie in two cache lines each: such a tile takes five times as
    long to load."""
    return T.call_pure_extern("int32", "mhsa_tile_offset", T.address_of(buffer[tuple(index)])) != T.int32(0)


def either(condition: Expr, one: Expr, other: Expr) -> Expr:
    """One of two buffers of a shape, where the condition holds, else the other."""
    start = [T.int64(0) for _ in one.shape]
    pointers = [T.address_of(buffer[tuple(start)]) for buffer in (one, other)]
    pointer = T.Bind(T.call_pure_extern("handle", "mhsa_either", condition, *pointers))
    return T.decl_buffer(one.shape, one.dtype, data=pointer)


def store_tile(tile: int, buffer: Expr, index: Sequence[Expr], pitch: Expr | int) -> None:
    _move("tilestored", tile, buffer, index, pitch)


def narrowed_pair(low: Expr, high: Expr) -> Expr:
    """Two vectors of sixteen float32 behind each other, the bits of bfloat16, to nearest even; denormals are zero, as
    the unit takes and leaves them."""
    return T.call_pure_extern("uint16x32", "mhsa_tile_narrowed_pair", low, high)


def upper_halves(low: Expr, high: Expr) -> Expr:
    """Two vectors of sixteen float32 as words of two bfloat16, whose lower bits are cut off."""
    return T.call_pure_extern("int32x16", "mhsa_upper_halves", low, high)


def _move(function: str, tile: int, buffer: Expr, index: Sequence[Expr], pitch: Expr | int) -> None:
    stride = pitch * DTYPE_BYTES[str(buffer.dtype)]
    stride = T.int64(stride) if isinstance(stride, int) else stride
    _call(f"{function}_{tile}", T.address_of(buffer[tuple(index)]), stride)


def _call(name: str, *arguments: Expr) -> None:
    T.evaluate(T.call_extern("void", f"mhsa_{name}", *arguments))


_TRIPLES = list(itertools.product(range(4), LEFTS, RIGHTS))
"""Tiles of C, A and B that are multiplied together."""
PRODUCTS = ("tdpbf16ps", "tdpfp16ps", "tdpbssd", "tdpbusd", "tdpbsud", "tdpbuud")


def _text(product: str) -> str:
    """A function for each tile of each instruction, of the products of one alone: LLVM ends the process where it meets
    one that the target lacks."""
    inlined = "alwaysinline nounwind"
    lines = [
        "declare void @llvm.x86.ldtilecfg(ptr)",
        "declare void @llvm.x86.tilerelease()",
        "declare void @llvm.x86.tilezero(i8 immarg)",
        "declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)",
        "declare void @llvm.x86.tileloaddt164(i8 immarg, ptr, i64)",
        "declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)",
        f"define void @mhsa_ldtilecfg(ptr %p) {inlined} {{ call void @llvm.x86.ldtilecfg(ptr %p) ret void }}",
        f"define void @mhsa_tilerelease() {inlined} {{ call void @llvm.x86.tilerelease() ret void }}",
    ]
    for t in range(8):
        lines += [
            f"define void @mhsa_tilezero_{t}() {inlined} {{ call void @llvm.x86.tilezero(i8 {t}) ret void }}",
            *(
                f"define void @mhsa_{move}_{t}(ptr %p, i64 %s) {inlined} "
                f"{{ call void @llvm.x86.{move}64(i8 {t}, ptr %p, i64 %s) ret void }}"
                for move in ("tileloadd", "tileloaddt1", "tilestored")
            ),
        ]
    lines.append(f"declare void @llvm.x86.{product}(i8 immarg, i8 immarg, i8 immarg)")
    for c, a, b in _TRIPLES:
        lines.append(
            f"define void @mhsa_{product}_{c}_{a}_{b}() {inlined} "
            f"{{ call void @llvm.x86.{product}(i8 {c}, i8 {a}, i8 {b}) ret void }}"
        )
    return "\n".join(lines) + HELPERS


_UPPER = ", ".join(f"i8 {i % 16 + 2 if i % 4 < 2 else 0}" for i in range(64))
"""For the lower half of each word, the upper one of the same word."""
_LOWER_HALVES = 0x3333333333333333
HELPERS = f"""
define i32 @mhsa_tile_offset(ptr %p) alwaysinline nounwind memory(none) {{
  %a = ptrtoint ptr %p to i64
  %b = trunc i64 %a to i32
  %c = and i32 %b, 63
  ret i32 %c
}}
define ptr @mhsa_either(i1 %c, ptr %p, ptr %q) alwaysinline nounwind memory(none) {{
  %r = select i1 %c, ptr %p, ptr %q
  ret ptr %r
}}
declare <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float>, <16 x float>)
define <32 x i16> @mhsa_tile_narrowed_pair(<16 x float> %low, <16 x float> %high) alwaysinline nounwind memory(none) {{
  %r = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float> %high, <16 x float> %low)
  %b = bitcast <32 x bfloat> %r to <32 x i16>
  ret <32 x i16> %b
}}
define <16 x i32> @mhsa_upper_halves(<16 x float> %low, <16 x float> %high) alwaysinline nounwind memory(none) {{
  %a = bitcast <16 x float> %low to <64 x i8>
  %b = bitcast <16 x float> %high to <16 x i32>
  %words = call <16 x i32> asm "vpshufb $3, $2, $0 {{$4}}", "=v,0,v,v,^Yk"(<16 x i32> %b, <64 x i8> %a,
    <64 x i8> <{_UPPER}>, i64 {_LOWER_HALVES})
  ret <16 x i32> %words
}}
"""


BFLOAT16 = Tiles("bfloat16", "float32", 16, 2, feature="amx_bf16", instruction="tdpbf16ps")
FLOAT16 = Tiles("float16", "float32", 16, 2, feature="amx_fp16", instruction="tdpfp16ps")
UNSIGNED_BYTES = Tiles("int8", "int32", 16, 4, feature="amx_int8", unsigned=True, instruction="tdpbusd")
SIGNED_BYTES = Tiles("int8", "int32", 16, 4, feature="amx_int8", instruction="tdpbssd")
"""Bytes of A of either sign, with signed ones of B."""


def unit_of(dtype: str) -> Tiles:
    """What multiplies floats; those of float32 by terms of bfloat16."""
    return FLOAT16 if dtype == "float16" else BFLOAT16
