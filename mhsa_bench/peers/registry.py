"""Whom we are compared with: one file for each family, in an explicit list. `Compiled` is ourselves, in the same form.

A peer computes the same thing, with the same weights, on the same number of threads, in the fastest form that its own
users would write; where that differs from workload to workload it has several, and `Fastest` tries them. Inputs are
brought into its own containers before the clock starts, and outputs stay in them. Whatever keeps a peer from running is
an exception, which `bench` turns into a visible row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from mhsa_bench.peers import iree, onnxruntime, openvino, torch_compile, torch_eager
from mhsa_bench.peers.peer import Opened, Peer, Problem
from mhsa_compile.bench.timing import quickest, tasks, workers_apart
from mhsa_compile.errors import InputError, ModelError, did_you_mean
from mhsa_compile.runtime.array_memory import to_list


class Compiled:
    """The artifact through its own runtime: NumPy in, NumPy out."""

    name = "mhsa_compile"

    @contextmanager
    def open(self, problem: Problem, threads: int) -> Iterator[Opened]:
        from mhsa_compile.runtime.compiled_attention import load

        compiled = load(problem.artifact, threads=threads)
        yield Opened([partial(compiled, *arrays.values()) for arrays in problem.inputs], to_list)


class Fastest:
    """A peer that has several forms of one computation: all are tried, the quickest one stays. Which one is fastest
    differs from workload to workload and from CPU to CPU; a fixed choice would flatter us on one.

    `forms` are peers by themselves; those that cannot run, or compute something else, are passed over.
    """

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


PEERS: tuple[Peer, ...] = (
    Fastest("torch", torch_eager.FORMS),
    Fastest("torch.compile", torch_compile.FORMS),
    onnxruntime.OnnxRuntimeOwnGraph(),
    Fastest("onnxruntime-fused", onnxruntime.FUSED),
    Fastest("openvino", openvino.FORMS),
    iree.Iree(),
)


def find(names: Iterable[str]) -> tuple[Peer, ...]:
    """The peers of these names, each once. Raises InputError for an unknown one."""
    by_name = {peer.name: peer for peer in PEERS}
    unique_names = dict.fromkeys(names)
    if unknown := [name for name in unique_names if name not in by_name]:
        raise InputError(
            "against", f"some of {', '.join(by_name)}", repr(unknown[0]), did_you_mean(unknown[0], by_name)
        )
    return tuple(by_name[name] for name in unique_names)
