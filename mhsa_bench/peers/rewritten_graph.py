"""A peer on an ONNX graph with other operators for the same computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mhsa_bench.peers import onnx_graph
from mhsa_bench.peers.peer import Opened, Problem
from mhsa_compile.verification.random_inputs import Arrays

if TYPE_CHECKING:
    from onnx import ModelProto

Feed = Callable[[Arrays, list[str]], dict[str, np.ndarray]]
"""(the problem's inputs, the graph's names of its inputs) -> what the graph takes."""
OpenSession = Callable[[bytes, int, Problem, Feed], Opened]
"""(model, threads, problem, feed) -> the peer, ready to be called."""


class RewrittenGraph:
    """`write` says which operators; `holds_scores` whether the peer keeps all scores in memory at once."""

    def __init__(
        self, name: str, write: Callable[[Problem], ModelProto], session: OpenSession, *, holds_scores: bool
    ) -> None:
        self.name, self.write, self.session, self.holds_scores = name, write, session, holds_scores

    @contextmanager
    def open(self, problem: Problem, threads: int) -> Iterator[Opened]:
        if self.holds_scores:
            problem.check_scores_fit()  # before the graph is written, whose constants may be as large
        model = self.write(problem).SerializeToString()
        yield self.session(model, threads, problem, partial(onnx_graph.inputs, problem))
