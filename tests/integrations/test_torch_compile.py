"""torch.compile(model, backend="mhsa"): graphs of Dynamo's as artifacts, and what stays with PyTorch."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from mhsa_compile.integrations import torch_compile
from mhsa_compile.integrations.layers import timed_turns
from mhsa_compile.verification.error_budget import budget

BACKEND = torch_compile.compile_graph


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small graphs may be slower than PyTorch; what is compiled here is to be looked at. Dynamo forgets the others."""
    monkeypatch.setattr(torch_compile, "_time_by_eager", lambda graph, run, inputs: 0.5)
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    """A layer that gives what Dynamo's graphs give: tensors, one of them twice, an input, and a size."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.linear = nn.Linear(32, 32)
        self.register_buffer("shift", torch.ones(32))

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.attention(x, x, x, need_weights=False)[0]
        z = self.linear(y + self.shift)
        return {"z": z, "again": z, "x": x, "length": x.shape[1], "y": y}


def assert_right(got: Tensor, layer: nn.Module, x: Tensor, name: str = "z") -> None:
    with torch.inference_mode():
        theirs = layer(x)[name]
        exact = copy.deepcopy(layer).double()(x.double())[name].numpy()
    error = float(abs(got.numpy() - exact).max())
    assert error <= budget(exact, theirs.numpy(), "float32"), error


def compiled(layer: nn.Module, **words: Any) -> Any:
    return torch.compile(layer.eval(), backend=BACKEND, dynamic=True, **words)


@pytest.mark.thorough
def test_every_length_and_thread() -> None:
    layer = Layer()
    run = compiled(layer)
    with torch.inference_mode():
        for size in ((2, 7), (3, 131), (2, 197), (5, 7)):
            x = torch.randn(*size, 32)
            found = run(x)
            assert found["x"] is x and found["length"] == size[1] and found["again"] is found["z"]
            assert_right(found["z"], layer, x)
            assert_right(found["y"], layer, x, "y")
        with ThreadPoolExecutor(3) as threads:
            x = torch.randn(2, 197, 32)
            expected = run(x)["z"]
            assert all(torch.equal(one, expected) for one in threads.map(lambda _: called(run, x), range(100)))


ONE_ARTIFACT = """
import torch
from mhsa_compile.integrations import torch_compile

made, original = [], torch_compile.compile
torch_compile.compile = lambda *words, **named: made.append(original(*words, **named)) or made[-1]
torch_compile._time_by_eager = lambda *words: 0.5
layer = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval()
run = torch.compile(lambda x: layer(x, x, x)[0], backend=torch_compile.compile_graph, dynamic=True)
with torch.no_grad():
    for size in ((2, 7), (3, 131), (2, 197), (5, 7)):
        run(torch.randn(*size, 32))
print(len(made))
"""


@pytest.mark.thorough
def test_every_length_is_one_artifact() -> None:
    """This runs in a process of its own: what others have done in one decides how often Dynamo compiles."""
    done = subprocess.run([sys.executable, "-c", ONE_ARTIFACT], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["1"], done.stderr


def called(run: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        found: Tensor = run(x)["z"]
        return found


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the backend compiles in a test."""
    artifacts, original = list[Any](), torch_compile.compile
    monkeypatch.setattr(torch_compile, "compile", lambda *words, **named: _noted(artifacts, original(*words, **named)))
    return artifacts


def _noted(artifacts: list[Any], artifact: Any) -> Any:
    artifacts.append(artifact)
    return artifact


def test_weights_that_change_and_layers_of_one_class_are_bound_anew(made: list[Any]) -> None:
    layers, x = [Layer().eval() for _ in range(2)], torch.randn(2, 19, 32)
    runs = [compiled(layer) for layer in layers]
    with torch.inference_mode():
        for layer, run in zip(layers, runs, strict=True):
            assert_right(run(x)["z"], layer, x)
    compilations = len(made)
    with torch.no_grad():
        layers[0].linear.weight.mul_(2.0)
    with torch.inference_mode():
        assert_right(runs[0](x)["z"], layers[0], x)
        assert_right(runs[1](x)["z"], layers[1], x)
    layers[0].load_state_dict(Layer().state_dict())
    with torch.inference_mode():
        assert_right(runs[0](x)["z"], layers[0], x)
    assert len(made) == compilations


@pytest.mark.thorough
def test_code_that_is_wrong_for_other_weights_is_compiled_anew(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`check` holds the first results of weights that were bound anew against PyTorch's."""
    monkeypatch.setattr(torch_compile.CompiledAttention, "with_weights", lambda self, weights: self)
    layer, x = Layer().eval(), torch.randn(2, 19, 32)
    run = compiled(layer)
    called(run, x)
    with torch.no_grad():
        layer.linear.weight.mul_(2.0)
    with pytest.warns(UserWarning, match="weights of a graph changed, and it was compiled anew"):
        assert_right(called(run, x), layer, x)
    assert len(made) == 2


class Placed(Layer):
    """A layer with the order of its features in a buffer, which becomes part of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(32))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"z": super().forward(x)["z"].index_select(2, self.order)}


def test_a_weight_that_is_part_of_the_code_is_compiled_anew(made: list[Any]) -> None:
    layer, x = Placed().eval(), torch.randn(2, 19, 32)
    run = compiled(layer)
    called(run, x)
    assert "order" not in " ".join(info.name for info in made[0].manifest.weights)
    with torch.no_grad():
        layer.order.copy_(torch.arange(32).flip(0))
    with pytest.warns(UserWarning, match="weights of a graph changed, and it was compiled anew"):
        assert_right(called(run, x), layer, x)
    assert len(made) == 2


MODELS = {
    "bert": lambda: BertModel(BertConfig(**SIZES, num_hidden_layers=2, hidden_size=64, num_attention_heads=4)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=99, use_cache=False)),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SIZES, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, use_cache=False
        )
    ),
}
SIZES = {"vocab_size": 99, "intermediate_size": 96}


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_whole_models(make: Callable[[], nn.Module]) -> None:
    """Padding, every length by one artifact; a warning would be an error."""
    model = make().eval()
    run = compiled(model)
    for size in ((2, 70), (3, 90), (2, 7)):
        words = torch.randint(3, 99, size)
        seen = torch.ones(size, dtype=torch.int64)
        seen[0, size[1] - 3 :] = 0
        with torch.inference_mode():
            found = run(input_ids=words, attention_mask=seen)[0].numpy()
            theirs = model(input_ids=words, attention_mask=seen)[0].numpy()
            exact = copy.deepcopy(model).double()(input_ids=words, attention_mask=seen)[0].numpy()
        error = float(abs(found - exact)[seen.numpy() > 0].max())
        assert error <= budget(exact, theirs, "float32"), error


class Writes(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        q.add_(1.0)
        return nn.functional.scaled_dot_product_attention(q, q, q)


class WritesIntoAView(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        q[:, :1] += 1.0
        return nn.functional.scaled_dot_product_attention(q, q, q)


class WritesIntoAWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(()))

    def forward(self, q: Tensor) -> Tensor:
        self.calls.fill_(1.0)
        return nn.functional.scaled_dot_product_attention(q, q, q) * self.calls


class WritesIntoItsOwn(nn.Module):
    """As T5 does with the buckets of its distances."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        sums: Any = 0
        sums += x * 2.0
        sums.add_(1.0)
        y: Tensor = self.layer(sums, x, x)[0]
        return y


@pytest.mark.thorough
def test_what_a_graph_made_itself_it_may_write_into() -> None:
    module, x = WritesIntoItsOwn().eval(), torch.randn(2, 19, 32)
    given = x.clone()
    with torch.inference_mode():
        found = compiled(module)(given)
        torch.testing.assert_close(found, module(x))
    assert torch.equal(given, x)


class Plain(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return torch.tanh(q) * 2.0


@pytest.mark.thorough_but("no attention", "writes into a weight")
@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Writes(), r"it writes into tensors \(add_\)"),
        (WritesIntoAView(), r"it writes into tensors \(<built-in function iadd>, <built-in function setitem>\)"),
        (WritesIntoAWeight(), r"it writes into tensors \(fill_\)"),
        (Plain(), "model: expected at least one attention, got Constant, Mul, Tanh"),
    ],
    ids=["writes", "writes into a view", "writes into a weight", "no attention"],
)
def test_what_stays_with_pytorch_is_said(module: nn.Module, why: str) -> None:
    x = torch.randn(1, 2, 5, 8)
    with torch.inference_mode():
        expected = module(x.clone())
        with pytest.warns(UserWarning, match=f"stays with PyTorch: {why}"):
            assert torch.equal(compiled(module)(x.clone()), expected)


class Boxes(nn.Module):
    """Reads places on an axis of four, which dynamic=True leaves free."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 32)

    def forward(self, x: Tensor, box: Tensor) -> Tensor:
        x = x + self.linear(box[:, :, 3:4] - box[:, :, 1:2])
        return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.thorough
def test_a_size_that_cannot_be_free_can_be_fixed_as_the_warning_says() -> None:
    boxes, x, box = Boxes().eval(), torch.randn(2, 7, 32), torch.randn(2, 7, 4)
    with torch.inference_mode():
        expected = boxes(x, box)
        with pytest.warns(UserWarning, match=r"free, got one that takes at least 4 there; fix .*mark_static"):
            assert torch.equal(compiled(boxes)(x, box), expected)
        torch._dynamo.mark_static(box, 2)
        torch._dynamo.reset()
        strict = compiled(boxes, options={"strict": True})
        assert torch.allclose(strict(x, box), expected, atol=1e-5)


@pytest.mark.thorough
def test_gradients_are_pytorchs() -> None:
    layer, x = Layer().eval(), torch.randn(2, 7, 32)
    with pytest.warns(UserWarning, match="gradients are wanted"):
        compiled(layer)(x)["z"].sum().backward()
    found = layer.linear.weight.grad.clone()
    layer.zero_grad()
    layer(x)["z"].sum().backward()
    assert torch.equal(found, layer.linear.weight.grad)


@pytest.mark.thorough
def test_a_slower_graph_stays_with_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compile, "_time_by_eager", lambda graph, run, inputs: 3.0)
    with torch.inference_mode(), pytest.warns(UserWarning, match="it takes 3.00 of PyTorch's time"):
        compiled(Layer())(torch.randn(2, 7, 32))


def test_both_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    graph = torch.fx.symbolic_trace(Plain())
    called: list[str] = []

    def ours(q: Tensor) -> list[Tensor]:
        called.append("ours")
        return [graph.forward(q)]

    monkeypatch.setattr(timed_turns, "_TURN", 1e-9)
    assert torch_compile._time_by_eager(graph, ours, [torch.randn(3)]) > 0
    assert 2 * timed_turns._LEAST_TURNS <= len(called) <= 2 * timed_turns._MOST_TURNS
    monkeypatch.setattr(timed_turns, "_seconds", lambda call: 6.0 if call.func is ours else 2.0)
    assert torch_compile._time_by_eager(graph, ours, []) == 3.0


@pytest.mark.thorough_but("words2-has no modes")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param({"options": {"strict": True}}, "expected at least one attention", marks=pytest.mark.thorough),
        (
            {"options": {"traget": "native"}},
            "options: expected any of target, threads, strict, check, float32_products, got traget",
        ),
        ({"mode": "max-autotune"}, "has no modes"),
    ],
)
def test_errors(words: dict[str, Any], said: str) -> None:
    with torch.inference_mode(), pytest.raises(BackendCompilerFailed, match=said):
        compiled(Plain(), **words)(torch.randn(2, 7, 32))


def test_by_its_name() -> None:
    assert "mhsa" in torch.compiler.list_backends()
