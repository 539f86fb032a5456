"""Attention modules of transformers as functions of tensors, so that they can be exported as they are.

Their forward takes (cos, sin) as one argument and gives (y, weights or None, ...). Here cos and sin are inputs of their
own, and y is the output. Anything else is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from torch import Tensor, nn

_PREFIX = "attention"


class AttentionOf(nn.Module):
    """A module of transformers whose forward gives y first; the inputs that are not given stay None."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> Tensor:
        given = {
            "attention_mask": attention_mask,
            "mask": mask,
            "key_value_states": key_value_states,
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
            "position_bias": position_bias,
        }
        arguments: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if cos is not None:
            arguments["position_embeddings"] = (cos, sin)
        result: Tensor = self.attention(hidden_states, **arguments)[0]
        return result


def is_attention_of_transformers(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__module__.startswith("transformers.models.") and kind.__name__.endswith("Attention")


def flattened(examples: Sequence[Any] | Mapping[str, Any] | None) -> Any:
    """Example inputs by name, with position_embeddings as cos and sin; the first by position is hidden_states."""
    if examples is None or not isinstance(examples, Mapping):
        return examples
    flat = dict(examples)
    if isinstance(pair := flat.pop("position_embeddings", None), tuple):
        flat["cos"], flat["sin"] = pair
    return flat


def with_own_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """The weights of an exported AttentionOf under the names that they have in the module of transformers."""
    renamed = {t.name: t.name.removeprefix(f"{_PREFIX}.") for t in model.graph.initializer}
    for tensor in model.graph.initializer:
        tensor.name = renamed[tensor.name]
    for info in model.graph.value_info:
        info.name = renamed.get(info.name, info.name)
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = renamed.get(name, name)
    return model
