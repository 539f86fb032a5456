"""What a kernel of ours has to do in a call: FLOPs, the bytes of its weights as they are packed, and how many FLOPs a
cycle the unit that multiplies for it makes on all cores, two instructions a cycle on each."""

from __future__ import annotations

import math
from collections.abc import Mapping

import tvm

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.cpu.units.choice import NARROW
from mhsa_compile.kernels.interface.ops import (
    AttentionOp,
    BlockLinearOp,
    Dim,
    LinearOp,
    Op,
    ProductOp,
    QuantisedLinearOp,
    RecurrenceOp,
)

_TILE_FLOPS = {8: 2048, 16: 1024}
"""Of a core that has matrix tiles, a cycle: 16 x 16 sums of 64 bytes in 16 cycles, by the bits of a factor."""
_PRODUCTS = {"ieee": 1, "bf16x6": 6, "bf16x3": 3, "bf16": 1}
_OF_HALVES = 4  # products of two terms that make one of float16
_FLOPS_A_LANE = 4


def kernel_flops(op: Op, sizes: Mapping[str, int], otherwise: int) -> int:
    """The FLOPs of an operation's products at these sizes of free dims; 0 of one that has none. Of attention every pair
    counts."""

    def size(dim: Dim) -> int:
        return dim if isinstance(dim, int) else sizes.get(dim, otherwise)

    if isinstance(op, LinearOp):
        return 2 * math.prod(map(size, op.rows)) * op.in_features * op.out_features
    if isinstance(op, ProductOp):
        rows, inner, columns = map(size, (op.rows, op.inner, op.columns))
        return 2 * math.prod(map(size, op.batch)) * rows * inner * columns
    if isinstance(op, RecurrenceOp):
        return 2 * size(op.steps) * size(op.batch) * len(op.backwards) * op.gates * op.units**2
    if isinstance(op, AttentionOp):
        pairs = size(op.batch) * size(op.q_length) * size(op.kv_length)
        return 2 * op.num_heads * pairs * (op.head_dim + op.v_head_dim)
    return 0


def weight_bytes(op: Op) -> int:
    """The bytes of a linear's weights as they are packed: numbers, and scales and zeros of float32; 0 of others."""
    if not isinstance(op, LinearOp):
        return 0
    numbers = op.in_features * op.out_features
    if isinstance(op, BlockLinearOp):
        of_block = {"": 4, "bytes": 5, "floats": 8}
        widest = max((of_block[kind] for kind in op.zeros), default=4)
        return numbers * op.bits // 8 + op.blocks * op.out_features * widest
    return numbers * (1 if _is_of_bytes(op) else tvm.DataType(op.dtype).bits // 8)


def flops_a_cycle(dtype: str, profile: CpuProfile) -> float:
    """The limit of all cores, of vectors: two multiply-adds a cycle on each."""
    lanes = max(1, profile.hardware.vector_bits // max(8, tvm.DataType(dtype).bits))
    return float(_FLOPS_A_LANE * lanes * profile.hardware.cores)


def kernel_flops_a_cycle(op: Op, on_tiles: bool, profile: CpuProfile) -> float:
    """The limit of the unit that multiplies for an operation."""
    cores, is_of_bytes = profile.hardware.cores, _is_of_bytes(op)
    dtype = "int8" if is_of_bytes else str(getattr(op, "dtype", "float32"))
    if on_tiles:
        products = _OF_HALVES if dtype == "float16" else _PRODUCTS[getattr(op, "float32_products", "ieee")]
        return _TILE_FLOPS[8 if is_of_bytes else 16] * cores / products
    unit = next((one for one in NARROW if one.dtype == dtype and one.is_on(profile)), None)
    if unit is None:
        return flops_a_cycle("float32", profile)
    return float(_FLOPS_A_LANE * unit.lanes * unit.group * cores)


def _is_of_bytes(op: Op) -> bool:
    """Whether an operation multiplies eight bits by eight."""
    return isinstance(op, QuantisedLinearOp) or bool(
        getattr(op, "int8_weights", False) or getattr(op, "rounds_x", False)
    )
