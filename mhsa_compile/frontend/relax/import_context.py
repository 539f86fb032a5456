"""The graph that is being imported, as the conversion of each node sees it and adds to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import relax

from mhsa_compile.frontend.relax.imported_module import DimNames, ImportedModule
from mhsa_compile.frontend.relax.masks import RelaxValue, SizeExpr
from mhsa_compile.kernels.interface.ops import Op


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
