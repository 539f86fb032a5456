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


class WeightStates:
    """Weights as they were bound, which they do not keep alive; None stands for one that a layer lacks.

    `read_alike`: somebody else sees to it that the memory is read as it was, by its shape, strides and dtype.
    """

    def __init__(self, weights: Sequence[Tensor | None] = (), *, read_alike: bool = False) -> None:
        self._identity = _memory if read_alike else _identity
        samples = max(_LEAST_SAMPLES, min(SAMPLES, _MOST_SAMPLES // max(1, len(weights))))
        present = [weight for weight in weights if weight is not None]
        self._weights = [None if weight is None else weakref.ref(weight) for weight in weights]
        self._identities = [None if weight is None else self._identity(weight) for weight in weights]
        self._places = _joined([_places(weight, samples) for weight in present if weight.numel()])
        self._samples = self._read()

    def hold(self, weights: Sequence[Tensor | None]) -> bool:
        """Whether these are the weights that were bound, in number, too, with the same numbers as far as is seen."""
        if len(weights) != len(self._weights):
            return False
        for reference, identity, weight in zip(self._weights, self._identities, weights, strict=True):
            if weight is None or reference is None:
                if (weight is None) != (reference is None):
                    return False
            elif reference() is not weight or self._identity(weight) != identity:
                return False
        return self._read() == self._samples  # their memory is there, since they are

    def _read(self) -> list[bytes]:
        return [memory[index].tobytes() for memory, index in self._places]


def _memory(weight: Tensor) -> tuple[Any, ...]:
    """Where the numbers lie, and PyTorch's count of writes."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def _identity(weight: Tensor) -> tuple[Any, ...]:
    """The same, and how the numbers are read."""
    return *_memory(weight), weight.shape, weight.stride(), weight.dtype, weight.is_neg()


def _places(weight: Tensor, samples: int) -> tuple[int, np.ndarray]:
    """(the bytes of a number, the addresses of those that are compared)."""
    size, strides = weight.element_size(), np.array(weight.stride(), np.int64)
    order = sorted(range(weight.ndim), key=lambda axis: int(strides[axis]), reverse=True)
    shape = tuple(weight.shape[axis] for axis in order)
    numbers = np.arange(0, weight.numel(), _step(weight.numel(), shape[-1] if shape else 1, samples))
    steps = zip(np.unravel_index(numbers, shape) if shape else (), strides[order], strict=True)
    return size, weight.data_ptr() + size * sum((place * stride for place, stride in steps), np.zeros_like(numbers))


def _joined(places: Sequence[tuple[int, np.ndarray]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each size of numbers: a view of the memory from the first of the addresses to the last, and an index into it.
    One look at all of them takes as long as one at each of two weights."""
    views = []
    for size in sorted({size for size, _ in places}):
        addresses = np.concatenate([one for other, one in places if other == size])
        first = int(addresses.min())
        memory: Any = (ctypes.c_ubyte * (int(addresses.max()) + size - first)).from_address(first)
        offsets = addresses - first
        if (offsets % size).any():  # numbers that do not begin at multiples of their size
            views.append((np.frombuffer(memory, np.uint8), (offsets[:, None] + np.arange(size)).ravel()))
        else:
            views.append((np.frombuffer(memory, f"V{size}"), offsets // size))
    return views


def _step(elements: int, row: int, samples: int) -> int:
    """The step between samples: of no divisor in common with a row's length, so that all columns have their turn."""
    step = max(1, elements // samples)
    while step > 1 and math.gcd(step, row) > 1:
        step += 1
    return step
