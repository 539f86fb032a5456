"""A whole model of transformers that runs without some of its heads, and how far it is from what it was, on text.

Notation: B batch, L query length, D embed, H heads, F value head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mhsa_analysis.model_layers import TrainedLayer
from mhsa_analysis.pruning import PruningPlan
from mhsa_compile.errors import InputError, ModelError


@contextmanager
def pruned_run(
    model: nn.Module, layers: Sequence[TrainedLayer], plans: Sequence[PruningPlan], *, refit: bool
) -> Iterator[nn.Module]:
    """While it lasts, `model` runs as if its layers had no more heads than those of the plans.

    refit    with W_O fitted anew; else with the means of what is gone in the bias

    A layer that runs several times in a call of the model, as ALBERT's, has a plan for each. Raises ModelError where
    the heads' outputs go through no module, InputError (too few tokens for a refit).
    """
    of_projection: dict[nn.Module, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for layer, plan in zip(layers, plans, strict=True):
        if layer.projection is None:
            got = f"{layer.name}, a {type(layer.module).__name__}"
            raise ModelError("model", "layers whose heads go through a module of their own", got)
        of_projection.setdefault(layer.projection, []).append(_output(plan, refit))
    with ExitStack() as undo:
        for projection, outputs in of_projection.items():
            undo.callback(projection.register_forward_hook(_instead(outputs)).remove)
        yield model


def _output(plan: PruningPlan, refit: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The columns of the heads' outputs that are kept, and what makes y of them: W_O and the bias."""
    moments = plan.split.fitted
    columns = moments.columns(plan.kept)
    out = plan.fit.out if refit else moments.out[columns]
    return torch.from_numpy(columns), torch.from_numpy(out), torch.from_numpy(moments.bias(plan.kept, out))


def _instead(outputs: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Any:
    """A hook that gives y in the order of `outputs`, again and again."""
    calls = 0

    def hook(_: nn.Module, heads: tuple[Tensor, ...], y: Tensor) -> Tensor:
        nonlocal calls
        columns, out, bias = outputs[calls % len(outputs)]
        calls += 1
        return heads[0][..., columns] @ out.to(y.dtype) + bias.to(y.dtype)

    return hook


@torch.no_grad()
def perplexity(model: nn.Module, inputs: Sequence[Mapping[str, Tensor]]) -> float:
    """exp of the mean of -ln p(next token), over all tokens of `inputs` but the first of each. Raises InputError."""
    total, count = 0.0, 0
    for one in inputs:
        ids = one["input_ids"]
        logits = model(**one).logits[:, :-1].double()
        total += float(nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
        count += ids[:, 1:].numel()
    if not count:
        raise InputError("inputs", "texts of two tokens or more", "no token that follows another")
    return float(torch.tensor(total / count, dtype=torch.float64).exp())


@torch.no_grad()
def token_outputs(model: nn.Module, inputs: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """The model's last hidden state at each token, (tokens, D), float64."""
    return torch.cat([model(**one).last_hidden_state.flatten(0, 1).double() for one in inputs])
