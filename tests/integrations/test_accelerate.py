"""accelerate and restore: the numbers of PyTorch's own layers, a model that is itself again, reasons for the rest."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.interface_models import decoder, generated, prompts
from torch import Tensor, nn

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.frontend.export.torch_layers import slow_path
from mhsa_compile.integrations.accelerate import NAME
from mhsa_compile.verification.error_budget import budget, max_error

B, L, S, D, H = 3, 7, 9, 64, 4


def rows(length: int = L) -> Tensor:
    return torch.randn(B, length, D, generator=torch.Generator().manual_seed(length))


def hidden_tail(length: int, count: int) -> Tensor:
    mask = torch.zeros(B, length, dtype=torch.bool)
    mask[1, length - count :] = True
    return mask


def layer(**fields: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    made = nn.MultiheadAttention(D, H, **{"batch_first": True, **fields}).eval()
    if made.in_proj_bias is not None:
        nn.init.normal_(made.in_proj_bias)
    return made


def converted(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def hold(model: nn.Module, call: Callable[[nn.Module, torch.dtype], Any]) -> None:
    """Holds what `call` gets of the accelerated model against float64; then the model is as it was, to the bit."""
    state, names = {k: v.clone() for k, v in model.state_dict().items()}, [set(vars(m)) for m in model.modules()]
    with torch.no_grad():
        with slow_path():  # the fast one gives NaN, and other rows for what is padded
            exact, own = call(copy.deepcopy(model).double(), torch.float64), call(model, torch.float32)
        before = call(model, torch.float32)
        report = mhsa.accelerate(model, on_unsupported="raise")
        results = [call(model, torch.float32) for _ in range(3)]
        assert report.calls == {}
        mhsa.restore(model)
        after = call(model, torch.float32)
    for truth, yardstick, *found in zip(exact, own, *results, strict=True):
        for one in found:
            assert max_error(truth.numpy(), one.numpy()) <= budget(truth.numpy(), yardstick.numpy(), "float32")
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert [set(vars(module)) for module in model.modules()] == names


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("batch_first", "cross", "given"),
    [
        (True, False, {}),
        (False, False, {"key_padding_mask": hidden_tail(L, 3), "average_attn_weights": False}),
        (False, True, {"key_padding_mask": hidden_tail(S, 2), "need_weights": False}),
        (True, False, {"attn_mask": torch.ones(L, L).triu(1).bool(), "is_causal": True, "need_weights": False}),
        (True, True, {"attn_mask": torch.randn(B * H, L, S, generator=torch.Generator().manual_seed(2))}),
    ],
    ids=["weights", "padding", "cross", "causal", "float"],
)
def test_a_layer(batch_first: bool, cross: bool, given: dict[str, Any]) -> None:
    x, context = rows(), rows(S)

    def call(model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
        q, c = (value if batch_first else value.transpose(0, 1) for value in (x.to(dtype), context.to(dtype)))
        others = {name: converted(value, dtype) for name, value in given.items()}
        found = model(q, c, c, **others) if cross else model(q, q, q, **others)
        return [one for one in found if one is not None]

    hold(layer(batch_first=batch_first), call)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # of the encoder as it was
def test_an_encoder_leaves_the_fast_path_and_nested_tensors() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 80, batch_first=True), 2).eval()
    padding = hidden_tail(L, 3)
    hold(model, lambda found, dtype: [found(rows().to(dtype), src_key_padding_mask=padding)])
    assert torch.backends.mha.get_fastpath_enabled()
    assert model.use_nested_tensor


@pytest.mark.thorough
def test_a_decoder() -> None:
    torch.manual_seed(0)
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, 80, batch_first=True), 1).eval()
    causal = torch.ones(L, L).triu(1).bool()

    def call(found: nn.Module, dtype: torch.dtype) -> list[Tensor]:
        return [found(rows().to(dtype), rows(S).to(dtype), tgt_mask=causal, tgt_is_causal=True)]

    hold(model, call)


@pytest.mark.thorough
def test_a_row_that_sees_nothing_is_the_bias() -> None:
    model, x = layer(), rows()
    padding = torch.zeros(B, L, dtype=torch.bool)
    padding[2] = True
    mhsa.accelerate(model)
    with torch.no_grad():
        y, weights = model(x, x, x, key_padding_mask=padding)
    assert torch.equal(y[2], model.out_proj.bias.detach().expand(L, D))
    assert not weights[2].any()


@pytest.mark.thorough
def test_edited_weights_are_noticed() -> None:
    model, x = layer(), rows()
    report = mhsa.accelerate(model)

    def error() -> float:
        with torch.no_grad():
            found = model(x, x, x, need_weights=False)[0]
            return float((found - nn.MultiheadAttention.forward(model, x, x, x)[0]).abs().max())

    assert error() < 1e-4
    with torch.no_grad():
        model.in_proj_weight.mul_(1.5)
    assert error() < 1e-4
    model.load_state_dict(layer().state_dict())
    assert error() < 1e-4
    model.out_proj.weight = nn.Parameter(model.out_proj.weight.detach() * 2)
    assert error() < 1e-4
    model.out_proj.weight.data.mul_(2)  # which PyTorch does not count
    assert error() < 1e-4
    model.out_proj.weight.data[0, 1] = 3  # of one number alone a sample does not tell
    report.refresh()
    assert error() < 1e-4


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_what_torchscript_traces_is_pytorchs() -> None:
    model, x = layer(), rows()
    mhsa.accelerate(model)
    with torch.no_grad():
        traced: Any = torch.jit.trace(model, (x, x, x))
        expected = nn.MultiheadAttention.forward(model, 2 * x, 2 * x, 2 * x)
        assert torch.allclose(traced(2 * x, 2 * x, 2 * x)[0], expected[0], atol=1e-6)


@pytest.mark.thorough
def test_several_threads_get_what_one_gets() -> None:
    model, inputs = layer(), [rows(length) for length in (3, 8, 21)]
    mhsa.accelerate(model)
    with torch.no_grad():
        expected = [model(x, x, x, need_weights=False)[0] for x in inputs]

    def call(number: int) -> None:
        x = inputs[number]
        with torch.no_grad():
            for _ in range(20):
                assert torch.equal(model(x, x, x, need_weights=False)[0], expected[number])

    with ThreadPoolExecutor(len(inputs)) as pool:
        list(pool.map(call, range(len(inputs))))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kdim", "vdim", "batch_first", "given"),
    [
        (D, D, True, {}),
        (D, D, False, {"key_padding_mask": hidden_tail(S, 4), "need_weights": False}),
        (37, 29, True, {"key_padding_mask": hidden_tail(S, 4), "average_attn_weights": False}),
        (D, 29, False, {"attn_mask": torch.randn(L, S, generator=torch.Generator().manual_seed(2))}),
        (37, D, True, {"need_weights": False}),
    ],
    ids=["one width", "one width, padding", "two widths", "values of another", "keys of another"],
)
def test_keys_and_values_of_two_tensors(kdim: int, vdim: int, batch_first: bool, given: dict[str, Any]) -> None:
    tensors = rows(), rows(S) if kdim == D else rows(S)[..., :kdim], torch.randn(B, S, vdim)

    def call(model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (x.to(dtype) if batch_first else x.to(dtype).transpose(0, 1) for x in tensors)
        others = {name: converted(value, dtype) for name, value in given.items()}
        return [one for one in model(q, k, v, **others) if one is not None]

    hold(layer(kdim=kdim, vdim=vdim, batch_first=batch_first), call)


def test_queries_and_keys_of_one_tensor_and_other_values() -> None:
    """DETR's encoder: places are added to queries and keys, and not to values. One sequence alone, too."""
    places = torch.randn(L, D, generator=torch.Generator().manual_seed(9))

    def call(model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
        x = rows().to(dtype)
        qk = x + places.to(dtype)
        return [*model(qk, qk, x), *model(qk[0], qk[0], x[0])]

    hold(layer(), call)


@pytest.mark.thorough
def test_lengths_and_widths_that_differ_are_refused_as_pytorch_refuses_them() -> None:
    model, x = layer(vdim=32), rows()
    mhsa.accelerate(model)
    with torch.no_grad():
        for value in (x[..., :31], x[:, 1:, :32], x):
            with pytest.raises(InputError, match="input 'value'"):
                model(x, x, value)


def test_what_has_no_artifact_is_pytorchs_and_counted() -> None:
    model, x = layer(), rows()
    expected = model(x, x, x)[0].detach()
    report = mhsa.accelerate(model)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(model(x, x, x)[0].float(), expected, atol=0.1)
    assert report.calls == {"autocast": 1}
    assert "1 calls computed by PyTorch: autocast" in repr(report)


class Quantised(nn.MultiheadAttention):
    """Some subclass of PyTorch's attention."""


def hooked() -> nn.MultiheadAttention:
    model = layer()
    model.register_forward_hook(lambda module, inputs, output: None)
    return model


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: layer(add_zero_attn=True), "add_zero_attn"),
        (lambda: layer(add_bias_kv=True), "add_bias_kv"),
        (lambda: nn.MultiheadAttention(D, H, device="meta").eval(), "meta device"),
        (lambda: Quantised(D, H).eval(), "a subclass"),
        (lambda: layer().double(), "float64"),
        (hooked, "it has hooks"),
    ],
)
def test_what_is_kept_says_why(made: Callable[[], nn.Module], why: str) -> None:
    model = nn.Sequential(made(), layer()).eval()
    report = mhsa.accelerate(model)
    (kept,) = report.kept
    assert kept.name == "0" and why in kept.why_kept and why in repr(report)
    assert [row.name for row in report.replaced] == ["1"]
    mhsa.restore(model)
    with pytest.raises(ModelError, match="attention '0' of the model"):
        mhsa.accelerate(model, on_unsupported="raise")
    assert "forward" not in vars(model[1])


@pytest.mark.parametrize(
    ("options", "argument", "hint"),
    [
        ({"layers": "fast"}, "layers", "Did you mean 'fastest'?"),
        ({"layers": "none"}, "layers", ""),
        ({"on_unsupported": "rase"}, "on_unsupported", "Did you mean 'raise'?"),
        ({"linears": "int-4"}, "linears", "Did you mean 'int4'?"),
        ({"linears": "float"}, "linears", ""),
        ({"linears": "int8"}, "linears", "Did you mean 'int8:block=32'?"),
        ({"linears": "int9:block=32"}, "linears", ""),
    ],
)
def test_choices_that_are_none_say_what_was_probably_meant(options: Any, argument: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        mhsa.accelerate(layer(), **options)
    assert (caught.value.argument, caught.value.next_step) == (argument, hint)


@pytest.mark.parametrize(
    ("model", "got"), [("bert-base-uncased", "got str. Make or load one first"), (nn.Linear, "got the class Linear. ")]
)
def test_what_is_no_model_is_refused(model: Any, got: str) -> None:
    with pytest.raises(InputError, match=got):
        mhsa.accelerate(model)
    with pytest.raises(InputError, match="that is not accelerated"):
        mhsa.restore(model)


def test_training_gradients_and_twice_are_refused() -> None:
    model, x = layer(), rows()
    with pytest.raises(InputError, match="eval mode"):
        mhsa.accelerate(model.train())
    with pytest.raises(InputError, match="not accelerated"):
        mhsa.restore(model)
    mhsa.accelerate(model.eval())
    with pytest.raises(InputError, match="without a gradient to follow"):
        model(x, x, x)
    with pytest.raises(InputError, match="not accelerated"):
        mhsa.accelerate(model)
    with pytest.raises(InputError, match="training mode"), torch.no_grad():
        model.train()(x, x, x)


@pytest.mark.thorough
def test_a_model_of_transformers() -> None:
    model, inputs = decoder("llama"), prompts(2, 11, hidden=3)
    expected = generated(model, inputs, "eager")
    report = mhsa.accelerate(model)
    assert [row.kind for row in report.replaced] == ["LlamaForCausalLM"] and not report.kept
    assert model.config._attn_implementation.startswith("mhsa")
    with torch.no_grad():
        assert torch.equal(model.generate(**inputs, max_new_tokens=10, min_new_tokens=10, do_sample=False), expected)
    mhsa.restore(model)
    assert model.config._attn_implementation == "eager"


def test_models_that_never_ask_are_kept() -> None:
    from transformers import BloomConfig, BloomModel

    model = BloomModel(BloomConfig(vocab_size=11, hidden_size=32, n_head=4, n_layer=1)).eval()
    before = model.config._attn_implementation
    (kept,) = mhsa.accelerate(model).kept
    assert "AttentionInterface" in kept.why_kept
    assert model.config._attn_implementation == before


def test_a_model_of_transformers_without_weights_is_kept() -> None:
    with torch.device("meta"):
        model = decoder("llama")
    (kept,) = mhsa.accelerate(model).kept
    assert "tensors on meta" in kept.why_kept
    assert not model.config._attn_implementation.startswith("mhsa")


def wrapped(layer: Any) -> None:
    """As libraries that move weights do, which keep the forward that was there, and call it."""
    before = layer.forward

    def forward(*inputs: Any, **named: Any) -> Any:
        result = before(*inputs, **named)
        return (result[0] * 2, *result[1:]) if isinstance(result, tuple) else result * 2

    layer.forward = forward


class Tokens(nn.Module):
    """An encoder and a linear, each of which is replaced."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 96, batch_first=True), 1)
        self.linear = nn.Linear(D, 31)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        result: Tensor = self.linear(self.encoder(x, src_key_padding_mask=padding))
        return result


@pytest.mark.thorough_only("linear")
@pytest.mark.parametrize("place", ["linear", "encoder", "encoder.layers.0", "encoder.layers.0.self_attn"])
def test_a_forward_that_was_put_over_ours_stays_and_calls_pytorchs(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mhsa_compile.integrations.torch_linear.LEAST_WEIGHTS", 0)
    monkeypatch.setattr("mhsa_compile.integrations.layers.encoder.SMALL", 0)
    plain, x, padding = Tokens().eval(), rows(), hidden_tail(L, 5)
    model = copy.deepcopy(plain)
    report = mhsa.accelerate(model, linears=True, layers="parts")
    for each in (plain, model):
        wrapped(each.get_submodule(place))
    with torch.no_grad(), slow_path():
        assert torch.allclose(model(x), plain(x), atol=1e-4)
        calls = report.checked
        mhsa.restore(model)
        for each in (None, padding):
            assert torch.equal(model(x, each), plain(x, each))
        assert report.checked == calls, "no call of a kind that is new is ours"


def test_a_forward_that_was_taken_away_is_no_obstacle() -> None:
    model = layer()
    mhsa.accelerate(model)
    del model.forward
    mhsa.restore(model)
    assert "forward" not in vars(model)


def test_what_watches_operators_sees_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of an artifact is no operator: to a counter it would be nothing, to make_fx a constant."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.overrides import TorchFunctionMode
    from torch.utils.flop_counter import FlopCounterMode

    class Doubling(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            return result * 2 if function is nn.functional.linear else result

    def operations(model: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter:
            model(rows())
        return int(counter.get_total_flops())

    monkeypatch.setattr("mhsa_compile.integrations.torch_linear.LEAST_WEIGHTS", 0)
    monkeypatch.setattr("mhsa_compile.integrations.layers.encoder.SMALL", 0)
    plain = Tokens().eval()
    model = copy.deepcopy(plain)
    report = mhsa.accelerate(model, linears=True, layers="whole")
    with torch.no_grad(), slow_path():  # the fast one is an operator that no counter knows
        assert torch.allclose(model(rows()), plain(rows()), atol=1e-4) and not report.calls
        assert operations(model) == operations(plain) > 5e5
        with Doubling():
            assert torch.allclose(model(rows()), plain(rows()), atol=1e-4)
        program = make_fx(model, tracing_mode="real")(rows())
        other = rows().flip(0)
        assert torch.allclose(program(other), plain(other), atol=1e-4)
        with torch.device("cpu"):
            report.calls.clear()
            assert torch.allclose(model(rows()), plain(rows()), atol=1e-4) and not report.calls
    assert not torch.equal(plain(other), plain(rows())), "a constant would be seen"


@pytest.mark.thorough
def test_models_that_asked_for_different_things_each_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of transformers is found by name in the process: each model's has a name of its own."""
    from mhsa_compile.compiler import pipeline
    from mhsa_compile.integrations import transformers as mhsa_transformers

    asked: list[tuple[str, str]] = []
    compiled = pipeline.compile

    def noted(source: Any, target: Any, **options: Any) -> Any:
        asked.append((target.name, options["float32_products"]))
        return compiled(source, target, **options)

    monkeypatch.setattr(pipeline, "compile", noted)
    first, second, ids = decoder("llama"), decoder("llama"), prompts(2, 11)["input_ids"]
    with torch.no_grad():
        expected = first(ids).logits
        report = mhsa.accelerate(first, target="x86-64-v3", float32_products="ieee", layers="parts")
        mhsa.accelerate(second, float32_products="bf16", layers="parts")
        mhsa_transformers.register(float32_products="bf16x3")
        assert torch.allclose(first(ids).logits, expected, atol=1e-4)
        assert set(asked) == {("x86-64-v3", "ieee")} and report.float32_outcomes() == {}
        asked.clear()
        second(ids)
        assert {products for _, products in asked} == {"bf16"}
        twin = pickle.loads(pickle.dumps(first))
        asked.clear()
        assert torch.allclose(twin(ids).logits, expected, atol=1e-4) and not asked
    mhsa_transformers.register()


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_refreshed_and_restored_themselves(
    twin_of: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer, forward and report name each other: of each there is one in a copy."""
    monkeypatch.setattr("mhsa_compile.integrations.torch_linear.LEAST_WEIGHTS", 0)
    plain, x = Tokens().eval(), rows()
    model = copy.deepcopy(plain)
    mhsa.accelerate(model, linears=True, layers="parts")
    twin = twin_of(model)
    with torch.no_grad(), slow_path():
        assert torch.allclose(twin(x), plain(x), atol=1e-4)
        for each in (plain, twin):  # one number, which no sample is sure to see
            each.linear.weight.data[1, 2] = 50.0
        vars(twin)[NAME].refresh()
        assert torch.allclose(twin(x), plain(x), atol=1e-3)
        twin.encoder.layers.append(copy.deepcopy(twin.encoder.layers[0]))
        plain.encoder.layers.append(copy.deepcopy(plain.encoder.layers[0]))
        mhsa.restore(twin)
        assert not any("forward" in vars(part) for part in twin.modules())
        assert torch.equal(twin(x), plain(x))
        assert any("forward" in vars(part) for part in model.modules())


def test_a_shallow_copy_of_a_layer_computes_with_its_own_parts() -> None:
    layer = nn.TransformerEncoderLayer(D, H, 2 * D, batch_first=True).eval()
    plain, x = copy.deepcopy(layer), rows()
    mhsa.accelerate(layer, layers="whole")
    with torch.no_grad():
        layer(x)
        ours, theirs = copy.copy(layer), copy.copy(plain)
        for one in (ours, theirs):
            one._modules = {name: copy.deepcopy(part) for name, part in one._modules.items()}
            for weight in one.parameters():
                weight.mul_(0.5)
        assert torch.allclose(ours(x), theirs(x), atol=1e-5)
        assert torch.allclose(layer(x), plain(x), atol=1e-5)
    layer.forward = wrapper = lambda *inputs: inputs[0]  # type: ignore[method-assign, assignment]
    assert copy.copy(layer).forward is wrapper


def test_a_copy_of_one_layer_is_none_of_the_model() -> None:
    model = nn.Sequential(*(nn.MultiheadAttention(D, H, batch_first=True) for _ in range(8))).eval()
    alone, x = len(pickle.dumps(model[0])), rows()
    mhsa.accelerate(model)
    assert len(pickle.dumps(model[0])) < 2 * alone
    twin, whole = copy.deepcopy(model[0]), pickle.loads(pickle.dumps(model))
    mhsa.restore(model)
    assert "forward" in vars(twin) and not any("forward" in vars(one) for one in model)
    with torch.no_grad():
        assert torch.allclose(twin(x, x, x)[0], model[0](x, x, x)[0], atol=1e-5)
    mhsa.restore(whole)
    assert not any("forward" in vars(one) for one in whole)
