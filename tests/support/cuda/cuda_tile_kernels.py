"""Attentions for GPUs: operations, and those in tiles as tests run them in the SIMT interpreter, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import msgspec
import numpy as np
import torch
from fuzz.attention import (
    NUMPY,
    Operands,
    draw_operands,
    evaluated,
    farthest,
    output_rows,
    output_shape,
    placed,
    poison,
    reordered,
)
from support.attention_ops import attention_of
from support.simt import interpreter
from support.simt.hopper import HopperMachine

from mhsa_compile.hardware.profile import CudaProfile, load_profile
from mhsa_compile.kernels.cuda.attention.kernel import Fp32AttentionKernel, MmaAttentionKernel, TiledAttentionKernel
from mhsa_compile.kernels.cuda.attention_hopper.kernel import HopperAttentionKernel
from mhsa_compile.kernels.interface.kernel import Emitted
from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout
from mhsa_compile.verification.parity import Draw, judge

ORDERS = 8
"""The number of orders in which PyTorch's sums are taken, where one may be luck."""
Sizes = tuple[int, int, int]  # B, L, S
Run = Callable[[AttentionOp, Operands, Sizes], np.ndarray]


def operation(heads: tuple[int, int] = (4, 2), widths: tuple[int, int] = (24, 40), **fields: Any) -> AttentionOp:
    """An attention with heads first and apart, rows out, in bfloat16, with symbolic sizes, unless `fields` say
    otherwise."""
    (H, G), (E, F) = heads, widths
    places = {role: HeadLayout(i, "heads", 0) for i, role in enumerate(("query", "key", "value"))}
    rest = {"band": None, "mask": None, "output": HeadLayout(0, "rows", H * F), "dtype": "bfloat16", "scale": E**-0.5}
    return attention_of("B", "L", "S", H, G, E, F, **{**rest, **places, **fields})


def check(run: Run, op: AttentionOp, sizes: Sizes, *, poisoned: bool = False) -> None:
    """Asserts that a run is within the budget of `parity`: PyTorch's eager attention at this dtype is the yardstick."""

    def draw(turn: int, orders: int) -> list[Draw]:
        operands = draw_operands(np.random.default_rng((17, turn)), op, sizes, 1.0, turn)
        truth, narrow = evaluated(op, operands, torch.float64), getattr(torch, op.dtype)
        yardstick = farthest(truth, [evaluated(op, reordered(operands, i), narrow) for i in range(orders)])
        if poisoned:
            poison(op, operands)
        return [(truth, yardstick.astype(NUMPY[op.dtype]), run(op, operands, sizes))]

    result = judge(lambda turn: draw(turn, 1), {})
    if not result.ok:
        result = judge(lambda turn: draw(turn, ORDERS), {})
    assert result.ok, result


GARBAGE = -(1 << 16)
"""What a workspace holds before somebody writes to it: NaN as a float32, and as a number none that counts anything."""


@dataclass(frozen=True)
class TileKernel:
    """A tiled kernel as the tests run it: `widths` are its heads' where a test asks for no others; `small` are the
    sizes of small tiles."""

    kernel: TiledAttentionKernel[Any]
    target: str
    dtypes: tuple[str, ...]
    widths: tuple[int, int]
    small: tuple[int, int, int]
    multiprocessors: int | None = None

    @cached_property
    def profile(self) -> CudaProfile:
        """The profile of the target, with `multiprocessors` where that is said."""
        profile = load_profile(self.target)
        assert isinstance(profile, CudaProfile)
        if self.multiprocessors is None:
            return profile
        hardware = msgspec.structs.replace(profile.hardware, multiprocessors=self.multiprocessors)
        return msgspec.structs.replace(profile, hardware=hardware)

    @property
    def chunk(self) -> int:
        """Elements of 16 bytes, which are copied at once."""
        return 16 // np.dtype(NUMPY[self.dtypes[0]]).itemsize

    def config(self, *sizes: int) -> dict[str, int]:
        return dict(zip(self.kernel.knobs, sizes, strict=True))

    def operation(
        self, heads: tuple[int, int] = (4, 2), widths: tuple[int, int] | None = None, **fields: Any
    ) -> AttentionOp:
        return operation(heads, widths or self.widths, **{"dtype": self.dtypes[0], **fields})

    def runner(self, *sizes: int, seed: int | None = None) -> Run:
        """Runs the kernel by the default config, unless `sizes` say otherwise; on Hopper in an order drawn by `seed`,
        if any."""

        def run(op: AttentionOp, operands: Operands, of_call: Sizes) -> np.ndarray:
            config = self.config(*sizes) if sizes else self.kernel.default_config(op, self.profile)
            machine, emitted = _translated(self, op, tuple(config.items()), seed)
            y = np.full(output_shape(op, of_call), np.nan, NUMPY[op.dtype])
            workspace = [np.full(emitted.workspace, GARBAGE, np.int32).view(np.float32)] if emitted.workspace else []
            machine(*placed(op, operands), *emitted.constants, y, *workspace)
            return output_rows(y, op.output)

        return run

    def check(
        self,
        op: AttentionOp,
        of_call: Sizes = (2, 67, 131),
        sizes: tuple[int, ...] = (),
        *,
        seed: int | None = None,
        poisoned: bool = False,
    ) -> None:
        check(self.runner(*sizes, seed=seed), op, of_call, poisoned=poisoned)


@lru_cache(maxsize=4)
def _translated(
    subject: TileKernel, op: AttentionOp, config: tuple[tuple[str, int], ...], seed: int | None
) -> tuple[interpreter.Machine, Emitted]:
    kernel, profile = subject.kernel, subject.profile
    assert kernel.why_not(op, profile) is None and kernel.why_not_config(op, profile, dict(config)) is None
    emitted = kernel.emit(op, profile, dict(config))
    is_of_roles = isinstance(kernel, HopperAttentionKernel)
    machine = HopperMachine(emitted.run, seed=seed) if is_of_roles else interpreter.Machine(emitted.run)
    return machine, emitted


MMA = TileKernel(MmaAttentionKernel(), "cuda-sm80", ("bfloat16", "float16"), (24, 40), (64, 32, 2))
FLOAT32 = TileKernel(Fp32AttentionKernel(), "cuda-sm80", ("float32",), (20, 68), (32, 32, 2))
HOPPER = TileKernel(HopperAttentionKernel(), "cuda-sm90a", ("bfloat16", "float16"), (24, 40), (2, 32, 2, 2), 3)
"""The kernel for Hopper on a GPU of few multiprocessors, so that a block has several items, of several heads."""
TILE_KERNELS = {"mma": MMA, "float32": FLOAT32, "hopper": HOPPER}
