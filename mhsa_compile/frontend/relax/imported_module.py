"""What the frontend makes of a model: a Relax module, the operations that it calls, and what a call is held to; and the
context in which it is made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax
from tvm_ffi import structural_equal

from mhsa_compile.frontend.relax.values import RelaxValue, SizeExpr
from mhsa_compile.kernels.interface.ops import Dim, Op
from mhsa_compile.runtime.artifact.manifest import Agreement


@dataclass(frozen=True)
class Broadcast:
    """What a mask of the call must broadcast to, (B, H, L, S), and whether it may end early, hiding the other keys."""

    full: tuple[Dim, ...]
    pads: bool


@dataclass
class ImportedModule:
    """A Relax module whose `main` takes inputs, weights and what is derived from these, and calls `ops` by name."""

    module: Any
    ops: dict[str, Op] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)  # parameter of main -> initializer
    derived: tuple[str, ...] = ()  # parameters of main that `derive_weights` computes from the weights
    masks: dict[str, Broadcast] = field(default_factory=dict)  # by input
    limits: dict[str, Dim] = field(default_factory=dict)  # input of integers -> the largest that they may be
    rows: dict[str, int] = field(default_factory=dict)  # input of ids -> the rows of the table that they pick from
    outputs: list[tuple[Dim, ...] | None] = field(default_factory=list)  # dims; None where they cannot be inferred
    agreements: list[Agreement] = field(default_factory=list)  # what a call's sizes are held to, by node
    in_place: dict[str, str] = field(default_factory=dict)  # output -> the input that a call turns into it


class DimNames:
    """Dims of operations by the sizes of values; what is computed alike has one name, of this prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._computed: list[SizeExpr] = []

    def __call__(self, size: SizeExpr) -> Dim:
        """A fixed size, or the name under which a kernel binds the size that it meets."""
        if isinstance(size, int | tvm.tirx.IntImm):
            return int(size)
        if isinstance(size, tvm.ir.Var):
            return str(size.name)
        number = next((i for i, other in enumerate(self._computed) if structural_equal(other, size)), None)
        if number is None:
            number = len(self._computed)
            self._computed.append(size)
        return f"{self._prefix}_{number}"


class ImportContext:
    """What conversions share: the builder that writes Relax, the operations and demands that are known so far, and the
    names of sizes and inputs."""

    def __init__(self, bb: relax.BlockBuilder, inputs: Mapping[str, RelaxValue]) -> None:
        self.bb = bb
        self.result = ImportedModule(module=None)
        self._inputs = inputs
        self.dim = DimNames("dim")

    def input_name(self, value: RelaxValue) -> str | None:
        """The input of the graph that `value` is."""
        return next((name for name, variable in self._inputs.items() if variable.same_as(value)), None)

    def call(self, op: Op, inputs: list[RelaxValue], shape: list[SizeExpr]) -> RelaxValue:
        """An operation with one result, of its dtype."""
        return self.call_for_several(op, inputs, [relax.TensorType(shape, op.dtype)])[0]

    def call_for_several(self, op: Op, inputs: list[RelaxValue], types: list[Any]) -> list[RelaxValue]:
        """An operation with several results, of types of their own."""
        name = f"op_{len(self.result.ops)}"
        self.result.ops[name] = op
        inputs = [self.bb.emit(value) if not isinstance(value, relax.Var) else value for value in inputs]
        result = self.bb.emit(relax.op.call_dps_packed(name, inputs, types))
        return [result] if len(types) == 1 else [self.bb.emit(relax.TupleGetItem(result, i)) for i in range(len(types))]


def dim_of(size: SizeExpr) -> Dim:
    """A size as a signature states it: a number, or an expression of its symbols."""
    if isinstance(size, int | tvm.tirx.IntImm):
        return int(size)
    text = re.sub(r"T\.int64\((\d+)\)", r"\1", str(size))
    names = [str(variable.name) for variable in tvm.tirx.analysis.undefined_vars(size)]
    for name in _SCRIPTS_OWN:
        if name in names and not any(other.startswith(f"{name}_") for other in names):
            text = re.sub(rf"\b{name}_\d+\b", name, text)
    return text


_SCRIPTS_OWN = ("I", "R", "T", "tirx")
"""Names that TVM writes expressions with: a symbol of that name it writes as T_1."""
