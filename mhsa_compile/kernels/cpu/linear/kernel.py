"""y = x W^T + b on a vector CPU, for one or more W that share x: the projections of an attention layer.

The weights are packed once, at load, into panels of `columns` vectors of output features, side by side for all
projections (`pack_weights`). A task is one panel against one block of rows of x. Its inner loop keeps a tile of
rows x columns in registers over a part of K; a group of tiles passes over that part while it lies in the first-level
cache, and their sums wait in a scratch for the next part. An epilogue follows where a group has written its rows.
Source: panels and register tile, Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import SizeVars, argument, ceil_div, prim_func
from mhsa_compile.kernels.common.op_args import epilogue_arguments, packed_arguments
from mhsa_compile.kernels.cpu.linear.activations import PackedRows, prepared
from mhsa_compile.kernels.cpu.linear.microkernel import Product, tasks
from mhsa_compile.kernels.cpu.linear.pack_weights import pack
from mhsa_compile.kernels.cpu.linear.packed_layout import PackedLayout, format_of, layout_of
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import materialize, register_tile
from mhsa_compile.kernels.interface.kernel import Config, Emitted, unknown_knobs
from mhsa_compile.kernels.interface.ops import LinearOp

MOST_INT8_TERMS = 65_536  # so many products of 255 and 127 still fit int32


class CpuLinearKernel:
    """Packed-weight matrix product with a fused bias, for any vector CPU and every dtype."""

    name = "cpu.linear"
    op_type: type[LinearOp] = LinearOp

    def why_not(self, op: LinearOp, profile: CpuProfile) -> str | None:
        if format_of(op).rounds_x and op.in_features > MOST_INT8_TERMS:
            return f"sums of int8 products up to {MOST_INT8_TERMS} terms, not {op.in_features}"
        return None

    def layout(self, op: LinearOp, profile: CpuProfile, columns: int) -> PackedLayout:
        """How weights lie in panels of so many vectors."""
        return layout_of(op, profile, columns)

    def search_space(self, op: LinearOp, profile: CpuProfile) -> dict[str, tuple[int, ...]]:
        count = 4096 if op.row_count is None else op.row_count
        unit = self.layout(op, profile, 1).unit
        float32_sums, joined = unit.group == 1, unit.rows
        return {
            "rows": tuple(n for n in (1, 2, 4, 6, 8, 12) if n <= max(count, joined) and n % joined == 0),
            "columns": (1, 2, 3, 4, 6),
            "block": tuple(n for n in (8, 16, 32, 64, 128, 256, 512) if n < 2 * count) or (8,),
            "depth": (16, 32, 64, 128) if float32_sums else (32, 64, 96, 128),
            "group": (1, 2, 4, 8),
        }

    def why_not_config(self, op: LinearOp, profile: CpuProfile, config: Config) -> str | None:
        if reason := unknown_knobs(config, ("rows", "columns", "block", "depth", "group")):
            return reason
        unit = self.layout(op, profile, 1).unit
        return unit.why_not_tile(config["rows"], config["columns"], profile.hardware.vector_registers)

    def default_config(self, op: LinearOp, profile: CpuProfile) -> dict[str, int]:
        """The register tile with the least padding of the output features and the fewest loads a product; rows that
        divide the usual lengths; a block of rows of x that the caches hold."""
        unit = self.layout(op, profile, 1).unit
        lanes, joined = unit.lanes, unit.rows
        registers = profile.hardware.vector_registers
        room = unit.room(registers)

        def padded(columns: int) -> int:
            return -(-op.out_features // (columns * lanes)) * columns * lanes

        def cost(tile: tuple[int, int]) -> tuple[float, float]:
            """What a tile multiplies, padding and all, where sixteen registers make its loads as dear: every product
            then comes with more than half a load, and instructions are started no faster. Then its loads."""
            lines, vectors_wide = tile
            loads = (lines + vectors_wide) / (lines * vectors_wide)
            return padded(vectors_wide // joined) * (1 + loads if registers <= 16 else 1), loads

        fitting = [c for c in (2, 3, 4) if 2 * c * joined < room] or [1]
        if op.out_features <= lanes and joined == 1:
            fitting = [1]  # half of two vectors would be padding; eight rows still hide what a sum takes
        tiles = [register_tile(room, (1, 2, 4, 6, 8), [c * joined]) for c in reversed(fitting)]
        lines, vectors_wide = min(tiles, key=cost)
        rows, columns = lines * joined, vectors_wide // joined
        return register_tile_config(self.layout(op, profile, columns), rows, profile)

    def emit(self, op: LinearOp, profile: CpuProfile, config: Config) -> Emitted:
        return linear(self.layout(op, profile, config["columns"]), profile, config)


def register_tile_config(layout: PackedLayout, rows: int, profile: CpuProfile) -> dict[str, int]:
    """The config of a register tile of so many rows: a block of rows of x that the caches hold, parts of K, and a group
    of tiles that share such a part."""
    # Where a third level feeds the rows (they ask for 2 bytes a cycle) they need not stay in L2, and the panels are
    # loaded less often. A core with vectors of 256 bits or a megabyte of L2 is taken to have that level.
    hardware = profile.hardware
    levels = 8 if hardware.vector_bits >= 256 or hardware.l2_kib > 512 else 1
    block = max(1, levels * profile.hardware.l2_kib * 1024 // (layout.step_bytes * layout.steps * rows))
    cache = profile.hardware.l1d_kib * 1024
    if layout.unit.group == 1:
        # Float32 sums, four parts at least and six from 64 terms a part on: PyTorch's library sums a single row of
        # x in many lanes. With four parts of 128 terms the error is up to 0.98 of the budget, with six of 128 half
        # of it; with 64 at most, sums that wait take 5 to 8 % of the time on AVX2. The panel's part takes three
        # eighths of the L1 cache.
        longest = max(64, cache * 3 // 8 // (layout.step_bytes * layout.panel))
        depth = max(16, min(64, -(-layout.steps // 4)), min(128, longest, layout.steps // 6))
    else:  # only speed counts: half of the L1 cache
        depth = max(32, min(128, cache // 2 // (layout.step_bytes * layout.panel) // 32 * 32))
    # A part of a panel, and for each tile its sums and its part of x, in three quarters of the L1 cache.
    rest = cache * 3 // 4 - layout.step_bytes * depth * layout.panel
    group = rest // (rows * (4 * layout.panel + layout.step_bytes * depth))
    block, group = min(512, block), max(1, min(8, group))
    return {"rows": rows, "columns": layout.columns, "block": block, "depth": depth, "group": group}


def linear(layout: PackedLayout, profile: CpuProfile, config: Config) -> Emitted:
    """The product with weights in this layout, and what packs them."""
    return Emitted(product_function("linear", layout, profile, config), pack(layout), layout.packed)


def product_function(
    name: str,
    layout: PackedLayout,
    profile: CpuProfile,
    config: Config,
    *,
    numbers: Callable[[], tuple[Expr, ...]] = lambda: (),
    rows: Callable[..., PackedRows] = prepared,
    product: type[Product] = Product,
    deal: Callable[..., None] = tasks,
) -> Expr:
    """The PrimFunc (x, numbers..., packed..., operands...) -> y. `numbers` are what a call brings behind x; the rows of
    x are rows(layout, x (count, K), *numbers, count, size), which `product` multiplies."""
    op, dim = layout.op, SizeVars()
    leading = [dim(d) for d in op.rows]
    with prim_func(name) as builder:
        x = argument("x", [*leading, T.int64(op.in_features)], layout.x_dtype)
        brought = numbers()
        packed = packed_arguments(layout.packed)
        operands = epilogue_arguments(op, leading)
        y = argument("y", [*leading, T.int64(op.pitch)], op.dtype)
        # TVM moves allocations to the function's begin, where nothing but the arguments' dims is known.
        size = prod(leading[1:], start=leading[0])
        count = materialize(size)

        def flat(tensor: Expr, width: int) -> Expr:
            return T.decl_buffer((count, T.int64(width)), tensor.dtype, data=tensor.data)

        with layout.imported():
            factors = rows(layout, flat(x, op.in_features), *brought, count, size)
            columns = vectors.chunks(layout.panel, layout.lanes)
            lines = materialize(ceil_div(count, layout.unit.rows)) if layout.unit.rows > 1 else count
            whole = len(operands) if op.epilogue is None else op.epilogue.operands
            others = [*(flat(tensor, op.pitch) for tensor in operands[:whole]), *operands[whole:]]
            large = layout.weight_bytes > profile.hardware.l2_kib * 1024 // 2
            pages = profile.hardware.pages_in_turn if large else 1
            task = product(layout, factors, packed, flat(y, op.pitch), columns, count, lines, others, pages)
            deal(task, profile.hardware.cores, config)
    return builder.get()
