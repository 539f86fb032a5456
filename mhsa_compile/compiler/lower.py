"""Every operation gets a kernel and a config; weights are packed by a function of their own.

Out comes a module with `main` (inputs, packed weights -> outputs), functions that pack weights (`weight_binding`) and
the kernels as PrimFuncs, and a report of what runs what. Operators that no kernel claims are left to TVM, and show
there as `fallback`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from mhsa_compile.compiler.bound_linears import with_bound_linears
from mhsa_compile.compiler.call_cost import predicted_call
from mhsa_compile.compiler.calls import calls, symbol_of, with_calls
from mhsa_compile.compiler.codegen.build import LoweredModule
from mhsa_compile.compiler.derived_weights import DERIVE, with_derived_weights
from mhsa_compile.compiler.epilogues import with_epilogues
from mhsa_compile.compiler.fallback import cpu_schedule, cuda_schedule
from mhsa_compile.compiler.fallback.plain_forms import plain_form
from mhsa_compile.compiler.kernel_code import code_of
from mhsa_compile.compiler.own_operations import with_own_operations
from mhsa_compile.compiler.selection.float32_products import Resolution, resolutions
from mhsa_compile.compiler.selection.select_kernel import KernelChoice, kernels_for, select_kernel
from mhsa_compile.compiler.weight_binding import Bound, add_bind_functions, packings
from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.relax.imported_module import ImportedModule
from mhsa_compile.hardware.profile import CpuProfile, CudaProfile, TargetProfile
from mhsa_compile.kernels.interface.kernel import Emitted
from mhsa_compile.kernels.interface.ops import (
    AttentionOp,
    BlockLinearOp,
    KvScatterOp,
    LinearOp,
    Op,
    QuantiseRowsOp,
    float32_products_of,
)
from mhsa_compile.records.record import RecordSet
from mhsa_compile.runtime.artifact.manifest import OpReport
from mhsa_compile.spec.float32_products import Float32Request

MAIN = "main"


@dataclass
class _Chosen:
    op: Op
    choice: KernelChoice
    emitted: Emitted


def schedule(
    imported: ImportedModule, profile: TargetProfile, shelf: RecordSet, float32_products: Float32Request = "auto"
) -> LoweredModule:
    """Gives every operation a kernel and a config: that of a record of `shelf`, else the kernel's default.

    `float32_products` is what was asked for: an operation gets it where its kernel makes it.

    Raises ModelError where an operation of ours has no kernel on this target.
    """
    imported = prepare(imported, profile)
    resolved = resolutions(imported.ops, float32_products, profile)
    imported = replace(imported, ops={name: resolution.op for name, resolution in resolved.items()})
    choose = functools.cache(lambda op: _choose(op, profile, shelf))  # layers of a model are alike
    choice_of = {name: choose(op) for name, op in imported.ops.items()}
    choices = {name: choice for name, choice in choice_of.items() if isinstance(choice, _Chosen)}
    plain = {name: op for name, op in imported.ops.items() if name not in choices}
    fallbacks = _fallbacks(imported.module["main"], choices)
    plain_module = _write_out(imported.module, plain) if plain else imported.module
    others, reports = _lower_others(plain_module, profile, shelf)
    on_tiles = {name for name, c in choices.items() if "tiles" in c.choice.kernel.name}
    cost, slow = predicted_call(others, imported, on_tiles, profile) if isinstance(profile, CpuProfile) else (None, ())
    builder = relax.BlockBuilder(others)
    run = {name: builder.add_func(c.emitted.run, f"{c.op.kind}_{name}") for name, c in choices.items()}
    body, bound = _with_kernels(imported, others, choices, run)
    packed = add_bind_functions(builder, others, imported, bound)
    main = others[MAIN]
    inputs = [p for p in main.params if p.name not in {*imported.weights, *imported.derived}]
    builder.update_func(
        others.get_global_var(MAIN),
        relax.Function([*inputs, *packed], body, main.ret_ty).with_attr("global_symbol", MAIN),
    )
    module = builder.get()
    if imported.derived:
        del module[DERIVE]
    reports = [*(_report(name, resolved[name], choice) for name, choice in choice_of.items()), *reports, *fallbacks]
    packing = packings(module, profile) if isinstance(profile, CpuProfile) else ()
    return LoweredModule(module, list(imported.weights.values()), len(packed), reports, slow, cost, packing)


def prepare(imported: ImportedModule, profile: TargetProfile) -> ImportedModule:
    """The module with everything computed once (each layer of a model makes its mask anew), weights' part of it when
    they are bound, products with that as linears, with what linears can do as they write their results in them, and
    products of two activations as operations."""
    once = replace(imported, module=relax.transform.EliminateCommonSubexpr()(imported.module))

    def takes(op: Op) -> bool:
        return bool(kernels_for(op, profile)[0])

    floats = with_derived_weights(_with_float_weights(once, takes))
    return with_own_operations(with_epilogues(with_bound_linears(floats, takes), takes), takes)


def _with_float_weights(imported: ImportedModule, takes: Callable[[Op], bool]) -> ImportedModule:
    """The module with linears of few bits that no kernel takes written out, so that binding weights makes floats."""
    ops = imported.ops.items()
    plain: dict[str, Op] = {name: op for name, op in ops if isinstance(op, BlockLinearOp) and not takes(op)}
    if not plain:
        return imported
    others = {name: op for name, op in imported.ops.items() if name not in plain}
    return replace(imported, module=_write_out(imported.module, plain), ops=others)


def _lower_others(module: Any, profile: TargetProfile, shelf: RecordSet) -> tuple[Any, list[OpReport]]:
    """(what no kernel claims as scheduled PrimFuncs, a row for each of which there are tuned records)."""
    if isinstance(profile, CudaProfile):
        return cuda_schedule.lower(module, profile), []
    lowered = cpu_schedule.lower(module, profile, shelf)
    return lowered.module, lowered.reports


def _choose(op: Op, profile: TargetProfile, shelf: RecordSet) -> _Chosen | str:
    """A kernel and its config, or why no kernel takes what can be written out in TVM's operators instead."""
    willing, reasons = kernels_for(op, profile)
    if willing:
        choice = select_kernel(op, profile, willing, shelf)
        recorded = choice.record is not None
        return _Chosen(op, choice, code_of(op, choice.kernel, choice.config, profile, is_recorded=recorded))
    if plain_form(op) is not None:
        return "; ".join(reasons) or "no kernel is made for it"
    hint = "kv_cache=True stores keys and values as activations are, on every target." if _of_stored_keys(op) else ""
    raise ModelError(op.summary(), f"a {op.kind} that a kernel can do", "; ".join(reasons) or "no kernel", hint)


def _of_stored_keys(op: Op) -> bool:
    """Whether an operation is there because a cache has another dtype than activations."""
    attention = getattr(op, "attention", op)
    if isinstance(attention, AttentionOp):
        return attention.kv_dtype is not None
    return isinstance(op, QuantiseRowsOp) or (isinstance(op, KvScatterOp) and op.rounds)


def _report(name: str, resolution: Resolution, outcome: _Chosen | str) -> OpReport:
    op, reason = resolution.op, resolution.reason
    if isinstance(outcome, str):
        note = f"{op.summary()}; written out in TVM's operators: {outcome}"
        return OpReport(name, op.kind, "plain", {}, "fallback", note, float32_reason=reason)
    choice = outcome.choice
    source: Literal["record", "default"] = "default" if choice.record is None else "record"
    word, kernel = float32_products_of(op), choice.kernel.name
    return OpReport(name, op.kind, kernel, choice.config, source, op.summary(), choice.tuning, word, reason)


def _write_out(module: Any, plain: dict[str, Op]) -> Any:
    """The module with its `plain` operations written out in TVM's own."""

    def written_out(builder: Any, call: Any) -> Any:
        op = plain.get(symbol_of(call))
        if op is None:
            return call
        form = plain_form(op)
        assert form is not None  # _choose saw to it
        return form(builder, op, list(call.args[1].fields))

    return with_calls(module, written_out, MAIN)


def _with_kernels(
    imported: ImportedModule, others: Any, choices: dict[str, _Chosen], run: dict[str, Any]
) -> tuple[Any, list[Bound]]:
    """(the body of main with kernels for its operations, what it takes of weights: packed, or as they are)."""
    main = others[MAIN]
    packed = {
        name: [
            relax.Var(f"{name}_packed_{i}", relax.TensorType(shape, dtype))
            for i, (shape, dtype) in enumerate(c.emitted.packed)
        ]
        for name, c in choices.items()
        if c.emitted.pack is not None
    }

    @mutator
    class KernelCalls(PyExprMutator):  # type: ignore[misc]
        def visit_call_(self, call: Any) -> Any:
            if call.op != tvm.ir.Op.get("relax.call_dps_packed"):
                return super().visit_call_(call)
            name = str(call.args[0].global_symbol)
            inputs = list(call.args[1].fields)
            if name in packed:
                inputs = [*_computed(choices[name].op, inputs), *packed[name], *_operands(choices[name].op, inputs)]
            inputs += [relax.const(array) for array in choices[name].emitted.constants]
            inputs = [self.visit_expr(value) for value in inputs]
            op = choices[name].op
            if isinstance(op, KvScatterOp) and op.in_place:
                return relax.op.call_tir_inplace(run[name], inputs, 0, call.ty_args[0])
            kind = call.ty_args[0]
            if workspace := choices[name].emitted.workspace:  # one more array, planned like those between operations
                both = relax.call_tir(run[name], inputs, [kind, relax.TensorType(workspace, "float32")])
                return relax.TupleGetItem(self.builder_.emit(both), 0)
            return relax.call_tir(run[name], inputs, list(kind.fields) if isinstance(kind, relax.TupleType) else kind)

    body = _without_unused(main.params, KernelCalls(others).visit_expr(main.body))
    variables, weights_of = set(relax.analysis.free_vars(body)), _weights_of(main, choices)
    bound = [
        Bound(tuple(results), tuple(weights_of[name]), choices[name].emitted.pack, name)
        for name, results in packed.items()
    ]
    parameters = [p for p in main.params if p.name in {*imported.weights, *imported.derived} and p in variables]
    return body, [*bound, *(Bound((p,), (p,)) for p in parameters)]


def _computed(op: Op, inputs: list[Any]) -> list[Any]:
    """What an operation with weights takes before these."""
    return inputs[: op.computed if isinstance(op, LinearOp) else 1]


def _operands(op: Op, inputs: list[Any]) -> list[Any]:
    """What an operation takes behind its activations and weights: the operands of its epilogue."""
    count = op.epilogue.inputs if isinstance(op, LinearOp) and op.epilogue is not None else 0
    return inputs[len(inputs) - count :]


def _without_unused(params: Any, body: Any) -> Any:
    """The body without what was computed only for the functions that pack weights."""
    free = [variable for variable in relax.analysis.free_vars(body) if variable not in set(params)]
    return relax.analysis.remove_all_unused(relax.Function([*params, *free], body, body.ty)).body


def _weights_of(main: Any, choices: dict[str, _Chosen]) -> dict[str, list[Any]]:
    """For each operation with a kernel, what it takes behind what a call computes: of a linear, its weights and
    biases."""
    weights = {}
    for call, name in ((call, symbol_of(call)) for call, _ in calls(main.body)):
        if name not in choices:
            continue
        op, inputs = choices[name].op, list(call.args[1].fields)
        weights[name] = inputs[len(_computed(op, inputs)) : len(inputs) - len(_operands(op, inputs))]
    return weights


def _fallbacks(main: Any, choices: dict[str, _Chosen]) -> list[OpReport]:
    """The operators that TVM's own lowering will run, and what `masks` adds; not those that make a weight to pack."""
    ours = {"relax.call_dps_packed", "relax.reshape"}
    bound = _only_packed(main, {name: choice.op for name, choice in choices.items() if choice.emitted.pack is not None})
    unclaimed = [(c, nested) for c, nested in calls(main.body) if c not in bound and isinstance(c.op, tvm.ir.Op)]
    others = [(c, nested) for c, nested in unclaimed if c.op.name not in ours]
    notes = {False: "no kernel claims it", True: "no kernel claims it, in a branch of an If"}
    return [
        OpReport(
            f"fallback_{i}",
            (symbol_of(c) or str(c.op.name)).removeprefix("relax."),
            "tvm",
            {},
            "fallback",
            notes[nested],
        )
        for i, (c, nested) in enumerate(others)
    ]


def _only_packed(main: Any, packing: dict[str, Op]) -> set[Any]:
    """The values of `main` that are needed for nothing but weights of these operations, which are packed once."""
    variables, values = set(relax.analysis.free_vars(main.body.body)), set()
    for binding in (binding for block in reversed(main.body.blocks) for binding in reversed(block.bindings)):
        value = binding.value
        if binding.var not in variables:
            values.add(value)
        elif isinstance(value, relax.Call) and value.op == tvm.ir.Op.get("relax.call_dps_packed"):
            inputs, op = list(value.args[1].fields), packing.get(str(value.args[0].global_symbol))
            inputs = inputs if op is None else [*_computed(op, inputs), *_operands(op, inputs)]
            variables |= {variable for argument in inputs for variable in relax.analysis.free_vars(argument)}
        else:
            variables |= set(relax.analysis.free_vars(value))
    return values
