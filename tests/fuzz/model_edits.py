"""Random edits of an accelerated model, each made to a plain copy as well: both must say the same after every one.

python -m fuzz.model_edits --edits 5000 --seed 0

Weights are written past PyTorch's counter of versions, replaced, pruned, parametrized, merged with adapters; dtypes,
modes and hooks change; models are copied, pickled, and loaded. `--layers`: of whole layers of an encoder. `--blind` is
the control: only the version of a weight is seen, and the campaign must find that.
"""

from __future__ import annotations

import argparse
import copy
import io
import pickle
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import mhsa_compile as mhsa
from mhsa_compile.frontend.export.torch_layers import slow_path
from mhsa_compile.integrations import weight_state

SIZE, HEADS = 256, 4
Random = np.random.Generator
Edit = Callable[[nn.Module, Random], None]


class Block(nn.Module):
    """Attention, a linear as large as those that are replaced, and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(x, x, x, need_weights=False)[0]
        result: Tensor = self.linear(x + y)
        return result


class Layer(nn.Module):
    """A whole layer of an encoder, by the names that edits know."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(SIZE, HEADS, SIZE, batch_first=True)

    @property
    def attention(self) -> nn.Module:
        return self.layer.self_attn

    @property
    def linear(self) -> nn.Module:
        return self.layer.linear1

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result


def drawn(random: Random, *shape: int) -> Tensor:
    return torch.from_numpy(random.standard_normal(shape).astype(np.float32)) * 0.1


def parameters(model: nn.Module, random: Random) -> list[nn.Parameter]:
    """Some of the model's parameters."""
    every = list(model.parameters())
    return [every[i] for i in random.choice(len(every), size=min(2, len(every)), replace=False)]


def write_in_place(model: nn.Module, random: Random) -> None:
    with torch.no_grad():
        for weight in parameters(model, random):
            weight.add_(drawn(random, *weight.shape).to(weight.dtype))


def write_data(model: nn.Module, random: Random) -> None:
    for weight in parameters(model, random):
        weight.data += drawn(random, *weight.shape).to(weight.dtype)


def put_data(model: nn.Module, random: Random) -> None:
    for weight in parameters(model, random):
        weight.data = drawn(random, *weight.shape).to(weight.dtype)


def read_otherwise(model: nn.Module, random: Random) -> None:
    """The same memory by other strides, or another one that does not lie row by row."""
    weight = model.linear._parameters.get("weight")  # type: ignore[union-attr]
    if weight is not None:
        weight.data = weight.data.t() if random.integers(2) else torch.stack([weight.data] * 2, -1)[..., 0]


def write_rows(model: nn.Module, random: Random) -> None:
    weight = model.linear._parameters.get("weight")  # type: ignore[union-attr]
    if weight is not None:
        weight.data[3:7] = drawn(random, 4, SIZE).to(weight.dtype)


def write_by_numpy(model: nn.Module, random: Random) -> None:
    for weight in parameters(model, random):
        if weight.dtype == torch.float32:
            weight.detach().numpy()[...] *= 1.25


def zero_a_head(model: nn.Module, random: Random) -> None:
    weight = getattr(model.attention, "in_proj_weight", None)  # type: ignore[union-attr]
    if isinstance(weight, nn.Parameter):
        head, size = int(random.integers(HEADS)), SIZE // HEADS
        weight.data[head * size : (head + 1) * size] = 0


def merge_an_adapter(model: nn.Module, random: Random) -> None:
    weight = model.linear._parameters.get("weight")  # type: ignore[union-attr]
    if weight is not None:
        weight.data += (drawn(random, SIZE, 4) @ drawn(random, 4, SIZE)).to(weight.dtype)


def step_fused(model: nn.Module, random: Random) -> None:
    step(model, random, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))


def step_plain(model: nn.Module, random: Random) -> None:
    step(model, random, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def step(model: nn.Module, random: Random, optimizer: Any) -> None:
    for weight in model.parameters():
        weight.grad = drawn(random, *weight.shape).to(weight.dtype) if weight.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()


def put_a_parameter(model: nn.Module, random: Random) -> None:
    for module in (model.attention, model.linear):
        for name, weight in list(module._parameters.items()):  # type: ignore[union-attr]
            if weight is not None and random.integers(2):
                fresh = drawn(random, *weight.shape).to(weight.dtype)
                delattr(module, name)
                del weight
                setattr(module, name, nn.Parameter(fresh))


def load_a_state(model: nn.Module, random: Random) -> None:
    state = {name: drawn(random, *value.shape).to(value.dtype) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=bool(random.integers(2)))


def pruned(model: nn.Module, random: Random) -> None:
    prune.l1_unstructured(model.attention, "in_proj_weight", amount=0.3)
    if random.integers(2):
        prune.l1_unstructured(model.linear, "weight", amount=0.3)


def pruned_for_good(model: nn.Module, random: Random) -> None:
    for module, name in ((model.attention, "in_proj_weight"), (model.linear, "weight")):
        if hasattr(module, f"{name}_mask"):
            prune.remove(module, name)


def parametrized(model: nn.Module, random: Random) -> None:
    if not hasattr(model.linear, "parametrizations") and "weight" in model.linear._parameters:  # type: ignore[union-attr]
        parametrizations.weight_norm(model.linear)


def other_dtype(model: nn.Module, random: Random) -> None:
    model.to((torch.float32, torch.float64)[int(random.integers(2))])


def train_and_back(model: nn.Module, random: Random) -> None:
    model.train()
    model.eval()


def frozen(model: nn.Module, random: Random) -> None:
    for weight in parameters(model, random):
        weight.requires_grad_(not weight.requires_grad)


def halved(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 0.5


def hooked(model: nn.Module, random: Random) -> None:
    model.linear.register_forward_hook(halved)  # type: ignore[union-attr,operator]


def without_a_bias(model: nn.Module, random: Random) -> None:
    model.linear.bias = None  # type: ignore[union-attr, assignment]


EDITS: tuple[Edit, ...] = (
    write_in_place, write_data, put_data, read_otherwise, write_rows, write_by_numpy, zero_a_head, merge_an_adapter,
    step_fused, step_plain, put_a_parameter, load_a_state, pruned, pruned_for_good, parametrized, other_dtype,
    train_and_back, frozen, hooked, without_a_bias,
)  # fmt: skip


def copied(model: nn.Module, plain: nn.Module, random: Random) -> tuple[nn.Module, nn.Module]:
    """Copies of both, by one of the ways that programs have; themselves where PyTorch copies none: of computed weights.

    Of both, since copies lie otherwise in memory, and PyTorch's fused optimizers step as memory lies.
    """
    way = int(random.integers(3))
    try:
        pickle.dumps(plain)
        copy.deepcopy(plain)
    except Exception:
        return model, plain
    return _copied(model, way), _copied(plain, way)


def _copied(model: nn.Module, way: int) -> nn.Module:
    if way == 0:
        return copy.deepcopy(model)
    if way == 1:
        twin: nn.Module = pickle.loads(pickle.dumps(model))
        return twin
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


def off(model: nn.Module, plain: nn.Module, x: Tensor) -> float:
    """The largest difference of both models' results, as a part of the largest number."""
    with torch.no_grad():
        expected = plain(x).double()
        return float((model(x).double() - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


def campaign(edits: int, seed: int, layers: bool = False) -> Counter[str]:
    """Edit -> how often both models differed after it; of whole layers with `layers`, by PyTorch's parts of them, since
    its operator looks at neither hooks that came later nor biases that are gone."""
    with slow_path() if layers else nullcontext():
        return _campaign(edits, seed, layers)


def _campaign(edits: int, seed: int, layers: bool) -> Counter[str]:
    random, wrong = np.random.default_rng(seed), Counter[str]()
    made = 0
    while made < edits:
        plain = (Layer if layers else Block)().eval()
        load_a_state(plain, random)
        model = copy.deepcopy(plain)
        mhsa.accelerate(model, linears=True, layers="whole")
        for _ in range(min(int(random.integers(4, 12)), edits - made)):
            edit = EDITS[int(random.integers(len(EDITS)))]
            twin = int(random.integers(2**31))
            kinds = []
            for each in (model, plain):
                try:
                    edit(each, np.random.default_rng(twin))
                except Exception as error:  # an edit that PyTorch refuses, of both
                    kinds.append(type(error))
            made += 1
            if len(set(kinds)) > 1 or len(kinds) == 1:
                wrong[f"{edit.__name__}: refused of one model alone"] += 1
                break
            if random.integers(8) == 0 and not kinds:
                model, plain = copied(model, plain, random)
            rows = (2, int(random.integers(1, 12)), SIZE)
            x = drawn(random, *rows).to(next(plain.parameters()).dtype) * 10
            if (error := off(model, plain, x)) > (1e-4 if x.dtype == torch.float32 else 1e-10):
                wrong[edit.__name__] += 1
                print(f"{edit.__name__}: off by {error:.1e} (seed {seed}, edit {made})", flush=True)
                break
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--edits", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", action="store_true", help="of whole layers of an encoder")
    parser.add_argument("--blind", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.blind:
        weight_state.SAMPLES = weight_state._LEAST_SAMPLES = 0
        weight_state._views = lambda places: []
    wrong = campaign(given.edits, given.seed, given.layers)
    kinds = "".join(f"; {name} {times}" for name, times in wrong.items())
    print(f"{given.edits} edits, seed {given.seed}: {sum(wrong.values())} wrong{kinds}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
