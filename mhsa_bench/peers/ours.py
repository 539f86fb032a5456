"""This project, in the same form as its peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from mhsa_bench.peers.peer import Opened, Problem
from mhsa_compile.runtime.array_memory import to_list


class Compiled:
    """The artifact through its own runtime: NumPy in, NumPy out."""

    name = "mhsa_compile"

    @contextmanager
    def open(self, problem: Problem, threads: int) -> Iterator[Opened]:
        from mhsa_compile.runtime.compiled_attention import load

        compiled = load(problem.artifact, threads=threads)
        yield Opened([partial(compiled, *arrays.values()) for arrays in problem.inputs], to_list)
