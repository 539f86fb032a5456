"""What a call costs by arithmetic, and which functions of TVM's own take much of it far below what the CPU can do.

Predicted in cycles at the sizes that are fixed and, of free dims, at a batch of 1 and lengths of 128. Kernels run at
half of the limit of the unit that multiplies for them; functions of TVM's are predicted from their loops as they are
scheduled. Their limit is two fused multiply-adds of a vector a cycle on each core, or four bytes of memory a cycle;
whole numbers that were widened for a sum count as narrow as they were. A step of a chain, each added to what lies
there, takes four cycles, any other statement one, a vector of either as long as one element. Starting anything takes
3000 cycles. Memory brings weights of linears, inputs and outputs once, four bytes a cycle for each core; the rest stays
in caches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.ir import Expr

from mhsa_compile.compiler.calls import calls, element_bytes, symbol_of
from mhsa_compile.compiler.kernel_work import flops_a_cycle, kernel_flops, kernel_flops_a_cycle, weight_bytes
from mhsa_compile.frontend.relax.imported_module import ImportedModule
from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.runtime.artifact.manifest import CallCost, SlowOperation

_BATCH, _LENGTH = 1, 128
_OF_LIMIT, _OF_TIME = 0.1, 0.1
"""Named is what stays below this share of the limit and takes more than this share of the predicted time."""
_CHAIN, _STATEMENT, _START = 4.0, 1.0, 3000.0
_BYTES, _KERNELS_REACH = 4, 0.5
CLOCK_GHZ = 3.0
"""Of every target: profiles state none, since a CPU's own changes from call to call."""
_CALLS = ("relax.call_tir", "relax.call_tir_inplace")
_TUNE = "`mhsa tune` can search for better loops"
_FIX = f"fix its sizes (`dims`): {_TUNE} of these"
_CAST = "cast both factors to float32, whose products a kernel computes"


@dataclass
class _Time:
    """Cycles of all runs of a function, and what they would be at the limit."""

    predicted: float = 0.0
    limit: float = 0.0


def predicted_call(
    module: Any, imported: ImportedModule, on_tiles: Collection[str], profile: CpuProfile
) -> tuple[CallCost, tuple[SlowOperation, ...]]:
    """(the cost of a call, a row for each function of TVM's own that is slow, the longest first).

    `module` is the one in which these have their schedules and kernels are still calls by name; `on_tiles` are the
    operations whose kernels multiply on matrix tiles.
    """
    sizes, kernels, flops = _example_sizes(imported), 0.0, 0
    runs, times = Counter[str](), dict[str, _Time]()
    functions = {str(v.name_hint): f for v, f in module.functions_items() if isinstance(f, tirx.PrimFunc)}
    narrow = _narrow(module["main"].body, functions)
    for call, _ in calls(module["main"].body):
        name = symbol_of(call)
        if call.op == tvm.ir.Op.get("relax.call_dps_packed"):
            op, kernels = imported.ops.get(name), kernels + _START
            if op is not None and (count := kernel_flops(op, sizes, _LENGTH)):
                kernels += count / kernel_flops_a_cycle(op, name in on_tiles, profile) / _KERNELS_REACH
                flops += count
        elif isinstance(call.op, tvm.ir.Op) and call.op.name in _CALLS:
            one, all_ = _loops_time(functions[name], call, sizes, profile, narrow), times.setdefault(name, _Time())
            all_.predicted, all_.limit = all_.predicted + one.predicted, all_.limit + one.limit
            runs[name] += 1
    rows = _slow_rows(times, kernels, runs, sizes, functions)
    moved_bytes = sum(map(weight_bytes, imported.ops.values())) + _edge_bytes(imported, sizes)
    gbs = _BYTES * profile.hardware.cores * CLOCK_GHZ
    cost = CallCost(
        sizes=sizes,
        flops=flops,
        kernels_us=_us(kernels),
        loops_us=_us(sum(time.predicted for time in times.values())),
        bytes=moved_bytes,
        gbs=gbs,
        memory_us=round(moved_bytes / gbs / 1e3, 1),
        cores=profile.hardware.cores,
        clock_ghz=CLOCK_GHZ,
    )
    return cost, rows


def _us(cycles: float) -> float:
    return round(cycles / CLOCK_GHZ / 1e3, 1)


def _slow_rows(
    times: Mapping[str, _Time],
    kernels: float,
    runs: Mapping[str, int],
    sizes: dict[str, int],
    functions: Mapping[str, Any],
) -> tuple[SlowOperation, ...]:
    """The functions of TVM's own that are far from the limit and take much of the call."""
    total = kernels + sum(time.predicted for time in times.values())
    slow = sorted(
        (
            (name, time)
            for name, time in times.items()
            if time.limit < _OF_LIMIT * time.predicted and time.predicted > _OF_TIME * total
        ),
        key=lambda row: -row[1].predicted,
    )
    return tuple(
        SlowOperation(
            name=name,
            runs=runs[name],
            share=round(time.predicted / total, 3),
            times_limit=round(time.predicted / time.limit),
            sizes=sizes,
            why="no kernel claims it: loops of TVM",
            way_out=_CAST if "matmul" in name and _is_of_integers(functions[name]) else _FIX if sizes else _TUNE,
        )
        for name, time in slow
    )


def _example_sizes(imported: ImportedModule) -> dict[str, int]:
    """The size of every free dim of an input. The batch is the first axis of an input that has another free one."""
    weights = {*imported.weights, *imported.derived}
    shapes = [p.ty.shape for p in imported.module["main"].params if p.name not in weights]
    free = [
        [(axis, str(dim.name)) for axis, dim in enumerate(shape.values) if isinstance(dim, tvm.ir.Var)]
        for shape in shapes
        if isinstance(shape, relax.ShapeExpr)
    ]
    names = [name for dims in free for _, name in dims]
    names_of_batch = {name for name in names if name == "B" or name.lower().startswith("batch")}
    batch = names_of_batch or {dims[0][1] for dims in free[:1] if len(dims) > 1 and dims[0][0] == 0}
    return {name: _BATCH if name in batch else _LENGTH for name in names}


def _narrow(body: Any, functions: Mapping[str, Any]) -> dict[Any, str]:
    """The dtype of the narrowest whole numbers that a value of main was computed of, where it was of such."""
    dtypes: dict[Any, str] = {}
    for binding in (binding for block in body.blocks for binding in block.bindings):
        call = binding.value
        if isinstance(call, relax.Call) and isinstance(call.op, tvm.ir.Op) and call.op.name in _CALLS:
            buffers = _buffers(functions[str(call.args[0].name_hint)])
            inputs = [dtypes.get(value, str(b.dtype)) for value, b in zip(call.args[1].fields, buffers, strict=False)]
            whole = [dtype for dtype in inputs if "int" in dtype]
            if whole and "int" in str(buffers[-1].dtype):
                dtypes[binding.var] = min(whole, key=lambda dtype: tvm.DataType(dtype).bits)
    return dtypes


def _edge_bytes(imported: ImportedModule, sizes: Mapping[str, int]) -> int:
    """The bytes of a call's inputs and outputs whose sizes are known."""
    main, weights = imported.module["main"], {*imported.weights, *imported.derived}
    results = main.ret_ty.fields if isinstance(main.ret_ty, relax.TupleType) else [main.ret_ty]
    types = [*(p.ty for p in main.params if p.name not in weights), *results]
    arrays = [one for one in types if isinstance(getattr(one, "shape", None), relax.ShapeExpr)]
    return sum(
        math.prod(_number(size, {}, sizes) for size in array.shape.values) * element_bytes(array.dtype)
        for array in arrays
    )


def _loops_time(
    function: Any, call: Any, sizes: Mapping[str, int], profile: CpuProfile, narrow: Mapping[Any, str]
) -> _Time:
    values = _bound(function, call, sizes)
    pairs = zip(_buffers(function), call.args[1].fields, strict=False)
    loops = _Loops(profile, values, {buffer: narrow[value] for buffer, value in pairs if value in narrow})
    loops.visit(function.body, 1.0, 1.0)
    size = sum(
        min(math.prod(loops.number(dim) for dim in buffer.shape), loops.statements) * element_bytes(buffer.dtype)
        for buffer in _buffers(function)
    )
    return _Time(loops.cycles + _START, max(loops.at_limit, size / _BYTES) + _START)


def _buffers(function: Any) -> list[Any]:
    """The arrays among a function's parameters, which may also be sizes."""
    return [parameter for parameter in function.params if hasattr(parameter, "shape")]


def _bound(function: Any, call: Any, sizes: Mapping[str, int]) -> dict[Any, int]:
    """The size of each symbol of a function, by the shapes of what this call passes."""
    results = list(call.ty_args[0].fields) if isinstance(call.ty_args[0], relax.TupleType) else list(call.ty_args)
    types = [*(value.ty for value in call.args[1].fields), *results]
    arrays = [one for one in types if isinstance(getattr(one, "shape", None), relax.ShapeExpr)]
    buffers = _buffers(function)
    values: dict[Any, int] = {}
    for buffer, array in zip(buffers, arrays, strict=False):
        for dim, size in zip(buffer.shape, array.shape.values, strict=False):
            if isinstance(dim, tvm.ir.Var):
                values[dim] = _number(size, {}, sizes)
    return {p: sizes[p.name] for p in function.params if not hasattr(p, "shape") and p.name in sizes} | values


def _number(expr: Expr, values: Mapping[Any, int], sizes: Mapping[str, int]) -> int:
    """An expression of symbols at these values, or else at the sizes of their names."""
    if isinstance(expr, int):
        return expr

    def valued(variable: Any) -> Any:
        size = values.get(variable, sizes.get(str(variable.name), _LENGTH))
        return tirx.const(size, str(variable.ty.dtype))

    result = tvm.sym.Analyzer().simplify(tvm_ffi.structural_map(expr, (tvm.ir.Var, valued)))
    return int(result) if isinstance(result, tirx.IntImm) else 1


class _Loops:
    """Counts a function's statements, how often each runs, and the cycles of all."""

    def __init__(self, profile: CpuProfile, values: dict[Any, int], narrow: Mapping[Any, str]) -> None:
        self._profile, self._values, self._narrow = profile, values, narrow
        self.statements = self.cycles = self.at_limit = 0.0

    def number(self, size: Expr) -> int:
        return _number(size, self._values, {})

    def visit(self, node: Any, times: float, at_once: float) -> None:
        """`times` a statement here runs, `at_once` of them together: elements of a vector, threads."""
        if isinstance(node, tirx.For):
            extent = max(1, self.number(node.extent))
            if node.kind == tirx.ForKind.VECTORIZED:
                at_once *= extent
            elif node.kind == tirx.ForKind.PARALLEL:
                at_once *= min(extent, self._profile.hardware.cores)
            self._values[node.loop_var] = extent - 1  # the most of a loop inside whose extent depends on it
            self.visit(node.body, times * extent, at_once)
        elif isinstance(node, s_tir.SBlockRealize):
            self.visit(node.block.body, times, at_once)
        elif isinstance(node, tirx.IfThenElse):  # parallel loops, or the same ones by one thread where there are few
            self.visit(node.then_case, times, at_once)
        elif isinstance(node, tirx.SeqStmt):
            for part in node.seq:
                self.visit(part, times, at_once)
        elif isinstance(node, tirx.BufferStore):
            self._store(node, times, at_once)
        elif (body := getattr(node, "body", None)) is not None:
            self.visit(body, times, at_once)

    def _store(self, node: Any, times: float, at_once: float) -> None:
        loads = _read(node)
        is_sum = any(load.source.same_as(node.buffer) for load in loads)
        factors = [self._narrow.get(load.source, str(load.source.dtype)) for load in loads if is_sum]
        self.statements += times
        self.cycles += times * (_CHAIN if is_sum else _STATEMENT) / at_once
        narrowest = min([*factors, str(node.buffer.dtype)], key=lambda dtype: tvm.DataType(dtype).bits)
        self.at_limit += times * (2 if is_sum else 1) / flops_a_cycle(narrowest, self._profile)


def _read(store: Any) -> list[Any]:
    """What a statement reads: what lies where it writes, too, where it adds to that, or the like."""
    loads: list[Any] = []
    tvm_ffi.structural_walk(store.value, (tvm.ir.TensorLoad, loads.append))
    return loads


def _is_of_integers(function: Any) -> bool:
    return all("int" in str(buffer.dtype) for buffer in _buffers(function))
