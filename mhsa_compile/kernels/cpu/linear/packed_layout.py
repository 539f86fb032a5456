"""What one step of a linear's inner loop multiplies, and the form in which its factors lie in memory."""

from __future__ import annotations

from dataclasses import dataclass

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import DTYPE_BYTES
from mhsa_compile.kernels.cpu.simd import dot_product as dot
from mhsa_compile.kernels.cpu.simd.dot_product import Dot
from mhsa_compile.kernels.interface.ops import LinearOp


@dataclass(frozen=True)
class PackedLayout:
    """Weights are packed into P panels of `panel` output features, step by step along K: (P, steps, panel).

    With a dot-product instruction a step is as many terms of the sum as the instruction takes, in one word. Without
    one it is a single term: x is float32, and so is what the weights are widened to when they are loaded. With a matrix
    product, rows of x lie side by side, two and two, step by step: they are multiplied together. The terms of a row of
    x for a `run` of steps are loaded at once.
    """

    op: LinearOp
    dot: Dot | None
    lanes: int
    columns: int
    run: int = 1

    @property
    def terms(self) -> int:
        return self.dot.group if self.dot else 1

    @property
    def joined(self) -> int:
        """Rows of x that one instruction multiplies."""
        return self.dot.rows if self.dot else 1

    @property
    def step_bytes(self) -> int:
        """Bytes of a step of x, and of one feature of the weights where an instruction takes them as they are
        stored."""
        return DTYPE_BYTES[self.dot.word] if self.dot else 4

    @property
    def steps(self) -> int:
        return -(-self.op.in_features // self.terms)

    @property
    def panel(self) -> int:
        return self.columns * self.lanes

    @property
    def panels(self) -> int:
        return -(-self.op.out_features // self.panel)

    @property
    def accumulator(self) -> str:
        return self.dot.accumulator if self.dot else "float32"

    @property
    def weight(self) -> str:
        """dtype of a step of the packed weights."""
        if self.dot:
            return self.dot.word
        return "int8" if self.op.int8_weights else self.op.dtype

    @property
    def offset(self) -> bool:
        """Whether x is quantised to unsigned bytes, x + 128, so that 128 times the sum of the weights is too much."""
        return self.op.int8_weights and self.dot is not None and self.dot.unsigned

    @property
    def packed(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shapes and dtypes: weight, bias; for int8 the scale of each feature; what an offset adds to each sum."""
        each = (self.panels, self.panel)
        scales = ((each, "float32"),) if self.op.int8_weights else ()
        offsets = ((each, "int32"),) if self.offset else ()
        return (((self.panels, self.steps, self.panel), self.weight), (each, "float32"), *scales, *offsets)


def format_of(op: LinearOp, profile: CpuProfile, columns: int) -> PackedLayout:
    """The format with the fastest instruction that the target has for this operation."""
    dtype = "int8" if op.int8_weights else op.dtype
    # A matrix product does twice the work of a dot product.
    instruction = dot.matrix(profile, dtype) or dot.available(profile, dtype)
    if instruction is None:
        return PackedLayout(op, None, profile.vector_lanes("float32"), columns, profile.elements_at_once("float32"))
    run = profile.elements_at_once(instruction.word) if instruction.rows == 1 else 1  # two rows fill a vector
    return PackedLayout(op, instruction, instruction.lanes, columns, run)
