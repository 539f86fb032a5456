"""Runs the attention kernel for Hopper in the SIMT interpreter, as on a GPU of few multiprocessors."""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np
from cuda_attention_checks import Run
from fuzz_attention import NUMPY, Operands, output_rows, output_shape, placed
from simt_hopper import HopperMachine

from mhsa_compile.kernels.cuda.hopper import KNOBS, HopperAttentionKernel
from mhsa_compile.kernels.operations import AttentionOp
from mhsa_compile.profile import CudaProfile, load_profile

KERNEL = HopperAttentionKernel()
HOPPER = load_profile("cuda-sm90a")
assert isinstance(HOPPER, CudaProfile)
SMALL = msgspec.structs.replace(HOPPER, hardware=msgspec.structs.replace(HOPPER.hardware, multiprocessors=3))
"""So that a block has several items, of several heads."""


def config_of(consumers: int, keys: int, stages: int) -> dict[str, int]:
    return dict(zip(KNOBS, (consumers, keys, stages), strict=True))


def runner(config: dict[str, int] | None = None, seed: int | None = None) -> Run:
    """By the default config, unless one is given; in an order drawn by `seed`, if that is given."""

    def run(op: AttentionOp, given: Operands, sizes: tuple[int, int, int]) -> np.ndarray:
        chosen = config or KERNEL.default(op, SMALL)
        machine, constants = _translated(op, tuple(chosen.items()), seed)
        y = np.full(output_shape(op, sizes), np.nan, NUMPY[op.dtype])
        machine(*placed(op, given), *constants, y)
        return output_rows(y, op.output)

    return run


@lru_cache(maxsize=4)
def _translated(
    op: AttentionOp, config: tuple[tuple[str, int], ...], seed: int | None
) -> tuple[HopperMachine, tuple[np.ndarray, ...]]:
    assert KERNEL.applies(op, SMALL) is None and KERNEL.unfit(op, SMALL, dict(config)) is None
    emitted = KERNEL.emit(op, SMALL, dict(config))
    return HopperMachine(emitted.run, seed=seed), emitted.constants
