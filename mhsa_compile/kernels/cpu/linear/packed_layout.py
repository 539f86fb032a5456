"""What one step of a linear's inner loop multiplies, and the form in which its factors lie in memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import DTYPE_BYTES
from mhsa_compile.kernels.cpu.formats.choice import FORMATS
from mhsa_compile.kernels.cpu.formats.format import Format
from mhsa_compile.kernels.cpu.units.choice import units
from mhsa_compile.kernels.cpu.units.unit import Unit
from mhsa_compile.kernels.interface.ops import LinearOp


@dataclass(frozen=True)
class PackedLayout:
    """Weights are packed into P panels of `panel` output features, step by step along K: (P, steps, panel).

    A unit that takes the weights as they are stored has as many terms of the sum as it multiplies at once in a step,
    one word. Else a step is a single term: x is float32, and so is what the weights are widened to when they are
    loaded. Rows of x that the unit multiplies together lie side by side, step by step.
    """

    op: LinearOp
    format: Format
    unit: Unit
    columns: int

    @property
    def lanes(self) -> int:
        return self.unit.lanes

    @property
    def widens(self) -> bool:
        """Whether weights are not multiplied as they are stored."""
        return self.unit.dtype != self.format.multiplied_as

    @property
    def run(self) -> int:
        """Steps of x that are loaded at once. (Rows that are multiplied together fill a vector.)"""
        return max(1, self.unit.run // self.unit.rows)

    @property
    def x_dtype(self) -> str:
        """dtype of x as a call brings it."""
        return self.op.dtype

    def imported(self) -> AbstractContextManager[Any]:
        """Stands around the body of a PrimFunc that multiplies."""
        return self.unit.imported()

    def turn(self, lines: int) -> int:
        """Steps in a turn of the inner loop, of a tile of so many lines."""
        return self.run * self.unit.runs_at_once(lines, self.columns)

    @property
    def is_worth_widening(self) -> bool:
        """Whether weights may be widened once for a group of tiles. Not where multiplications take their factors from
        memory: there widening costs as little, and the way through the cache 2 to 8 %."""
        return self.widens and self.run > 1

    @property
    def has_tiles_of_one(self) -> bool:
        """Whether a single line that is left gets a tile of its own, and not half a tile."""
        return False

    @property
    def together(self) -> int:
        """Terms of x that are written at once: of one step, where the next one of the row lies behind other rows."""
        return self.lanes if self.unit.rows == 1 else min(self.lanes, self.unit.group)

    @property
    def step_bytes(self) -> int:
        """Bytes of a step of x, and of one feature of the weights where they are multiplied as they are stored."""
        return DTYPE_BYTES[self.unit.word]

    @property
    def steps(self) -> int:
        return -(-self.op.in_features // self.unit.group)

    @property
    def pitch(self) -> int:
        """Terms from a line of prepared x to the next."""
        return self.unit.rows * self.steps * self.unit.group

    @property
    def words(self) -> int:
        """Words of a feature's weights, each an element of the packed weights."""
        return self.steps

    @property
    def panel(self) -> int:
        return self.columns * self.lanes

    @property
    def panels(self) -> int:
        return -(-self.op.out_features // self.panel)

    @property
    def weight(self) -> str:
        """dtype of a step of the packed weights."""
        return self.format.dtype if self.widens else self.unit.word

    @property
    def weight_bytes(self) -> int:
        """What all packed weights take in memory."""
        return DTYPE_BYTES[self.weight] * self.words * self.panel * self.panels

    @property
    def offset(self) -> bool:
        """Whether x is quantised to unsigned bytes, x + 128, so that 128 times the sum of the weights is too much."""
        return self.unit.unsigned

    @property
    def packed(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shapes and dtypes: weight, bias; the step of each feature, where they have one; what an offset adds to each
        sum."""
        each = (self.panels, self.panel)
        scales = ((each, "float32"),) if self.format.is_scaled else ()
        offsets = ((each, "int32"),) if self.offset else ()
        return (((self.panels, self.words, self.panel), self.weight), (each, "float32"), *scales, *offsets)


def format_of(op: LinearOp) -> Format:
    """What weights are packed into."""
    return FORMATS["int8" if op.int8_weights else op.dtype]


def layout_of(op: LinearOp, profile: CpuProfile, columns: int, format: Format | None = None) -> PackedLayout:
    """The layout for the fastest unit that the target has for weights of a format, by default the operation's own."""
    format = format or format_of(op)
    return PackedLayout(op, format, units(profile, format.multiplied_as)[0], columns)
