"""Iterations of a parallel loop that write to the same places: found in lowered code, refused by `build`, and caught by
the self-check of `verify` where nobody refused them."""

from __future__ import annotations

import os
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from support import planted_races
from support.kernel_runs import vector_machine
from tvm.script import from_source

import mhsa_compile as mhsa
from mhsa_compile.compiler.codegen import build
from mhsa_compile.errors import BuildError
from mhsa_compile.verification import repeated_runs, self_checks

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
    "a place that a float of its own says": """
        for i in T.parallel(64):
            place = T.alloc_buffer((1,), "float32")
            place[0] = T.Cast("float32", 63 - i)
            y[T.Cast("int32", place[0]), 0] = x[i, 0]
        """,
}


def built(body: str) -> Any:
    text = HEAD + textwrap.indent(textwrap.dedent(body), "    ")
    module = tvm.IRModule({"run": from_source(text).with_attr("global_symbol", "run")})
    with build.pass_context():
        return tvm.compile(module, target=tvm.target.Target(PROFILE.tvm_config()))


@pytest.mark.thorough_but("as many places as the loop has come to")
@pytest.mark.parametrize("name", SHARED)
def test_shared_places_are_refused(name: str) -> None:
    array = "scratch" if "scratch" in name else "y"
    with pytest.raises(BuildError, match=f"function 'run'.*write to the same of '{array}'"):
        built(SHARED[name])


@pytest.mark.thorough_but("scratch inside", "a place that a float of its own says")
@pytest.mark.parametrize("name", OWN)
def test_places_of_their_own_are_not(name: str) -> None:
    built(OWN[name])


def compiled() -> mhsa.Artifact:
    """A norm, a softmax and a product beside an attention, at sizes that are shared among threads."""
    tensors = tuple(torch.randn(2, 4, 144, 32) for _ in range(3))
    return mhsa.compile(planted_races.EagerCausal(), example_inputs=tensors, dynamic_shapes=({}, {}, {}))


@pytest.mark.thorough
def test_scratch_of_what_no_kernel_claims_is_each_iterations_own() -> None:
    attention = compiled()
    check = self_checks.with_any_threads(attention.manifest, lambda threads: runs(attention, threads))
    assert (check.difference, check.note) == (0.0, "to the bit")


def runs(artifact: mhsa.Artifact, threads: int) -> repeated_runs.Run:
    attention = mhsa.load(artifact, threads=threads)
    return lambda inputs: [np.asarray(attention(**inputs))]


@pytest.mark.thorough
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: threads do not run at once")
def test_verify_finds_a_planted_race(monkeypatch: pytest.MonkeyPatch) -> None:
    with planted_races.scratch_in_front(), pytest.raises(BuildError, match="hreads would disturb each other"):
        compiled()
    with planted_races.scratch_of_kernels_in_front("softmax"), planted_races.unrefused():
        attention = compiled()
    monkeypatch.setattr(self_checks, "SECONDS", 5.0)
    for _ in range(10):  # on a busy machine the threads of a call may run one after the other
        verdict = mhsa.verify(attention, cases=[{}])
        failed = {check.name: check.note for check in verdict.checks if not check.ok}
        if failed:
            break
    assert "calls differ" in failed[self_checks.THREADS]
    assert not verdict.ok
