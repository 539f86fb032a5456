"""Attention of 16-bit types on Hopper: products of whole warpgroups (wgmma) on tiles that the copy engine brings.

A block is one warpgroup that copies and two or three that compute, 64 rows of queries each. `warp_specialized` deals
the roles out, `consumer` holds the arithmetic, and its docstring the algorithm; `tile_scheduler` says which block
computes what. This file says what the kernel takes and which sizes fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

from mhsa_compile.hardware.profile import CudaProfile
from mhsa_compile.kernels.cuda.attention.block_sparsity import CudaBlockSparsity
from mhsa_compile.kernels.cuda.attention.kernel import TiledAttentionKernel
from mhsa_compile.kernels.cuda.attention_hopper.shared_memory import HopperBlockShape
from mhsa_compile.kernels.cuda.attention_hopper.tile_scheduler import COUNTER, needs_counter
from mhsa_compile.kernels.cuda.attention_hopper.warp_specialized import attention
from mhsa_compile.kernels.cuda.primitives.hopper_ptx import ROWS
from mhsa_compile.kernels.cuda.primitives.hopper_tma import REGISTERS
from mhsa_compile.kernels.cuda.primitives.simt import MOST_REGISTERS
from mhsa_compile.kernels.interface.kernel import Config, Emitted
from mhsa_compile.kernels.interface.ops import AttentionOp

if TYPE_CHECKING:
    pass

KNOBS = ("consumers", "keys", "stages", "query_stages")
KEYS = (128, 112, 96, 80, 64, 48, 32)
_BESIDE = {2: 44, 3: 36}
"""Registers of a thread beside its tiles: addresses, statistics, what the compiler needs in between. This and the two
below follow what nvcc 13.0 made of kernels: with a few less, it spilt."""
_MASK = 64
"""Registers for the elements of a mask that the call brings, and their addresses; and one for each of half the
scores."""
_BITS = 12
"""Registers for the bits of a constant mask."""
_AHEAD = 10
"""Registers for where the queries of an item lie, if those of the next are there as well: with fewer to spare, nothing
spilt, but exponentials were taken when the products beside them were over."""
_WORTH_THREE = 96
"""Keys of a tile from which three warpgroups are better than two: they share K and V, but have fewer registers."""
_WORTH_AHEAD = 64
"""Keys of a tile from which the next queries may take some of the room that more keys would have."""
_WASTED = 1.06
"""The rows of whole tiles, by those of two warpgroups' tiles, beyond which three are no better: what is beyond the last
query is computed, too."""


class HopperAttentionKernel(TiledAttentionKernel[HopperBlockShape]):
    """FlashAttention-3 for 16-bit types."""

    name = "cuda.attention_hopper"
    functions = False
    dtypes, dtypes_in_words = ("bfloat16", "float16"), "16-bit types"
    knobs = KNOBS

    def why_not(self, op: AttentionOp, profile: CudaProfile) -> str | None:
        if not profile.has_wgmma:
            return "made for GPUs whose warpgroups multiply"
        if reason := super().why_not(op, profile):
            return reason
        if next(self._fitting(op, profile), None) is None:
            return f"no tile of keys fits the registers and shared memory beside heads of {op.head_dim, op.v_head_dim}"
        return None

    def search_space(self, op: AttentionOp, profile: CudaProfile) -> dict[str, tuple[int, ...]]:
        return {"consumers": (2, 3), "keys": (*KEYS, 144, 160, 176), "stages": (2, 3, 4), "query_stages": (1, 2)}

    def default_config(self, op: AttentionOp, profile: CudaProfile) -> dict[str, int]:
        return next(self._fitting(op, profile))

    def _fitting(self, op: AttentionOp, profile: CudaProfile) -> Iterator[dict[str, int]]:
        """Configs that fit, the best first: the next queries copied ahead, where tiles are not small then; tiles of
        many keys, up to 128, since a wider one computes more that a band hides; three of them in the ring."""
        for consumers in (3, 2) if _fills(op, 3) else (2,):
            for query_stages, least in ((2, _WORTH_AHEAD), (1, 0)):
                for keys, stages in product(KEYS, (3, 2)):
                    config = dict(zip(KNOBS, (consumers, keys, stages, query_stages), strict=True))
                    is_worth_it = keys >= (_WORTH_THREE if consumers == 3 else least)
                    if is_worth_it and self.why_not_config(op, profile, config) is None:
                        yield config

    def shape(self, op: AttentionOp, config: Config) -> HopperBlockShape:
        consumers, keys, stages, query_stages = (config[knob] for knob in KNOBS)
        return HopperBlockShape(ROWS * consumers, keys, stages, op.head_dim, op.v_head_dim, query_stages)

    def why_not_knobs(self, config: Config) -> str | None:
        if config["consumers"] not in REGISTERS or config["keys"] % 16 or config["keys"] > 256:
            return f"two or three consumers, and keys in multiples of 16 up to 256, not {dict(config)}"
        if config["stages"] < 2:  # the values of one tile are waited for before those of the last are given back
            return "a ring of two tiles at least"
        if config["query_stages"] not in (1, 2):
            return "queries of one item, or of two"
        return None

    def why_not_shape(self, op: AttentionOp, shape: HopperBlockShape, most: int = MOST_REGISTERS) -> str | None:
        return super().why_not_shape(op, shape, REGISTERS[shape.consumers][1])

    def registers(self, op: AttentionOp, shape: HopperBlockShape) -> int:
        masks = (_MASK + shape.keys // 4 if op.any_step("blind") else 0) + (_BITS if op.pairs is not None else 0)
        ahead = _AHEAD if shape.query_stages > 1 else 0
        return shape.tile_registers + _BESIDE[shape.consumers] + masks + ahead

    def launched(
        self, op: AttentionOp, shape: HopperBlockShape, plan: CudaBlockSparsity | None, profile: CudaProfile
    ) -> Emitted:
        multiprocessors = profile.hardware.multiprocessors
        counted = needs_counter(op, plan is not None, shape.queries, multiprocessors)
        return Emitted(attention(op, shape, plan, multiprocessors), workspace=COUNTER if counted else ())


def _fills(op: AttentionOp, consumers: int) -> bool:
    """Whether tiles of so many warpgroups have hardly more rows beyond the last query than those of two."""
    if isinstance(op.q_length, str):
        return True
    rows, least = (-(-op.q_length // (64 * count)) * count for count in (consumers, 2))
    return rows <= _WASTED * least
