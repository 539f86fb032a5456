"""Attention on NVIDIA GPUs from sm_80 on, in tiles of queries and keys: which attentions the kernels take, which sizes
fit a block, how a constant mask comes to them.

A block of four warps is one tile of query rows of one head. Of 16-bit types `block_mma` holds its arithmetic, on tensor
cores, and its docstring the algorithm; of float32 `block_fp32`, exactly, by the multiply-adds of CUDA cores, since
tensor cores round float32 to ten bits. `launch` deals the blocks out and says where each operand lies.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Generic

from mhsa_compile.hardware.profile import CudaProfile
from mhsa_compile.kernels.common.pair_plan import plan_constants, why_not_plan
from mhsa_compile.kernels.common.score_scale import why_not_scores
from mhsa_compile.kernels.cuda.attention.block_fp32 import Fp32AttentionBlock, Fp32BlockShape
from mhsa_compile.kernels.cuda.attention.block_mma import MmaAttentionBlock, MmaBlockShape
from mhsa_compile.kernels.cuda.attention.block_sparsity import CudaBlockSparsity, separate_plan
from mhsa_compile.kernels.cuda.attention.launch import WARPS, Shape, TileShape, attention
from mhsa_compile.kernels.cuda.primitives.inputs import why_not_widths
from mhsa_compile.kernels.cuda.primitives.simt import MOST_REGISTERS, occupancy_hint
from mhsa_compile.kernels.interface.kernel import Config, Emitted, unknown_knobs
from mhsa_compile.kernels.interface.ops import AttentionOp

KNOBS = ("queries", "keys", "stages")
MOST_KEYS = 128
"""The most keys of a tile on tensor cores, where a warp has 16 rows: scores in 64 registers. Half as many with twice
the rows."""
BESIDE_TILES, BESIDE_FP32_TILES = 55, 23
"""Registers for addresses, copies and the softmax: so many were left where nothing spilt (nvcc and NVRTC 13.0). What
`registers` adds for a ring of several stages, and steps of scores for themselves, was found the same way."""
_LIKED = 40
"""Registers beyond those that bands, masks and terms of the scores took of float32 where there was room."""


class TiledAttentionKernel(ABC, Generic[Shape]):
    """A kernel whose block has a tile of queries of one head and goes over tiles of keys."""

    op_type = AttentionOp
    dtypes: tuple[str, ...]
    dtypes_in_words: str
    knobs: tuple[str, ...] = KNOBS
    shape_type: type[Shape]
    functions = True
    """Whether it computes functions of scores."""

    def shape(self, op: AttentionOp, config: Config) -> Shape:
        """The sizes of a block."""
        queries, keys, stages = (config[knob] for knob in KNOBS)
        return self.shape_type(queries, keys, stages, op.head_dim, op.v_head_dim)

    @abstractmethod
    def why_not_knobs(self, config: Config) -> str | None:
        """Why a block cannot be of such sizes, whatever the attention and the GPU."""

    @abstractmethod
    def registers(self, op: AttentionOp, shape: Shape) -> int:
        """The registers that a thread needs so that nothing spills."""

    @abstractmethod
    def launched(self, op: AttentionOp, shape: Shape, plan: CudaBlockSparsity | None, profile: CudaProfile) -> Emitted:
        """An attention whose blocks have these sizes, but for the plan's constants."""

    def why_not_shape(self, op: AttentionOp, shape: Shape, most: int = MOST_REGISTERS) -> str | None:
        """Why the threads of a block have too few registers: those that they need, of so many."""
        count = self.registers(op, shape)
        return f"{count} registers of {most}" if count > most else None

    def why_not(self, op: AttentionOp, profile: CudaProfile) -> str | None:
        if op.dtype not in self.dtypes:
            return f"of {self.dtypes_in_words}, not {op.dtype}"
        return why_not_plan(op, "cuda") or why_not_widths(op) or why_not_scores(op, functions=self.functions)

    def why_not_config(self, op: AttentionOp, profile: CudaProfile, config: Config) -> str | None:
        if reason := unknown_knobs(config, self.knobs) or self.why_not_knobs(config):
            return reason
        shape, available = self.shape(op, config), profile.hardware.shared_kib_per_block * 1024
        if shape.shared_bytes > available:
            return f"{shape.shared_bytes} bytes of shared memory of {available}"
        return self.why_not_shape(op, shape)

    def emit(self, op: AttentionOp, profile: CudaProfile, config: Config) -> Emitted:
        shape = self.shape(op, config)
        op, plan = separate_plan(op, shape.queries, shape.keys)
        return replace(self.launched(op, shape, plan, profile), constants=plan_constants(plan))


def _sizes(*values: int) -> dict[str, int]:
    return dict(zip(KNOBS, values, strict=True))


class MmaAttentionKernel(TiledAttentionKernel[MmaBlockShape]):
    """FlashAttention-2 by mma.sync."""

    name = "cuda.attention"
    dtypes, dtypes_in_words = ("bfloat16", "float16"), "16-bit types"
    shape_type = MmaBlockShape

    def search_space(self, op: AttentionOp, profile: CudaProfile) -> dict[str, tuple[int, ...]]:
        return {"queries": (64, 128), "keys": (16, 32, 48, 64, 96, 128), "stages": (1, 2, 3)}

    def default_config(self, op: AttentionOp, profile: CudaProfile) -> dict[str, int]:
        """Two blocks are to share a multiprocessor, so that one multiplies while the other waits or takes exponentials.
        With 128 rows, each piece of K and V that comes out of shared memory is multiplied by twice as many queries;
        with 64, there are blocks for more multiprocessors."""
        for config in (_sizes(queries, keys, 1) for queries in (128, 64) for keys in (64, 32)):
            shape = self.shape(op, config)
            fills = shape.queries == 64 or _blocks(op, shape) >= profile.hardware.multiprocessors
            if self.why_not_config(op, profile, config) is None and _together(shape, profile) >= 2 and fills:
                return config
        return _sizes(64, 16, 1)

    def why_not_knobs(self, config: Config) -> str | None:
        if config["queries"] % (16 * WARPS) or config["keys"] % 16:
            return f"queries in multiples of {16 * WARPS} and keys of 16, not {dict(config)}"
        return None

    def why_not_shape(self, op: AttentionOp, shape: MmaBlockShape, most: int = MOST_REGISTERS) -> str | None:
        if shape.row_tiles * shape.keys > MOST_KEYS:
            return f"{shape.keys} keys, where {shape.queries} rows go with {MOST_KEYS // shape.row_tiles} at most"
        return super().why_not_shape(op, shape, most)

    def registers(self, op: AttentionOp, shape: MmaBlockShape) -> int:
        own = shape.tile_registers + BESIDE_TILES + (0, 9, 13)[min(shape.stages, 3) - 1]
        of_steps: dict[str, int] = {}
        for step in op.scores:
            for purpose, count in step.cuda_registers(shape.row_tiles, shape.keys, shape.stages).items():
                of_steps[purpose] = max(count, of_steps.get(purpose, 0))
        return own + sum(of_steps.values())

    def launched(
        self, op: AttentionOp, shape: MmaBlockShape, plan: CudaBlockSparsity | None, profile: CudaProfile
    ) -> Emitted:
        together = None
        if not op.any_step("function"):  # which take whatever there is
            together = occupancy_hint(profile, shape.threads, self.registers(op, shape), shape.shared_bytes)
        return Emitted(attention(op, shape, plan, MmaAttentionBlock, together))


def _blocks(op: AttentionOp, shape: MmaBlockShape) -> float:
    """How many blocks there are, if the batch and the queries are known; else infinitely many."""
    if isinstance(op.batch, str) or isinstance(op.q_length, str):
        return math.inf
    return op.batch * op.num_heads * -(-op.q_length // shape.queries)


class Fp32AttentionKernel(TiledAttentionKernel[Fp32BlockShape]):
    """FlashAttention-2 by multiply-adds of float32."""

    name = "cuda.attention_float32"
    dtypes, dtypes_in_words = ("float32",), "float32"
    shape_type = Fp32BlockShape

    def search_space(self, op: AttentionOp, profile: CudaProfile) -> dict[str, tuple[int, ...]]:
        return {"queries": (16, 32, 64), "keys": (16, 32, 48, 64), "stages": (1, 2)}

    def default_config(self, op: AttentionOp, profile: CudaProfile) -> dict[str, int]:
        """Two blocks are to share a multiprocessor, so that one multiplies while the other waits; many rows, since a
        thread multiplies each key and value by all of its own."""
        sizes = [(64, 64), (64, 48), (64, 32), (32, 64), (32, 32), (32, 16), (16, 16)]
        configs = [_sizes(queries, keys, 1) for queries, keys in sizes]
        fitting = [config for config in configs if self.why_not_config(op, profile, config) is None]
        return next((config for config in fitting if _together(self.shape(op, config), profile) >= 2), fitting[-1])

    def why_not_knobs(self, config: Config) -> str | None:
        if config["queries"] % 8 or config["keys"] % 16:
            return f"queries in multiples of 8 and keys of 16, not {dict(config)}"
        return None

    def registers(self, op: AttentionOp, shape: Fp32BlockShape) -> int:
        return shape.tile_registers + BESIDE_FP32_TILES

    def launched(
        self, op: AttentionOp, shape: Fp32BlockShape, plan: CudaBlockSparsity | None, profile: CudaProfile
    ) -> Emitted:
        registers = self.registers(op, shape) + _LIKED
        together = occupancy_hint(profile, shape.threads, registers, shape.shared_bytes)
        return Emitted(attention(op, shape, plan, Fp32AttentionBlock, together))


def _together(shape: TileShape, profile: CudaProfile) -> int:
    """The blocks of a multiprocessor, whatever registers they take."""
    return profile.blocks_at_once(shape.threads, MOST_REGISTERS, shape.shared_bytes)
