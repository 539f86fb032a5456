"""What runs on tiles, on the CPU's, on emulated ones and on soft ones, each of which must give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import argument
from mhsa_compile.kernels.cpu.linear.tiles import CpuTileLinearKernel
from mhsa_compile.kernels.cpu.tile_attention.kernel import CpuTileAttentionKernel
from mhsa_compile.kernels.cpu.units import tiles
from mhsa_compile.kernels.interface.kernel import Emitted
from mhsa_compile.kernels.interface.ops import HeadLayout, LinearOp, WindowSpec
from mhsa_compile.kernels.scores.call_mask import CallMask
from support import this_cpu
from support.attention_ops import attention_of
from support.kernel_runs import built, vector_machine

TILES = frozenset({"amx_bf16", "amx_int8", "amx_tile"})
MACHINE = vector_machine(512, 32, "x86-64-v4", (*sorted(TILES), "avx512_bf16"))
BFLOAT16 = ml_dtypes.bfloat16
DRAWS = 200
"""Products of each kind of numbers."""


def lacking(root: Path | None = None) -> str | None:
    """Why this CPU cannot run these cases, even where tiles are emulated."""
    places = () if root is None else (root,)
    return this_cpu.lacking(MACHINE.tvm_config(), *places, beside=TILES)


# ---- Single products


def numbers(kind: str, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(bits of bfloat16 (count, 512), bits of float32 (count, 256))."""
    narrow, wide = rng.standard_normal((count, 512), np.float32), rng.standard_normal((count, 256), np.float32)
    if kind == "any bits":
        return rng.integers(0, 2**16, narrow.shape, np.uint16), rng.integers(0, 2**32, wide.shape, np.uint32)
    if kind == "wide":
        narrow *= 2.0 ** rng.integers(-20, 21, narrow.shape)
    if kind in ("tiny", "huge"):
        power = -63 if kind == "tiny" else 63
        narrow, wide = narrow * np.float32(2.0**power), np.ldexp(wide, 2 * power - 1)
    bits = narrow.astype(BFLOAT16).view(np.uint16)
    if kind == "not finite":
        odd = rng.choice(
            np.array([0x7F80, 0xFF80, 0x7FC1, 0xFFC2, 0x7F81, 1, 0x807F, 0, 0x8000], np.uint16), bits.shape
        )
        bits = np.where(rng.random(bits.shape) < 0.05, odd, bits)
    return bits, wide.view(np.uint32)


KINDS = ("normal", "wide", "tiny", "huge", "not finite", "any bits")


def product(instruction: str) -> list[np.ndarray]:
    """C + A B of many tiles, an array (draws, 256) for each kind of numbers."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name("run")
        n = T.int64(DRAWS)
        a, b = (argument(name, [n, T.int64(1024)], "uint8") for name in "ab")
        c = argument("c", [n, T.int64(256)], "int32")
        unit = tiles.Tiles("bfloat16", "float32", 16, 2, feature="amx_bf16", instruction=instruction)
        with unit.imported():
            tiles.configure()
            with T.serial(n) as i:
                tiles.load_tile(0, c, [i, T.int64(0)], 16)
                tiles.load_tile(tiles.LEFT, a, [i, T.int64(0)], 64)
                tiles.load_tile(tiles.RIGHT, b, [i, T.int64(0)], 64)
                unit.product(0, tiles.LEFT, tiles.RIGHT)
                tiles.store_tile(0, c, [i, T.int64(0)], 16)
            tiles.release()
    run = built(Emitted(builder.get()), MACHINE)["run"]
    results = []
    for kind in KINDS if instruction == "tdpbf16ps" else ("any bits",):
        rng = np.random.default_rng(len(kind))
        (a, c), (b, _) = numbers(kind, rng, DRAWS), numbers(kind, rng, DRAWS)
        arrays = [tvm.runtime.tensor(x.view(dtype)) for x, dtype in ((a, np.uint8), (b, np.uint8), (c, np.int32))]
        run(*arrays)
        results.append(arrays[2].numpy().view(np.float32 if instruction == "tdpbf16ps" else np.int32))
    return results


# ---- Kernels


def linear(rows: tuple[int, ...], in_features: int, widths: tuple[int, ...]) -> list[np.ndarray]:
    op = LinearOp(("B", "L"), in_features, widths, (True,) * len(widths), (False,) * len(widths), "bfloat16")
    kernel = CpuTileLinearKernel()
    emitted = kernel.emit(op, MACHINE, kernel.default_config(op, MACHINE) | {"depth": 1})
    module, rng = built(emitted, MACHINE), np.random.default_rng(3)
    weights = [rng.standard_normal((n, in_features), np.float32) for n in widths]
    biases = [rng.standard_normal(n, np.float32) for n in widths]
    packed = [tvm.runtime.tensor(np.zeros(shape, _NAMES.get(dtype, dtype))) for shape, dtype in emitted.packed]
    module["pack"](*(tvm.runtime.tensor(x.astype(BFLOAT16)) for x in (*weights, *biases)), *packed)
    results = []
    for count in rows:
        x = tvm.runtime.tensor(rng.standard_normal((1, count, in_features), np.float32).astype(BFLOAT16))
        y = tvm.runtime.tensor(np.zeros((1, count, op.out_features), BFLOAT16))
        module["run"](x, *packed, y)
        results.append(y.numpy().view(np.uint16))
    return results


_NAMES = {"bfloat16": BFLOAT16}


def attention(
    sizes: tuple[tuple[int, int], ...], E: int, F: int, heads: tuple[int, int] = (2, 1), **fields: Any
) -> list[np.ndarray]:
    H, G = heads
    places = {role: HeadLayout(i, "heads", 0) for i, role in enumerate(("query", "key", "value"))}
    op = attention_of(
        1, "L", "S", H, G, E, F, E**-0.5,
        **{"band": None, "mask": None, "output": HeadLayout(0, "rows", H * F), "dtype": "bfloat16", **places, **fields},
    )  # fmt: skip
    kernel = CpuTileAttentionKernel()
    run = built(kernel.emit(op, MACHINE, {"queries": 32, "keys": 64}), MACHINE)["run"]
    rng, results = np.random.default_rng(5), []
    for L, S in sizes:
        shapes = ((H, L, E), (G, S, E), (G, S, F))
        q, k, v = (rng.standard_normal((1, *shape), np.float32).astype(BFLOAT16) for shape in shapes)
        k *= 4
        mask = []
        if "mask" in fields:
            mask = [rng.random((1, 1, L, S)) < 0.5]
            mask[0][:, :, 1::4] = False
            v[0, 0, S // 2] = np.inf
        y = tvm.runtime.tensor(np.zeros((1, L, H * F), BFLOAT16))
        run(*(tvm.runtime.tensor(array) for array in (q, k, v, *mask)), y)
        results.append(y.numpy().view(np.uint16))
    return results


CASES: dict[str, Callable[[], list[np.ndarray]]] = {
    **{f"product {name}": lambda name=name: product(name) for name in tiles._PRODUCTS},
    "linear": lambda: linear((1, 15, 16, 17, 33), 70, (31, 64)),
    "linear, whole": lambda: linear((64,), 128, (96,)),
    "attention": lambda: attention(((7, 33), (33, 77)), 64, 64),
    "attention, 128": lambda: attention(((17, 97),), 128, 128),
    "attention, other widths": lambda: attention(((40, 70),), 96, 32, (3, 3)),
    "attention, causal": lambda: attention(((45, 45), (16, 70)), 32, 32, band=WindowSpec(None, 0, "bottom_right")),
    "attention, window": lambda: attention(((70, 70),), 32, 64, band=WindowSpec(9, 3, "top_left"), softcap=5.0),
    "attention, mask": lambda: attention(((33, 70),), 32, 32, mask=CallMask("bool", (1, 1, "L", "S"))),
}
"""By name; each gives the bits of its outputs."""
