"""Code in which threads disturb each other, on purpose: what looks for races must find these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import tvm
from torch import nn
from tvm import tirx

from mhsa_compile.compiler import lower
from mhsa_compile.compiler.codegen import data_races
from mhsa_compile.compiler.fallback import cpu_schedule

Function = Any  # TVM has no type stubs
Statement = Any


class EagerCausal(nn.Module):
    """A softmax and a product that no kernel claims, beside an attention."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return torch.nn.functional.scaled_dot_product_attention(q, k, scores.masked_fill(~seen, -1.0).softmax(-1) @ v)


@contextmanager
def unrefused() -> Iterator[None]:
    """Code is made of whatever there is."""
    with patch.object(data_races, "shared_writes", lambda function: []):
        yield


@contextmanager
def scratch_in_front() -> Iterator[None]:
    """The schedule of fallbacks that was here once: both loops use the same arrays, which TVM then moves in front of
    them."""

    def in_parallel_if_large(function: Function, size: Any) -> Function:
        compact = cpu_schedule.traces.COMPACT(tvm.IRModule({"main": function}))["main"]
        root = compact.body.block
        loop = root.body
        alone = tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)
        choice = tirx.IfThenElse(size > cpu_schedule.WORTH_SHARING, loop, alone)
        block = tvm.s_tir.SBlock(root.iter_vars, root.reads, root.writes, root.name_hint, choice)
        module = tvm.IRModule({"main": compact.with_body(tvm.s_tir.SBlockRealize([], True, block))})
        return tirx.transform.ConvertSSA()(module)["main"]

    with patch.object(cpu_schedule, "_in_parallel_if_large", in_parallel_if_large):
        yield


@contextmanager
def scratch_of_kernels_in_front(prefix: str) -> Iterator[None]:
    """What iterations of parallel loops allocate first they share, in kernels whose names begin so."""

    def moved(loop: Statement) -> Statement:
        if not isinstance(loop.body, tirx.SeqStmt):
            return loop
        ours = [s for s in loop.body.seq if isinstance(s, tirx.AllocBuffer) and list(s.buffer.shape) != [1]]
        others = [s for s in loop.body.seq if not any(s.same_as(one) for one in ours)]
        return tirx.SeqStmt([*ours, _like(loop, tirx.SeqStmt(others))]) if ours else loop

    with _every_parallel_loop(moved, prefix):
        yield


@contextmanager
def iterations_twice() -> Iterator[None]:
    """The second half of iterations does again what the first one does: results are right, and each place follows from
    the iteration, so that `races` and equal bits both say nothing."""

    def twice(loop: Statement) -> Statement:
        again = tirx.Var("again", loop.loop_var.ty)
        same = tirx.Bind(loop.loop_var, tirx.floormod(again, loop.extent))
        body = [*loop.body.seq] if isinstance(loop.body, tirx.SeqStmt) else [loop.body]
        return tirx.For(again, loop.min, loop.extent * 2, loop.kind, tirx.SeqStmt([same, *body]))

    with _every_parallel_loop(twice, ""):
        yield


@contextmanager
def _every_parallel_loop(change: Callable[[Statement], Statement], prefix: str) -> Iterator[None]:
    """In what is compiled, each is another one, if it is in a function whose name begins so; not those in blocks."""

    def changed(statement: Statement) -> Statement:
        if isinstance(statement, tirx.For):
            loop = _like(statement, changed(statement.body))
            return change(loop) if loop.kind == tirx.ForKind.PARALLEL else loop
        if isinstance(statement, tirx.SeqStmt):
            return tirx.SeqStmt([changed(part) for part in statement.seq])
        if isinstance(statement, tirx.IfThenElse):
            otherwise = statement.else_case
            return tirx.IfThenElse(
                statement.condition, changed(statement.then_case), None if otherwise is None else changed(otherwise)
            )
        return statement

    scheduled = lower.schedule

    def all_changed(*arguments: Any) -> Any:
        result = scheduled(*arguments)
        for variable, function in result.module.functions_items():
            if isinstance(function, tirx.PrimFunc) and str(variable.name_hint).startswith(prefix):
                result.module.update_func(variable, function.with_body(changed(function.body)))
        return result

    with patch.object(lower, "schedule", all_changed):
        yield


def _like(loop: Statement, body: Statement) -> Statement:
    return tirx.For(
        loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations, loop.step
    )
