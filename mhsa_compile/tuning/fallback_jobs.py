"""What no kernel claims, as something to measure: functions, inputs, what must come out, and code for a schedule."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from mhsa_compile.compiler.codegen import build
from mhsa_compile.compiler.codegen.build import pass_context
from mhsa_compile.compiler.fallback import cpu_schedule, traces
from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.tuning.measure.job import Candidate, MeasureJob
from mhsa_compile.verification.error_budget import budget

LEAST_ELEMENTS = 1 << 10
"""The fewest elements of an output that is worth tuning: a smaller function takes about as long as a call of it."""


@dataclass(frozen=True)
class FallbackTask:
    """A PrimFunc that no kernel claims. `exact` is the same without arithmetic in place of erf and the like; `reason`
    is why it cannot be tuned, or empty."""

    name: str
    function: tirx.PrimFunc
    exact: tirx.PrimFunc
    key: dict[str, Any]
    reason: str = ""


def fallback_tasks(module: Any, profile: CpuProfile) -> list[FallbackTask]:
    """What an imported module leaves for TVM, equal functions once."""
    functions, exact = (
        cpu_schedule.primitives(module, profile),
        cpu_schedule.primitives(module, profile, arithmetic=False),
    )
    by_key: dict[str, FallbackTask] = {}
    for name, function in functions.items():
        key = traces.key_of(function)
        by_key.setdefault(
            key["function"], FallbackTask(name, function, exact.get(name), key, _unfit(function, exact.get(name)))
        )
    return list(by_key.values())


def _unfit(function: tirx.PrimFunc, exact: tirx.PrimFunc | None) -> str:
    """Why a function cannot be tuned, or nothing."""
    if not traces.is_static(function):
        return "its lengths are symbols, which MetaSchedule cannot tune: fix them, such as with --batch and --length"
    arrays = traces.buffers(function)
    is_of_arrays = exact is not None and len(arrays) == len(function.params)
    if not is_of_arrays or len(tvm.s_tir.Schedule(function).get_output_blocks("root")) != 1:
        return "it is not a function of arrays that gives one"
    if any(str(array.dtype) not in ("float32", "bool") for array in arrays) or str(arrays[-1].dtype) != "float32":
        return "it has numbers that are not float32, whose meaning nobody knows"
    if prod(int(dim) for dim in arrays[-1].shape) < LEAST_ELEMENTS:
        return "it is too small to be worth it"
    return ""


def job_of(task: FallbackTask, seed: int = 0) -> MeasureJob:
    """Random inputs, and what the function makes of them in float64.

    The budget has the form of `parity`'s: twice the error of the same function in float32 as TVM writes it without a
    schedule, and one rounding step of the largest output.
    """
    rng = np.random.default_rng(seed)
    *shapes, output = [(tuple(int(dim) for dim in b.shape), str(b.dtype)) for b in traces.buffers(task.exact)]
    inputs = [
        rng.random(shape) < 0.8 if dtype == "bool" else rng.standard_normal(shape).astype(np.float32)
        for shape, dtype in shapes
    ]
    expected = _evaluate(_in_float64(task.exact), inputs, output[0], np.float64)
    yardstick = _evaluate(task.exact, inputs, output[0], np.float32)
    return MeasureJob(
        inputs=tuple(inputs),
        weights=(),
        output=output,
        checked=np.arange(expected.size),
        expected=expected.reshape(-1),
        budget=budget(expected, yardstick, "float32"),
    )


def _in_float64(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function in float64: its text with the one word for the other. Buffers that name no dtype are of float32."""
    text = re.sub(
        r"(T\.sblock_alloc_buffer\(\([^\"\n]*\))\)$", r'\1, "float64")', function.script(), flags=re.MULTILINE
    )
    return tvm.script.from_source(text.replace("float32", "float64"))


def _evaluate(function: tirx.PrimFunc, inputs: list[Any], shape: tuple[int, ...], dtype: Any) -> Any:
    """What the function makes of the inputs at `dtype`, run on this machine without a schedule."""
    with pass_context():
        run = tvm.compile(tvm.IRModule({"run": function.with_attr("global_symbol", "run")}), target="llvm")["run"]
    arrays = [array if array.dtype == np.bool_ else array.astype(dtype) for array in (*inputs, np.zeros(shape, dtype))]
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    run(*tensors)
    return tensors[-1].numpy()


def candidate_of(function: tirx.PrimFunc, profile: CpuProfile) -> Candidate:
    """Compiles and links a scheduled function."""
    return Candidate(build.library({"run": function}, profile))
