"""The attention layers of other people's models: found, recorded, and held against what the model itself computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mhsa_compile.analysis.trained_layers import TrainedLayer, recording, trained_layers
from mhsa_compile.errors import ModelError

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 50, "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}
GROUPED = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 64}


def recorded(kind: str, **sizes: Any) -> list[TrainedLayer]:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # transformers draws weights so small that every softmax is a mean
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    layers = trained_layers(model)
    assert len(layers) == 2
    with torch.no_grad(), recording(layers):
        for length in (20, 7):
            model(input_ids=torch.randint(0, 50, (1, length)))
    model(input_ids=torch.zeros(1, 3, dtype=torch.long))  # not recorded any more
    assert [tuple(x.shape) for x in layers[1].inputs] == [(1, 20, 24), (1, 7, 24)]
    return layers


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("Bert", SIZES), ("Llama", GROUPED), ("Qwen2", GROUPED), ("Mistral", GROUPED | {"sliding_window": 5})],
)
def test_layers_compute_what_the_model_computes(kind: str, sizes: dict[str, Any]) -> None:
    for layer in recorded(kind, **sizes):
        for call, x in enumerate(layer.inputs):
            layer.check(call, layer.attention(x).detach())
            with pytest.raises(ModelError, match="whose own result is another"):
                layer.check(call, layer.attention(x) * 1.1)


def test_a_model_that_looks_like_llama_and_means_something_else_is_refused() -> None:
    """Cohere turns queries and keys in pairs, where Llama turns them in halves: the names are the same."""
    layer = recorded("Cohere", **GROUPED)[1]
    with pytest.raises(ModelError, match=r"what BERT's or Llama's does, got layers\.1\.self_attn, a CohereAttention"):
        layer.check(0, layer.attention(layer.inputs[0]))


def test_a_model_without_such_layers() -> None:
    with pytest.raises(ModelError, match="model: expected attention written as in BERT or Llama, got Linear"):
        trained_layers(torch.nn.Linear(2, 2))
