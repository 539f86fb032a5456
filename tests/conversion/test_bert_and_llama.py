"""Layers of BERT and Llama, converted: the same results in float64, and the rotary tables of every scaling."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mhsa_compile import masks
from mhsa_compile.conversion.from_torch import from_torch
from mhsa_compile.conversion.from_transformers import from_bert, from_llama
from mhsa_compile.conversion.rotary import rope_of
from mhsa_compile.errors import ModelError
from mhsa_compile.nn.modules import MultiHeadAttention
from mhsa_compile.spec.attention_spec import AttentionSpec

pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("float64")

CLOSE = {"rtol": 0, "atol": 1e-12}  # everything here runs in float64, where both sides are exact to about 1e-15


def bert_attention(**options) -> nn.Module:
    bert = pytest.importorskip("transformers.models.bert.modeling_bert")
    config = bert.BertConfig(hidden_size=24, num_attention_heads=4, attn_implementation="eager")
    return bert.BertAttention(config, **options).eval()


def test_from_bert() -> None:
    layer = bert_attention()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    ours = from_bert(layer.float()).double()
    layer = layer.double()
    x = torch.randn(2, 5, 24)
    padding = torch.from_numpy(masks.key_padding([5, 3], 5))
    additive = torch.where(padding, 0.0, -torch.inf)[:, None, None, :]
    expected = layer(x, attention_mask=additive)[0]
    # BertAttention goes on: dropout, residual and LayerNorm, which stay outside of ours.
    torch.testing.assert_close(layer.output.LayerNorm(ours(x, mask=padding) + x), expected, **CLOSE)


def test_from_bert_kinds() -> None:
    assert from_bert(bert_attention(is_causal=True).float(), mask=None).spec.causal == "top_left"
    assert from_bert(bert_attention(is_cross_attention=True).float()).spec.kv_embed_dim == 24
    with pytest.raises(ModelError, match=r"got a BertSelfAttention.*BertAttention: the output projection"):
        from_bert(bert_attention().self.float())
    with pytest.raises(ModelError, match="layer: expected an attention module of transformers, got Linear"):
        from_bert(nn.Linear(2, 2))


def exact(spec: AttentionSpec) -> MultiHeadAttention:
    """The layer of a spec in float64, with tables that never were anything else."""
    module = MultiHeadAttention(spec).double()
    module.rope_cos, module.rope_sin = map(torch.from_numpy, spec.rope.tables())
    return module


def llama_attention(**options) -> nn.Module:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    config = llama.LlamaConfig(**sizes, attn_implementation="sdpa", **options)  # eager is float32 in part
    return llama.LlamaAttention(config, layer_idx=0).eval()


SCALED = {"rope_theta": 300.0, "factor": 6.0, "original_max_position_embeddings": 23}
LLAMA3 = SCALED | {"rope_type": "llama3", "low_freq_factor": 0.2, "high_freq_factor": 1.5}
YARN = SCALED | {"rope_type": "yarn"}
LLAMAS = (
    {},
    pytest.param({"head_dim": 10, "attention_bias": True}, marks=pytest.mark.thorough),
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    pytest.param({"head_dim": 22, "rope_parameters": LLAMA3}, marks=pytest.mark.thorough),
    pytest.param({"head_dim": 22, "rope_parameters": YARN}, marks=pytest.mark.thorough),
    {"head_dim": 22, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False}},
    {"head_dim": 22, "rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 1.5, "beta_slow": 0.5}},
)


@pytest.mark.parametrize("options", LLAMAS, ids=str)
def test_from_llama(options: dict[str, object]) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    layer = llama_attention(**options).float()
    ours = from_llama(layer, max_length=7)
    spec = ours.spec
    x = torch.randn(2, 7, 24)
    cos, sin = (torch.from_numpy(table).repeat(1, 2)[None] for table in spec.rope.tables())
    theirs = LlamaRotaryEmbedding(layer.config)(x.float(), torch.arange(7)[None])
    torch.testing.assert_close((cos.float(), sin.float()), theirs, rtol=0, atol=7 * torch.finfo(torch.float32).eps)
    hidden = torch.where(torch.from_numpy(masks.causal(7, 7, "top_left")), 0.0, -torch.inf)[None, None]
    expected = layer.double()(x, position_embeddings=(cos, sin), attention_mask=hidden)[0]
    exact_tables = exact(spec)
    exact_tables.load_state_dict(ours.double().state_dict())
    torch.testing.assert_close(exact_tables(x), expected, **CLOSE)
    assert from_llama(layer.float(), kv_cache=True).spec.rope.max_length == 32


def test_from_llama_refuses() -> None:
    with pytest.raises(ModelError, match="weights of float32, bfloat16, float16, got float64"):
        from_llama(llama_attention())
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ModelError, match="no call changes: linear, llama3, yarn, got rope_type='dynamic'"):
        from_llama(llama_attention(rope_parameters=scaled).float())


def test_which_rotary_embedding_a_layer_has_is_said_by_its_kind() -> None:
    layer = llama_attention().float()
    layer.config.rope_parameters = {"full": {"rope_theta": 7.0}, "sliding": {"rope_theta": 9.0}}
    with pytest.raises(ModelError, match="a layer_type among full, sliding, as its config has, got None"):
        rope_of(layer, layer.config, 6)
    layer.layer_type = "sliding"
    assert rope_of(layer, layer.config, 6).theta == 9.0


def test_layers_of_others_with_more_outputs() -> None:
    words = ("y", "heads", "entropy", "weights:heads=0")
    assert from_torch(nn.MultiheadAttention(24, 4, dtype=torch.float32), outputs=words).spec.outputs == words
    assert from_bert(bert_attention().float(), outputs=list(words)).spec.outputs == words
    assert from_llama(llama_attention().float(), outputs=words).spec.outputs == words
