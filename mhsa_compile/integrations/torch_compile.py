"""torch.compile(model, backend="mhsa"): graphs that Dynamo captures, as compiled artifacts.

A graph with attention is exported and compiled with its weights; sizes that Dynamo holds to be symbolic stay so. A
graph stays with PyTorch where it holds no attention, where gradients are wanted, where it writes into tensors, where
something in it has no code here, and where PyTorch is faster: a warning says which, once for each graph.

    model = torch.compile(model, backend="mhsa")
    model = torch.compile(model, backend="mhsa", options={"target": "x86-64-v3", "threads": 4})
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import tracing

from mhsa_compile.compiler.pipeline import compile
from mhsa_compile.errors import DefectError, InputError, MhsaError, ModelError
from mhsa_compile.integrations.captured_graph import BoundWeights, CapturedGraph
from mhsa_compile.integrations.first_calls import difference
from mhsa_compile.integrations.layers.timed_turns import in_turns
from mhsa_compile.integrations.weight_state import WeightStates
from mhsa_compile.runtime.compiled_attention import CompiledAttention, load
from mhsa_compile.spec.float32_products import Float32Products, Float32Request, float32_request

_SLOWER = 1.02
"""Times PyTorch's time that a graph may take; its turns differ by less on a quiet machine."""
_MOST_WEIGHTS = 64
"""Sets of weights that one graph keeps artifacts for: layers that were compiled one by one share a graph."""

RunGraph = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class BackendOptions:
    """`options` of torch.compile.

    target     what to compile for, as `compile` takes it
    threads    the threads of a call, as `load` takes them
    is_strict  whether a graph that would stay with PyTorch is an error. "strict" in the options
    check      whether the first inputs' results are held against PyTorch's: a graph that differs by more than rounding
               stays with it
    float32_products  how float32 is multiplied, as in `compile`; a warning says where a graph got another than was
               asked for, and why
    """

    target: str = "native"
    threads: int | None = None
    is_strict: bool = False
    check: bool = True
    float32_products: Float32Request = "auto"

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> BackendOptions:
        """Raises InputError."""
        words = ("target", "threads", "strict", "check", "float32_products")
        fields = {word: "is_strict" if word == "strict" else word for word in words}
        if unknown := sorted(options.keys() - fields.keys()):
            raise InputError("options", f"any of {', '.join(fields)}", ", ".join(unknown))
        float32_request(options.get("float32_products", "auto"))
        return cls(**{fields[name]: value for name, value in options.items()})


def compile_graph(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str = "default",
) -> RunGraph:
    """The backend: a function of the graph's inputs. Raises InputError for unknown options or a mode, and with
    `options={"strict": True}` whatever keeps a graph from being compiled."""
    if mode != "default":
        raise InputError("mode", 'none: the backend "mhsa" has no modes', repr(mode), "Leave it out, or use options.")
    read = BackendOptions.read(options or {})
    program = CapturedGraph.read(graph, example_inputs)
    if isinstance(program, str):
        return _left(graph, program, read)
    bound = _Bound(program, read)
    try:
        manifest = bound.compiled(example_inputs).manifest
    except MhsaError as error:
        if read.is_strict:
            raise
        why = f"{error.argument}: expected {error.expected}, got {error.got}"
        return _left(graph, why + _way_out(program, error), read)
    if any(op.float32_reason for op in manifest.ops) and read.float32_products != "auto":
        warnings.warn(f"torch.compile: float32_products: {manifest.float32_outcome()}", stacklevel=2)
    inputs = program.with_numbers(example_inputs)
    if read.check and (why := _difference(graph, bound, inputs, manifest.coarsest_products)):
        return _left(graph, why, read)
    if (ratio := _time_by_eager(graph, bound, inputs)) > _SLOWER:
        return _left(graph, f"it takes {ratio:.2f} of PyTorch's time", read)
    return bound


def _way_out(program: CapturedGraph, error: MhsaError) -> str:
    """What to do where an error names a size that Dynamo left free, and that may be one that never changes."""
    symbols = {symbol for axes in program.free_dims().values() for symbol in axes.values()}
    if symbols.isdisjoint(re.findall(r"\w+", error.expected)):
        return ""
    return "; fix a size that never changes by torch._dynamo.mark_static(x, axis), or leave out dynamic=True"


def _left(graph: fx.GraphModule, why: str, options: BackendOptions) -> RunGraph:
    """The graph as PyTorch runs it, and a word about it."""
    operations = sum(node.op.startswith("call") for node in graph.graph.nodes)
    if options.is_strict:
        raise InputError("graph", "one that compiles, since options say strict", why)
    warnings.warn(f"torch.compile: a graph of {operations} operations stays with PyTorch: {why}", stacklevel=3)
    run: RunGraph = graph.forward
    return run


@dataclass(frozen=True)
class _Entry:
    """The artifact of one set of weights and numbers; `joined` are the dims that it takes to be equal, if any. `bound`
    are the weights in whose place its code takes others; None where it takes none."""

    states: WeightStates
    numbers: tuple[float, ...]
    artifact: CompiledAttention
    joined: dict[str, dict[int, str]] | None
    bound: BoundWeights | None


@dataclass
class _Bound:
    """A captured graph as artifacts, one for each set of weights that it is called with."""

    captured: CapturedGraph
    options: BackendOptions
    _entries: tuple[_Entry, ...] = ()  # the newest first
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, *inputs: Any) -> list[Any]:
        return self._results(self.compiled(inputs), *inputs)

    def _results(self, artifact: CompiledAttention, *inputs: Any) -> list[Any]:
        results = artifact(**self.captured.arguments(inputs))
        return self.captured.outputs(results if isinstance(results, tuple) else (results,), inputs)

    def compiled(self, inputs: Sequence[Any]) -> CompiledAttention:
        """The compiled graph for the weights and numbers among these inputs; weights are bound once for each set of
        them, and the graph is compiled where no artifact takes them."""
        if (artifact := self._entry_for(inputs)) is not None:
            return artifact
        with self._lock:
            if (artifact := self._entry_for(inputs)) is not None:
                return artifact
            states = WeightStates(self.captured.weights_of(inputs), read_alike=True)  # by Dynamo's guards
            entry = self._rebound(states, inputs)
            if is_new := entry is None:
                with torch.random.fork_rng(devices=()):
                    artifact, dims = self._compile(inputs)
                numbers, bound = (
                    self.captured.numbers_of(inputs),
                    self.captured.bound_weights(artifact.manifest, inputs),
                )
                entry = _Entry(states, numbers, artifact, dims, bound)
            self._entries = (entry, *self._others_of(states, inputs, warn=is_new))[:_MOST_WEIGHTS]
            return entry.artifact

    def _rebound(self, states: WeightStates, inputs: Sequence[Any]) -> _Entry | None:
        """The entry of these weights, by the code of one that was compiled for others; None where there is none that
        takes them as it is, and where its results are not PyTorch's."""
        for entry in self._entries:
            if entry.bound is None or not self._is_of(entry, inputs) or not entry.bound.fits(inputs):
                continue
            with torch.inference_mode(False), torch.no_grad():
                artifact = entry.artifact.with_weights(entry.bound.among(inputs))
            rebound = replace(entry, states=states, artifact=artifact)
            graph, run = self.captured.graph, partial(self._results, artifact)
            if not self.options.check or not _difference(graph, run, inputs, artifact.manifest.coarsest_products):
                return rebound
        return None

    def _others_of(self, states: WeightStates, inputs: Sequence[Any], *, warn: bool) -> list[_Entry]:
        """The entries that a call may have again: of weights that are there, and that were not written over, of which
        a warning tells."""
        alive = [entry for entry in self._entries if not entry.states.are_gone()]
        weights = self.captured.weights_of(inputs)
        kept = [entry for entry in alive if not entry.states.are_where(states) or entry.states.hold(weights)]
        if warn and len(kept) < len(alive):
            hint = "Its code had numbers of theirs in it. Edit them before."
            warnings.warn(f"torch.compile: weights of a graph changed, and it was compiled anew. {hint}", stacklevel=4)
        return kept

    def _entry_for(self, inputs: Sequence[Any]) -> CompiledAttention | None:
        weights = self.captured.weights_of(inputs)
        for entry in self._entries:
            if self._is_of(entry, inputs) and entry.states.hold(weights):
                return entry.artifact
        return None

    def _is_of(self, entry: _Entry, inputs: Sequence[Any]) -> bool:
        """Whether an entry is of the numbers among these inputs, and of sizes that are equal where theirs are."""
        alike = entry.numbers == self.captured.numbers_of(inputs)
        return alike and (entry.joined is None or entry.joined == self.captured.joined_dims(inputs))

    def _compile(self, inputs: Sequence[Any]) -> tuple[CompiledAttention, dict[str, dict[int, str]] | None]:
        """The artifact, with all dims free, or else with those joined that are of one size here."""
        free, alike = self.captured.free_dims(), self.captured.joined_dims(inputs)
        try:
            return self._compiled(inputs, free), None
        except (ModelError, DefectError):
            if alike == free:
                raise
        return self._compiled(inputs, alike), alike

    def _compiled(self, inputs: Sequence[Any], dims: Mapping[str, Mapping[int, str]]) -> CompiledAttention:
        # The exporter would add its guards to those of the graph that is being compiled, and they never hold.
        with tracing(None), torch.inference_mode(False), torch.no_grad():
            # Copies: the exporter marks its examples, and Dynamo's guards would find that theirs are others.
            examples = {name: value.clone() for name, value in self.captured.arguments(inputs).items()}
            artifact = compile(
                self.captured.module(inputs),
                self.options.target,
                example_inputs=examples,
                dynamic_shapes={name: axes or None for name, axes in dims.items()},
                without_attention="refuse",
                float32_products=self.options.float32_products,
            )
        return load(artifact, threads=self.options.threads)


def _difference(graph: fx.GraphModule, run: RunGraph, inputs: Sequence[Any], products: Float32Products) -> str:
    """How the results of a call differ from PyTorch's by more than rounding."""
    with torch.no_grad():
        results = zip(run(*inputs), graph.forward(*inputs), strict=True)
    pairs = [(ours, theirs) for ours, theirs in results if isinstance(theirs, Tensor)]
    return difference([ours for ours, _ in pairs], [theirs for _, theirs in pairs], products)


def _time_by_eager(graph: fx.GraphModule, run: RunGraph, inputs: Sequence[Any]) -> float:
    """The time of a call, divided by that of PyTorch's."""
    ours, theirs = in_turns(partial(run, *inputs), partial(graph.forward, *inputs))
    return ours / theirs
