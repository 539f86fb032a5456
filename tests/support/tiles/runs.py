"""What runs on tiles, on the CPU's, on emulated ones and on soft ones, each of which must give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import argument
from mhsa_compile.kernels.cpu.linear.bytes_on_tiles import CpuTileInt8LinearKernel, CpuTileQuantisedLinearKernel
from mhsa_compile.kernels.cpu.linear.float32_on_tiles import CpuFloat16TileLinearKernel, CpuFloat32TileLinearKernel
from mhsa_compile.kernels.cpu.linear.rounded_on_tiles import CpuRoundedTileLinearKernel
from mhsa_compile.kernels.cpu.linear.tiles import CpuTileLinearKernel
from mhsa_compile.kernels.cpu.products.on_tiles import CpuTileProductKernel
from mhsa_compile.kernels.cpu.tile_attention.kernel import CpuTileAttentionKernel
from mhsa_compile.kernels.cpu.units import tiles
from mhsa_compile.kernels.interface.kernel import Emitted, Kernel
from mhsa_compile.kernels.interface.ops import (
    HeadLayout,
    LinearOp,
    ProductOp,
    ProductOperand,
    QuantisedLinearOp,
    WindowSpec,
)
from mhsa_compile.kernels.scores.call_mask import CallMask
from support import this_cpu
from support.attention_ops import attention_of
from support.kernel_runs import built, tensor_at, vector_machine

MACHINE, WITH_FLOAT16 = (
    vector_machine(512, 32, "x86-64-v4", (*sorted(this_cpu.TILES - {"amx_fp16"} | more), "avx512_bf16"))
    for more in (frozenset[str](), frozenset({"amx_fp16"}))
)
"""The second as Granite Rapids has it."""
BFLOAT16 = ml_dtypes.bfloat16
DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": BFLOAT16,
    "int32": np.int32,
    "int8": np.int8,
    "uint8": np.uint8,
}
DRAWS = 200
"""Products of each kind of numbers."""


def lacking() -> str | None:
    """Why this CPU cannot run these cases, even where tiles are emulated."""
    return this_cpu.lacking(MACHINE.tvm_config(), beside=this_cpu.TILES)


# ---- Single products


def numbers(kind: str, rng: np.random.Generator, count: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """(bits of a dtype of 16 (count, 512), bits of float32 (count, 256))."""
    is_float16 = dtype == np.float16
    narrow, wide = rng.standard_normal((count, 512), np.float32), rng.standard_normal((count, 256), np.float32)
    if kind == "any bits":
        return rng.integers(0, 2**16, narrow.shape, np.uint16), rng.integers(0, 2**32, wide.shape, np.uint32)
    if kind == "wide":
        spread = 9 if is_float16 else 20
        narrow *= 2.0 ** rng.integers(-spread, spread + 1, narrow.shape)
    if kind in ("tiny", "huge"):
        power = (-13 if kind == "tiny" else 12) if is_float16 else (-63 if kind == "tiny" else 63)
        narrow, wide = narrow * np.float32(2.0**power), np.ldexp(wide, 2 * power - 1)
    bits = narrow.astype(dtype).view(np.uint16)
    if kind == "not finite":
        odd = rng.choice(np.array([*ODD[str(np.dtype(dtype))], 1, 0x8000, 0, 0x807F], np.uint16), bits.shape)
        bits = np.where(rng.random(bits.shape) < 0.05, odd, bits)
    return bits, wide.view(np.uint32)


ODD = {"bfloat16": (0x7F80, 0xFF80, 0x7FC1, 0xFFC2, 0x7F81), "float16": (0x7C00, 0xFC00, 0x7E01, 0xFE02, 0x7C01)}
"""Infinities and NaN."""
KINDS = ("normal", "wide", "tiny", "huge", "not finite", "any bits")


def product(instruction: str) -> list[np.ndarray]:
    """C + A B of many tiles, an array (draws, 256) for each kind of numbers."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name("run")
        n = T.int64(DRAWS)
        a, b = (argument(name, [n, T.int64(1024)], "uint8") for name in "ab")
        c = argument("c", [n, T.int64(256)], "int32")
        dtype = "float16" if instruction == "tdpfp16ps" else "bfloat16"
        unit = tiles.Tiles(dtype, "float32", 16, 2, instruction=instruction)
        with unit.imported():
            tiles.configure()
            with T.serial(n) as i:
                tiles.load_tile(0, c, [i, T.int64(0)], 16)
                tiles.load_tile(tiles.LEFT, a, [i, T.int64(0)], 64)
                tiles.load_tile(tiles.RIGHT, b, [i, T.int64(0)], 64)
                unit.product(0, tiles.LEFT, tiles.RIGHT)
                tiles.store_tile(0, c, [i, T.int64(0)], 16)
            tiles.release()
    run = built(Emitted(builder.get()), WITH_FLOAT16 if dtype == "float16" else MACHINE)["run"]
    results, of_floats = [], instruction in ("tdpbf16ps", "tdpfp16ps")
    for kind in KINDS if of_floats else ("any bits",):
        rng = np.random.default_rng(len(kind))
        (a, c), (b, _) = (numbers(kind, rng, DRAWS, DTYPES[dtype]) for _ in "ab")
        arrays = [tvm.runtime.tensor(x.view(dtype)) for x, dtype in ((a, np.uint8), (b, np.uint8), (c, np.int32))]
        run(*arrays)
        results.append(arrays[2].numpy().view(np.float32 if of_floats else np.int32))
    return results


# ---- Kernels


def linear(
    kernel: Kernel[Any],
    rows: tuple[int, ...],
    in_features: int,
    widths: tuple[int, ...],
    first_byte: int = 0,
    **fields: Any,
) -> list[np.ndarray]:
    """x begins so many bytes behind a cache line."""
    kind = QuantisedLinearOp if "stored" in fields else LinearOp
    op = kind(("B", "L"), in_features, widths, (True,) * len(widths), (False,) * len(widths), **fields)
    machine = WITH_FLOAT16 if kernel is BY_TILES and op.dtype == "float16" else MACHINE
    assert kernel.why_not(op, machine) is None
    emitted = kernel.emit(op, machine, kernel.default_config(op, machine))
    module, rng = built(emitted, machine), np.random.default_rng(3)
    packed = [tvm.runtime.tensor(np.zeros(shape, DTYPES[dtype])) for shape, dtype in emitted.packed]
    module["pack"](*map(tvm.runtime.tensor, _weights(op, rng)), *packed)
    results = []
    for count in rows:
        x = _drawn(rng, getattr(op, "x_dtype", op.dtype), 1, count, in_features)
        numbers = [np.array(3, op.x_dtype), np.array(0.25, np.float32)] if "stored" in fields else []
        y = tvm.runtime.tensor(np.zeros((1, count, op.out_features), DTYPES[op.dtype]))
        module["run"](tensor_at(x, first_byte), *map(tvm.runtime.tensor, numbers), *packed, y)
        results.append(y.numpy().view(f"uint{8 * y.numpy().itemsize}"))
    return results


def _weights(op: Any, rng: np.random.Generator) -> list[np.ndarray]:
    dtypes = getattr(op, "stored", (op.dtype,) * len(op.widths))
    weights = [_drawn(rng, dtype, n, op.in_features) for dtype, n in zip(dtypes, op.widths, strict=True)]
    if isinstance(op, QuantisedLinearOp):
        weights += [_drawn(rng, dtype, n) for dtype, n in zip(dtypes, op.widths, strict=True)]
        weights += [rng.random(n, np.float32) for n in op.widths]
    return [*weights, *(_drawn(rng, op.dtype, n) for n in op.widths)]


def _drawn(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    if dtype in ("int8", "uint8"):
        return rng.integers(0, 256, shape).astype(np.uint8).view(dtype)
    return rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])


def attention(
    sizes: tuple[tuple[int, int], ...], E: int, F: int, heads: tuple[int, int] = (2, 1), **fields: Any
) -> list[np.ndarray]:
    """`sizes`: (L, S) of calls; of one alone the kernel is made for it."""
    (H, G), (L, S) = heads, sizes[0] if len(sizes) == 1 else ("L", "S")
    places = {role: HeadLayout(i, "heads", 0) for i, role in enumerate(("query", "key", "value"))}
    op = attention_of(
        1, L, S, H, G, E, F, E**-0.5,
        **{"band": None, "mask": None, "output": HeadLayout(0, "rows", H * F), "dtype": "bfloat16", **places, **fields},
    )  # fmt: skip
    kernel, machine = CpuTileAttentionKernel(), WITH_FLOAT16 if op.dtype == "float16" else MACHINE
    assert kernel.why_not(op, machine) is None
    run = built(kernel.emit(op, machine, {"queries": 32, "keys": 64}), machine)["run"]
    rng, results, dtype = np.random.default_rng(5), [], DTYPES[op.dtype]
    for L, S in sizes:
        shapes = ((H, L, E), (G, S, E), (G, S, F))
        q, k, v = (rng.standard_normal((1, *shape), np.float32).astype(dtype) for shape in shapes)
        k *= 4
        mask = []
        if "mask" in fields:
            mask = [rng.random((1, 1, L, S)) < 0.5]
            mask[0][:, :, 1::4] = False
            v[0, 0, S // 2] = np.inf
        y = tvm.runtime.tensor(np.zeros((1, L, H * F), dtype))
        run(*(tvm.runtime.tensor(array) for array in (q, k, v, *mask)), y)
        results.append(y.numpy().view(f"uint{8 * y.numpy().itemsize}"))
    return results


def products(sizes: tuple[tuple[int, int, int], ...], *, turned: bool, **fields: Any) -> list[np.ndarray]:
    """A B of these (M, K, N), both stored with K last or, `turned`, with K first."""
    places = (ProductOperand((2, "K", "M"), (0,), 2, 1), ProductOperand((2, "K", "N"), (0,), 1, 2))
    if not turned:
        places = (ProductOperand((2, "M", "K"), (0,), 1, 2), ProductOperand((2, "N", "K"), (0,), 2, 1))
    op = ProductOp((2,), "M", "K", "N", *places, **fields)
    kernel, machine = CpuTileProductKernel(), WITH_FLOAT16 if op.dtype == "float16" else MACHINE
    assert kernel.why_not(op, machine) is None
    run, rng, results = built(kernel.emit(op, machine, {}), machine)["run"], np.random.default_rng(7), []
    for M, K, N in sizes:
        a, b = (_drawn(rng, op.dtype, 2, *((K, size) if turned else (size, K))) for size in (M, N))
        if op.dtype == "float32":
            a[0, 0, 0], b[1, -1, -1] = np.inf, 1e-30
        y = tvm.runtime.tensor(np.zeros((2, M, N), DTYPES[op.dtype]))
        run(*map(tvm.runtime.tensor, (a, b)), y)
        results.append(y.numpy().view(f"uint{8 * y.numpy().itemsize}"))
    return results


BY_TILES, BY_TERMS, ROUNDED = CpuTileLinearKernel(), CpuFloat32TileLinearKernel(), CpuRoundedTileLinearKernel()
OF_ROUNDED, OF_BYTES = CpuTileInt8LinearKernel(), CpuTileQuantisedLinearKernel()
CASES: dict[str, Callable[[], list[np.ndarray]]] = {
    **{f"product {name}": lambda name=name: product(name) for name in tiles.PRODUCTS},
    "linear": lambda: linear(BY_TILES, (1, 15, 16, 17, 33), 70, (31, 64), dtype="bfloat16"),
    "linear, whole": lambda: linear(BY_TILES, (64,), 128, (96,), dtype="bfloat16"),
    "linear, whole, within lines": lambda: linear(BY_TILES, (33,), 128, (40,), first_byte=16, dtype="bfloat16"),
    "linear of float32 by six products": lambda: linear(BY_TERMS, (5, 65), 70, (31, 64), float32_products="bf16x6"),
    "linear of float32 by three products": lambda: linear(BY_TERMS, (33,), 70, (40,), float32_products="bf16x3"),
    "linear of rounded float32": lambda: linear(ROUNDED, (5, 33), 75, (31, 64), float32_products="bf16"),
    "linear, tiles of float16": lambda: linear(BY_TILES, (1, 17, 33), 70, (31, 64), dtype="float16"),
    "linear of float16": lambda: linear(CpuFloat16TileLinearKernel(), (33,), 70, (40,), dtype="float16"),
    "linear of rounded rows": lambda: linear(OF_ROUNDED, (5, 33), 130, (31, 64), int8_weights=True, dtype="bfloat16"),
    "linear of bytes": lambda: linear(OF_BYTES, (5, 33), 130, (31, 64), x_dtype="uint8", stored=("int8", "uint8")),
    "linear of signed bytes": lambda: linear(OF_BYTES, (17,), 64, (40,), x_dtype="int8", stored=("int8",)),
    "products": lambda: products(
        ((16, 64, 32), (5, 70, 45), (33, 401, 31)), turned=False, dtype="bfloat16", result="bfloat16"
    ),
    "products, turned": lambda: products(((17, 45, 33),), turned=True, dtype="bfloat16", result="bfloat16"),
    "products, tiles of float16": lambda: products(
        ((16, 64, 32), (33, 401, 31)), turned=False, dtype="float16", result="float16"
    ),
    "products of float32 by six": lambda: products(((40, 150, 45),), turned=False, float32_products="bf16x6"),
    "products of float32 by three": lambda: products(((17, 45, 33),), turned=True, float32_products="bf16x3"),
    "attention, one tile of queries": lambda: attention(((16, 64),), 32, 32, (1, 1)),
    "attention": lambda: attention(((7, 33), (33, 77)), 64, 64),
    "attention, tiles of float16": lambda: attention(
        ((33, 77),), 64, 64, dtype="float16", mask=CallMask("bool", (1, 1, 33, 77))
    ),
    "attention, 128": lambda: attention(((17, 97),), 128, 128),
    "attention, other widths": lambda: attention(((40, 70),), 96, 32, (3, 3)),
    "attention, causal": lambda: attention(((45, 45), (16, 70)), 32, 32, band=WindowSpec(None, 0, "bottom_right")),
    "attention, window": lambda: attention(((70, 70),), 32, 64, band=WindowSpec(9, 3, "top_left"), softcap=5.0),
    **{
        f"attention of float32 by {word}": lambda word=word: attention(
            ((33, 110),), 32, 32, band=WindowSpec(None, 0, "bottom_right"), dtype="float32", float32_products=word
        )
        for word in ("bf16x6", "bf16x3", "bf16")
    },
    "attention, mask": lambda: attention(((33, 70),), 32, 32, mask=CallMask("bool", (1, 1, 33, 70))),
}
"""By name; each gives the bits of its outputs."""
OF_FLOAT16 = frozenset({"product tdpfp16ps", *(name for name in CASES if "tiles of float16" in name)})
"""Those for `WITH_FLOAT16`."""
