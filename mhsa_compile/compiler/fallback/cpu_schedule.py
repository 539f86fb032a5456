"""What no kernel claims: TVM's own lowering, with elementary functions as arithmetic and a schedule by fixed rules.

TVM alone writes every operator of a fused function as loops of their own over memory, on one thread. Here what is
computed element by element becomes one loop nest, rows are shared among threads where there is enough to do, and exp,
log, erf, tanh and sigmoid are arithmetic (`scalar_math`), of which LLVM makes vectors. Lengths may be symbols.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, s_tir, te, tirx, topi
from tvm.ir import Expr
from tvm.s_tir.schedule import ScheduleError
from tvm_ffi import structural_equal

from mhsa_compile.compiler.calls import with_calls
from mhsa_compile.compiler.fallback import running_sums, top_k, traces
from mhsa_compile.compiler.fallback.bfloat16 import bfloat16_as_bits
from mhsa_compile.compiler.fallback.binding_order import sizes_first
from mhsa_compile.compiler.fallback.edges import EDGES
from mhsa_compile.compiler.fallback.function_nodes import at_any_address, rewritten, without_scopes
from mhsa_compile.compiler.fallback.fused_sizes import sizes_at_one_place
from mhsa_compile.compiler.fallback.hidden_values import hide_dividends, hide_operands
from mhsa_compile.compiler.fallback.plain_function import product
from mhsa_compile.compiler.fallback.squares import in_squares
from mhsa_compile.compiler.fallback.whole_numbers import wrap_in_llvm
from mhsa_compile.frontend.relax.sizes.broadcasting import equal
from mhsa_compile.hardware.profile import CpuProfile, TargetProfile
from mhsa_compile.kernels.common.buffers import DTYPE_BYTES
from mhsa_compile.kernels.cpu.simd import scalar_math
from mhsa_compile.kernels.cpu.simd.vectors import WORTH_SHARING
from mhsa_compile.records.record import RecordSet
from mhsa_compile.runtime.artifact.manifest import OpReport


@dataclass(frozen=True)
class Lowered:
    """What no kernel claims, lowered; `reports` has a row for each function of which there are tuned records."""

    module: Any
    reports: list[OpReport]


def lower(module: Any, profile: CpuProfile, shelf: RecordSet) -> Lowered:
    """Every operator of Relax as a scheduled PrimFunc. Our kernels come later: some passes cannot look at them."""
    lowered = legalize_all(with_calls(module, _own_function), profile, _LEGALIZED)
    lanes, reports = profile.vector_lanes("float32"), list[OpReport]()
    for variable, function in lowered.functions_items():
        if isinstance(function, tirx.PrimFunc):
            function = _as_arithmetic(function)
            tuned = _tuned(str(variable.name_hint), bfloat16_as_bits(function), shelf)
            reports += [tuned[1]] if tuned else []
            primitive = tuned[0] if tuned and tuned[0] else bfloat16_as_bits(schedule_function(function, lanes))
            lowered.update_func(
                variable,
                rewritten(primitive, at_any_address, without_scopes, hide_dividends, hide_operands, wrap_in_llvm),
            )
    return Lowered(lowered, reports)


def _own_function(builder: Any, call: Any) -> Any:
    """A call of an operator that a CPU has a function of ours for, before a pass of TVM's replaces it."""
    call_of = _OWN_FUNCTIONS.get(getattr(call.op, "name", ""))
    return call if call_of is None else call_of(builder, call)


_OWN_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "relax.cumprod": running_sums.call_of,
    "relax.cumsum": running_sums.call_of,
    "relax.topk": top_k.call_of,
}
"""By operator: a relax.BlockBuilder and a call of it -> what takes the call's place."""


def primitives(module: Any, profile: CpuProfile, *, arithmetic: bool = True) -> dict[str, tirx.PrimFunc]:
    """The PrimFuncs of what no kernel claims, not scheduled; without `arithmetic` as TVM alone would write them."""
    lowered = legalize_all(module, profile, _LEGALIZED if arithmetic else {})
    functions = {str(v.name_hint): f for v, f in lowered.functions_items() if isinstance(f, tirx.PrimFunc)}
    return {name: bfloat16_as_bits(_as_arithmetic(f)) for name, f in functions.items()} if arithmetic else functions


def legalize_all(module: Any, profile: TargetProfile, arithmetic: dict[str, Any]) -> Any:
    """Every operator as a PrimFunc, not scheduled; `arithmetic` says how some are lowered, by name."""
    passes = [
        relax.backend.DispatchSortScan(),  # CumSum among others, which LegalizeOps leaves
        relax.transform.LegalizeOps(EDGES | _OF_NUMBERS | arithmetic),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        sizes_at_one_place,
        relax.transform.FuseTIR(),
        relax.transform.RewriteDataflowReshape(),
        relax.transform.DeadCodeElimination(),
    ]
    with tvm.target.Target(profile.tvm_config()):
        return sizes_first(tvm.transform.Sequential(passes)(module))


def _tuned(name: str, function: tirx.PrimFunc, shelf: RecordSet) -> tuple[tirx.PrimFunc | None, OpReport] | None:
    """(the function by a record's trace, None where none fits; its row in the report); None without records of it."""
    if not shelf.knows(traces.KIND) or not function.attrs.get("s_tir", False) or not traces.is_static(function):
        return None
    key = traces.key_of(function)
    if not shelf.knows(traces.KIND, key):
        return None
    match = shelf.best_match(traces.KIND, key, lambda record: traces.apply(function, record.trace))
    if isinstance(match, str):
        return None, OpReport(name, traces.KIND, traces.KIND, {}, "fallback", _NOTE, match)
    record, primitive = match
    return primitive, OpReport(name, traces.KIND, traces.KIND, {}, "record", _NOTE, record.summary())


_NOTE = "a function of the operators below that no kernel claims"


# ---- Elementary functions as arithmetic

_ARITHMETIC = "arithmetic"
"""The name of the blocks of elementary functions as arithmetic, which are worth vectors."""


_COMPUTED = ("float32", "float16", "bfloat16")
"""Dtypes whose elementary functions are arithmetic of float32."""


def _in_float32(formula: Callable[[Expr], Expr], dtype: str) -> Callable[[Expr], Expr]:
    """The formula of a number of this dtype, whose result has it again."""
    if dtype == "float32":
        return formula
    return lambda x: formula(x.astype("float32")).astype(dtype)


def _elementwise(formula: Callable[[Expr], Expr]) -> Callable[[Any, Any], Any]:
    """How LegalizeOps lowers an operator of one argument: by the formula where it is of floats of 32 or 16 bits, of
    which the latter are computed in float32 and rounded once; else as TVM does."""

    def legalize(builder: Any, call: Any) -> Any:
        value = call.args[0]
        if (dtype := str(value.ty.dtype)) not in _COMPUTED:
            return call.op.get_attr("FLegalize")(builder, call)
        compute = _formula(_in_float32(formula, dtype))
        return builder.call_te(compute, value, primfunc_name_hint=call.op.name.rpartition(".")[2])

    return legalize


def _as_arithmetic(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with its calls of elementary functions as arithmetic, whichever operator they are of: the C
    library's take 5 to 70 ns."""

    def call_mapped(call: Any) -> Any:
        formula = _CALLS.get(call.op.name) if isinstance(call.op, tvm.ir.Op) else None
        if formula is None or (dtype := str(call.ty.dtype)) not in _COMPUTED or _has_names(call.args[0]):
            return call
        return _in_float32(formula, dtype)(call.args[0])

    return tvm_ffi.structural_map(function, (tvm.ir.Call, call_mapped))


_CALLS: dict[str, Callable[[Expr], Expr]] = {
    "tirx.acos": scalar_math.acos,
    "tirx.asin": scalar_math.asin,
    "tirx.atan": scalar_math.atan,
    "tirx.exp": scalar_math.exp,
    "tirx.log": scalar_math.log,
    "tirx.log1p": scalar_math.log1p,
    "tirx.sigmoid": scalar_math.sigmoid,
    "tirx.tanh": scalar_math.tanh,
}


def _formula(formula: Callable[[Expr], Expr]) -> Callable[[Any], Any]:
    return lambda x: te.compute(x.shape, lambda *place: formula(x[place]), name=_ARITHMETIC)


def _power(builder: Any, call: Any) -> Any:
    """Squares and cubes as products: the C library takes 20 ns for each."""
    value, exponent = call.args
    stated = exponent.value.numpy() if isinstance(exponent, tvm.ir.GenericConst) else None
    if stated is None or stated.shape != () or float(stated) not in _PRODUCTS:
        return call.op.get_attr("FLegalize")(builder, call)
    return builder.call_te(_formula(_PRODUCTS[float(stated)]), value, primfunc_name_hint="power")


def _of_zero(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """How LegalizeOps lowers an operator of two: a constant 0 is read as an array. Written into the code, as TVM has
    it, 0 times NaN would be 0, and 0 plus -0 be -0."""

    def legalize(builder: Any, call: Any) -> Any:
        numbers = [value.value.numpy() for value in call.args if isinstance(value, tvm.ir.GenericConst)]
        if not any(number.shape == () and number == 0 for number in numbers):
            return call.op.get_attr("FLegalize")(builder, call)
        return builder.call_te(compute, *call.args, primfunc_name_hint=call.op.name.rpartition(".")[2])

    return legalize


def _reshape(builder: Any, call: Any) -> Any:
    """A reshape of computed lengths as a view: as loops, each element's place is found by divisions by these lengths,
    from which LLVM makes code for minutes. So are those that nobody can show to hold as many elements. An input
    or a constant, in whose memory no output may lie, is copied before, and its view again: RewriteDataflowReshape drops
    what it sees to be no output, so that the first copy goes, and the second but at the end."""
    value, shape = call.args
    sizes, target = value.ty.shape.values, shape.values
    if all(map(_is_plain, (*sizes, *target))) and equal(product(sizes), product(target)):
        return call.op.get_attr("FLegalize")(builder, call)
    if isinstance(value, relax.Var) and builder.lookup_binding(value) is not None:
        return call
    view = relax.op.reshape(builder.emit(_copy(builder, value)), shape)
    return _copy(builder, builder.emit(view))


def _full(builder: Any, call: Any) -> Any:
    """An array of one number. Where that is infinite or NaN, as in what causal masks begin with, TVM takes a dtype
    for a word and raises TypeError."""
    shape, number = call.args
    if not isinstance(shape, relax.ShapeExpr) or not isinstance(number, tvm.ir.GenericConst):
        return call.op.get_attr("FLegalize")(builder, call)
    value, dtype = number.value.numpy().item(), str(call.ty.dtype)
    return builder.call_te(topi.full, shape.values, dtype, value, primfunc_name_hint="full")


def _copy(builder: Any, value: Any) -> Any:
    return builder.call_te(lambda x: te.compute(x.shape, lambda *at: x(*at), "copy"), value, primfunc_name_hint="copy")


def _is_plain(size: Expr) -> bool:
    """Whether a size is a number, a dim, or a product of these."""
    return isinstance(size, tvm.ir.Var | tirx.IntImm) or (
        isinstance(size, tirx.Mul) and _is_plain(size.a) and _is_plain(size.b)
    )


_PRODUCTS: dict[float, Callable[[Expr], Expr]] = {2.0: scalar_math.square, 3.0: scalar_math.cube}


_OF_NUMBERS = {
    "relax.add": _of_zero(topi.add),
    "relax.divide": _of_zero(topi.divide),
    "relax.full": _full,
    "relax.multiply": _of_zero(topi.multiply),
}
"""How what is written with a number in the code is lowered, where TVM's own way is wrong."""

_LEGALIZED = {
    "relax.erf": _elementwise(scalar_math.erf),
    "relax.nn.gelu": _elementwise(scalar_math.gelu),
    "relax.nn.gelu_tanh": _elementwise(scalar_math.gelu_tanh),
    "relax.nn.silu": _elementwise(scalar_math.silu),
    "relax.power": _power,
    "relax.reshape": _reshape,
}


# ---- Schedules by fixed rules


def schedule_function(function: tirx.PrimFunc, lanes: int) -> tirx.PrimFunc:
    """The function by the rules of this file, `lanes` to a vector; as it is where they do not know its form."""
    if not function.attrs.get("s_tir", False) or not _is_tree_of_blocks(function):
        return function
    schedule = s_tir.Schedule(function)
    is_arithmetic = _has_names(function) or any(
        schedule.get(block).name_hint.startswith(_ARITHMETIC) for block in _blocks(schedule)
    )
    _inline(schedule)
    blocks = [schedule.get(block) for block in _blocks(schedule)]
    if len(blocks) == 1 and (squares := in_squares(function, blocks[0], lanes)) is not None:
        return squares
    sizes = list(map(_size, blocks))
    for rule in (_by_rows, _by_columns, _of_all, _by_squares, partial(_by_elements, is_arithmetic=is_arithmetic)):
        copy = schedule.copy()
        with suppress(ScheduleError):
            if rule(copy, lanes):
                _begin_sums(copy)
                return _in_parallel_if_large(_names_apart(copy.mod["main"]), sizes)
    _begin_sums(schedule)
    return _names_apart(schedule.mod["main"])


def _has_names(node: Any) -> bool:
    """Whether values within expressions have names, as those of `scalar_math` have. One such formula of another's value
    takes TVM minutes: it puts what has a name wherever the name stands, when it makes code of either."""
    names: list[Any] = []
    tvm_ffi.structural_walk(node, (tirx.Let, names.append))
    return bool(names)


def _is_bfloat16(block: Any) -> bool:
    """Whether a block rounds what it writes to bfloat16, by arithmetic with names in the end."""
    return isinstance(block.body, tirx.BufferStore) and str(block.body.value.ty.dtype) == "bfloat16"


def _names_apart(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with a name of its own for each value: what was written into two places names the same twice."""
    return tirx.transform.ConvertSSA()(tvm.IRModule({"main": function}))["main"]


def _begin_sums(schedule: s_tir.Schedule) -> None:
    """Writes what a sum over axes that may be 0 begins with in front of its loops: within, as TVM has it, such an axis
    would leave it out."""
    for block in _blocks(schedule):
        axes = [axis for axis in schedule.get(block).iter_vars if axis.iter_type != tirx.IterVar.DataPar]
        if schedule.get(block).init is None or all(map(_has_steps, axes)):
            continue
        for loop in reversed(schedule.get_loops(block)):
            with suppress(ScheduleError):  # another loop that it sums over lies around this one
                schedule.decompose_reduction(block, loop)
                break


def _has_steps(axis: Any) -> bool:
    """Whether an axis is known to be longer than 0."""
    extent = axis.dom.extent
    return isinstance(extent, tirx.IntImm) and int(extent.value) > 0


def _is_tree_of_blocks(function: tirx.PrimFunc) -> bool:
    """Whether loops and blocks lie below a root, as in tensor expressions. TVM's CumSum is one block of plain code."""
    body = function.body
    return isinstance(body, s_tir.SBlockRealize) and str(body.block.name_hint) == "root"


def _blocks(schedule: s_tir.Schedule) -> list[Any]:
    return list(schedule.get_child_blocks(schedule.get_sblock("root")))


def _inline(schedule: s_tir.Schedule) -> None:
    """Computes where it is read what only elements of the same place read, or a last sum alone; and what is a copy."""
    for block in _blocks(schedule):
        own, consumers = schedule.get(block), schedule.get_consumers(block)
        readers = [schedule.get(consumer) for consumer in consumers]
        is_last = len(consumers) == 1 and not schedule.get_consumers(consumers[0])
        if readers and (
            _is_copy(own)
            or all(_same_elements(own, reader, is_last) and _stays_small(own, reader) for reader in readers)
        ):
            with suppress(ScheduleError):  # not a plain loop over its output
                schedule.compute_inline(block)


_MOST_READ = 32
"""Elements that one expression reads. What reads another's value several times has its expression as often, and so on
along a chain: 85 of one element, in roundings and comparisons of each other, took TVM two minutes."""


def _stays_small(block: Any, reader: Any) -> bool:
    """Whether a reader's expression, with the block's in the places where it reads it, is one that TVM can take."""
    reads, own = _elements_read(reader.body), _elements_read(block.body)
    times = len([each for each in reads if each.source.same_as(block.writes[0].source)])
    return times < 2 or len(reads) + times * (len(own) - 1) <= _MOST_READ


def _elements_read(body: Any) -> list[Any]:
    reads: list[Any] = []
    tvm_ffi.structural_walk(body, (tvm.ir.TensorLoad, reads.append))
    return reads


def _is_copy(block: Any) -> bool:
    """Whether a block writes each element as it reads it, as a cast to the dtype that it has does."""
    value = block.body.value if isinstance(block.body, tirx.BufferStore) else None
    if not isinstance(value, tvm.ir.TensorLoad) or len(value.indices) != len(block.body.indices):
        return False
    return all(map(structural_equal, value.indices, block.body.indices))


def _same_elements(block: Any, reader: Any, is_last: bool) -> bool:
    """Whether a reader reads each element of the block once, both one by one; or summing, if it `is_last`."""
    if _kinds(block).strip("S") or (_kinds(reader).strip("S") and not is_last):
        return False
    if not equal(_size(block), _size(reader)):
        return False
    if not _has_names(block.body):
        return True
    return not _has_names(reader.body) and not (_is_bfloat16(block) and _is_bfloat16(reader))


def _kinds(block: Any) -> str:
    """The kinds of a block's axes, in order: S for one of its output, R for one that it sums over, or the like."""
    return "".join("S" if axis.iter_type == tirx.IterVar.DataPar else "R" for axis in block.iter_vars)


def _size(block: Any) -> Expr:
    return product(axis.dom.extent for axis in block.iter_vars)


def _by_squares(schedule: s_tir.Schedule, lanes: int) -> bool:
    """One block that reads along another axis than it writes, as a Transpose does: square after square of both, whose
    lines stay in the cache until all of their elements have had their turn. Whether it is that."""
    blocks = _blocks(schedule)
    block, loops = schedule.get(blocks[0]), schedule.get_loops(blocks[0])
    *axes, last = block.iter_vars
    if len(blocks) != 1 or _kinds(block).strip("S") or len(loops) != len(block.iter_vars):
        return False
    places = _last_indices(block)
    reads = [k for k, axis in enumerate(axes) if any(place.same_as(axis.var) for place in places)]
    if not reads or any(place.same_as(last.var) for place in places):
        return False
    extents = [axes[reads[0]].dom.extent, last.dom.extent]
    if any(isinstance(extent, tirx.IntImm) and int(extent.value) < _SQUARE for extent in extents):
        return False
    of_bytes = isinstance(block.body, tirx.BufferStore) and DTYPE_BYTES.get(str(block.body.value.ty.dtype)) == 1
    of_bytes = of_bytes and all(_divisor(extent, _OF_BYTES) == _OF_BYTES for extent in extents)
    side = _OF_BYTES if of_bytes else _SQUARE
    (row, i), (column, j) = (schedule.split(loops[k], [None, side]) for k in (reads[0], -1))
    others = [loop for k, loop in enumerate(loops[:-1]) if k != reads[0]]
    schedule.reorder(*others, row, column, i, j)
    if of_bytes:
        schedule.vectorize(j)
    schedule.parallel(schedule.fuse(*others, row))
    return True


_SQUARE = 32
"""Elements: of 4 bytes, lines of both arrays fit the first cache; with 64 those of rows by powers of two do not."""
_OF_BYTES = 8
"""The same of bytes that are written, as vectors of a whole number of squares; where there is a rest, 32 are faster."""


def _by_elements(schedule: s_tir.Schedule, lanes: int, is_arithmetic: bool) -> bool:
    """One block, computed element by element: all loops but the innermost few are one, and parallel. Whether it is
    that."""
    blocks = _blocks(schedule)
    if len(blocks) != 1 or _kinds(schedule.get(blocks[0])).strip("S"):
        return False
    loops = schedule.get_loops(blocks[0])
    if len(loops) < 2:
        return False
    shared = loops[: _outer(schedule, loops)]
    if is_arithmetic:  # of other code LLVM makes vectors as good as these
        _vectorize(schedule, loops[-1], lanes)
    schedule.parallel(schedule.fuse(*shared))
    return True


def _outer(schedule: s_tir.Schedule, loops: list[Any]) -> int:
    """How many loops are worth one. Where that one is, are divisions by their lengths; so it holds what may be shared,
    and a stretch of known length inside is loops as they are."""
    count, elements = len(loops) - 1, _number_in(schedule.get(loops[-1]).extent)
    while count > 1 and isinstance(extent := schedule.get(loops[count - 1]).extent, tirx.IntImm):
        elements *= int(extent)
        if elements > _STRETCH:
            break
        count -= 1
    return count


_STRETCH = 256
"""Elements that one thread computes in loops as they are: enough to pay for a place found by divisions."""


def _by_rows(schedule: s_tir.Schedule, lanes: int) -> bool:
    """Sums along rows (or maxima), and what is made of them, or of one number a row: one parallel loop over rows.
    Whether it is that.

    Everything about a row is computed before the next one. A sum is one of `lanes` sums at first, which is faster and
    more exact than one chain of additions.
    """
    blocks = [schedule.get(block) for block in _blocks(schedule)]
    kinds = [_kinds(block) for block in blocks]
    outer = _row_axes(blocks, kinds)
    if outer < 1 or "R" in kinds[-1].rstrip("R") or (len(blocks) == 1 and not _is_along_memory(blocks[0])):
        return False
    for block in _blocks(schedule):
        if _is_sum_of_a_row(schedule.get(block), outer):
            _in_lanes(schedule, block, lanes)
    *before, last = _blocks(schedule)
    loops = schedule.get_loops(last)
    row = schedule.fuse(*loops[:outer])
    schedule.parallel(row)
    if "R" not in kinds[-1] and outer < len(kinds[-1]):
        _vectorize(schedule, schedule.get_loops(last)[-1], lanes)
    for block in reversed(before):
        if _has_names(schedule.get(block).body) and _kinds(schedule.get(block)) == kinds[-1]:
            _vectorize(schedule, schedule.get_loops(block)[-1], lanes)
        schedule.compute_at(block, row, preserve_unit_loops=True)
        if schedule.get(block).name_hint.endswith("_rf"):
            lane, *loops = schedule.get_loops(block)[1:]
            steps = loops[-_kinds(schedule.get(block)).count("R") :]
            schedule.reorder(*steps, lane)
            schedule.vectorize(lane)
            schedule.decompose_reduction(block, steps[0])
        elif (columns := _columns(schedule.get(block))) and columns[-1] >= outer:
            loops = schedule.get_loops(block)[1:]
            if len(loops) == len(schedule.get(block).iter_vars):
                schedule.decompose_reduction(block, _columns_innermost(schedule, block, loops, lanes)[1][0])
    return True


def _row_axes(blocks: list[Any], kinds: list[str]) -> int:
    """How many axes, from the first on, number the rows that all blocks have; 0 where they have none alike. All of the
    last block's, where it makes one number of each row's sums, such as their mean."""
    sums = [block for block, kind in zip(blocks, kinds, strict=True) if "R" in kind]
    is_number = "R" not in kinds[-1] and bool(sums) and all(map(_is_along_memory, sums))
    own = min(len(kind) - len(kind.lstrip("S")) for kind in kinds)
    inside = min(own, len(kinds[-1]) - 1)
    for count in (own, inside) if is_number else (inside,):
        if count > 0 and all(
            equal(one, other)
            for block in blocks
            for one, other in zip(_rows(block, count), _rows(blocks[-1], count), strict=True)
        ):
            return count
    return 0


def _is_along_memory(block: Any) -> bool:
    """Whether a block sums, its last step being one to the next element of all that it reads."""
    last, places = block.iter_vars[-1], _last_indices(block)
    return last.iter_type != tirx.IterVar.DataPar and bool(places) and all(p.same_as(last.var) for p in places)


def _last_indices(block: Any) -> list[Expr]:
    """Where along its last axis a block reads each array."""
    return [read.region[-1].min for read in block.reads if len(read.region)]


def _by_columns(schedule: s_tir.Schedule, lanes: int) -> bool:
    """A sum (or maximum) over an axis, where neighbours in memory are terms of sums beside each other: a step of all of
    these at a time, in vectors. Whether it is that."""
    blocks = _blocks(schedule)
    if len(blocks) != 1 or not _columns(schedule.get(blocks[0])):
        return False
    outer, steps = _columns_innermost(schedule, blocks[0], schedule.get_loops(blocks[0]), lanes)
    if not outer:
        return False
    schedule.parallel(schedule.fuse(*outer))
    schedule.decompose_reduction(blocks[0], steps[0])
    return True


def _columns(block: Any) -> list[int]:
    """The axes of a block along which what it sums has neighbours in memory; none of what is no sum."""
    kind, places = _kinds(block), _last_indices(block)
    if "R" not in kind or kind.rstrip("R").strip("S"):
        return []
    return [i for i in range(kind.count("S")) if any(place.same_as(block.iter_vars[i].var) for place in places)]


def _columns_innermost(
    schedule: s_tir.Schedule, block: Any, loops: list[Any], lanes: int
) -> tuple[list[Any], list[Any]]:
    """Puts a block's last such axis inside of the steps of its sums, in vectors where they fit; `loops` has one for
    each axis. The loops around the steps, and these."""
    own, column = _kinds(schedule.get(block)).count("S"), _columns(schedule.get(block))[-1]
    outer, steps = [*loops[:column], *loops[column + 1 : own]], loops[own:]
    inner, extent = [loops[column]], schedule.get(loops[column]).extent
    if width := _divisor(extent, lanes):
        vectors = max(count for count in _VECTORS if int(extent) // width % count == 0)
        chunk, *inner = schedule.split(loops[column], [None, vectors, width])
        outer.append(chunk)
    schedule.reorder(*outer, *steps, *inner)
    if width:
        schedule.unroll(inner[0])
        schedule.vectorize(inner[-1])
    return outer, steps


def _of_all(schedule: s_tir.Schedule, lanes: int) -> bool:
    """A sum of all elements, by one thread. Whether it is that."""
    blocks = _blocks(schedule)
    block = schedule.get(blocks[0])
    if len(blocks) != 1 or _kinds(block).strip("R") or not _is_along_memory(block):
        return False
    _in_lanes(schedule, blocks[0], lanes)
    first, *rest = _blocks(schedule)
    if rest:
        *steps, lane = schedule.get_loops(first)
        schedule.vectorize(lane)
        schedule.decompose_reduction(first, steps[0])
    return True


def _is_sum_of_a_row(block: Any, outer: int) -> bool:
    """Whether a block sums along the last axes alone, which may stay behind as ones of a single element."""
    kind = _kinds(block)
    own, axes = kind.rstrip("R"), block.iter_vars
    return kind != own and not own.strip("S") and all(equal(axis.dom.extent, 1) for axis in axes[outer : len(own)])


def _rows(block: Any, outer: int) -> list[Expr]:
    return [axis.dom.extent for axis in block.iter_vars[:outer]]


def _in_lanes(schedule: s_tir.Schedule, block: Any, lanes: int) -> None:
    """A sum over the last axis as sums over every so many elements, of these a few sums, and theirs: a chain of all of
    them would round as often as they are many. Maxima do not round."""
    body = schedule.get(block).body
    adds = isinstance(body, tirx.BufferStore) and isinstance(body.value, tirx.Add)
    for width in (lanes, _LEAST_LANES) if adds else (lanes,):
        loop = schedule.get_loops(block)[-1]
        if (count := _divisor(schedule.get(loop).extent, width)) and not equal(schedule.get(loop).extent, count):
            _, lane = schedule.split(loop, [None, count])
            schedule.rfactor(lane, _kinds(schedule.get(block)).count("S"))


def _vectorize(schedule: s_tir.Schedule, loop: Any, lanes: int) -> None:
    if width := _divisor(schedule.get(loop).extent, lanes):
        _, lane = schedule.split(loop, [None, width])
        schedule.vectorize(lane)


def _divisor(extent: Expr, lanes: int) -> int:
    """The widest vector, up to `lanes`, that fits a whole number of times; 0 where that is not worth it."""
    size = int(extent) if isinstance(extent, tirx.IntImm) else 0
    return max((width for width in range(_LEAST_LANES, lanes + 1) if size % width == 0), default=0) if size else 0


_LEAST_LANES = 4
_VECTORS = (1, 2, 4)
"""How many vectors of sums beside each other a step may add to: neighbours in memory come by whole lines and pages, and
no addition waits for the one before it."""


def _in_parallel_if_large(function: tirx.PrimFunc, sizes: list[Expr]) -> tirx.PrimFunc:
    """The function with its parallel loop run by one thread where its blocks, of these sizes, have too few elements to
    be worth sharing.

    Blocks become plain statements first: where blocks of both loops name an array, TVM allocates it in front of the
    choice between the loops, and all threads share it. A statement that allocates inside of a loop stays there.
    """
    compact = traces.COMPACT(tvm.IRModule({"main": function}))
    shared = s_tir.transform.LowerOpaqueBlock()(compact)["main"].body
    if not isinstance(shared, tirx.For):  # one row: its loop is gone
        return function
    choice = shared
    if sum(map(_number_in, sizes)) <= WORTH_SHARING:  # else one thread would run it where a dim is 0 alone
        alone = tirx.For(shared.loop_var, shared.min, shared.extent, tirx.ForKind.SERIAL, shared.body)
        choice = tirx.IfThenElse(functools.reduce(operator.add, sizes) > WORTH_SHARING, shared, alone)
    root = compact["main"].body.block
    block = s_tir.SBlock(root.iter_vars, root.reads, root.writes, root.name_hint, choice)
    return _names_apart(compact["main"].with_body(s_tir.SBlockRealize([], True, block)))


def _number_in(size: Expr) -> int:
    """The product of the numbers among the factors of a size."""
    if isinstance(size, tirx.Mul):
        return _number_in(size.a) * _number_in(size.b)
    return int(size.value) if isinstance(size, tirx.IntImm) else 1
