"""Families of transformers accelerated in place: attentions that ran on artifacts, errors, tokens, and the way back.

`model_families.py` has the families, and compiles them whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import mhsa_compile as mhsa
from mhsa_compile.compiler import pipeline
from mhsa_compile.integrations import attention_operator, call_table, layer_artifacts, torch_attention
from mhsa_compile.integrations import transformers as interface
from mhsa_compile.verification.error_budget import budget, max_error
from support.cpu_time import cpu_seconds
from support.interface_models import CACHES, prompts, sharpen, ten_tokens
from support.model_families import UNSEEN, Family, Inputs

DTYPE = "float32"


@dataclass
class InPlace:
    """What became of one family.

    ours, left   attentions of one forward that an artifact computed, and that PyTorch did
    worst        the largest error as a share of its budget
    tokens       whether each way of generating gave the tokens of eager attention, by the kind of cache
    seconds      of CPUs that compiling took, over all that was compiled for the family
    kept         why an attention was not replaced, if one was not
    """

    ours: int = 0
    left: int = 0
    worst: float = 0.0
    tokens: dict[str, bool] = field(default_factory=dict)
    seconds: float = 0.0
    kept: str = ""


def run(family: Family) -> InPlace:
    """Accelerates the family's whole model, holds calls of several sizes against float64, generates, and restores.

    Raises AssertionError where the model is not itself again, or where its attention by name is another.
    """
    outcome = InPlace()
    with _anew(outcome):
        _judge_outputs(_weighted(family.build("eager")), family, outcome)
        if outcome.ours and family.generates:
            _judge_tokens(family, outcome)
    return outcome


def _judge_outputs(model: nn.Module, family: Family, outcome: InPlace) -> None:
    cases = [_given(family, sizes) for sizes in UNSEEN]
    exact = [_outputs(copy.deepcopy(model).double(), _wide(inputs), inputs) for inputs in cases]
    own = [_outputs(model, inputs, inputs) for inputs in cases]
    report = mhsa.accelerate(model)
    outcome.kept = "; ".join(dict.fromkeys(row.why_kept for row in report.kept))
    if not report.replaced:
        return
    _outputs(model, cases[0], cases[0])  # compiles; what traces a module then is no attention of the model's
    outcome.ours, outcome.left = _counted(model, cases[0])
    for inputs, truths, yardsticks in zip(cases, exact, own, strict=True):
        for _ in range(2):
            results = _outputs(model, inputs, inputs)
            for truth, yardstick, result in zip(truths, yardsticks, results, strict=True):
                outcome.worst = max(outcome.worst, max_error(truth, result) / budget(truth, yardstick, DTYPE))
        if not any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
            _assert_equal(_outputs(_by_name(model, family), inputs, inputs), results, "attn_implementation='mhsa'")
    mhsa.restore(model)
    for inputs, yardsticks in zip(cases, own, strict=True):
        _assert_equal(_outputs(model, inputs, inputs), yardsticks, "restore")


def _by_name(model: nn.Module, family: Family) -> nn.Module:
    """The same model, built with attn_implementation="mhsa"."""
    copy = _weighted(family.build(interface.NAME))
    copy.load_state_dict(model.state_dict())
    return copy


def _judge_tokens(family: Family, outcome: InPlace) -> None:
    """Ten tokens by greedy search, half of the prompts with padding before them."""
    fields = {**family.fields, **({"use_cache": True} if "use_cache" in family.fields else {})}
    model = _weighted(replace(family, model=family.generates, fields=fields).build("eager"))
    inputs = _prompt(family)
    for cache, options in CACHES.items():
        try:
            expected = ten_tokens(model, inputs, **options)
        except ValueError:  # the family has no such cache
            continue
        mhsa.accelerate(model)
        outcome.tokens[cache] = all(torch.equal(ten_tokens(model, inputs, **options), expected) for _ in range(2))
        mhsa.restore(model)


def _prompt(family: Family) -> Inputs:
    inputs = family.inputs(2, 9)
    if "input_features" in inputs:
        return {"input_features": inputs["input_features"]}
    if "decoder_input_ids" in inputs:
        return prompts(2, 9)
    return prompts(2, 9, hidden=4)


def _weighted(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    sharpen(model)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others know no float64
    return model


def _given(family: Family, sizes: tuple[int, int]) -> Inputs:
    torch.manual_seed(sum(sizes))
    return family.inputs(*sizes)


def _wide(inputs: Inputs) -> Inputs:
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def _outputs(model: nn.Module, inputs: Inputs, mask_of: Inputs) -> list[np.ndarray]:
    """All tensors that the model gives; of rows of tokens only those that the mask shows."""
    with torch.no_grad():
        results = model(**inputs)
    mask = mask_of.get("attention_mask")
    outputs = []
    for value in pytree.tree_leaves(dict(results)):
        if isinstance(value, Tensor) and value.is_floating_point():
            by_token = mask is not None and value.shape[:2] == mask.shape
            outputs.append((value[mask.bool()] if by_token else value).numpy())
    assert outputs
    return outputs


def _assert_equal(actual: list[np.ndarray], expected: list[np.ndarray], what: str) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert np.array_equal(one, other), f"{what} gives other bits"


class _Softmaxes(TorchDispatchMode):
    """Counts the attentions that PyTorch computes: softmaxes of scores, with three axes or more, and fused ones."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if "scaled_dot_product" in name or ("softmax" in name and args[0].ndim > 2):
            self.count += 1
        return func(*args, **(kwargs or {}))


def _counted(model: nn.Module, inputs: Inputs) -> tuple[int, int]:
    """The attentions of one forward: by artifacts, by PyTorch."""
    calls: list[str] = []
    with (
        _noted(attention_operator, "attend", calls),
        _noted(torch_attention.LayerForward, "_compute", calls),
        _Softmaxes() as softmaxes,
        torch.no_grad(),
    ):
        model(**inputs)
    return len(calls), softmaxes.count


@contextmanager
def _noted(place: Any, name: str, calls: list[str]) -> Iterator[None]:
    original: Callable[..., Any] = getattr(place, name)

    def noted(*words: Any, **keywords: Any) -> Any:
        calls.append(name)
        return original(*words, **keywords)

    with mock.patch.object(place, name, noted):
        yield


@contextmanager
def _anew(outcome: InPlace) -> Iterator[None]:
    """A context in which nothing that another family had compiled is there; what compiling takes is counted."""
    original = pipeline.compile

    def timed(*words: Any, **keywords: Any) -> Any:
        began = cpu_seconds()
        try:
            return original(*words, **keywords)
        finally:
            outcome.seconds += cpu_seconds() - began

    with (
        mock.patch.dict(call_table.TABLES, {}, clear=True),
        mock.patch.object(layer_artifacts, "_ARTIFACTS", layer_artifacts._Artifacts()),
        mock.patch.object(pipeline, "compile", timed),
    ):
        yield
