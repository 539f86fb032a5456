"""What the Hopper instructions of the SIMT interpreter have in common: operands, and who executes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from support.simt.hopper_memory import Mbarrier
from support.simt.memory import WARP, SimtError

if TYPE_CHECKING:
    from support.simt.hopper import HopperMachine

WARPGROUP = 128


def operands_of(node: Any) -> list[Any]:
    return [a for a in node.args if type(a).__name__ != "StringImm"]


def words_of(node: Any) -> list[str]:
    return [str(a.value) for a in node.args if type(a).__name__ == "StringImm"]


def active_lanes(machine: HopperMachine, *values: Any) -> list[tuple[int, ...]]:
    """For each active lane: its block, its warp, and what it has of the values."""
    lanes = machine.lanes
    arrays = [lanes.block, lanes.thread // WARP, *(machine.spread(value) for value in values)]
    return list(zip(*(array.tolist() for array in lanes.chosen(*arrays)), strict=True))


def whole_warps(machine: HopperMachine, what: str) -> list[tuple[int, int]]:
    """(block, warp) of the warps that are active, whole."""
    machine.lanes.whole(WARP, what)
    return sorted({(b, w) for b, w in active_lanes(machine)})


def whole_blocks(machine: HopperMachine, what: str) -> list[int]:
    """Blocks whose whole warpgroup is active."""
    whole = machine.lanes.whole(WARPGROUP, what)
    return [int(b) for b in np.flatnonzero(whole)]


def same_of(machine: HopperMachine, value: Any, block: int) -> int:
    """What all threads of the warpgroup have in a block. Raises SimtError where they do not agree."""
    values = machine.spread(value).reshape(-1, WARPGROUP)[block]
    if (values != values[0]).any():
        raise SimtError("an operand that is not the same for the warpgroup")
    return int(values[0])


def shared_of(machine: HopperMachine) -> Any:
    assert machine.memory is not None
    return machine.memory


def barrier_at(machine: HopperMachine, at: int) -> Mbarrier:
    if at not in machine.mbarriers:
        raise SimtError(f"no mbarrier at address {at}")
    return machine.mbarriers[at]
