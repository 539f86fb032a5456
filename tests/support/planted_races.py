"""Code in which threads disturb each other, on purpose: what looks for races must find these."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
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
    """A norm, which no kernel claims, of a softmax and a product beside an attention."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2)
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        values = nn.functional.layer_norm(scores.masked_fill(~visible, -1.0).softmax(-1) @ v, v.shape[-1:])
        return torch.nn.functional.scaled_dot_product_attention(q, k, values)


@contextmanager
def unrefused() -> Iterator[None]:
    """Nothing is refused for its data races: code is made of whatever there is."""
    with patch.object(data_races, "shared_writes", lambda function: []):
        yield


@contextmanager
def scratch_in_front() -> Iterator[None]:
    """The schedule of fallbacks that was here once: both loops use the same arrays, which TVM then moves in front of
    them."""

    def in_parallel_if_large(function: Function, sizes: list[Any]) -> Function:
        compact = cpu_schedule.traces.COMPACT(tvm.IRModule({"main": function}))["main"]
        root = compact.body.block
        loop = root.body
        alone = tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)
        choice = tirx.IfThenElse(reduce(operator.add, sizes) > cpu_schedule.WORTH_SHARING, loop, alone)
        block = tvm.s_tir.SBlock(root.iter_vars, root.reads, root.writes, root.name_hint, choice)
        module = tvm.IRModule({"main": compact.with_body(tvm.s_tir.SBlockRealize([], True, block))})
        return tirx.transform.ConvertSSA()(module)["main"]

    with patch.object(cpu_schedule, "_in_parallel_if_large", in_parallel_if_large):
        yield


@contextmanager
def scratch_of_kernels_in_front(prefix: str) -> Iterator[None]:
    """What iterations of parallel loops allocate they share, in kernels whose names begin so."""

    def moved(loop: Statement) -> Statement:
        scratch: list[Statement] = []
        alone = _like(loop, _without_scratch(loop.body, scratch))
        return tirx.SeqStmt([*scratch, alone]) if scratch else loop

    with _every_parallel_loop(moved, prefix):
        yield


@contextmanager
def iterations_twice() -> Iterator[None]:
    """The second half of iterations does again what the first one does: results are right, and each place follows from
    the iteration, so that `data_races` and equal bits both say nothing."""

    def twice(loop: Statement) -> Statement:
        again = tirx.Var("again", loop.loop_var.ty)
        same = tirx.Bind(loop.loop_var, tirx.floormod(again, loop.extent))
        body = [*loop.body.seq] if isinstance(loop.body, tirx.SeqStmt) else [loop.body]
        return tirx.For(again, loop.min, loop.extent * 2, loop.kind, tirx.SeqStmt([same, *body]))

    with _every_parallel_loop(twice, ""):
        yield


@contextmanager
def _every_parallel_loop(change: Callable[[Statement], Statement], prefix: str) -> Iterator[None]:
    """Changes every parallel loop of what is compiled, if it is in a function whose name begins with `prefix`; not
    those in blocks."""

    def changed(statement: Statement) -> Statement:
        result = _with_parts(statement, changed)
        return change(result) if isinstance(result, tirx.For) and result.kind == tirx.ForKind.PARALLEL else result

    scheduled = lower.schedule

    def all_changed(*arguments: Any) -> Any:
        result = scheduled(*arguments)
        for variable, function in result.module.functions_items():
            if isinstance(function, tirx.PrimFunc) and str(variable.name_hint).startswith(prefix):
                result.module.update_func(variable, function.with_body(changed(function.body)))
        return result

    with patch.object(lower, "schedule", all_changed):
        yield


def _without_scratch(statement: Statement, scratch: list[Statement]) -> Statement:
    """The statement without what allocates arrays in it, which goes to `scratch`; single values stay."""
    if isinstance(statement, tirx.SeqStmt):
        ours = [_is_scratch(part) for part in statement.seq]
        scratch += [part for part, is_ours in zip(statement.seq, ours, strict=True) if is_ours]
        statement = tirx.SeqStmt([part for part, is_ours in zip(statement.seq, ours, strict=True) if not is_ours])
    return _with_parts(statement, lambda part: _without_scratch(part, scratch))


def _is_scratch(statement: Statement) -> bool:
    if not isinstance(statement, tirx.AllocBuffer):
        return False
    shape = list(statement.buffer.shape)
    return shape != [1] and all(isinstance(size, tirx.IntImm) for size in shape)


def _with_parts(statement: Statement, change: Callable[[Statement], Statement]) -> Statement:
    """The statement with each of its parts as `change` makes it."""
    if isinstance(statement, tirx.For):
        return _like(statement, change(statement.body))
    if isinstance(statement, tirx.SeqStmt):
        return tirx.SeqStmt([change(part) for part in statement.seq])
    if isinstance(statement, tirx.IfThenElse):
        otherwise = None if statement.else_case is None else change(statement.else_case)
        return tirx.IfThenElse(statement.condition, change(statement.then_case), otherwise)
    return statement


def _like(loop: Statement, body: Statement) -> Statement:
    return tirx.For(
        loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations, loop.step
    )
