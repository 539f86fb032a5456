"""What a kernel is: a template over a target's facts and a config, and the four questions that it answers about an
operation. Asking it anything is pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mhsa_compile.kernels.operations import Op
from mhsa_compile.profile import TargetProfile

Config = Mapping[str, int]
CACHE_LINE = 64  # bytes, on every machine here
PrimFunc = Any  # tvm.tirx.PrimFunc; TVM has no type stubs


@dataclass(frozen=True)
class Emitted:
    """The code of one operation: `run`, and for operations with weights the `pack` that prepares them at load.

    `run` takes the inputs, then the packed weights, then the `constants`, then the output (none where the operation is
    in place). `pack` takes the weights (and biases), then its outputs, of `packed`: the shape and dtype of each.
    """

    run: PrimFunc
    pack: PrimFunc | None = None
    packed: tuple[tuple[tuple[int, ...], str], ...] = ()
    constants: tuple[np.ndarray[Any, Any], ...] = ()


class Kernel(Protocol):
    """One template. `applies` is the only statement of its constraints: None, or the reason why not."""

    name: str

    def applies(self, op: Op, profile: TargetProfile) -> str | None: ...

    def space(self, op: Op, profile: TargetProfile) -> dict[str, tuple[int, ...]]:
        """The choices of each knob, for a tuner."""
        ...

    def default(self, op: Op, profile: TargetProfile) -> dict[str, int]:
        """A config that is good without tuning."""
        ...

    def emit(self, op: Op, profile: TargetProfile, config: Config) -> Emitted: ...


class Fixed:
    """The part of a kernel that has no knobs: nothing to choose, and one config."""

    def space(self, op: Op, profile: TargetProfile) -> dict[str, tuple[int, ...]]:
        return {}

    def default(self, op: Op, profile: TargetProfile) -> dict[str, int]:
        return {}
