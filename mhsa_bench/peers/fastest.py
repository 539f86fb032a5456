"""A peer that has several forms of one computation: all are tried, the quickest one stays.

Which form is fastest differs from workload to workload and from CPU to CPU; a fixed choice would flatter us on one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from mhsa_bench.peers.peer import Opened, Peer, Problem
from mhsa_compile.bench.timing import quickest, tasks, workers_apart
from mhsa_compile.errors import ModelError


class Fastest:
    """`forms` are peers by themselves; those that cannot run, or compute something else, are passed over."""

    def __init__(self, name: str, forms: Sequence[Peer]) -> None:
        self.name = name
        self.forms = forms

    @contextmanager
    def open(self, problem: Problem, threads: int) -> Iterator[Opened]:
        reasons: list[Exception] = []
        best: tuple[float, Opened] | None = None
        with ExitStack() as stack:
            for form in self.forms:
                with ExitStack() as trial:
                    others = tasks()
                    try:
                        opened = trial.enter_context(form.open(problem, threads))
                        problem.check(opened.arrays(opened.calls[0]()))  # and its threads appear
                        with workers_apart(() if opened.caller_works else tasks() - others):
                            seconds = quickest(opened.calls[0])
                    except Exception as error:  # whatever others refuse
                        reasons.append(error)
                        continue
                    if best is None:
                        stack.push(trial.pop_all())
                    elif seconds < best[0]:
                        # Last in, first out, then once more: PyTorch's modes are put back as they were found.
                        trial.close()
                        stack.close()
                        opened = stack.enter_context(form.open(problem, threads))
                        opened.calls[0]()
                    else:
                        continue
                    best = seconds, replace(opened, form=form.name)
            if best is None:
                # What a form was not made for says less than what the peer itself refused.
                foreign = [reason for reason in reasons if not isinstance(reason, ModelError)]
                raise (foreign or reasons or [ModelError(self.name, "a form that runs here", "none")])[0]
            yield best[1]
