"""What `main` takes behind its inputs is made of weights, when an artifact is loaded, by functions that share the work.

    bind_weights_0(weight_0, weight_3, weight_4) -> packed weights
    bind_weights_1(weight_1, weight_2)           -> packed weights

A large weight is read by one of them alone, so whoever binds lets go of it behind that one: not all weights lie in
memory twice. `weight_N` is the N-th that the manifest lists, and what the functions return, one after the other, is
what `main` takes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import Expr
from tvm.relax.expr_functor import PyExprMutator, mutator

from mhsa_compile.compiler.calls import element_bytes
from mhsa_compile.compiler.derived_weights import DERIVE
from mhsa_compile.frontend.relax.imported_module import ImportedModule
from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.runtime.artifact.manifest import Packing
from mhsa_compile.runtime.weight_binding import BIND, WEIGHT

_STEPS = 16
"""About as many functions as there are for a model: with more of them less is held at once, and each takes time to
compile."""
_SMALL = 1 << 16
"""Bytes of a weight that several functions may read: a bias of zeros, which an exporter wrote once."""


@dataclass(frozen=True)
class Bound:
    """Parameters of `main` that are made together of `sources`, expressions of it: by the PrimFunc `pack`, or as they
    are."""

    results: tuple[Expr, ...]
    sources: tuple[Expr, ...]
    pack: Any = None
    name: str = ""


def add_bind_functions(builder: Any, module: Any, imported: ImportedModule, bound: list[Bound]) -> list[Expr]:
    """Adds the functions to `builder`, whose `module` has `main` as its operations still take weights, and returns the
    parameters of the `main` to come in the order in which they are made."""
    values = _Values(module, imported)
    steps = _steps(bound, values)
    for number, step in enumerate(steps):
        needs = {weight for one in step for source in one.sources for weight in values.weights_of(source)}
        params = {weight: relax.Var(weight.name, weight.ty) for weight in values.weights if weight in needs}
        with builder.function(f"{BIND}_{number}", list(params.values())):
            with builder.dataflow():
                output = builder.emit_output(relax.Tuple(list(_make(builder, step, _Parts(builder, values, params)))))
            builder.emit_func_output(output)
    return [result for step in steps for one in step for result in one.results]


def packings(module: Any, profile: CpuProfile) -> tuple[Packing, ...]:
    """What each of the functions reads and does: two of one digest make the same of the same weights, so that what one
    artifact has packed, another need not."""
    functions = {str(variable.name_hint): function for variable, function in module.functions_items()}
    target = json.dumps(profile.tvm_config(), sort_keys=True, default=str)
    steps: list[Packing] = []
    for number in count():
        if (function := functions.get(f"{BIND}_{number}")) is None:
            return tuple(steps)
        callees: list[Any] = []
        tvm_ffi.structural_walk(function, (tvm.ir.GlobalVar, callees.append))
        names = sorted({str(variable.name_hint) for variable in callees})
        words = [tvm.ir.save_json(one) for one in (function, *(functions[name] for name in names))]
        places = tuple(int(param.name.removeprefix(WEIGHT)) for param in function.params)
        steps.append(Packing(places, hashlib.sha256(" ".join((target, *words)).encode()).hexdigest()))
    raise AssertionError


def _make(builder: Any, step: list[Bound], parts: _Parts) -> Iterator[Expr]:
    for one in step:
        sources = [parts.visit_expr(source) for source in one.sources]
        if one.pack is None:
            yield from sources
            continue
        pack = builder.add_func(one.pack, f"pack_{one.name}")
        packed = builder.emit(relax.call_tir(pack, sources, [result.ty for result in one.results]))
        yield from (builder.emit(relax.TupleGetItem(packed, i)) for i in range(len(one.results)))


def _steps(bound: list[Bound], values: _Values) -> list[list[Bound]]:
    """What shares a large weight is in one step, and so much more that a step has its part of all bytes."""
    groups: list[tuple[set[Expr], list[Bound]]] = []
    for one in bound:
        weights = {w for source in one.sources for w in values.weights_of(source) if _bytes(w) > _SMALL}
        overlap = [group for group in groups if group[0] & weights]
        groups = [group for group in groups if not group[0] & weights]
        members = [member for group in overlap for member in group[1]]
        groups.append((weights.union(*(group[0] for group in overlap)), [*members, one]))
    enough = sum(_bytes(weight) for weights, _ in groups for weight in weights) / _STEPS
    steps: list[list[Bound]] = []
    room = 0.0
    for weights, members in groups:
        if room <= 0:
            steps.append([])
            room = enough
        steps[-1] += members
        room -= sum(map(_bytes, weights))
    return steps


def _bytes(weight: Expr) -> int:
    return math.prod(map(int, weight.ty.shape.values)) * element_bytes(weight.ty.dtype)


class _Values:
    """What the variables of `main`, and of `derive_weights`, are computed from."""

    def __init__(self, module: Any, imported: ImportedModule) -> None:
        main = module["main"]
        by_name = {p.name: p for p in main.params}
        self.weights = [by_name[name] for name in imported.weights]
        self.of = dict(bindings(main.body))
        if imported.derived:
            derive = module[DERIVE]
            self.of |= bindings(derive.body)
            self.of |= {p: by_name[p.name] for p in derive.params}
            results = derive.body.body
            while isinstance(results, relax.Var):
                results = self.of[results]
            self.of |= {by_name[name]: field for name, field in zip(imported.derived, results.fields, strict=True)}
        self._read = {weight: frozenset([weight]) for weight in self.weights}

    def weights_of(self, value: Expr) -> frozenset[Expr]:
        """The weights that a value is computed from."""
        return frozenset().union(*(self._weights_of(variable) for variable in relax.analysis.free_vars(value)))

    def _weights_of(self, variable: Expr) -> frozenset[Expr]:
        if variable not in self._read:
            self._read[variable] = self.weights_of(self.of[variable])
        return self._read[variable]


@mutator
class _Parts(PyExprMutator):  # type: ignore[misc]
    """Values of `main`, computed anew by `builder` from the parameters that stand for its weights."""

    def __init__(self, builder: Any, values: _Values, params: dict[Expr, Expr]) -> None:
        super().__init__()
        self._target, self._values, self._make = builder, values.of, dict(params)

    def visit_var_(self, variable: Any) -> Any:
        return self._compute(variable)

    visit_dataflow_var_ = visit_var_

    def _compute(self, variable: Any) -> Any:
        if variable not in self._make:
            value = self.visit_expr(self._values[variable])
            self._make[variable] = value if isinstance(value, relax.Var) else self._target.emit(value)
        return self._make[variable]


def bindings(body: Any) -> Iterator[tuple[Any, Any]]:
    """(variable, value) of a function's body, and of the branches of its Ifs."""
    for binding in (binding for block in body.blocks for binding in block.bindings):
        yield binding.var, binding.value
        if isinstance(binding.value, relax.If):
            yield from bindings(binding.value.true_branch)
            yield from bindings(binding.value.false_branch)
