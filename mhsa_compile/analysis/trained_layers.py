"""The attention layers of somebody's model, and what each is called with while the model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mhsa_compile.errors import ModelError
from mhsa_compile.nn.convert import from_bert, from_llama
from mhsa_compile.nn.modules import MultiHeadAttention

_ROUNDED = 1e-3
"""How far a layer of ours may be from the model's own, relative to its size: float32 rounds to 1e-6, and a layer that
means something else (another rotary layout, a cap of the scores) is off by more than a hundredth."""


@dataclass(eq=False)
class TrainedLayer:
    """`module` lies in the model as `name`; `attention` is to compute the same, for sequences without padding. What
    each call brought and gave while `recording`: x and the module's own result, (B, L, D)."""

    name: str
    module: Any
    attention: MultiHeadAttention
    inputs: list[Tensor] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def check(self, call: int, y: Tensor) -> None:
        """Raises ModelError unless y (B, L, D), of `attention` or of its artifact, is what the model computed."""
        made = y
        if isinstance(norm := getattr(getattr(self.module, "output", None), "LayerNorm", None), nn.LayerNorm):
            made = norm(y + self.inputs[call])  # where BERT's attention ends
        own = self.results[call]
        if not float((made - own).norm()) <= _ROUNDED * float(own.norm()):
            expected = "attention that means what BERT's or Llama's does"
            got = f"{self.name}, a {type(self.module).__name__}, whose own result is another"
            raise ModelError("model", expected, got, "Its heads would be described wrongly.")


def trained_layers(model: nn.Module) -> list[TrainedLayer]:
    """The self-attentions of transformers' BERT, Llama and what is written as they are, in the model's order.

    Raises ModelError where there is none, and what `from_bert` and `from_llama` raise.
    """
    found = []
    for name, module in model.named_modules():
        if all(hasattr(module, part) for part in ("self", "output")) and hasattr(module.self, "query"):
            attention = from_bert(module, mask=None)
        elif all(hasattr(module, f"{part}_proj") for part in "qkvo"):
            attention = from_llama(module, window=_window(module))
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
    """While it lasts, `inputs` and `results` of each layer grow."""

    def note(layer: TrainedLayer) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
            layer.inputs.append((args[0] if args else named["hidden_states"]).detach())
            layer.results.append((result[0] if isinstance(result, tuple) else result).detach())

        return hook

    hooks = [layer.module.register_forward_hook(note(layer), with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _window(module: Any) -> tuple[int, int] | None:
    """The window of a layer that sees so many keys back, itself among them, by its own word or its config's."""
    config = getattr(module, "config", None)
    keys = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    return None if keys is None else (int(keys) - 1, 0)
