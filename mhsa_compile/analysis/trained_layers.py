"""The attention layers of somebody's model, and what each is called with while the model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from mhsa_compile.errors import ModelError
from mhsa_compile.nn.convert import from_bert, from_llama
from mhsa_compile.nn.modules import MultiHeadAttention


@dataclass(eq=False)
class TrainedLayer:
    """`module` lies in the model as `name`; `attention` computes the same, for sequences without padding. `inputs`:
    x (B, L, D) of each call while `recording`."""

    name: str
    module: nn.Module
    attention: MultiHeadAttention
    inputs: list[Tensor] = field(default_factory=list)


def trained_layers(model: nn.Module) -> list[TrainedLayer]:
    """The self-attentions of transformers' BERT, Llama and what is written as they are, in the model's order.

    Raises ModelError where there is none, and what `from_bert` and `from_llama` raise.
    """
    found = []
    for name, module in model.named_modules():
        if all(hasattr(module, part) for part in ("self", "output")) and hasattr(module.self, "query"):
            attention = from_bert(module, mask=None)
        elif all(hasattr(module, f"{part}_proj") for part in "qkvo"):
            attention = from_llama(module)
        else:
            continue
        if not attention.spec.is_cross:
            found.append(TrainedLayer(name, module, attention))
    if not found:
        hint = "Of other models, compile a layer with --outputs y,heads,weights, and give the artifact."
        raise ModelError("model", "attention written as in BERT or Llama", type(model).__name__, hint)
    return found


@contextmanager
def recording(layers: list[TrainedLayer]) -> Iterator[None]:
    """While it lasts, `inputs` of each layer grow."""

    def note(layer: TrainedLayer) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            layer.inputs.append((args[0] if args else named["hidden_states"]).detach())

        return hook

    hooks = [layer.module.register_forward_pre_hook(note(layer), with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
