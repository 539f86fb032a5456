"""What depends on weights alone is computed once, when weights are bound.

    main(x, w): t = permute_dims(w); y = take(t, x)        ->        main(x, w, t): y = take(t, x)
                                                                     derive_weights(w): permute_dims(w)

Whatever the operators. What is derived takes the place of what it came from: a weight that nobody else reads is not
kept. What would be much larger than its weights, such as a vector spread over a matrix, stays in the call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import Expr
from tvm.relax.expr_functor import PyExprMutator, mutator

from mhsa_compile.compiler.calls import element_bytes
from mhsa_compile.frontend.relax.imported_module import ImportedModule

DERIVE = "derive_weights"
GROWTH = 2
"""How many times the size of its weights a derived value may have: a cast from float16 to float32 may be kept."""
PACKED = 8
"""As how many bytes one of a weight of bytes counts there: of two bits each, it has four numbers that become floats."""
SMALL = 1 << 16
"""Bytes up to which a derived value is kept whatever its size beside its weights."""
_OTHERS_CODE = ("relax.call_dps_packed", "relax.call_packed", "relax.call_pure_packed", "relax.call_inplace_packed")


def with_derived_weights(imported: ImportedModule) -> ImportedModule:
    """The module whose `main` takes what depends on weights alone as parameters, behind its weights, and whose
    `derive_weights` computes it from all weights; the same module where nothing does."""
    main = imported.module["main"]
    weights = [p for p in main.params if p.name in imported.weights]
    bindings = [binding for block in main.body.blocks for binding in block.bindings]
    variables = _derived_variables(bindings, weights, main.body.body)
    live = {v for b in bindings if b.var not in variables for v in relax.analysis.free_vars(b.value)}
    results = [b.var for b in bindings if b.var in variables and b.var in live]
    if not results:
        return imported
    names = [f"derived_{i}" for i in range(len(results))]
    parameters = {var: relax.Var(name, var.ty) for var, name in zip(results, names, strict=True)}
    module = imported.module.clone()
    module.update_func(module.get_global_var("main"), _without(main, variables, parameters))
    made = [b for b in bindings if b.var in variables]
    builder = relax.BlockBuilder(relax.transform.Normalize()(module))
    builder.add_func(_derivation(weights, made, results), DERIVE)
    return replace(imported, module=builder.get(), derived=tuple(names))


def _derived_variables(bindings: list[Expr], weights: list[Expr], result: Expr) -> set[Expr]:
    """The variables that depend on weights alone and are to be computed once. Whoever reads one from outside takes it
    as a tensor; an output of the module is none, as it would lie in the weights' memory."""
    outputs, others = set(relax.analysis.free_vars(result)), set[Expr]()
    while True:
        sources = {weight: {weight} for weight in weights}
        for binding in bindings:
            value, var = binding.value, binding.var
            if var in others or var in outputs or not isinstance(binding, relax.VarBinding) or not _is_plain(value):
                continue
            reads = set(relax.analysis.free_vars(value))
            if (
                reads
                and reads <= sources.keys()
                and _is_worth_keeping(var, origin := set().union(*(sources[v] for v in reads)))
            ):
                sources[var] = origin
        variables = sources.keys() - set(weights)
        outside = {v for b in bindings if b.var not in variables for v in relax.analysis.free_vars(b.value)}
        unfit = {var for var in variables & outside if not isinstance(var.ty, relax.TensorType)}
        if not unfit:
            return set(variables)
        others |= unfit


def _is_plain(value: Expr) -> bool:
    """Whether a value is an operator's, or a part of one's."""
    if isinstance(value, relax.Call):
        return isinstance(value.op, tvm.ir.Op) and value.op.name not in _OTHERS_CODE
    return isinstance(value, relax.Tuple | relax.TupleGetItem | relax.Var)


def _is_worth_keeping(var: Expr, weights: set[Expr]) -> bool:
    """Whether a value is of a known size, and not much larger than its weights."""
    sizes = [_bytes(kind) for kind in _tensors(var.ty)]
    if not sizes or None in sizes:
        return False
    total = sum(size for size in sizes if size is not None)
    return total <= max(SMALL, GROWTH * sum(_weight(weight.ty) for weight in weights))


def _weight(kind: Expr) -> int:
    """What a weight counts for beside values derived of it."""
    return (_bytes(kind) or 0) * (PACKED if str(kind.dtype) in ("uint8", "int8") else 1)


def _tensors(kind: Expr) -> Iterator[Expr]:
    if isinstance(kind, relax.TupleType):
        for field in kind.fields:
            yield from _tensors(field)
    else:
        yield kind


def _bytes(kind: Expr) -> int | None:
    shape = getattr(kind, "shape", None)
    if not isinstance(shape, relax.ShapeExpr) or not all(isinstance(size, tirx.IntImm) for size in shape.values):
        return None
    return math.prod(int(size) for size in shape.values) * element_bytes(kind.dtype)


def _without(main: Expr, variables: set[Expr], parameters: dict[Expr, Expr]) -> Expr:
    """`main` without what is derived, which it takes as further parameters."""
    blocks = []
    for block in main.body.blocks:
        kind = relax.DataflowBlock if isinstance(block, relax.DataflowBlock) else relax.BindingBlock
        blocks.append(kind([binding for binding in block.bindings if binding.var not in variables]))
    body = _Renamed(parameters).visit_expr(relax.SeqExpr(blocks, main.body.body))
    return relax.Function([*main.params, *parameters.values()], body, main.ret_ty, main.is_pure, main.attrs)


def _derivation(weights: list[Expr], bindings: list[Expr], results: list[Expr]) -> Expr:
    """A function of all weights that computes `results` by these bindings."""
    params = {weight: relax.Var(weight.name, weight.ty) for weight in weights}
    builder, rename = relax.BlockBuilder(), _Renamed(params)
    with builder.function(DERIVE, list(params.values())):
        with builder.dataflow():
            for binding in bindings:
                rename.names[binding.var] = builder.emit(rename.visit_expr(binding.value))
            output = builder.emit_output(relax.Tuple([rename.names[var] for var in results]))
        builder.emit_func_output(output)
    return builder.get()[DERIVE]


@mutator
class _Renamed(PyExprMutator):  # type: ignore[misc]
    """Expressions with some variables in the place of others."""

    def __init__(self, names: dict[Expr, Expr]) -> None:
        super().__init__()
        self.names = dict(names)

    def visit_var_(self, variable: Any) -> Any:
        return self.names[variable] if variable in self.names else super().visit_var_(variable)

    def visit_dataflow_var_(self, variable: Any) -> Any:
        return self.names[variable] if variable in self.names else super().visit_dataflow_var_(variable)
