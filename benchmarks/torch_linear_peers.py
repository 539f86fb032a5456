"""PyTorch on one linear: eagerly, and through torch.compile, which packs frozen weights before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from mhsa_bench.peers.peer import Opened, Problem
from mhsa_bench.peers.torch_eager import torch_threads
from mhsa_compile.nn.functional import to_numpy, to_torch


class TorchLinear:
    """`torch.nn.Linear` with the artifact's weights."""

    def __init__(self, name: str, *, compiled: bool) -> None:
        self.name, self.compiled = name, compiled

    @contextmanager
    def open(self, problem: Problem, threads: int) -> Iterator[Opened]:
        with torch_threads(threads):
            import torch
            from torch._inductor import config

            weights = {name: to_torch(array) for name, array in problem.weights.items()}
            outputs, inputs = weights["weight"].shape
            layer = torch.nn.Linear(inputs, outputs, bias="bias" in weights, dtype=weights["weight"].dtype).eval()
            layer.load_state_dict(weights)
            with torch.inference_mode(), config.patch(freezing=True):
                form = layer.forward
                if self.compiled:
                    torch._dynamo.reset()
                    form = torch.compile(layer, dynamic=False, fullgraph=True)
                calls = [partial(form, *map(to_torch, arrays.values())) for arrays in problem.inputs]
                yield Opened(calls, lambda result: [to_numpy(result)])


FORMS = (TorchLinear("eager", compiled=False), TorchLinear("frozen", compiled=True))
