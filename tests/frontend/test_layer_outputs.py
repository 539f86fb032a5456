"""What attentions inside of other people's graphs do, as outputs: weights, entropy and heads of each layer.

What is right is what PyTorch says of the same layers in float64; what is allowed follows from what it says in float32.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

import mhsa_compile as mhsa
from mhsa_compile.errors import MhsaError, ModelError, SpecError
from mhsa_compile.frontend.canonicalize.canonicalize import canonicalize
from mhsa_compile.frontend.export.export import export
from mhsa_compile.spec.outputs import LayerWord, layer_words, split_words
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.oracle.evaluate import oracle

VOCABULARY, HEADS, WIDTH = 101, 3, 60
EXAMPLE, SIZES, CALLS = (2, 7), ((3, 23), (2, 40), (1, 1)), 5
Arrays = dict[str, np.ndarray]
pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")


class Model(nn.Module):
    """`tokens` and `valid` (B, L) -> (B, L, D), by one of transformers."""

    def __init__(self, inner: nn.Module, **said: Any) -> None:
        super().__init__()
        self.inner, self.said = inner, said

    def forward(self, tokens: Tensor, valid: Tensor) -> Tensor:
        result: Tensor = self.inner(input_ids=tokens, attention_mask=valid, **self.said).last_hidden_state
        return result


class Encoder(nn.Module):
    """PyTorch's own encoder, of `x` (B, L, D) and `hidden` (B, L), True where there is padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 70, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        result: Tensor = self.inner(x, src_key_padding_mask=hidden)
        return result


def bert(kind: str) -> nn.Module:
    config = BertConfig(
        hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=HEADS, intermediate_size=70,
        vocab_size=VOCABULARY, max_position_embeddings=64, attn_implementation=kind,
    )  # fmt: skip
    return Model(BertModel(config, add_pooling_layer=False))


def gpt2(kind: str) -> nn.Module:
    config = GPT2Config(
        n_embd=WIDTH, n_head=HEADS, n_layer=2, vocab_size=VOCABULARY, n_positions=64, attn_implementation=kind
    )
    return Model(GPT2Model(config), use_cache=False)


def tokens(batch: int, length: int) -> dict[str, Tensor]:
    """The last row ends before the others."""
    torch.manual_seed(length)
    valid = torch.ones(batch, length, dtype=torch.int64)
    valid[-1, max(1, length // 2) :] = 0
    return {"tokens": torch.randint(0, VOCABULARY, (batch, length)), "valid": valid}


def rows(batch: int, length: int) -> dict[str, Tensor]:
    x = torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(length))
    return {"x": x, "hidden": tokens(batch, length)["valid"] == 0}


@dataclass(frozen=True)
class Subject:
    """A model, what it is called with, how many layers it has, and which of its modules take what heads put out."""

    build: Callable[[str], nn.Module]
    inputs: Callable[[int, int], dict[str, Tensor]]
    layers: int
    joined: str = ""

    def made(self, kind: str) -> nn.Module:
        torch.manual_seed(0)
        model = self.build(kind).eval()
        for name, parameter in model.named_parameters():
            nn.init.normal_(parameter, std=0.1 if "bias" in name else 0.3)  # else all keys are looked at alike
        return model


SUBJECTS = {
    "bert": Subject(bert, tokens, 3, "attention.output.dense"),
    "gpt2": Subject(gpt2, tokens, 2, "attn.c_proj"),
    "encoder": Subject(lambda kind: Encoder(), rows, 2),
}
FILES = [("bert", "eager", 17), ("bert", "sdpa", 23), ("gpt2", "eager", 23), ("encoder", "sdpa", 23)]
MODULES = [("bert", "sdpa"), ("gpt2", "sdpa")]


def inside(name: str, model: nn.Module, inputs: dict[str, Tensor]) -> Arrays:
    """What the layers do, as PyTorch says it: their names as ours."""
    dtype = next(model.parameters()).dtype
    given = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    with torch.no_grad():
        found = of_encoder(model, **given) if name == "encoder" else of_transformers(name, model, given)
    for key in [key for key in found if key.endswith("weights")]:
        found[key.replace("weights", "entropy")] = torch.special.entr(found[key]).sum(-1)
    return {key: value.numpy() for key, value in found.items()}


def of_transformers(name: str, model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    model.inner.set_attn_implementation("eager")
    seen: list[Tensor] = []
    joined = [module for path, module in model.named_modules() if path.endswith(SUBJECTS[name].joined)]
    hooks = [module.register_forward_pre_hook(lambda _, x: seen.append(x[0])) for module in joined]
    y = model.inner(inputs["tokens"], attention_mask=inputs["valid"], output_attentions=True, **model.said)
    for hook in hooks:
        hook.remove()
    found = {"y": y.last_hidden_state}
    for number, (weights, heads) in enumerate(zip(y.attentions, seen, strict=True)):
        found[f"layer{number}_weights"] = weights
        found[f"layer{number}_heads"] = heads.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    return found


def of_encoder(model: Any, x: Tensor, hidden: Tensor) -> dict[str, Tensor]:
    found = {}
    for number, layer in enumerate(model.inner.layers):
        attention = layer.self_attn
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in nn.functional.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
        )
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden[:, None, None], -torch.inf)
        found[f"layer{number}_weights"] = weights = scores.softmax(-1)
        found[f"layer{number}_heads"] = heads = weights @ v
        x = layer.norm1(x + attention.out_proj(heads.transpose(1, 2).flatten(-2)))
        x = layer.norm2(x + layer.linear2(layer.linear1(x).relu()))
    return {"y": x, **found}


def exported(model: nn.Module, inputs: dict[str, Tensor], opset: int, path: Path) -> Path:
    """By PyTorch's old exporter up to opset 17, else by its new one; batch and length are free."""
    with warnings.catch_warnings(), fast_path_off():
        warnings.simplefilter("ignore")
        if opset <= 17:
            axes = {name: {0: "B", 1: "L"} for name in (*inputs, "y")}
            torch.onnx.export(
                model, tuple(inputs.values()), path, input_names=list(inputs), output_names=["y"],
                dynamic_axes=axes, opset_version=opset, dynamo=False,
            )  # fmt: skip
            return path
        sizes = {0: torch.export.Dim("B"), 1: torch.export.Dim("L")}
        program = torch.onnx.export(
            model, kwargs=inputs, dynamic_shapes=dict.fromkeys(inputs, sizes), opset_version=opset, dynamo=True,
            verbose=False, output_names=["y"],
        )  # fmt: skip
        assert program is not None
        program.save(path)
    return path


@contextmanager
def fast_path_off() -> Iterator[None]:
    """What it calls has no ONNX."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def check_all(name: str, model: nn.Module, artifact: mhsa.Artifact) -> None:
    """Every output of many calls, of several sizes and with one thread and two, within the budget."""
    subject, exact = SUBJECTS[name], copy.deepcopy(model).double()
    for threads in (1, 2):
        compiled = mhsa.load(artifact, threads=threads)
        for batch, length in SIZES:
            inputs = subject.inputs(batch, length)
            truth, yardstick = inside(name, exact, inputs), inside(name, model, inputs)
            arrays = {key: value.numpy() for key, value in inputs.items()}
            with ThreadPoolExecutor(2) as pool:
                results = list(pool.map(lambda _: compiled(**arrays), range(CALLS)))
            for result in results:
                assert set(result._fields) == truth.keys()
                for key, value in zip(result._fields, result, strict=True):
                    assert max_error(truth[key], value) <= budget(truth[key], yardstick[key], "float32"), key


WORDS = ["weights", "entropy", "heads"]


def check_signature(name: str, artifact: mhsa.Artifact, names: tuple[str, ...] = ("B", "L")) -> None:
    B, L = names
    layers = range(SUBJECTS[name].layers)
    dims = {"weights": (B, HEADS, L, L), "entropy": (B, HEADS, L), "heads": (B, HEADS, L, WIDTH // HEADS)}
    expected = [(f"layer{i}_{word}", dims[word]) for i in layers for word in WORDS]
    assert [(info.name, info.dims) for info in artifact.manifest.outputs][1:] == expected
    assert [block.fused for block in artifact.manifest.attention] == [True for _ in layers]


@pytest.mark.parametrize(("name", "kind", "opset"), FILES)
def test_layers_of_a_file(name: str, kind: str, opset: int, tmp_path: Path) -> None:
    model = SUBJECTS[name].made(kind)
    path = exported(model, SUBJECTS[name].inputs(*EXAMPLE), opset, tmp_path / "model.onnx")
    artifact = mhsa.compile(path, outputs=WORDS)
    check_signature(name, artifact)
    check_all(name, model, artifact)
    artifact.save(tmp_path / "model.mhsa")
    verdict = mhsa.verify(tmp_path / "model.mhsa", cases=[{"B": 2, "L": 17}])
    assert verdict.ok, (verdict.worst, [check for check in verdict.checks if not check.ok])


@pytest.mark.parametrize(("name", "kind"), MODULES)
def test_layers_of_a_module(name: str, kind: str) -> None:
    model = SUBJECTS[name].made(kind)
    artifact = mhsa.compile(model, example_inputs=SUBJECTS[name].inputs(*EXAMPLE), outputs=WORDS)
    check_all(name, model, artifact)
