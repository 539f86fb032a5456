"""Products with what is made of weights alone are linears, whose weights are packed once.

    main(x, t): y = matmul(x, t); z = y + b        ->        z = linear(x, t, b)

Where a file states the weights of a product, its graph says so (`frontend.fusion.linear_pattern`). These are the ones
that it computes: unpacked from few bits, folded, cast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import Expr

from mhsa_compile.compiler.epilogues import with_bindings
from mhsa_compile.frontend.relax.imported_module import DimNames, ImportedModule
from mhsa_compile.frontend.relax.sizes.broadcasting import dims_of
from mhsa_compile.kernels.interface.ops import LinearOp, Op

_DTYPES = ("float32", "float16", "bfloat16")


def with_bound_linears(imported: ImportedModule, takes: Callable[[Op], bool]) -> ImportedModule:
    """The module with such products as operations; `takes` says whether a kernel can compute one."""
    if not imported.derived:
        return imported
    products = _Products(imported, takes)
    blocks = [products.rewritten(list(block.bindings)) for block in imported.module["main"].body.blocks]
    return with_bindings(imported, blocks, imported.ops | products.ops) if products.ops else imported


class _Products:
    """The products of a module that are linears; `ops` are those so far."""

    def __init__(self, imported: ImportedModule, takes: Callable[[Op], bool]) -> None:
        main = imported.module["main"]
        self.ops: dict[str, Op] = {}
        self._takes, self._count, self._rows = takes, len(imported.ops), DimNames("rows")
        self._derived = {p for p in main.params if p.name in imported.derived}
        self._weights = self._derived | {p for p in main.params if p.name in imported.weights}
        values = [binding.value for block in main.body.blocks for binding in block.bindings]
        self._readers: dict[Expr, list[Expr]] = {}
        for value in (*values, main.body.body):
            for variable in relax.analysis.free_vars(value):
                self._readers.setdefault(variable, []).append(value)

    def rewritten(self, bindings: list[Expr]) -> list[Expr]:
        """The bindings of a block, a linear in the place of a product, or of the sum with its bias."""
        result: dict[Expr, Expr] = {binding.var: binding for binding in bindings}
        by_value = {binding.value: binding.var for binding in bindings}
        for binding in bindings:
            op = self._linear(binding)
            if op is None:
                continue
            inputs, place = list(binding.value.args), binding.var
            readers = self._readers.get(binding.var, [])
            bias = self._bias(binding.var, readers[0], op) if len(readers) == 1 else None
            biased = replace(op, biased=(True,))
            if bias is not None and readers[0] in by_value and self._takes(biased):
                op, place = biased, by_value[readers[0]]
                inputs.append(bias)
                del result[binding.var]
            elif not self._takes(op):
                continue
            name = f"op_{self._count + len(self.ops)}"
            self.ops[name] = op
            result[place] = relax.VarBinding(place, relax.op.call_dps_packed(name, inputs, place.ty))
        return list(result.values())

    def _linear(self, binding: Expr) -> LinearOp | None:
        """A product of activations with a matrix that is made of weights, as a linear."""
        value = binding.value
        if not _is(value, "relax.matmul") or value.args[1] not in self._derived or value.args[0] in self._weights:
            return None
        left, right = (dims_of(argument) for argument in value.args)
        kinds = {str(kind.dtype) for kind in (value.args[0].ty, value.args[1].ty, binding.var.ty)}
        if left is None or right is None or len(left) < 2 or len(right) != 2 or len(kinds) > 1:
            return None
        dtype = kinds.pop()
        if dtype not in _DTYPES or not all(isinstance(size, tirx.IntImm) for size in (left[-1], *right)):
            return None
        K, N = map(int, right)
        rows = tuple(map(self._rows, left[:-1]))
        return LinearOp(rows, K, (N,), (False,), (True,), dtype)  # type: ignore[arg-type]

    def _bias(self, product: Expr, reader: Expr, op: LinearOp) -> Expr | None:
        """What a reader of a product adds to its columns, if that is all it does."""
        if not _is(reader, "relax.add"):
            return None
        bias = reader.args[1 if reader.args[0].same_as(product) else 0]
        if bias not in self._weights or str(bias.ty.dtype) != op.dtype:
            return None
        sizes = dims_of(bias) or []
        fits = len(sizes) == 1 and isinstance(sizes[0], tirx.IntImm) and int(sizes[0]) == op.out_features
        return bias if fits else None


def _is(value: Any, operator: str) -> bool:
    return isinstance(value, relax.Call) and value.op == tvm.ir.Op.get(operator)
