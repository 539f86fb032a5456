"""Models on meta, sharded, quantised, hooked or edited: one message and nothing changed, or the right numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import mhsa_compile as mhsa
from mhsa_compile.conversion.from_torch import from_torch
from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.integrations import transformers as mhsa_transformers

D, H = 32, 4
X = torch.randn(2, 7, D, generator=torch.Generator().manual_seed(0))
QUANTISING = (
    "ignore:.*torch.ao.quantization is deprecated:DeprecationWarning",
    "ignore:.*quantized tensor creation functions:UserWarning",
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(D, H, batch_first=True), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x, need_weights=False)[0])


def block() -> Block:
    torch.manual_seed(0)
    return Block().eval()


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return block()


def quantised() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(block(), {nn.Linear}).eval()


def quantisable() -> nn.Module:
    model = block()
    model.attention = torch.ao.nn.quantizable.MultiheadAttention(D, H, batch_first=True).eval()
    return model


def with_a_computed_weight() -> nn.Module:
    """A model as FSDP leaves a layer whose parameters it has flattened."""
    model = block()
    weight = model.attention.in_proj_weight.detach()
    del model.attention.in_proj_weight
    model.attention.in_proj_weight = weight
    return model


def with_a_part_of_a_weight() -> nn.Module:
    model = block()
    model.attention.out_proj.weight = nn.Parameter(torch.zeros(D * D // 2))
    return model


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A process by itself, as a group of one."""
    from torch.distributed.device_mesh import init_device_mesh

    place: Path = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def state(model: nn.Module) -> list[Any]:
    """What a refusal may not change: attributes, hooks and modes of every part, and which tensors it has."""
    parts = [(set(vars(part)), len(part._forward_pre_hooks), part.training) for part in model.modules()]
    return [parts, [id(value) for value in (*model.parameters(), *model.buffers())]]


@pytest.mark.filterwarnings(*QUANTISING)
@pytest.mark.parametrize(
    ("made", "why"),
    [
        (on_meta, "on the meta device"),
        (quantisable, "a subclass of nn.MultiheadAttention"),
        (with_a_computed_weight, "in_proj_weight is no whole parameter of its own"),
        (with_a_part_of_a_weight, "out_proj.weight is no whole parameter of its own"),
    ],
)
def test_what_accelerate_keeps(made: Callable[[], nn.Module], why: str) -> None:
    model = made()
    before = state(model)
    with pytest.raises(ModelError, match=f"attention 'attention' of the model: .*{why}"):
        mhsa.accelerate(model, on_unsupported="raise")
    assert state(model) == before


def test_a_part_in_training_mode_is_refused_by_name() -> None:
    model = block()
    model.out.train()
    before = state(model)
    with pytest.raises(InputError, match=r"model: expected eval mode.*got out in training mode. Call model.eval\(\)"):
        mhsa.accelerate(model)
    assert state(model) == before


@pytest.mark.filterwarnings(*QUANTISING)
@pytest.mark.parametrize(
    ("made", "why"),
    [
        (on_meta, "weights in this process's memory, got 'attention.in_proj_weight' on the meta device"),
        (quantised, "layers with weights as they were trained, got out, a quantised Linear"),
    ],
)
def test_what_compile_refuses(made: Callable[[], nn.Module], why: str) -> None:
    model = made().train()
    before = state(model)
    with pytest.raises(ModelError, match=f"module: expected {why}"):
        mhsa.compile(model, example_inputs=(X,))
    assert state(model) == before


@pytest.mark.thorough
@pytest.mark.filterwarnings(*QUANTISING)
def test_attention_beside_quantised_layers_is_replaced() -> None:
    model, found = quantised(), list[Tensor]()
    model.out.register_forward_pre_hook(lambda module, given: found.append(given[0]))
    report = mhsa.accelerate(model)
    assert [row.name for row in report.replaced] == ["attention"]
    with torch.no_grad():
        model(X)
        mhsa.restore(model)
        model(X)
    assert torch.allclose(*found, atol=1e-6) and not torch.equal(*found)


def test_a_layer_without_numbers_is_no_layer_of_ours() -> None:
    with pytest.raises(ModelError, match=r"layer: expected a plain tensor as q_proj.weight, got a tensor on the meta"):
        from_torch(nn.MultiheadAttention(D, H, device="meta"))


def test_sharded_weights_and_activations(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    model = block()
    model.attention.in_proj_weight = nn.Parameter(distribute_tensor(model.attention.in_proj_weight, mesh, [Shard(0)]))
    (kept,) = mhsa.accelerate(model).kept
    assert kept.why_kept == "in_proj_weight is a DTensor"
    with pytest.raises(ModelError, match=r"got 'attention.in_proj_weight' sharded, a DTensor"):
        mhsa.compile(model, example_inputs=(X,))
    with pytest.raises(ModelError, match=r"as q_proj.weight, got a DTensor"):
        from_torch(model.attention)
    q = distribute_tensor(torch.randn(1, H, 5, 8), mesh, [Shard(1)])
    with pytest.raises(InputError, match="query: expected a tensor in this process's memory, got a DTensor"):
        mhsa_transformers.attention_forward(nn.Identity(), q, q, q, is_causal=True)
    other = block()
    fully_shard(other.attention, mesh=mesh)
    (kept,) = mhsa.accelerate(other).kept
    assert "a subclass" in kept.why_kept


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


@pytest.mark.thorough
def test_parametrized_later_on() -> None:
    """The next call has the weights as they are computed, and those after an edit."""
    layer = block().attention
    mhsa.accelerate(layer)
    with torch.no_grad():
        layer(X, X, X)
        weight_norm(layer.out_proj)
        parametrize.register_parametrization(layer, "in_proj_weight", Doubled())
        for _ in range(2):
            expected = nn.MultiheadAttention.forward(layer, X, X, X)[0]
            assert torch.allclose(layer(X, X, X)[0], expected, atol=1e-5)
            layer.out_proj.parametrizations.weight.original0.mul_(3)


@pytest.mark.thorough
def test_hooks_that_come_later_run() -> None:
    model, seen = block(), list[str]()
    mhsa.accelerate(model)
    model.attention.register_forward_pre_hook(lambda module, given: seen.append("before"))
    model.attention.register_forward_hook(lambda module, given, result: seen.append("after"))
    with torch.no_grad():
        model(X)
        mhsa.restore(model)
        model(X)
    assert seen == ["before", "after"] * 2


def test_moved_away_later_on() -> None:
    """On a device where there are no numbers a call is an error, as without us, and not what was computed before."""
    model = block()
    mhsa.accelerate(model)
    with torch.no_grad():
        model(X)
        with pytest.raises(RuntimeError, match="meta"):  # PyTorch's own
            model.to("meta").attention(X, X, X)
