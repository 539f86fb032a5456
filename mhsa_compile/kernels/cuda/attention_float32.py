"""Attention of float32 on NVIDIA GPUs, exactly: by the multiply-adds of CUDA cores, since their tensor cores round
float32 to ten bits.

A block of four warps is one tile of query rows of one head, as in `attention`; `attention_float32_tile` holds its
arithmetic.
"""

from __future__ import annotations

from mhsa_compile.kernels.base import Config, Emitted, unknown_knobs
from mhsa_compile.kernels.cuda.attention_float32_tile import AttentionBlock, Shape
from mhsa_compile.kernels.cuda.attention_launch import attention
from mhsa_compile.kernels.cuda.attention_plan import planned_apart
from mhsa_compile.kernels.cuda.operands import unfit_widths
from mhsa_compile.kernels.operations import AttentionOp, Op
from mhsa_compile.kernels.scores import unfit_scores
from mhsa_compile.profile import CudaProfile

KNOBS = ("queries", "keys", "stages")
REGISTERS = 255  # of a thread, on every GPU
BESIDE_TILES = 23
"""Registers for addresses, copies and the softmax: so many were left where nothing spilt (nvcc 13.0)."""


class AttentionFloat32Kernel:
    """FlashAttention-2 by multiply-adds of float32."""

    name = "cuda.attention_float32"

    def applies(self, op: Op, profile: CudaProfile) -> str | None:
        if not isinstance(op, AttentionOp):
            return "not an attention"
        if op.dtype != "float32":
            return f"of float32, not {op.dtype}"
        if op.static_mask is not None and op.mask is not None:
            return "a static mask or one that the call brings, not both"
        return unfit_widths(op) or unfit_scores(op)

    def space(self, op: Op, profile: CudaProfile) -> dict[str, tuple[int, ...]]:
        return {"queries": (16, 32, 64), "keys": (16, 32, 48, 64), "stages": (1, 2)}

    def default(self, op: Op, profile: CudaProfile) -> dict[str, int]:
        """Two blocks are to share a multiprocessor, so that one multiplies while the other waits; many rows, since a
        thread multiplies each key and value by all of its own."""
        assert isinstance(op, AttentionOp)
        sizes = [(64, 64, 1), (64, 48, 1), (64, 32, 1), (32, 64, 1), (32, 32, 1), (32, 16, 1), (16, 16, 1)]
        configs = [dict(zip(KNOBS, chosen, strict=True)) for chosen in sizes]
        fitting = [config for config in configs if self.unfit(op, profile, config) is None]
        return next((config for config in fitting if self._together(op, profile, config) >= 2), fitting[-1])

    def _together(self, op: AttentionOp, profile: CudaProfile, config: Config) -> int:
        shape = _shape(op, config)
        return profile.blocks_at_once(shape.threads, REGISTERS, shape.shared_bytes)

    def unfit(self, op: Op, profile: CudaProfile, config: Config) -> str | None:
        assert isinstance(op, AttentionOp)
        if reason := unknown_knobs(config, KNOBS):
            return reason
        if config["queries"] % 8 or config["keys"] % 16:
            return f"queries in multiples of 8 and keys of 16, not {dict(config)}"
        shape, available = _shape(op, config), profile.hardware.shared_kib_per_block * 1024
        if shape.shared_bytes > available:
            return f"{shape.shared_bytes} bytes of shared memory of {available}"
        if (needed := shape.tile_registers + BESIDE_TILES) > REGISTERS:
            return f"{needed} registers of {REGISTERS}"
        return None

    def shared_bytes(self, op: AttentionOp, config: Config) -> int:
        """What a block takes of shared memory."""
        return _shape(op, config).shared_bytes

    def emit(self, op: Op, profile: CudaProfile, config: Config) -> Emitted:
        assert isinstance(op, AttentionOp)
        op, planned = planned_apart(op, config["queries"], config["keys"])
        constants = planned.arrays if planned else ()
        return Emitted(attention(op, _shape(op, config), planned, AttentionBlock), constants=constants)


def _shape(op: AttentionOp, config: Config) -> Shape:
    return Shape(config["queries"], config["keys"], config["stages"], op.head_dim, op.v_head_dim)
