"""What no kernel claims, on a GPU: TVM's own lowering, scheduled by the rules of TVM's DLight.

A function may become several kernels, with arrays between them. TVM would take these from a pool of the calling thread,
which knows no streams; here they are results of the call like any other, so that all memory is planned in one place
(`caller_memory`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.s_tir import dlight

from mhsa_compile.compiler.calls import symbol_of, with_calls
from mhsa_compile.compiler.fallback import cpu_schedule
from mhsa_compile.compiler.fallback.function_nodes import Nodes, rewritten
from mhsa_compile.compiler.fallback.hidden_values import hide_dividends, hide_operands
from mhsa_compile.compiler.fallback.whole_numbers import wrap_without_sign
from mhsa_compile.frontend.relax.sizes.call_checks import CHECK
from mhsa_compile.hardware.profile import CudaProfile


class _Matmul(dlight.gpu.Matmul):  # type: ignore[misc]
    """DLight's rule for products, but what it finds that it cannot do is left to the rules after it: it takes products
    of float16 with a symbolic number of rows for ones that fit its tensor core schedule, and then fails (TVM 0.27)."""

    def apply(self, func: Any, target: Any, tunable: bool) -> Any:
        try:
            return super().apply(func, target, tunable)
        except s_tir.ScheduleError:
            return None


def lower(module: Any, profile: CudaProfile) -> Any:
    """Every operator of Relax as scheduled PrimFuncs, without arrays of their own in the GPU's memory."""
    # GeneralReduction is not among them: it holds whole rows in shared memory, for which their length must be fixed.
    rules = (_Matmul(), dlight.gpu.GEMV(), dlight.gpu.Reduction(), dlight.gpu.Fallback())
    lowered = cpu_schedule.legalize_all(_without_host_checks(module), profile, {})
    _rewrite(lowered, hide_operands, wrap_without_sign)  # before schedules, which simplify
    with tvm.target.Target(profile.tvm_config()):
        lowered = dlight.ApplyDefaultSchedule(*rules)(lowered)
    _rewrite(lowered, hide_dividends)
    return _with_scratch_as_results(lowered)


def _rewrite(module: Any, *changes: Callable[[Nodes], None]) -> None:
    for variable, function in module.functions_items():
        if isinstance(function, tirx.PrimFunc):
            module.update_func(variable, rewritten(function, *changes))


def _without_host_checks(module: Any) -> Any:
    """The module without functions that look at a number on the host (`call_checks.CHECK`): it lies on the GPU."""
    functions = {v: f for v, f in module.functions_items() if isinstance(f, tirx.PrimFunc)}
    checks = {str(v.name_hint) for v, f in functions.items() if f.attrs and CHECK in f.attrs}
    if not checks:
        return module

    def unchecked(_: Any, call: Any) -> Any:
        return call.args[1].fields[0] if symbol_of(call) in checks else call

    return relax.transform.DeadCodeElimination()(with_calls(module, unchecked))


def _with_scratch_as_results(module: Any) -> Any:
    """Arrays that functions allocate for themselves become results of theirs, which nobody reads."""
    functions = {v: f for v, f in module.functions_items() if isinstance(f, tirx.PrimFunc)}
    scratch = {str(v.name_hint): arrays for v, f in functions.items() if (arrays := _scratch_of(f))}
    if not scratch:
        return module
    builder = relax.BlockBuilder(module)
    opened = {name: builder.add_func(_with_parameters(module[name], arrays), name) for name, arrays in scratch.items()}
    calling = _call_with_scratch(builder.get(), opened, scratch)
    return relax.transform.DeadCodeElimination()(calling)


def _scratch_of(function: Any) -> list[Any]:
    body = function.body
    if not isinstance(body, s_tir.SBlockRealize):
        return []
    return [array for array in body.block.alloc_buffers if array.scope() in ("", "global")]


def _with_parameters(function: Any, arrays: list[Any]) -> Any:
    """The function with these arrays as its last parameters."""
    root = function.body.block
    buffers = [array for array in root.alloc_buffers if not any(array.same_as(one) for one in arrays)]
    block = s_tir.SBlock(
        root.iter_vars, root.reads, root.writes, root.name_hint, root.body, root.init, buffers, root.match_buffers,
        root.annotations,
    )  # fmt: skip
    body = s_tir.SBlockRealize([], True, block)
    return tirx.PrimFunc([*function.params, *arrays], body, function.ret_type, function.attrs)


def _call_with_scratch(module: Any, opened: dict[str, Any], scratch: dict[str, list[Any]]) -> Any:
    """The module with calls of the `opened` functions, by the names of those that they replace."""

    def with_scratch(builder: Any, call: Any) -> Any:
        name = symbol_of(call)
        if name not in scratch:
            return call
        kind, inputs = call.ty_args[0], call.args[1]
        own = list(kind.fields) if isinstance(kind, relax.TupleType) else [kind]
        sizes = _sizes(module[name], [value.ty for value in inputs.fields] + own)
        types = [relax.TensorType([_value_of(size, sizes) for size in one.shape], one.dtype) for one in scratch[name]]
        results = builder.emit(relax.call_tir(opened[name], inputs, [*own, *types]))
        firsts = [builder.emit(relax.TupleGetItem(results, i)) for i in range(len(own))]
        return relax.Tuple(firsts) if isinstance(kind, relax.TupleType) else firsts[0]

    return with_calls(module, with_scratch)


def _value_of(size: Any, sizes: dict[Any, Any]) -> Any:
    return tvm_ffi.structural_map(size, (tvm.ir.Var, lambda symbol: sizes.get(symbol, symbol)), order="post")


def _sizes(function: Any, types: list[Any]) -> dict[Any, Any]:
    """The symbols of a function's parameters -> what they are in a call with operands of these types."""
    sizes = {}
    for parameter, kind in zip(function.params, types, strict=False):
        for size, value in zip(parameter.shape, kind.shape.values, strict=True):
            if isinstance(size, tvm.ir.Var):
                sizes[size] = value
    return sizes
