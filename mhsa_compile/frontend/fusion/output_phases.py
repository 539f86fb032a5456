"""The outputs of a transposed convolution by phase, each of which a plain convolution of its own computes.

Along an axis x[i] w[k] is added to y[s i + d k]. So y[s q + r] is the sum of x[q - m] w[k] over the taps with
d k = r + s m: of phase r every (s / gcd(s, d))-th tap, d / gcd(s, d) elements of x apart. No product is with a zero
that strides put between elements, and nothing is added twice to one place. W. Shi et al., "Is the deconvolution layer
the same as a convolutional layer?", arXiv:1609.07009.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PhasedAxis:
    """A transposed convolution along one axis: its sizes, and of what is computed how much is cut off at its ends."""

    kernel: int
    stride: int
    dilation: int
    before: int
    behind: int

    @classmethod
    def of(cls, kernel: int, stride: int, dilation: int, pads: tuple[int, int], output_padding: int) -> PhasedAxis:
        """`behind` is less than what pads say where output_padding asks for more; it may be negative then."""
        return cls(kernel, stride, dilation, pads[0], pads[1] - output_padding)

    @property
    def reach(self) -> int:
        return (self.kernel - 1) * self.dilation + 1

    @property
    def more(self) -> int:
        """How many places more than x has elements each phase has, and one."""
        return -(-max(self.reach, self.reach - self.behind) // self.stride)

    @property
    def cut(self) -> int:
        """How many elements behind are computed too many."""
        return self.stride * self.more - self.reach + self.behind

    @property
    def spread(self) -> int:
        """How many elements of x lie from a tap of a phase to its next."""
        return self.dilation // math.gcd(self.stride, self.dilation)

    def taps(self, phase: int) -> list[int]:
        """The taps that a phase adds up, in falling order, as the elements of x that they are for rise."""
        return [k for k in reversed(range(self.kernel)) if (k * self.dilation - phase) % self.stride == 0]

    def window(self, phase: int) -> tuple[int, int, int] | None:
        """How many elements of x a phase reads at a time, and how many zeros lie before x and behind it, so
        that all phases have as many places; None where it has no tap."""
        places = [(k * self.dilation - phase) // self.stride for k in self.taps(phase)]
        return (len(places), places[0], self.more - 1 - places[-1]) if places else None


Windows = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""How many elements are read at a time, how many zeros lie before x and behind it: a number for each axis."""


def by_windows(axes: Sequence[PhasedAxis]) -> dict[Windows, list[tuple[int, ...]]]:
    """Windows -> the phases that read through them; those without a tap are in none."""
    groups: dict[Windows, list[tuple[int, ...]]] = {}
    for phase in itertools.product(*(range(axis.stride) for axis in axes)):
        windows = [axis.window(r) for axis, r in zip(axes, phase, strict=True)]
        if len(known := list(filter(None, windows))) == len(axes):
            counts, before, behind = zip(*known, strict=True)
            groups.setdefault((counts, before, behind), []).append(phase)
    return groups
