"""The kernels that one call runs, in order, with the very arrays that they read and write.

TVM's VM tells an instrument of each of its instructions, but an instrument in Python takes several microseconds for
each of the dozens that a call has, which is longer than a small call. So it only notes, once, what is run. The kernels
are then run again in their order, by themselves: on the same arrays, so with the same in the CPU's caches as in a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mhsa_compile.runtime.tvm_runtime import Runtime, Vm

_OF_THE_VM = ("vm.builtin.", "shape_func")
"""Instructions that are no kernels: memory, shapes, checks."""


@dataclass(frozen=True)
class KernelRun:
    """`run(*arguments)` computes what the call computes there.

    symbol   its name in the code; operations with the same code share one
    counts   what the arguments that are lists of integers held then, as numbers of keys: later arrays of the call may
             lie in the same memory
    """

    symbol: str
    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    counts: tuple[tuple[int, ...], ...] = ()


def capture(runtime: Runtime, vm: Vm, arguments: Sequence[Any]) -> list[KernelRun]:
    """The kernels that one call runs, in their order; it is made on a VM that nobody else uses."""
    found: list[KernelRun] = []

    def is_list(held: Any) -> bool:
        return isinstance(held, runtime.ffi.Tensor) and str(held.dtype) == "int64" and len(held.shape) == 1

    def note(function: Any, symbol: str, before: bool, result: Any, *held: Any) -> None:
        if before and not symbol.startswith(_OF_THE_VM) and any(isinstance(one, runtime.ffi.Tensor) for one in held):
            found.append(KernelRun(symbol, function, held, tuple(map(_numbers, filter(is_list, held)))))

    vm.instrument(runtime.ffi.convert(note))
    vm.main(*arguments)
    return found


def _numbers(tensor: Any) -> tuple[int, ...]:
    return tuple(np.from_dlpack(tensor).tolist())
