"""y = x W^T + b on a vector CPU, for one or more W that share x: the projections of an attention layer.

The weights are packed once, at load, into panels of `columns` vectors of output features, feature by feature along K,
side by side for all projections: P panels of (K, panel). A task is one panel against one block of rows of x; its inner
loop keeps a tile of rows x columns in registers over the whole of K, so y is written once and nothing else is.
Source: panels and register tile, Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.base import Config, Emitted, LinearOp, Op
from mhsa_compile.kernels.cpu import vectors
from mhsa_compile.kernels.cpu.vectors import (
    Dims,
    Expr,
    RegisterTile,
    argument,
    ceil_div,
    load,
    register_tile,
    settle,
    store,
    tile_registers,
)
from mhsa_compile.profile import TargetProfile


class LinearKernel:
    """Packed-weight matrix product with a fused bias, for any vector CPU."""

    name = "cpu.linear"

    def applies(self, op: Op, profile: TargetProfile) -> str | None:
        if not isinstance(op, LinearOp):
            return "not a linear projection"
        if profile.family != "cpu":
            return f"made for CPUs, not for {profile.family}"
        if op.dtype != "float32" or op.int8_weights:
            return "float32 only"
        return None

    def space(self, op: Op, profile: TargetProfile) -> dict[str, tuple[int, ...]]:
        registers = profile.hardware.vector_registers
        return {
            "rows": tuple(range(1, registers)),
            "columns": tuple(range(1, 7)),
            "block": (1, 2, 4, 8, 16, 32, 64),
            "depth": (32, 64),
        }

    def default(self, op: Op, profile: TargetProfile) -> dict[str, int]:
        """The register tile with the least padding of the output features, then the fewest loads a product; rows that
        divide the usual lengths; a block of rows of x that fills half of the L2 cache."""
        assert isinstance(op, LinearOp)
        registers, lanes = profile.hardware.vector_registers, profile.vector_lanes("float32")

        def padded(columns: int) -> int:
            return -(-op.out_features // (columns * lanes)) * columns * lanes

        room = tile_registers(registers)
        fitting = [c for c in (2, 3, 4) if 2 * c < room] or [1]
        least = min(map(padded, fitting))
        rows, columns = register_tile(room, (1, 2, 4, 8), [c for c in fitting if padded(c) == least])
        block = max(1, profile.hardware.l2_kib * 1024 // 2 // (4 * op.in_features * rows))
        return {"rows": rows, "columns": columns, "block": min(64, block), "depth": 32}

    def emit(self, op: Op, profile: TargetProfile, config: Config) -> Emitted:
        assert isinstance(op, LinearOp)
        panel = config["columns"] * profile.vector_lanes("float32")
        panels = -(-op.out_features // panel)
        packed = (((panels, op.in_features, panel), "float32"), ((panels, panel), "float32"))
        return Emitted(_linear(op, profile, config), _pack(op, panel, panels), packed)


def _linear(op: LinearOp, profile: TargetProfile, config: Config) -> Expr:
    lanes = profile.vector_lanes("float32")
    rows, columns, block = config["rows"], config["columns"], config["block"]
    panel = columns * lanes
    panels = -(-op.out_features // panel)
    dim = Dims()
    leading = [dim(d) for d in op.rows]
    with IRBuilder() as builder:
        with T.prim_func():
            T.func_name("linear")
            T.func_attr({"tirx.noalias": True})
            x = argument("x", [*leading, T.int64(op.in_features)], "float32")
            weight = argument("weight", [T.int64(panels), T.int64(op.in_features), T.int64(panel)], "float32")
            bias = argument("bias", [T.int64(panels), T.int64(panel)], "float32")
            y = argument("y", [*leading, T.int64(op.out_features)], "float32")
            count = _product(leading)
            x, y = _flat(x, count, op.in_features), _flat(y, count, op.out_features)
            operands = _Operands(op, x, weight, bias, y, vectors.chunks(panel, lanes), config["depth"])
            tiles = settle(ceil_div(count, rows))
            blocks = settle(ceil_div(tiles, block))
            size = settle(T.truncdiv(tiles + blocks - 1, T.max(T.int64(1), blocks)))  # equal blocks are equal tasks
            with T.parallel(blocks * panels) as index:
                p = settle(T.truncmod(index, T.int64(panels)))
                first_tile = settle(T.truncdiv(index, T.int64(panels)) * size)
                with T.serial(first_tile, T.min(tiles, first_tile + size)) as tile:
                    # Beyond the last row the last one is computed again, and written again with the same values.
                    at = [settle(T.min(tile * rows + r, count - 1)) for r in range(rows)]
                    _tile(operands, at, p)
    return builder.get()


def _product(dims: list[Expr]) -> Expr:
    total = dims[0]
    for dim in dims[1:]:
        total = total * dim
    return settle(total)


def _flat(tensor: Expr, count: Expr, width: int) -> Expr:
    """A (..., width) tensor seen as (count, width)."""
    return T.decl_buffer((count, T.int64(width)), "float32", data=tensor.data)


@dataclass(frozen=True)
class _Operands:
    """The buffers of the product, x and y seen as matrices, and how a panel is cut."""

    op: LinearOp
    x: Expr
    weight: Expr
    bias: Expr
    y: Expr
    columns: list[vectors.Chunk]
    depth: int


def _tile(operands: _Operands, at: list[Expr], p: Expr) -> None:
    """y[at, panel p] = x[at, :] W^T + b.

    A float32 sum of K terms drifts with sqrt(K): the sum runs in parts, and the parts are added up. The bias comes
    last, since sums that begin with it are rounded at its magnitude at every step.
    """
    op, columns = operands.op, operands.columns
    panel = sum(lanes for _, lanes in columns)
    tile = RegisterTile(len(at), columns)
    total = T.alloc_buffer((len(at), panel), "float32")

    def add_total(row: int, c: int) -> Expr:
        offset, lanes = columns[c]
        return tile.get(row, c) + load(total, [T.int64(row), T.int64(offset)], lanes)

    def add_bias(row: int, c: int) -> Expr:
        offset, lanes = columns[c]
        return tile.get(row, c) + load(operands.bias, [p, T.int64(offset)], lanes)

    parts = -(-op.in_features // operands.depth)
    depth = -(-op.in_features // parts)
    _sum(operands, tile, at, p, T.int64(0), T.int64(depth))
    with T.serial(T.int64(1), T.int64(parts)) as part:
        _write(tile, total, [T.int64(row) for row in range(len(at))], T.int64(0), columns)
        first = settle(part * depth)
        _sum(operands, tile, at, p, first, T.min(first + depth, T.int64(op.in_features)))
        tile.each(add_total)
    tile.each(add_bias)
    whole, rest = divmod(op.out_features, panel)
    with T.If(p < whole):
        with T.Then():
            _write(tile, operands.y, at, p * panel, columns)
        with T.Else():  # the last panel is padded: only its real columns are written
            _write_part(tile, operands.y, at, whole * panel, rest, columns)


def _sum(operands: _Operands, tile: RegisterTile, at: list[Expr], p: Expr, first: Expr, end: Expr) -> None:
    """tile = x[at, first:end] W[panel p, first:end]^T."""
    tile.fill(0.0)
    with T.serial(first, end) as k:
        tile.outer_product(
            lambda row: load(operands.x, [at[row], k], 1),
            lambda c: load(operands.weight, [p, k, T.int64(operands.columns[c][0])], operands.columns[c][1]),
        )


def _write(tile: RegisterTile, y: Expr, at: list[Expr], first: Expr, columns: list[vectors.Chunk]) -> None:
    for row, index in enumerate(at):
        for c, (offset, lanes) in enumerate(columns):
            store(y, [index, first + offset], tile.get(row, c), lanes)


def _write_part(
    tile: RegisterTile, y: Expr, at: list[Expr], first: int, width: int, columns: list[vectors.Chunk]
) -> None:
    """Writes the first `width` columns of the tile, the last vector in ever smaller parts."""
    for row, index in enumerate(at):
        for c, (offset, lanes) in enumerate(columns):
            for part, size in vectors.chunks(min(lanes, max(0, width - offset)), lanes):
                value = vectors.part(tile.get(row, c), part, size, lanes)
                store(y, [index, T.int64(first + offset + part)], value, size)


def _pack(op: LinearOp, panel: int, panels: int) -> Expr:
    """(weights..., biases...) -> packed (P, K, panel), bias (P, panel); columns beyond the last feature are zeros."""
    with IRBuilder() as builder:
        with T.prim_func():
            T.func_name("pack_linear")
            T.func_attr({"tirx.noalias": True})
            weights, biases = [], []
            for i, width in enumerate(op.widths):
                shape = (op.in_features, width) if op.transposed[i] else (width, op.in_features)
                weights.append(argument(f"weight{i}", [T.int64(n) for n in shape], "float32"))
            for i, width in enumerate(op.widths):
                biases.append(argument(f"bias{i}", [T.int64(width)], "float32") if op.biased[i] else None)
            packed = argument("packed", [T.int64(panels), T.int64(op.in_features), T.int64(panel)], "float32")
            bias = argument("bias", [T.int64(panels), T.int64(panel)], "float32")
            with T.parallel(T.int64(panels)) as p, T.serial(T.int64(panel)) as column:
                _pack_column(op, weights, biases, packed, bias, p, column, settle(p * panel + column))
    return builder.get()


def _pack_column(
    op: LinearOp,
    weights: list[Expr],
    biases: list[Expr | None],
    packed: Expr,
    bias: Expr,
    p: Expr,
    column: Expr,
    feature: Expr,
) -> None:
    """Copies output feature `feature` of the projections laid side by side."""
    begin = 0
    for width, weight, offset, flipped in zip(op.widths, weights, biases, op.transposed, strict=True):
        with T.If(T.And(feature >= begin, feature < begin + width)), T.Then():
            store(bias, [p, column], T.float32(0) if offset is None else offset[feature - begin], 1)
            with T.serial(T.int64(op.in_features)) as k:
                source = (k, feature - begin) if flipped else (feature - begin, k)
                store(packed, [p, k, column], weight[source], 1)
        begin += width
    with T.If(feature >= begin), T.Then():
        store(bias, [p, column], T.float32(0), 1)
        with T.serial(T.int64(op.in_features)) as k:
            store(packed, [p, k, column], T.float32(0), 1)
