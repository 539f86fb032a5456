"""attn_implementation="mhsa": the tokens that eager attention gives, nothing silent, nothing compiled for a length."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.interface_models import (
    CACHES,
    PLAIN,
    TOKENS,
    built,
    decoder,
    encoder,
    generated,
    prompts,
    share_of_budget,
)

from mhsa_compile.errors import InputError
from mhsa_compile.integrations import transformers as mhsa_transformers
from mhsa_compile.integrations.call_table import TABLES

Model = Any


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    mhsa_transformers.register()


@pytest.fixture(scope="module")
def llama() -> Model:
    return decoder("llama")


@pytest.mark.thorough
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("hidden", [0, 4])
def test_generates_the_tokens_of_eager_attention(llama: Model, cache: str, hidden: int) -> None:
    inputs = prompts(2, 11, hidden)
    expected = generated(llama, inputs, "eager", **CACHES[cache])
    for _ in range(3):
        assert torch.equal(generated(llama, inputs, "mhsa", **CACHES[cache]), expected)


@pytest.mark.thorough_only("2-7-3")
@pytest.mark.parametrize(("batch", "length", "hidden"), [(2, 7, 3), (1, 1, 0), (3, 13, 0)])
def test_is_within_the_budget_of_eager_attention(llama: Model, batch: int, length: int, hidden: int) -> None:
    inputs = prompts(batch, length)
    inputs["attention_mask"][-1, length - hidden :] = 0  # at the end: what is behind a query is hidden from none
    assert share_of_budget(llama, lambda model: model(**inputs).logits) <= 1


@pytest.mark.thorough
def test_an_encoder_reads_padding() -> None:
    inputs = prompts(2, 9, hidden=3)
    assert share_of_budget(encoder("bert"), lambda model: model(**inputs).last_hidden_state) <= 1


def test_no_length_compiles_anything(llama: Model) -> None:
    generated(llama, prompts(2, 5), "mhsa")
    before = len(TABLES["mhsa"])
    for batch, length in ((1, 1), (3, 17), (2, 40)):
        generated(llama, prompts(batch, length, hidden=length // 2), "mhsa")
    from transformers import DynamicCache

    cache, ids = DynamicCache(), prompts(1, 12)["input_ids"]
    with torch.no_grad():
        first = llama(ids[:, :7], past_key_values=cache).logits
        rest = llama(ids[:, 7:], past_key_values=cache).logits  # several queries behind a cache come with a mask
        whole = llama(ids).logits
    assert torch.allclose(torch.cat((first, rest), 1), whole, rtol=1e-4, atol=1e-4)
    assert len(TABLES["mhsa"]) == before


def test_several_threads_get_what_one_gets(llama: Model) -> None:
    inputs = [prompts(2, length, 2) for length in (5, 9, 16)]
    llama.set_attn_implementation("mhsa")
    with torch.no_grad():
        expected = [llama(**given).logits for given in inputs]

    def call(number: int) -> None:
        with torch.no_grad():
            for _ in range(10):
                assert torch.equal(llama(**inputs[number]).logits, expected[number])

    with ThreadPoolExecutor(len(inputs)) as pool:
        list(pool.map(call, range(len(inputs))))


def test_masks_of_four_axes_pass_as_they_are(llama: Model) -> None:
    ids = prompts(2, 11)["input_ids"]
    seen = torch.ones(2, 1, 11, 11).tril(1).bool()  # not the causal one: each query sees the next key, too
    added = torch.zeros(2, 1, 11, 11).masked_fill(~seen, torch.finfo(torch.float32).min)
    assert share_of_budget(llama, lambda model: model(ids, attention_mask=added.to(model.dtype)).logits) <= 1
    llama.set_attn_implementation("mhsa")
    with torch.no_grad():
        results = [llama(ids, attention_mask=mask).logits for mask in (seen, added)]
        assert torch.allclose(*results, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(results[0], llama(ids).logits, atol=1e-2)
        with pytest.raises(InputError, match="attention_mask: expected bool"):
            llama(ids, attention_mask=seen.long())


def test_gradients_dropout_and_weights_are_refused(llama: Model) -> None:
    llama.set_attn_implementation("mhsa")
    given = prompts(1, 5)
    with pytest.raises(InputError, match="without a gradient to follow"):
        llama(**given)
    with torch.no_grad(), pytest.raises(InputError, match="output_attentions"):
        llama(**given, output_attentions=True)
    layer = llama.model.layers[0].self_attn
    layer.attention_dropout = 0.1
    llama.train()
    try:
        with torch.no_grad(), pytest.raises(InputError, match="dropout"):
            llama(**given)
    finally:
        llama.eval()
        layer.attention_dropout = 0.0


def test_weights_that_are_collected_by_hooks_are_refused() -> None:
    """OPT's layers are not told that anybody wants them: none would come, without a word."""
    model = built("OPT", "OPTForCausalLM", {**PLAIN, **TOKENS, "ffn_dim": 64, "word_embed_proj_dim": 64})
    given = prompts(1, 5)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        assert len(model(**given, output_attentions=True).attentions) == 2
        model.set_attn_implementation("mhsa")
        with pytest.raises(InputError, match="output_attentions: expected False"):
            model(**given, output_attentions=True)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"indices": torch.zeros(1)}, "keyword 'indices'"),
        ({"cache": object()}, "cache"),
        ({"cu_seq_lens_q": torch.zeros(2)}, "keyword 'cu_seq_lens_q'"),
        ({"sliding_window": 3}, "a mask, as 5 keys"),
        ({"is_causal": None}, "is_causal"),
    ],
)
def test_what_may_change_the_meaning_is_refused(given: dict[str, Any], named: str) -> None:
    q = torch.randn(1, 4, 5, 16)
    with pytest.raises(InputError, match=named):
        mhsa_transformers.attention_forward(torch.nn.Identity(), q, q, q, **{"is_causal": True, **given})


class Layer(torch.nn.Module):
    """Calls the interface as an attention layer of a decoder does."""

    is_causal = True

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return mhsa_transformers.attention_forward(self, q, k, k, scaling=0.25)[0]


@pytest.mark.thorough
def test_export_and_compile_see_one_operator() -> None:
    made = torch.Generator().manual_seed(0)
    free = {name: {0: torch.export.Dim("B"), 2: torch.export.Dim("L")} for name in ("q", "k")}
    examples = torch.randn(2, 4, 7, 16, generator=made), torch.randn(2, 2, 7, 16, generator=made)
    with torch.no_grad():
        program = torch.export.export(Layer(), examples, dynamic_shapes=free, strict=False)
        assert sum("mhsa.attention" in str(node.target) for node in program.graph.nodes) == 1
        compiled = torch.compile(Layer(), backend="aot_eager", fullgraph=True)
        for batch, length in ((2, 7), (3, 11)):
            q, k = (torch.randn(batch, heads, length, 16, generator=made) for heads in (4, 2))
            expected = Layer()(q, k)
            assert expected.shape == (batch, length, 4, 16)
            assert torch.equal(program.module()(q, k), expected)
            assert torch.equal(compiled(q, k), expected)


@pytest.mark.thorough
def test_a_backward_through_the_operator_is_refused() -> None:
    q = torch.randn(1, 4, 5, 16, requires_grad=True)
    y = torch.ops.mhsa.attention(q, q, q, None, None, 0.25, 0.0, False, False, False)
    with pytest.raises(InputError, match="without a gradient to follow"):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:attention .mhsa.. PyTorch computes calls with")
def test_float64_is_pytorchs_whatever_there_is_of_scores() -> None:
    """As of a Gemma 2 or a gpt-oss that became float64."""
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 7, 16, generator=made, dtype=torch.float64) for heads in (4, 2, 2))
    sinks, bias = (torch.randn(size, generator=made, dtype=torch.float64) for size in ((4,), (1, 4, 7, 7)))
    seen = torch.ones(7, 7).tril().bool()
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = ((q @ k.mT * 0.25 / 3).tanh() * 3 + bias).masked_fill(~seen, -torch.inf)
    weights = torch.cat((scores, sinks.view(1, 4, 1, 1).expand(2, 4, 7, 1)), -1).softmax(-1)[..., :-1]
    rest = {"is_causal": True, "scaling": 0.25, "softcap": 3.0, "s_aux": sinks}
    module = torch.nn.Identity()
    for mask in (None, seen[None, None]):
        y, _ = mhsa_transformers.attention_forward(module, q, k, v, mask, position_bias=bias, **rest)
        assert y.dtype == torch.float64 and torch.allclose(y, (weights @ v).transpose(1, 2), atol=1e-12)
