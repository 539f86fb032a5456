"""What there is to choose for an operation: the kernels that can compute it, and the knobs of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from mhsa_compile.compiler.selection.select_kernel import kernels_for
from mhsa_compile.errors import ModelError
from mhsa_compile.hardware.profile import TargetProfile
from mhsa_compile.kernels.interface.kernel import Kernel
from mhsa_compile.kernels.interface.ops import Op


@dataclass(frozen=True)
class Point:
    """A kernel and a value for each of its knobs, in the kernel's order."""

    kernel: str
    knobs: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, kernel: str, config: Mapping[str, int]) -> Point:
        return cls(kernel, tuple(config.items()))

    @property
    def config(self) -> dict[str, int]:
        return dict(self.knobs)

    def __str__(self) -> str:
        return " ".join((self.kernel, *(f"{knob}={value}" for knob, value in self.knobs)))


@dataclass(frozen=True)
class Space:
    """An operation's choices on a target. The algorithm is one of them: every kernel that is willing.

    values  kernel -> knob -> its choices, those of the default among them, in ascending order
    """

    op: Op
    profile: TargetProfile
    kernels: dict[str, Kernel[Any]]
    values: dict[str, dict[str, tuple[int, ...]]]
    default: Point

    @classmethod
    def of(cls, op: Op, profile: TargetProfile) -> Space:
        """The space of an operation on a target. Raises ModelError where no kernel takes the operation."""
        willing, reasons = kernels_for(op, profile)
        if not willing:
            raise ModelError("operation", "one that a kernel can do", "; ".join(reasons) or "no kernel")
        defaults = {kernel.name: kernel.default_config(op, profile) for kernel in willing}
        values = {
            kernel.name: {
                knob: tuple(sorted({*choices, defaults[kernel.name][knob]}))
                for knob, choices in kernel.search_space(op, profile).items()
            }
            for kernel in willing
        }
        first = willing[0].name
        return cls(op, profile, {kernel.name: kernel for kernel in willing}, values, _ordered(first, values, defaults))

    def why_not(self, point: Point) -> str | None:
        """Why nothing can be emitted for a point, or None."""
        return self.kernels[point.kernel].why_not_config(self.op, self.profile, point.config)

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """All points that can be emitted."""
        return tuple(point for point in self._product() if self.why_not(point) is None)

    def _product(self) -> Iterator[Point]:
        for kernel, knobs in self.values.items():
            for values in product(*knobs.values()):
                yield Point(kernel, tuple(zip(knobs, values, strict=True)))

    def nearest(self, kernel: str, config: Mapping[str, int]) -> Point | None:
        """The point of these knobs, each at its nearest value; None for another kernel or other knobs, or where nothing
        can be emitted for that."""
        knobs = self.values.get(kernel)
        if knobs is None or knobs.keys() != config.keys():
            return None
        near = {knob: min(choices, key=lambda value: abs(value - config[knob])) for knob, choices in knobs.items()}
        point = Point.of(kernel, near)
        return point if self.why_not(point) is None else None

    def steps(self, point: Point, other: Point) -> float:
        """How many steps of knobs apart two points are; infinitely many where their kernels differ."""
        if point.kernel != other.kernel:
            return float("inf")
        choices = self.values[point.kernel]
        places = (
            (choices[k].index(a), choices[k].index(b)) for (k, a), (_, b) in zip(point.knobs, other.knobs, strict=True)
        )
        return sum(abs(a - b) for a, b in places)

    def described(self) -> dict[str, Any]:
        """The choices as JSON: two spaces that say the same can share a study."""
        return {
            kernel: {knob: list(choices) for knob, choices in knobs.items()} for kernel, knobs in self.values.items()
        }


def _ordered(kernel: str, values: Mapping[str, Mapping[str, Any]], configs: Mapping[str, Mapping[str, int]]) -> Point:
    return Point(kernel, tuple((knob, configs[kernel][knob]) for knob in values[kernel]))
