"""Attention of 16-bit types on the tensor cores of NVIDIA GPUs from sm_80 on, by mma.sync.

A block of four warps is one tile of query rows of one head. `block_mma` holds its arithmetic, and its docstring
the algorithm; `launch` deals the blocks out and says where each operand lies.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mhsa_compile.hardware.profile import CudaProfile
from mhsa_compile.kernels.cuda.attention.block_mma import MmaAttentionBlock, MmaBlockShape
from mhsa_compile.kernels.cuda.attention.block_sparsity import CudaBlockSparsity
from mhsa_compile.kernels.cuda.attention.launch import WARPS, attention
from mhsa_compile.kernels.cuda.attention.tiled_kernel import TiledAttentionKernel
from mhsa_compile.kernels.cuda.primitives.warp import MOST_REGISTERS, occupancy_hint
from mhsa_compile.kernels.interface.kernel import Config
from mhsa_compile.kernels.interface.ops import AttentionOp

if TYPE_CHECKING:
    from tvm.ir import Expr

KNOBS = ("queries", "keys", "stages")
MOST_KEYS = 128
"""The most keys of a tile, where a warp has 16 rows: scores in 64 registers. Half as many with twice the rows."""
BESIDE_TILES = 55
"""Registers for addresses, copies and the softmax: so many were left where nothing spilt (nvcc and NVRTC 13.0). What
`_registers` adds for a ring of several stages, and steps of scores for themselves, was found the same way."""


class MmaAttentionKernel(TiledAttentionKernel[MmaBlockShape]):
    """FlashAttention-2 by mma.sync."""

    name = "cuda.attention"
    dtypes, dtypes_in_words = ("bfloat16", "float16"), "16-bit types"
    knobs = KNOBS

    def search_space(self, op: AttentionOp, profile: CudaProfile) -> dict[str, tuple[int, ...]]:
        return {"queries": (64, 128), "keys": (16, 32, 48, 64, 96, 128), "stages": (1, 2, 3)}

    def default_config(self, op: AttentionOp, profile: CudaProfile) -> dict[str, int]:
        """Two blocks are to share a multiprocessor, so that one multiplies while the other waits or takes exponentials.
        With 128 rows, each piece of K and V that comes out of shared memory is multiplied by twice as many queries;
        with 64, there are blocks for more multiprocessors."""
        sizes = [(queries, keys, 1) for queries in (128, 64) for keys in (64, 32)]
        for config in (dict(zip(KNOBS, values, strict=True)) for values in sizes):
            shape = self.shape(op, config)
            together = profile.blocks_at_once(shape.threads, MOST_REGISTERS, shape.shared_bytes)
            fills = shape.queries == 64 or _blocks(op, shape) >= profile.hardware.multiprocessors
            if self.why_not_config(op, profile, config) is None and together >= 2 and fills:
                return config
        return dict(zip(KNOBS, (64, 16, 1), strict=True))

    def shape(self, op: AttentionOp, config: Config) -> MmaBlockShape:
        return MmaBlockShape(config["queries"], config["keys"], config["stages"], op.head_dim, op.v_head_dim)

    def why_not_knobs(self, config: Config) -> str | None:
        if config["queries"] % (16 * WARPS) or config["keys"] % 16:
            return f"queries in multiples of {16 * WARPS} and keys of 16, not {dict(config)}"
        return None

    def why_not_shape(self, op: AttentionOp, shape: MmaBlockShape) -> str | None:
        if shape.row_tiles * shape.keys > MOST_KEYS:
            return f"{shape.keys} keys, where {shape.queries} rows go with {MOST_KEYS // shape.row_tiles} at most"
        needed = _registers(op, shape)
        return f"{needed} registers of {MOST_REGISTERS}" if needed > MOST_REGISTERS else None

    def function(
        self, op: AttentionOp, shape: MmaBlockShape, plan: CudaBlockSparsity | None, profile: CudaProfile
    ) -> Expr:
        together = None
        if not op.any_step("function"):  # which take whatever there is
            together = occupancy_hint(profile, shape.threads, _registers(op, shape), shape.shared_bytes)
        return attention(op, shape, plan, MmaAttentionBlock, together)


def _registers(op: AttentionOp, shape: MmaBlockShape) -> int:
    """The registers that a thread needs so that nothing spills."""
    needed = shape.tile_registers + BESIDE_TILES + (0, 9, 13)[min(shape.stages, 3) - 1]
    of_steps: dict[str, int] = {}
    for step in op.scores:
        for purpose, count in step.cuda_registers(shape.row_tiles, shape.keys, shape.stages).items():
            of_steps[purpose] = max(count, of_steps.get(purpose, 0))
    return needed + sum(of_steps.values())


def _blocks(op: AttentionOp, shape: MmaBlockShape) -> float:
    """How many blocks there are, if the batch and the queries are known; else infinitely many."""
    if isinstance(op.batch, str) or isinstance(op.q_length, str):
        return math.inf
    return op.batch * op.num_heads * -(-op.q_length // shape.queries)
