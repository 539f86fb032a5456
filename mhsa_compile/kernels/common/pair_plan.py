"""The plan of pairs that are known when a kernel is compiled: how much of the window goes into it, and the arguments
that bring it to the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import argument
from mhsa_compile.kernels.interface.ops import AttentionOp
from mhsa_compile.spec.window import WindowSpec


def why_not_plan(op: AttentionOp, family: str) -> str | None:
    """Why a family of kernels can make no plan of the pairs that are known in advance, or None."""
    others = [step.not_beside[family] for step in op.scores if family in step.not_beside]
    return f"a static mask or {others[0]}, not both" if op.pairs is not None and others else None


def split_window(op: AttentionOp) -> tuple[WindowSpec | None, AttentionOp]:
    """(what a plan holds of the window, what is left to the kernel): a window counted from numbers of keys is known in
    the call only, and distances and places are counted from its edge."""
    if op.any_step("counts_keys") and op.from_end:
        return None, op
    if op.any_step("from_places"):
        return op.window, op
    return op.window, replace(op, scores=tuple(step for step in op.scores if step.window is None))


def constant_arguments(arrays: Mapping[str, NDArray[Any]]) -> list[Expr]:
    """The arguments of constants."""
    return [argument(name, [T.int64(n) for n in array.shape], str(array.dtype)) for name, array in arrays.items()]


def plan_constants(plan: Any) -> tuple[NDArray[Any], ...]:
    """The constants of a plan, a dataclass of arrays; none where there is no plan."""
    return () if plan is None else tuple(vars(plan).values())


def plan_arguments(plan: Any) -> list[Expr] | None:
    """The arguments that bring them; None where there is no plan."""
    return None if plan is None else constant_arguments(vars(plan))
