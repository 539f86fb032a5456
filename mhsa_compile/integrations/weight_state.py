"""Whether a weight is what it was when it was bound, asked in each call and answered in a microsecond.

PyTorch counts writes in a tensor's version. Past that counter write its fused optimizers, whoever writes into `.data`
(libraries that merge adapters do), NumPy's views, and inference tensors, which have none. So a sample of the numbers is
compared as well: SAMPLES of them, at a step that no row and no column of a matrix escapes for long.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

SAMPLES = 256
"""Numbers of one weight. An edit of a part p of the numbers, spread evenly, is missed with (1 - p) ** 256: of 2 %, in
one case of 170. A block of rows is never missed from one row in 256 on."""
_MOST_SAMPLES, _LEAST_SAMPLES = 4096, 16
"""Numbers of all weights of a graph together; of each, however many there are."""


class WeightState:
    """One weight as it was bound. It keeps neither the weight nor its memory alive."""

    def __init__(self, weight: Tensor, samples: int = SAMPLES) -> None:
        self._weight = weakref.ref(weight)
        self._identity = _identity(weight)
        self._array, self._places = _places(weight, samples)
        self._sample: bytes = self._array[self._places].tobytes()

    def holds(self, weight: Tensor | None) -> bool:
        """Whether `weight` is that weight, with the same numbers as far as is seen."""
        if weight is None or self._weight() is not weight or _identity(weight) != self._identity:
            return False
        sample: bytes = self._array[self._places].tobytes()  # its memory is there, since the weight is
        return sample == self._sample


States = tuple[WeightState | None, ...]


def states_of(weights: Sequence[Tensor | None]) -> States:
    """The weights as they are now, in order. Of many, smaller samples are kept: reading them is what a call pays."""
    samples = max(_LEAST_SAMPLES, min(SAMPLES, _MOST_SAMPLES // max(1, len(weights))))
    return tuple(None if weight is None else WeightState(weight, samples) for weight in weights)


def hold(states: States, weights: Sequence[Tensor | None]) -> bool:
    """Whether the weights are those that were bound, in number, too."""
    if len(states) != len(weights):
        return False
    for state, weight in zip(states, weights, strict=True):
        if (weight is not None) if state is None else not state.holds(weight):
            return False
    return True


def _identity(weight: Tensor) -> tuple[Any, ...]:
    """Where the numbers lie and how they are read, and PyTorch's count of writes."""
    version = 0 if weight.is_inference() else weight._version
    return weight.data_ptr(), version, weight.shape, weight.stride(), weight.dtype, weight.is_neg()


def _places(weight: Tensor, samples: int) -> tuple[np.ndarray, Any]:
    """(the numbers as bytes where they lie, an index of those that are compared): a slice where all lie densely."""
    size, elements = weight.element_size(), weight.numel()
    if not elements:
        return np.empty(0, np.uint8), slice(None)
    steps = weight.stride()
    order = sorted(range(weight.ndim), key=lambda axis: steps[axis], reverse=True)
    dense = weight.permute(order)
    shape, strides = tuple(dense.shape), [stride * size for stride in dense.stride()]
    reach = 1 + sum((length - 1) * stride // size for length, stride in zip(shape, strides, strict=True))
    memory: Any = (ctypes.c_ubyte * (reach * size)).from_address(weight.data_ptr())
    numbers = np.frombuffer(memory, f"V{size}")
    step = _step(elements, shape[-1] if shape else 1, samples)
    if dense.is_contiguous():
        return numbers, slice(None, None, step)
    array = np.ndarray(shape, numbers.dtype, numbers, 0, strides)
    return array, np.unravel_index(np.arange(0, elements, step), shape)


def _step(elements: int, row: int, samples: int) -> int:
    """The step between samples: of no divisor in common with a row's length, so that all columns have their turn."""
    step = max(1, elements // samples)
    while step > 1 and math.gcd(step, row) > 1:
        step += 1
    return step
