"""The functions of `mhsa_compile.kernels.cpu.units.tiles` in plain LLVM IR, on memory: the same names and signatures,
so the same kernels run on tiles that are none.

Zig compiles them to a library, and kernels call what it has by its address: what kernels import LLVM inlines, and a
product is long. Loads and stores take their rows and bytes from the config block; products multiply whole tiles, of
which loads have filled the rest with zeros.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from mhsa_compile.hardware import zig
from mhsa_compile.kernels.cpu.units import tiles

_SIGNS = {
    "tdpbssd": ("ashr", "ashr"),
    "tdpbsud": ("ashr", "lshr"),
    "tdpbusd": ("lshr", "ashr"),
    "tdpbuud": ("lshr", "lshr"),
}
FUNCTIONS = ("configure", "release", "zero", "move", *tiles.PRODUCTS)
_STATE = "i8, ptr @mhsa_soft_state, i64"


def text(product: str) -> str:
    """What kernels import of one product, in the place of `tiles._text`."""
    library = _library()
    address = {name: ctypes.cast(getattr(library, f"mhsa_soft_{name}"), ctypes.c_void_p).value for name in FUNCTIONS}

    def calling(name: str, parameters: str, call: str, arguments: str) -> str:
        return (
            f"define void @mhsa_{name}({parameters}) alwaysinline nounwind "
            f"{{ call void inttoptr (i64 {address[call]} to ptr)({arguments}) ret void }}"
        )

    parts = [calling("ldtilecfg", "ptr %p", "configure", "ptr %p"), calling("tilerelease", "", "release", "")]
    for tile in range(8):
        parts.append(calling(f"tilezero_{tile}", "", "zero", f"i64 {tile}"))
        for name, inwards in (("tileloadd", "true"), ("tileloaddt1", "true"), ("tilestored", "false")):
            call = f"i64 {tile}, ptr %p, i64 %s, i1 {inwards}"
            parts.append(calling(f"{name}_{tile}", "ptr %p, i64 %s", "move", call))
    for c, a, b in tiles._TRIPLES:
        parts.append(calling(f"{product}_{c}_{a}_{b}", "", product, f"i64 {c}, i64 {a}, i64 {b}"))
    return "\n".join(parts) + tiles.HELPERS


@cache
def _library() -> ctypes.CDLL:
    with TemporaryDirectory() as folder:
        source, library = Path(folder, "soft.ll"), Path(folder, "soft.so")
        source.write_text("\n".join([_MEMORY, *(_product(name) for name in tiles.PRODUCTS)]))
        words = ["-O2", "-mcpu=x86_64_v4", "-Wno-override-module", "-shared", "-fPIC", "-o", library, source]
        zig.run("cc", "x86_64-linux-gnu", words, "soft tiles")
        return ctypes.CDLL(str(library))


def _flushed(x: str, to: str) -> str:
    """Denormals become zeros of their sign."""
    return (
        f"  {to}.a = call <16 x float> @llvm.fabs.v16f32(<16 x float> {x})\n"
        f"  {to}.t = fcmp olt <16 x float> {to}.a, splat (float 0x3810000000000000)\n"
        f"  {to}.z = call <16 x float> @llvm.copysign.v16f32(<16 x float> zeroinitializer, <16 x float> {x})\n"
        f"  {to} = select <16 x i1> {to}.t, <16 x float> {to}.z, <16 x float> {x}\n"
    )


def _float_step(name: str) -> str:
    """Both terms of a word, each into its chain: bfloat16 with denormals as zeros, float16 with all of its numbers."""
    lines = []
    for side, sums in enumerate(("even", "odd")):
        for factor in "ab":
            to = f"%{factor}.{sums}"
            if name == "tdpfp16ps":
                lines.append(
                    f"  {to}.w = lshr <16 x i32> %{factor}w, splat (i32 {16 * side})\n"
                    f"  {to}.s = trunc <16 x i32> {to}.w to <16 x i16>\n"
                    f"  {to}.h = bitcast <16 x i16> {to}.s to <16 x half>\n"
                    f"  {to} = fpext <16 x half> {to}.h to <16 x float>"
                )
                continue
            move = ("shl", "16") if side == 0 else ("and", "-65536")
            lines.append(f"  {to}.w = {move[0]} <16 x i32> %{factor}w, splat (i32 {move[1]})")
            lines.append(f"  {to}.f = bitcast <16 x i32> {to}.w to <16 x float>\n{_flushed(f'{to}.f', to)}")
        lines.append(
            f"  %{sums}.r = call <16 x float> @llvm.fma.v16f32("
            f"<16 x float> %a.{sums}, <16 x float> %b.{sums}, <16 x float> %{sums})"
        )
        lines.append(_flushed(f"%{sums}.r", f"%{sums}.next"))
    return "\n".join(lines)


def _byte_step(signs: tuple[str, str]) -> str:
    lines = []
    for i in range(4):
        for factor, widened in zip("ab", signs, strict=True):
            lines.append(f"  %{factor}.l{i} = shl <16 x i32> %{factor}w, splat (i32 {24 - 8 * i})")
            lines.append(f"  %{factor}.{i} = {widened} <16 x i32> %{factor}.l{i}, splat (i32 24)")
        lines.append(f"  %p.{i} = mul <16 x i32> %a.{i}, %b.{i}")
        to = "%even.next" if i == 3 else f"%s.{i}"
        lines.append(f"  {to} = add <16 x i32> {'%even' if i == 0 else f'%s.{i - 1}'}, %p.{i}")
    return "\n".join(lines)


def _product(name: str) -> str:
    floats = name not in _SIGNS
    kind = "float" if floats else "i32"
    odd = f"  %odd = phi <16 x {kind}> [ zeroinitializer, %rows ], [ %odd.next, %sum ]\n" if floats else ""
    if floats:
        step = _float_step(name)
        end = (
            "  %pair.r = fadd <16 x float> %even.next, %odd.next\n" + _flushed("%pair.r", "%pair")
            + _flushed("%c", "%c.in") + "  %new.r = fadd <16 x float> %c.in, %pair\n" + _flushed("%new.r", "%new")
        )  # fmt: skip
    else:
        step, end = _byte_step(_SIGNS[name]), "  %new = add <16 x i32> %c, %even.next\n"
    return f"""
define void @mhsa_soft_{name}(i64 %tc, i64 %ta, i64 %tb) nounwind {{
entry:
  %tiles = getelementptr {_STATE} 64
  %pc = getelementptr [1024 x i8], ptr %tiles, i64 %tc
  %pa = getelementptr [1024 x i8], ptr %tiles, i64 %ta
  %pb = getelementptr [1024 x i8], ptr %tiles, i64 %tb
  br label %rows
rows:
  %m = phi i64 [ 0, %entry ], [ %m.next, %store ]
  %cp = getelementptr [64 x i8], ptr %pc, i64 %m
  br label %sum
sum:
  %k = phi i64 [ 0, %rows ], [ %k.next, %sum ]
  %even = phi <16 x {kind}> [ zeroinitializer, %rows ], [ %even.next, %sum ]
{odd}  %am = getelementptr [64 x i8], ptr %pa, i64 %m
  %ap = getelementptr i32, ptr %am, i64 %k
  %a = load i32, ptr %ap, align 4
  %aw.1 = insertelement <16 x i32> poison, i32 %a, i64 0
  %aw = shufflevector <16 x i32> %aw.1, <16 x i32> poison, <16 x i32> zeroinitializer
  %bp = getelementptr [64 x i8], ptr %pb, i64 %k
  %bw = load <16 x i32>, ptr %bp, align 4
{step}
  %k.next = add i64 %k, 1
  %k.end = icmp eq i64 %k.next, 16
  br i1 %k.end, label %store, label %sum
store:
  %c = load <16 x {kind}>, ptr %cp, align 4
{end}  store <16 x {kind}> %new, ptr %cp, align 4
  %m.next = add i64 %m, 1
  %m.end = icmp eq i64 %m.next, 16
  br i1 %m.end, label %done, label %rows
done:
  ret void
}}
"""


_MEMORY = f"""
@mhsa_soft_state = internal thread_local global [8256 x i8] zeroinitializer, align 64
declare <16 x float> @llvm.fabs.v16f32(<16 x float>)
declare <16 x float> @llvm.copysign.v16f32(<16 x float>, <16 x float>)
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1 immarg)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1 immarg)

define void @mhsa_soft_configure(ptr %p) nounwind {{
  call void @llvm.memset.p0.i64(ptr @mhsa_soft_state, i8 0, i64 8256, i1 false)
  call void @llvm.memcpy.p0.p0.i64(ptr @mhsa_soft_state, ptr %p, i64 64, i1 false)
  ret void
}}
define void @mhsa_soft_release() nounwind {{
  call void @llvm.memset.p0.i64(ptr @mhsa_soft_state, i8 0, i64 8256, i1 false)
  ret void
}}
define void @mhsa_soft_zero(i64 %t) nounwind {{
  %tiles = getelementptr {_STATE} 64
  %p = getelementptr [1024 x i8], ptr %tiles, i64 %t
  call void @llvm.memset.p0.i64(ptr %p, i8 0, i64 1024, i1 false)
  ret void
}}
define void @mhsa_soft_move(i64 %t, ptr %p, i64 %stride, i1 %in) nounwind {{
entry:
  %tiles = getelementptr {_STATE} 64
  %tile = getelementptr [1024 x i8], ptr %tiles, i64 %t
  %at.rows = add i64 %t, 48
  %rows.p = getelementptr {_STATE} %at.rows
  %rows.8 = load i8, ptr %rows.p
  %rows = zext i8 %rows.8 to i64
  %at.bytes.1 = shl i64 %t, 1
  %at.bytes = add i64 %at.bytes.1, 16
  %bytes.p = getelementptr {_STATE} %at.bytes
  %bytes.16 = load i16, ptr %bytes.p
  %bytes = zext i16 %bytes.16 to i64
  br i1 %in, label %clear, label %test
clear:
  call void @llvm.memset.p0.i64(ptr %tile, i8 0, i64 1024, i1 false)
  br label %test
test:
  %r = phi i64 [ 0, %entry ], [ 0, %clear ], [ %r.next, %step ]
  %more = icmp ult i64 %r, %rows
  br i1 %more, label %row, label %done
row:
  %mine = getelementptr [64 x i8], ptr %tile, i64 %r
  %offset = mul i64 %r, %stride
  %theirs = getelementptr i8, ptr %p, i64 %offset
  %to = select i1 %in, ptr %mine, ptr %theirs
  %from = select i1 %in, ptr %theirs, ptr %mine
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %bytes, i1 false)
  br label %step
step:
  %r.next = add i64 %r, 1
  br label %test
done:
  ret void
}}
"""
