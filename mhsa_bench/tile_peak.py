"""What the matrix tiles of a CPU (AMX) can do at best: products of tiles that never leave their registers.

A program must ask Linux for the tiles, once, before the first instruction; without, that ends the process. The state
is a thread's own, so each call loads it at its start and releases it at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import tvm
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_bench.native_threads import together
from mhsa_bench.roofline import Probe
from mhsa_compile.hardware import host, tile_permission
from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import argument

FEATURES = ("amx_tile", "amx_bf16")
FEW_SUMS, MOST_SUMS = 2, 6
"""Tiles that sums are kept in, beside two of factors. Two are enough to keep the unit busy. Six use all tiles, which is
as fast, but not always: on a virtual machine it was seen to fall to 40 % for seconds, with four sums to 75 %, with two
to 93 %, while multiply-adds stayed as they were. The core's other hyperthread, awake, would explain it."""
PRODUCTS = 6 << 16
"""Of each call and thread, about 2.7 ms: far above the cost of handing out work."""
ROWS, COLUMNS, DEPTH = 16, 16, 32
FLOPS = 2 * ROWS * COLUMNS * DEPTH
"""Of one product of tiles of bfloat16."""
TILE_BYTES = 1024


def why_no_tiles() -> str | None:
    """None once this process may use tiles of bfloat16, which is asked for here; else what keeps it from them."""
    if missing := [feature for feature in FEATURES if feature not in host.cpu_features()]:
        return f"the CPU has no {' and no '.join(missing)}"
    reason = tile_permission.refusal()
    return f"tiles are refused: {reason}" if reason else None


@contextmanager
def tile_products(profile: CpuProfile, threads: int, sums: int = FEW_SUMS) -> Iterator[Probe]:
    """The rate of products of bfloat16 tiles on this machine (`profile` must be its own), where `why_no_tiles` has no
    reason against them."""
    config = profile.tvm_config()
    features = ["+" + feature.replace("_", "-") for feature in FEATURES]
    target = tvm.target.Target(config | {"mattr": [*config.get("mattr", []), *features]})
    module = tvm.IRModule({"limit": _loop(sums).with_attr("global_symbol", "limit")})
    loop = tvm.compile(module, target=target)["limit"]
    factors = tvm.runtime.tensor(_factors())
    state = tvm.runtime.tensor(_config())
    with together([partial(loop, state, factors, PRODUCTS // sums) for _ in range(threads)]) as run:
        yield Probe(run, FLOPS * PRODUCTS * threads)


def _loop(sums: int) -> Expr:
    """(state (64,), factors (2 tiles), rounds): each sum plus the product of the factors, `rounds` times."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name("tiles")
        state = argument("state", [T.int64(64)], "uint8")
        factors = argument("factors", [T.int64(2 * TILE_BYTES)], "uint8")
        rounds = T.arg("rounds", T.int64())
        with T.attr(0, "pragma_import_llvm", _functions(sums)):

            def call(name: str, *arguments: Expr) -> None:
                T.evaluate(T.call_extern("void", name, *arguments))

            call("limit_tiles_begin", T.address_of(state[0]), T.address_of(factors[0]))
            with T.serial(rounds):
                call("limit_tiles_multiply")
            call("limit_tiles_end")
    return builder.get()


def _functions(sums: int) -> str:
    """LLVM IR. Tiles are immediates of the instructions, and LLVM knows of none that they are alive between two; so
    nothing but the loop stands between these."""
    inline = "alwaysinline nounwind"
    zeros = "".join(f"  call void @llvm.x86.tilezero(i8 {tile})\n" for tile in range(sums))
    products = "".join(f"  call void @llvm.x86.tdpbf16ps(i8 {tile}, i8 6, i8 7)\n" for tile in range(sums))
    return f"""
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8 immarg)
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8 immarg, i8 immarg, i8 immarg)
define void @limit_tiles_begin(ptr %state, ptr %factors) {inline} {{
  call void @llvm.x86.ldtilecfg(ptr %state)
  %right = getelementptr i8, ptr %factors, i64 {TILE_BYTES}
  call void @llvm.x86.tileloadd64(i8 6, ptr %factors, i64 64)
  call void @llvm.x86.tileloadd64(i8 7, ptr %right, i64 64)
{zeros}  ret void
}}
define void @limit_tiles_multiply() {inline} {{
{products}  ret void
}}
define void @limit_tiles_end() {inline} {{
  call void @llvm.x86.tilerelease()
  ret void
}}
"""


def _factors() -> np.ndarray:
    """Two tiles of random bfloat16 numbers: a product of zeros would need less power, and might run faster."""
    numbers = np.random.default_rng(0).standard_normal(TILE_BYTES, np.float32)
    return np.ascontiguousarray((numbers.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)


def _config() -> np.ndarray:
    """What ldtilecfg reads: a palette, and the bytes of a row and the rows of each of the eight tiles."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    config[16:32] = np.full(8, 64, "<u2").view(np.uint8)
    config[48:56] = ROWS
    return config
