"""Iterations of a parallel loop that write to the same places: found in lowered code, refused by `build`, and caught by
the self-check of `verify` where nobody refused them."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from kernel_runs import vector_machine
from torch import nn
from tvm import tirx
from tvm.script import from_source

import mhsa_compile as mhsa
from mhsa_compile import build, races, repeats, rest, selfcheck
from mhsa_compile.errors import BuildError

PROFILE = vector_machine(256, 16)
HEAD = """
@T.prim_func(s_tir=True)
def run(x: T.Buffer((64, 8), "float32"), y: T.Buffer((64, 8), "float32")):
"""
SHARED = {
    "scratch outside": """
        scratch = T.alloc_buffer((8,), "float32")
        for i in T.parallel(64):
            for j in range(8):
                scratch[j] = x[i, j]
                y[i, j] = scratch[7 - j]
        """,
    "one place of the output": """
        for i in T.parallel(64):
            y[0, 0] = x[i, 0]
        """,
    "where the inner loop alone decides": """
        for i in T.parallel(64):
            for j in range(8):
                y[j, j] = x[i, j]
        """,
    "as many places as the loop has come to": """
        for i in T.parallel(64):
            for j in range(i):
                y[j, 0] = x[i, 0]
        """,
}
OWN = {
    "scratch inside": """
        for i in T.parallel(64):
            scratch = T.alloc_buffer((8,), "float32")
            scratch[0] = x[i, 0]
            y[i, 0] = scratch[0]
        """,
    "a row each": """
        for i in T.parallel(64):
            for j in range(8):
                y[i, j] = x[i, j]
        """,
    "from the loop's place on": """
        for i in T.parallel(64):
            for j in range(i, i + 1):
                y[j, 0] = x[i, 0]
        """,
    "a place that is looked up in memory of its own": """
        for i in T.parallel(64):
            place = T.alloc_buffer((1,), "int32")
            place[0] = 63 - i
            y[place[0], 0] = x[i, 0]
        """,
}


def built(body: str) -> Any:
    text = HEAD + textwrap.indent(textwrap.dedent(body), "    ")
    module = tvm.IRModule({"run": from_source(text).with_attr("global_symbol", "run")})
    with build.pass_context():
        return tvm.compile(module, target=tvm.target.Target(PROFILE.tvm_config()))


@pytest.mark.parametrize("name", SHARED)
def test_shared_places_are_refused(name: str) -> None:
    array = "scratch" if "scratch" in name else "y"
    with pytest.raises(BuildError, match=f"function 'run'.*write to the same of '{array}'"):
        built(SHARED[name])


@pytest.mark.parametrize("name", OWN)
def test_places_of_their_own_are_not(name: str) -> None:
    built(OWN[name])


class EagerCausal(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return torch.nn.functional.scaled_dot_product_attention(q, k, scores.masked_fill(~seen, -1.0).softmax(-1) @ v)


def compiled() -> mhsa.Artifact:
    """A softmax and a product beside an attention, at sizes that are shared among threads."""
    tensors = tuple(torch.randn(2, 4, 144, 32) for _ in range(3))
    return mhsa.compile(EagerCausal(), example_inputs=tensors, dynamic_shapes=({}, {}, {}))


def test_scratch_of_what_no_kernel_claims_is_each_iterations_own() -> None:
    attention = compiled()
    check = selfcheck.with_any_threads(attention.manifest, lambda threads: runs(attention, threads))
    assert (check.difference, check.note) == (0.0, "to the bit")


def runs(artifact: mhsa.Artifact, threads: int) -> repeats.Run:
    attention = mhsa.load(artifact, threads=threads)
    return lambda inputs: [np.asarray(attention(**inputs))]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: threads do not run at once")
def test_verify_finds_a_planted_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule that was here once: both loops use the same arrays, which TVM then moves in front of them."""

    def shared(function: Any, size: Any) -> Any:
        compact = rest.traces.COMPACT(tvm.IRModule({"main": function}))["main"]
        root = compact.body.block
        loop = root.body
        alone = tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)
        choice = tirx.IfThenElse(size > rest.WORTH_SHARING, loop, alone)
        block = tvm.s_tir.SBlock(root.iter_vars, root.reads, root.writes, root.name_hint, choice)
        module = tvm.IRModule({"main": compact.with_body(tvm.s_tir.SBlockRealize([], True, block))})
        return tirx.transform.ConvertSSA()(module)["main"]

    @contextmanager
    def unseen() -> Iterator[Any]:
        yield tvm.instrument.PassInstrument()

    monkeypatch.setattr(rest, "_in_parallel_if_large", shared)
    with pytest.raises(BuildError, match="hreads would disturb each other"):
        compiled()
    monkeypatch.setattr(races, "refused", unseen)
    monkeypatch.setattr(selfcheck, "SECONDS", 5.0)
    attention = compiled()
    verdict = mhsa.verify(attention, cases=[{}])
    failed = {check.name: check.note for check in verdict.checks if not check.ok}
    assert "calls differ" in failed[selfcheck.THREADS]
    assert not verdict.ok
