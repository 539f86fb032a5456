"""Linears in eight bits on matrix tiles: of a file's bytes, and of rows of x that are rounded by their own scale.

Sums are whole numbers: parts of K do not change what they are. Weights are packed as signed bytes, and x goes in as it
comes: the unit takes either sign of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.ir import Expr

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.cpu.formats.choice import FORMATS, store_narrow
from mhsa_compile.kernels.cpu.linear.kernel import MOST_INT8_TERMS, product_function
from mhsa_compile.kernels.cpu.linear.pack_weights import pack
from mhsa_compile.kernels.cpu.linear.quantised import MOST_TERMS, LayoutOfBytes, ProductOfBytes, linear_of_bytes
from mhsa_compile.kernels.cpu.linear.tiles import COLUMNS, TileLayout, TileProduct, tile_tasks
from mhsa_compile.kernels.cpu.units import tiles
from mhsa_compile.kernels.interface.kernel import Config, Emitted, unknown_knobs
from mhsa_compile.kernels.interface.ops import LinearOp, QuantisedLinearOp


class CpuTileInt8LinearKernel:
    """Packed-weight matrix product on tiles of bytes, of floats that are rounded row by row."""

    name = "cpu.linear_int8_on_tiles"
    op_type: type[LinearOp] = LinearOp

    def why_not(self, op: LinearOp, profile: CpuProfile) -> str | None:
        if not op.int8_weights:
            return f"weights in eight bits, not {op.dtype}"
        return _why_not(op, profile, MOST_INT8_TERMS)

    def layout(self, op: LinearOp) -> TileLayout:
        return TileLayout(op, FORMATS["int8"], tiles.SIGNED_BYTES, COLUMNS)

    def search_space(self, op: LinearOp, profile: CpuProfile) -> dict[str, tuple[int, ...]]:
        return {"block": (2, 4, 8, 16, 32), "depth": (8, 12, 16, 24, 48, 96), "group": (1, 2, 4, 8)}

    def why_not_config(self, op: LinearOp, profile: CpuProfile, config: Config) -> str | None:
        return unknown_knobs(config, ("block", "depth", "group"))

    def default_config(self, op: LinearOp, profile: CpuProfile) -> dict[str, int]:
        return {"block": 8, "depth": 96, "group": 1}

    def emit(self, op: LinearOp, profile: CpuProfile, config: Config) -> Emitted:
        layout = self.layout(op)
        run = product_function("linear", layout, profile, config, product=_Product, deal=tile_tasks)
        return Emitted(run, pack(layout), layout.packed)


class CpuTileQuantisedLinearKernel(CpuTileInt8LinearKernel):
    """The same of bytes that a file stores."""

    name = "cpu.linear_of_bytes_on_tiles"
    op_type = QuantisedLinearOp

    def why_not(self, op: LinearOp, profile: CpuProfile) -> str | None:
        return _why_not(op, profile, MOST_TERMS)

    def layout(self, op: LinearOp) -> _TileLayoutOfBytes:
        assert isinstance(op, QuantisedLinearOp)
        unit = tiles.UNSIGNED_BYTES if op.x_dtype == "uint8" else tiles.SIGNED_BYTES
        return _TileLayoutOfBytes(op, FORMATS["int8"], unit, COLUMNS)

    def emit(self, op: LinearOp, profile: CpuProfile, config: Config) -> Emitted:
        return linear_of_bytes(self.layout(op), profile, config, _ProductOfBytes, tile_tasks)


def _why_not(op: LinearOp, profile: CpuProfile, terms: int) -> str | None:
    if op.in_features > terms:
        return f"sums of products of bytes up to {terms} terms, not {op.in_features}"
    return None if tiles.SIGNED_BYTES.is_on(profile) else "a CPU with amx_int8"


class _TileLayoutOfBytes(TileLayout, LayoutOfBytes):
    """Words of four bytes in whole tiles."""


@dataclass(frozen=True)
class _Product(TileProduct):
    def store(self, row: Expr, column: Expr, value: Expr, lanes: int) -> None:
        store_narrow(self.y, [row, column], value, lanes)


@dataclass(frozen=True)
class _ProductOfBytes(_Product, ProductOfBytes):
    pass
