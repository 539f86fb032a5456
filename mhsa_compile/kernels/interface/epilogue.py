"""What becomes of a linear's result before anybody reads it: an activation, a residual sum, a gate.

Data only: what may be in one is decided in `compiler.epilogues`, and a kernel that takes it emits it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Value = TypeVar("Value")
BINARY = ("add", "sub", "mul", "div", "min", "max")
UNARY = ("cube", "erf", "gelu", "gelu_tanh", "round", "sigmoid", "silu", "square", "tanh")


@dataclass(frozen=True)
class EpilogueStep:
    """One of BINARY or UNARY, of values by their numbers and of constants, which are floats."""

    op: str
    args: tuple[int | float, ...]


@dataclass(frozen=True)
class Epilogue:
    """Arithmetic on each element of y by itself.

    Value 0 is the element as the linear made it, values 1 to `operands` are those at the same place of further inputs
    of y's shape and dtype, the next `features` those of its column in inputs that have one number for each, and each of
    `steps` makes one more. The last is written.
    """

    operands: int
    steps: tuple[EpilogueStep, ...]
    features: int = 0

    @property
    def inputs(self) -> int:
        """How many inputs it has beside y."""
        return self.operands + self.features

    def value(
        self,
        first: Sequence[Value],
        constant: Callable[[float], Value],
        ops: Mapping[str, Callable[..., Value]],
        named: Callable[[Value], Value] = lambda value: value,
    ) -> Value:
        """The value that is written. `first` are the values before those of the steps; `named` is one that others may
        read, for which it is computed once."""
        values = list(first)
        for step in self.steps:
            args = [constant(arg) if isinstance(arg, float) else values[arg] for arg in step.args]
            values.append(named(ops[step.op](*args)))
        return values[-1]

    def summary(self) -> str:
        return ", ".join(step.op for step in self.steps)
