"""Modules that compute something else at every call are refused, and left as they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.export.export import export
from mhsa_compile.integrations import torch_compile

X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(32)
        self.register_buffer("seen", torch.zeros(4))

    def attend(self, x: Tensor, dropout: float = 0.0) -> Tensor:
        q = x.unflatten(-1, (4, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=dropout).transpose(1, 2).flatten(2)


class Drops(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.attend(x), 0.25)  # always, whatever the module's mode


class DropsWeights(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, dropout=0.25)


class Noisy(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x) + torch.rand_like(x)


class Counts(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.seen[1:3] += 1
        return self.attend(x) * self.seen.sum()


class Norms(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(x).transpose(1, 2)
        return F.batch_norm(y, self.norm.running_mean, self.norm.running_var, training=True)


class Follows(Base):
    """What is right: dropout and norm by the module's mode."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.attend(x, 0.5 if self.training else 0.0), 0.5, self.training)
        return self.norm(self.drop(y).transpose(1, 2))


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        pytest.param(Drops, r"random numbers, by dropout\(p=0.25, train=True\)", marks=pytest.mark.thorough),
        pytest.param(
            DropsWeights,
            r"random numbers, by scaled_dot_product_attention\(dropout_p=0.25\)",
            marks=pytest.mark.thorough,
        ),
        pytest.param(Noisy, "random numbers, by rand_like", marks=pytest.mark.thorough),
        (Counts, "one that writes into 'seen', by add_"),
        pytest.param(
            Norms,
            r"one that writes into 'norm.running_mean', by batch_norm\(training=True\)",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_what_differs_from_call_to_call_is_refused(kind: type[Base], named: str) -> None:
    module = kind().train()
    module.norm.eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ModelError, match=f"module: expected one that computes the same at every call.* got {named}"):
        mhsa.compile(module, example_inputs=(X,))
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert [part.training for part in (module, module.drop, module.norm)] == [True, True, False]


@pytest.mark.thorough
def test_a_module_is_exported_at_inference_and_each_part_keeps_its_mode() -> None:
    module = Follows().train()
    module.norm.eval()
    model = export(module, example_inputs=(X,))
    assert "Dropout" not in {node.op_type for node in model.graph.node}
    assert [part.training for part in (module, module.drop, module.norm)] == [True, True, False]


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch_compile, "_time_by_eager", lambda graph, run, inputs: 0.5)
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", [pytest.param(Follows, marks=pytest.mark.thorough), DropsWeights])
def test_what_drops_at_random_stays_with_pytorch_under_torch_compile(anew: None, kind: type[Base]) -> None:
    module = kind().train()
    module.norm.eval()  # in training it counts its batches, which Dynamo shows
    run = torch.compile(module, backend=torch_compile.compile_graph)
    with torch.no_grad(), pytest.warns(UserWarning, match="stays with PyTorch: .*the same at every call"):
        results = [run(X) for _ in range(2)]
    assert not torch.equal(*results)
