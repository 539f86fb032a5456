"""A layer of transformers as one artifact: whatever its own forward computes, exported, for calls without a cache.

Where the forward cannot be exported, where a call asks for more than numbers, and where it is faster, the layer's parts
are called, of which attention and linears may be replaced each, or the layer as it was before.

Notation: B batch, L query length.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mhsa_compile.errors import MhsaError
from mhsa_compile.integrations.call_context import wants_gradient, why_not_numbers
from mhsa_compile.integrations.layers.export import (
    PREFIX,
    ExportedCall,
    ExportedKind,
    call_of,
    graph_of,
    named_weights,
    parameter_names,
)
from mhsa_compile.integrations.layers.measured import MeasuredForward
from mhsa_compile.integrations.layers.state import LayerState, has_global_hooks, is_captured, plain_look
from mhsa_compile.integrations.layers.ways import LayerRow, LayerWay, WayTimings
from mhsa_compile.integrations.weight_state import LayerInUse
from mhsa_compile.runtime.compiled_attention import CompiledAttention

BEFORE = "sdpa"
"""The attention that a layer has to have had: what its forward is exported and timed with."""
LEAST_WEIGHTS = 256 * 256
"""What a layer must have for its products to take longer than what a call costs besides."""
_MOST_KINDS = 8
"""Of calls of one layer: more are sizes that were taken for a layer's own."""
_Form = tuple[bool | str, ...] | None
"""What a layer returns: a tensor, or a tuple in which there is a tensor at these places, None at the others, and the
tensor that it was given at those with that one's name."""


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a model of transformers that hold no other ones, by name."""
    library: Any = sys.modules.get("transformers.modeling_layers")
    layers = [] if library is None else list(_innermost(model, library.GradientCheckpointingLayer))
    inside = {part for _, layer in layers for part in layer.modules()}
    yield from layers
    for name, layer in _innermost(model, tuple(_recorded(model))):
        if inside.isdisjoint(layer.modules()):
            yield name, layer


def _innermost(model: nn.Module, kinds: Any) -> Iterator[tuple[str, nn.Module]]:
    """The parts of some classes in which there is no other such part, by name."""
    for name, part in model.named_modules():
        if isinstance(part, kinds) and not any(isinstance(one, kinds) for one in part.modules() if one is not part):
            yield name, part


def _recorded(model: nn.Module) -> Iterator[type[nn.Module]]:
    """The classes whose results are a model's hidden states, as transformers has it: ALBERT's layers are no others."""
    for part in model.modules():
        named: Any = (getattr(part, "_can_record_outputs", None) or {}).get("hidden_states", ())
        for one in named if isinstance(named, list | tuple) else (named,):
            if isinstance(kind := getattr(one, "target_class", one), type):
                yield kind


def why_kept(layer: nn.Module, *, whatever_its_size: bool) -> str:
    """Why a layer's parts are called, always; "" if its calls may be one artifact each."""
    if "forward" in vars(layer):
        return "it has a forward of its own"
    if not whatever_its_size and sum(weight.numel() for weight in layer.parameters()) < LEAST_WEIGHTS:
        return f'it has fewer than {LEAST_WEIGHTS} weights; layers="whole" takes it, too'
    return ""


class ExportedLayerForward(MeasuredForward[ExportedKind, Any, ExportedCall]):
    """The forward of a layer of transformers whose attention is ours, which `implementation` calls it."""

    def __init__(self, use: LayerInUse, row: LayerRow, timings: WayTimings | None, implementation: str) -> None:
        super().__init__(use, row, timings)
        self._implementation = implementation
        self._names = parameter_names(use.layer)
        self._state: LayerState | None = None
        self._look: tuple[LayerState, Any] | None = None
        self._forms: dict[ExportedKind, _Form | str] = {}  # what calls of a kind return; why no artifact returns it

    def _arguments(self) -> tuple[Any, ...]:
        return (*super()._arguments(), self._implementation)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        if self._is_pytorchs() or self._row.why_parts:  # what PyTorch does is as right
            return self._parts(*positional, **named)
        call = call_of(self._names, positional, named)
        if isinstance(call, str):
            self._row.count_parts(call)
            return self._parts(*positional, **named)
        result = self._fastest(call)
        return self._parts(*positional, **named) if result is None else result

    def _parts(self, *positional: Any, **named: Any) -> Any:
        return type(self._layer).forward(self._layer, *positional, **named)

    def _before(self, call: ExportedCall) -> Any:
        """What the layer gave before it was accelerated."""
        state = self._state or self._looked_at()
        if self._look is None or self._look[0] is not state:
            self._look = state, plain_look(self._layer, BEFORE)
        look = self._look[1]
        return type(look).forward(look, **call.arguments)

    def _looked_at(self) -> LayerState:
        """What the layer is made of now; what calls need of it after that, they have of `_state`."""
        if (state := self._state) is None or not state.holds():
            state = self._state = LayerState(self._layer, self._implementation)
        return state

    def _why_not(self, call: ExportedCall) -> str:
        if why := self._why_changed() or why_not_numbers(*call.tensors.values()):
            return why
        state = self._looked_at()
        if state.why:
            return state.why
        if has_global_hooks():
            return "hooks of all modules, which would not run"
        if state.captures and is_captured():
            return "transformers collects what its parts return: hidden states, or weights of attention"
        if torch.is_grad_enabled() and wants_gradient(*call.tensors.values(), *state.weights()):
            return "a gradient is wanted: call under torch.no_grad()"
        return ""

    def _may_go_unasked(self, call: ExportedCall) -> bool:
        return not self._why_not(call)

    def _sizes(self, call: ExportedCall) -> tuple[int, int]:
        return call.sizes

    def _others(self, call: ExportedCall) -> dict[LayerWay, Callable[[], Any]]:
        return {"pytorch": lambda: self._before(call), "parts": lambda: self._parts(**call.arguments)}

    def _why_wrong(self, call: ExportedCall, kind: ExportedKind, result: Any) -> str:
        ones = tuple(size == 1 for size in call.sizes)
        return self._first_calls.check((kind, ones), _tensors(result), lambda: _tensors(self._before(call)))

    def _by_artifact(self, call: ExportedCall) -> tuple[Any, ExportedKind] | str:
        kind = call.kind((self._state or self._looked_at()).structure)
        if (form := self._form(call, kind)) is not None and isinstance(form, str):
            return form
        compiled = self._compiled(kind)
        if isinstance(compiled, str):
            return compiled
        inputs = call.inputs()
        result = compiled(**{info.name: inputs[info.name] for info in compiled.manifest.inputs})
        if form is None:
            return result, kind
        if form.count(True) != len(compiled.manifest.outputs):
            return "its graph returns other tensors than its forward"
        results = iter(result if isinstance(result, tuple) else (result,))
        return tuple(_at_place(what, results, call) for what in form), kind

    def _form(self, call: ExportedCall, kind: ExportedKind) -> _Form | str:
        """What calls of a kind return, or why no artifact does: told from one call of the layer as it was before."""
        if kind not in self._forms:
            if len(self._forms) >= _MOST_KINDS:
                return f"more than {_MOST_KINDS} kinds of calls, each of which would be compiled"
            look = plain_look(self._layer, BEFORE)
            state = LayerState(look, BEFORE)
            before = [(x, x.clone()) for x in (*call.tensors.values(), *look.buffers())]
            result = type(look).forward(look, **call.arguments)
            written = [(x, then) for x, then in before if not _equal(x, then)]
            for x, then in written:
                x.copy_(then)
            if written or not state.holds():
                self._forms[kind] = "its forward writes into what it is given, or into the layer"
            elif isinstance(result, Tensor):
                self._forms[kind] = None
            elif type(result) is tuple and all(one is None or isinstance(one, Tensor) for one in result):
                given = {id(x): name for name, x in call.tensors.items()}
                form = tuple(one is not None and given.get(id(one), True) for one in result)
                self._forms[kind] = form if True in form else "it returns nothing but what it is given"
            else:
                self._forms[kind] = f"it returns a {type(result).__name__}"
        return self._forms[kind]

    def _weights(self) -> tuple[Tensor | None, ...]:
        return (self._state or self._looked_at()).weights()

    def _source(self, kind: ExportedKind) -> tuple[Any, Mapping[str, Any]]:
        weights = {PREFIX + name: weight.detach() for name, weight in named_weights(self._layer)}
        return (kind, lambda: graph_of(self._layer, kind)), weights

    def _bound_or_why(self, kind: ExportedKind) -> CompiledAttention | str:
        with torch.inference_mode(False), torch.no_grad():
            try:
                compiled = super()._bound_or_why(kind)
            except MhsaError as error:
                return f"{error.argument}: expected {error.expected}, got {error.got}"
        if isinstance(compiled, CompiledAttention) and (limits := compiled.manifest.limits):
            return f"an artifact of it takes sizes up to {', '.join(map(str, limits.values()))} alone"
        return compiled


def _at_place(what: bool | str, results: Iterator[Tensor], call: ExportedCall) -> Tensor | None:
    """What a layer returns at one place, of an artifact's results and what the layer was given."""
    if isinstance(what, str):
        return call.tensors[what]
    return next(results) if what else None


def _equal(x: Tensor, other: Tensor) -> bool:
    return torch.equal(x.nan_to_num(), other.nan_to_num())


def _tensors(result: Any) -> list[Tensor]:
    return [one for one in (result if isinstance(result, tuple) else (result,)) if one is not None]
