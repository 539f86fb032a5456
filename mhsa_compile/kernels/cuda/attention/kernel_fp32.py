"""Attention of float32 on NVIDIA GPUs, exactly: by the multiply-adds of CUDA cores, since their tensor cores round
float32 to ten bits.

A block of four warps is one tile of query rows of one head, as in `attention`; `block_fp32` holds its
arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mhsa_compile.hardware.profile import CudaProfile
from mhsa_compile.kernels.cuda.attention.block_fp32 import Fp32AttentionBlock, Fp32BlockShape
from mhsa_compile.kernels.cuda.attention.block_sparsity import CudaBlockSparsity
from mhsa_compile.kernels.cuda.attention.launch import attention
from mhsa_compile.kernels.cuda.attention.tiled_kernel import TiledAttentionKernel
from mhsa_compile.kernels.cuda.primitives.warp import MOST_REGISTERS, occupancy_hint
from mhsa_compile.kernels.interface.kernel import Config
from mhsa_compile.kernels.interface.ops import AttentionOp

if TYPE_CHECKING:
    from tvm.ir import Expr

KNOBS = ("queries", "keys", "stages")
BESIDE_TILES = 23
"""Registers for addresses, copies and the softmax: so many were left where nothing spilt (nvcc 13.0)."""
_LIKED = 40
"""Registers beyond BESIDE_TILES that bands, masks and terms of the scores took where there was room."""


class Fp32AttentionKernel(TiledAttentionKernel[Fp32BlockShape]):
    """FlashAttention-2 by multiply-adds of float32."""

    name = "cuda.attention_float32"
    dtypes, dtypes_in_words = ("float32",), "float32"
    knobs = KNOBS

    def search_space(self, op: AttentionOp, profile: CudaProfile) -> dict[str, tuple[int, ...]]:
        return {"queries": (16, 32, 64), "keys": (16, 32, 48, 64), "stages": (1, 2)}

    def default_config(self, op: AttentionOp, profile: CudaProfile) -> dict[str, int]:
        """Two blocks are to share a multiprocessor, so that one multiplies while the other waits; many rows, since a
        thread multiplies each key and value by all of its own."""
        sizes = [(64, 64, 1), (64, 48, 1), (64, 32, 1), (32, 64, 1), (32, 32, 1), (32, 16, 1), (16, 16, 1)]
        configs = [dict(zip(KNOBS, values, strict=True)) for values in sizes]
        fitting = [config for config in configs if self.why_not_config(op, profile, config) is None]
        return next((config for config in fitting if self._together(op, profile, config) >= 2), fitting[-1])

    def _together(self, op: AttentionOp, profile: CudaProfile, config: Config) -> int:
        shape = self.shape(op, config)
        return profile.blocks_at_once(shape.threads, MOST_REGISTERS, shape.shared_bytes)

    def shape(self, op: AttentionOp, config: Config) -> Fp32BlockShape:
        return Fp32BlockShape(config["queries"], config["keys"], config["stages"], op.head_dim, op.v_head_dim)

    def why_not_knobs(self, config: Config) -> str | None:
        if config["queries"] % 8 or config["keys"] % 16:
            return f"queries in multiples of 8 and keys of 16, not {dict(config)}"
        return None

    def why_not_shape(self, op: AttentionOp, shape: Fp32BlockShape) -> str | None:
        needed = _registers(shape)
        return f"{needed} registers of {MOST_REGISTERS}" if needed > MOST_REGISTERS else None

    def function(
        self, op: AttentionOp, shape: Fp32BlockShape, plan: CudaBlockSparsity | None, profile: CudaProfile
    ) -> Expr:
        together = occupancy_hint(profile, shape.threads, _registers(shape) + _LIKED, shape.shared_bytes)
        return attention(op, shape, plan, Fp32AttentionBlock, together)


def _registers(shape: Fp32BlockShape) -> int:
    """The registers that a thread needs so that nothing spills."""
    return shape.tile_registers + BESIDE_TILES
