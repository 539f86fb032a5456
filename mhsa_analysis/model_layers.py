"""The attention layers of somebody's model, found by running it, and what each was called with.

Notation: B batch, L query length, D embed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mhsa_analysis.torch_calls import TorchCall, attention_of, torch_calls
from mhsa_compile.conversion.attention_calls import attention_calls
from mhsa_compile.conversion.from_torch import dtype_of
from mhsa_compile.conversion.from_transformers import asks_by_name
from mhsa_compile.conversion.layer_calls import LayerCalls, visible_keys_of
from mhsa_compile.conversion.visible_keys import mask_for
from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.nn.modules import MultiHeadAttention
from mhsa_compile.verification.error_budget import agrees

KNOWN = (
    "attention as in BERT, RoBERTa, ELECTRA, ALBERT, DistilBERT, ModernBERT, GPT-2, GPT-NeoX, OPT, Llama, Mistral, "
    "Qwen 2, Gemma, Gemma 2, Cohere, GLM, Granite, Phi, T5's, BART's and Whisper's encoders, ViT, DINOv2, or an "
    "nn.MultiheadAttention"
)
"""Families that are known to be taken. Nothing goes by this list: what a layer does decides."""


@dataclass(eq=False)
class TrainedLayer:
    """`module` lies in the model as `name`; `attention` computes the same, and `projection` is the model's module that
    makes y of the heads, side by side; None where none is called, as in nn.MultiheadAttention.

    Of each call: x and the module's own result,
    (B, L, D), what `attention` takes as `mask=`, or None, and which queries see a key, bool (B, L).

    >>> model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    >>> (layer,) = trained_layers(model, [{"src": torch.randn(1, 9, 16)}])
    >>> layer.attention(**layer.arguments(0)).shape
    torch.Size([1, 9, 16])
    """

    name: str
    module: nn.Module
    attention: MultiHeadAttention
    projection: nn.Module | None
    inputs: list[Tensor]
    masks: list[Tensor | None]
    results: list[Tensor]
    rows: list[Tensor]

    def arguments(self, call: int) -> dict[str, Tensor]:
        """What `attention` and its artifact are called with, by name."""
        mask = self.masks[call]
        return {"x": self.inputs[call]} | ({} if mask is None else {"mask": mask})

    @torch.no_grad()
    def check(self, results: Sequence[Tensor]) -> None:
        """Raises ModelError unless `results`, y (B, L, D) of each call, of `attention` or of its artifact, are what the
        model computed where queries see a key: over all calls together as close to float64 as twice PyTorch's own error
        allows, in the model's operators or in ours. Of a short call alone that error is a matter of chance."""
        same, in_float64 = self._eager
        exact = self._visible([in_float64(**_in_float64(self.arguments(call))) for call in range(len(self.inputs))])
        ours = self._visible([same(**self.arguments(call)) for call in range(len(self.inputs))])
        actual = self._visible(results)
        if not any(agrees(exact, own, actual) for own in (self._visible(self.results), ours)):
            got = f"{self.name}, a {type(self.module).__name__}, whose own result is another"
            raise ModelError("model", KNOWN, got, "Its heads would be described wrongly.")

    def _visible(self, results: Sequence[Tensor]) -> Tensor:
        """Of all calls the rows (n, D) of queries that see a key."""
        return torch.cat([result[rows] for result, rows in zip(results, self.rows, strict=True)])

    @cached_property
    def _eager(self) -> tuple[MultiHeadAttention, MultiHeadAttention]:
        """`attention` with y alone, in its dtype and in float64."""
        same = self.attention.with_outputs("y")
        return same, copy.deepcopy(same).double()


def _in_float64(arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Floats as float64; masks of flags as they are."""
    return {name: value if value.dtype == torch.bool else value.double() for name, value in arguments.items()}


def trained_layers(model: nn.Module, inputs: Sequence[Mapping[str, Any]]) -> list[TrainedLayer]:
    """The self-attentions of a model of transformers or PyTorch, in the order in which they run.

    inputs   the model is called with each of them: `model(**inputs[0])`, ... Each call is kept

    A layer that is called several times in a run, as ALBERT's, is found once for each: `name`, `name, call 2`, ...
    A causal mask or a window becomes part of `attention`; padding and T5's bias by distance are masks of its calls.

    Raises ModelError: no attention, attention that means what an AttentionSpec cannot say, and attention whose own
    result is another than ours on one of the inputs.

    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    >>> [layer.name for layer in trained_layers(model, [{"src": torch.randn(1, 9, 16)}])]
    ['layers.0.self_attn', 'layers.1.self_attn']
    """
    if not inputs:
        raise InputError("inputs", "one or more inputs to run the model on", "none")
    if model.training:
        raise InputError("model", "eval mode: dropout would be in the way", "training mode", "Call model.eval() first.")
    runs = [_run(model, one) for one in inputs]
    names = {module: name for name, module in model.named_modules()}
    layers: list[TrainedLayer] = []
    for place, times in _places(runs).items():
        calls = [run[place] for run in runs if place in run]
        name = names[place[0]] + (f", call {place[1] + 1}" if times > 1 and place[1] else "")
        if len(calls) < len(runs):
            raise ModelError("model", "attention that every input runs through", f"{name}, which some do not call")
        if calls[0].context is None:
            layers.append(_layer(name, calls))
    if not layers:
        raise ModelError("model", KNOWN, *_why_none(model))
    return layers


Place = tuple[nn.Module, int]  # a module, and how often it was called before in the same run


def _run(model: nn.Module, inputs: Mapping[str, Any]) -> dict[Place, Any]:
    """The calls of attention in one run."""
    with torch.no_grad(), ExitStack() as noting:
        call_lists: list[Any] = [noting.enter_context(torch_calls(model))]
        if asks_by_name(model):
            call_lists.append(noting.enter_context(attention_calls(model)))
        model(**inputs)
    by_place: dict[Place, Any] = {}
    for call in (one for calls in call_lists for one in calls):
        times = sum(module is call.module for module, _ in by_place)
        by_place[call.module, times] = call
    return by_place


def _places(runs: Sequence[Mapping[Place, Any]]) -> dict[Place, int]:
    """The places at which attention was called, each with how often its module was called in a run."""
    places = dict.fromkeys(place for run in runs for place in run)
    return {place: sum(module is place[0] for module, _ in places) for place in places}


def _layer(name: str, calls: Sequence[Any]) -> TrainedLayer:
    module = calls[0].module
    try:
        if isinstance(calls[0], TorchCall):
            attention, masks = attention_of(calls), [call.visible for call in calls]
        else:
            attention = LayerCalls(calls, dtype_of(next(module.parameters()))).attention()
            masks = [visible_keys_of(call) for call in calls]
    except ModelError as error:
        raise ModelError("model", KNOWN, f"{name}, {error.got}", error.next_step) from error
    return TrainedLayer(
        name=name,
        module=module,
        attention=attention,
        projection=getattr(calls[0], "projection", None),
        inputs=[call.x for call in calls],
        masks=[mask_for(attention.spec, one, calls[0].y.dtype) for one in masks],
        results=[call.y for call in calls],
        rows=[one.rows(len(call.x)) for one, call in zip(masks, calls, strict=True)],
    )


def _why_none(model: nn.Module) -> tuple[str, str]:
    """(what the model is, in which no attention was found; what to do about it)."""
    hint = "Of other models, compile a layer with --outputs y,heads,weights, and give the artifact."
    own = sorted({type(module).__name__ for module in model.modules() if "Attention" in type(module).__name__})
    if not own:
        return f"a {type(model).__name__}, in which there is no attention", hint
    return (
        f"a {type(model).__name__}, whose {', '.join(own)} asks for no attention by name and computes it itself",
        hint,
    )
