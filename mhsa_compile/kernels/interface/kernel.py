"""What a kernel is: a template over a target's facts and a config, and the four questions that it answers about an
operation. Asking it anything is pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from mhsa_compile.kernels.interface.ops import Op
from mhsa_compile.spec.float32_products import Float32Products

Config = Mapping[str, int]
CACHE_LINE = 64  # bytes, on every machine here
PrimFunc = Any  # tvm.tirx.PrimFunc; TVM has no type stubs


@dataclass(frozen=True)
class Emitted:
    """The code of one operation: `run`, and for operations with weights the `pack` that prepares them at load.

    `run` takes the inputs, then the packed weights, then the `constants`, then the output (none where the operation is
    in place), then the workspace, where it has one: float32 of this shape, to write in and read from during the call.
    `pack` takes the weights (and biases), then its outputs, of `packed`: the shape and dtype of each.
    """

    run: PrimFunc
    pack: PrimFunc | None = None
    packed: tuple[tuple[tuple[int, ...], str], ...] = ()
    constants: tuple[np.ndarray[Any, Any], ...] = ()
    workspace: tuple[int, ...] = ()


Profile = Any
"""The profile of the kernel's own family: a CpuProfile or a CudaProfile."""


OpT = TypeVar("OpT", bound=Op)


class Kernel(Protocol[OpT]):
    """One template, for operations of one type. It is asked about no others; of those that it is asked about, `why_not`
    is the only statement of its constraints: None, or the reason why not."""

    name: str
    op_type: type[OpT]

    def why_not(self, op: OpT, profile: Profile) -> str | None: ...

    def search_space(self, op: OpT, profile: Profile) -> dict[str, tuple[int, ...]]:
        """The choices of each knob, for a tuner."""
        ...

    def default_config(self, op: OpT, profile: Profile) -> dict[str, int]:
        """A config that is good without tuning."""
        ...

    def why_not_config(self, op: OpT, profile: Profile, config: Config) -> str | None:
        """Why nothing can be emitted for a config, or None: asked of what a tuner draws, and of what a record says."""
        ...

    def emit(self, op: OpT, profile: Profile, config: Config) -> Emitted: ...


@runtime_checkable
class TermProducts(Protocol):
    """What a kernel has beside, if it can multiply float32 numbers by bfloat16 terms. A kernel without it, or that
    answers with nothing, multiplies them as IEEE has it. Neither answer hangs on the operation's own word."""

    def float32_products(self, op: Any, profile: Profile) -> tuple[Float32Products, ...]:
        """The words other than "ieee" with which it computes such an operation on this target; its `why_not` is asked
        about the operation with the word, too."""
        ...

    def exact_products(self, op: Any, profile: Profile) -> tuple[Float32Products, ...]:
        """Those of them that are known to stay inside float32's error budget, and not to take longer."""
        ...


def products_of(kernel: Any, op: Op, profile: Profile) -> tuple[Float32Products, ...]:
    """The words with which a kernel multiplies float32 numbers."""
    return ("ieee", *kernel.float32_products(op, profile)) if isinstance(kernel, TermProducts) else ("ieee",)


class Fixed:
    """The part of a kernel that has no knobs: nothing to choose, and one config. It takes every operation of its type,
    unless it says why not."""

    def why_not(self, op: Any, profile: Profile) -> str | None:
        return None

    def search_space(self, op: Op, profile: Profile) -> dict[str, tuple[int, ...]]:
        return {}

    def default_config(self, op: Op, profile: Profile) -> dict[str, int]:
        return {}

    def why_not_config(self, op: Op, profile: Profile, config: Config) -> str | None:
        return unknown_knobs(config, ())


def unknown_knobs(config: Config, knobs: Iterable[str]) -> str | None:
    """Why a config does not give these knobs, each a whole number from 1 on, or None."""
    if set(config) != set(knobs):
        return f"knobs {sorted(config)}, where the kernel has {sorted(knobs)}"
    wrong = [f"{knob} = {value}" for knob, value in config.items() if value < 1]
    return f"{', '.join(wrong)}, which must be from 1 on" if wrong else None


def why_not_tile(rows: int, columns: int, registers: int) -> str | None:
    """Why an outer product's tile of accumulators does not fit the vector registers, or None: beside it there are a row
    of vectors and a scalar."""
    count = rows * columns + columns + 1
    return f"a tile of {rows} x {columns} needs {count} registers of {registers}" if count > registers else None
