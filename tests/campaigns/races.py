"""Every rule of the fallbacks, every kernel and some models, called again and again with 1, 2, 3 and 8 threads: all
calls must give the bits of the first one with one thread. `make races`.

    python -m campaigns.races --calls 200 --table-calls 3000

Sizes are large: what is small is computed by one thread. Exits with 1 if any call differed, or a case did not compile.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from support import operator_models
from torch import nn
from torch.nn import functional as F

import mhsa_compile as mhsa
from campaigns.same_code_artifacts import FALLBACKS, FILES, SPECS, Beside, file_of
from mhsa_compile import masks
from mhsa_compile.kernels.registry import KERNELS
from mhsa_compile.verification import repeated_runs
from mhsa_compile.verification.self_check_inputs import SelfCheckInputs

SIZES = (67, 331)
"""Lengths: the second is shared among threads by everything there is."""


@dataclass(frozen=True)
class Case:
    """A source, and what `compile` takes with it. `lengths`: of a source whose length is free."""

    group: str
    name: str
    source: Any
    options: dict[str, Any]
    lengths: tuple[int, ...] = SIZES


class EagerCausal(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2) / k.shape[-1] ** 0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v


class SoftmaxOfAttention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v).softmax(-1)


class PixelsThenAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pixels = nn.Conv2d(384, 384, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pixels(x).flatten(2).transpose(1, 2)[:, None]
        return F.scaled_dot_product_attention(y, y, y)[:, 0]


RULES: dict[str, Callable[[], nn.Module]] = {
    **{name: functools.partial(make, 128) for name, make in FALLBACKS.items()},
    "softmax along another axis": lambda: Beside(lambda y: y.softmax(1)),
    "root mean square": lambda: Beside(lambda y: y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt()),
    "gelu by tanh": lambda: Beside(lambda y: F.gelu(y, approximate="tanh")),
    "silu": lambda: Beside(F.silu),
    "largest": lambda: Beside(lambda y: y - y.amax(-1, keepdim=True)),
    "running sums": lambda: Beside(lambda y: y.cumsum(1)),
    "choice": lambda: Beside(lambda y: torch.where(y > 0, y, y.exp() - 1)),
    "product, channels first": lambda: Beside(lambda y: y.transpose(1, 2) @ y),
    "product of bfloat16": lambda: FALLBACKS["product of activations"](128),
}


def rules() -> Iterator[Case]:
    for name, make in RULES.items():
        dtype = torch.bfloat16 if name.endswith("bfloat16") else torch.float32  # an export is judged by its inputs'
        yield Case("rules", name, make().eval(), {"example_inputs": (torch.randn(2, 7, 128).to(dtype),)})


def kernels() -> Iterator[Case]:
    of_plain_options = {name: fields for name, fields in SPECS.items() if not {"dims", "weights"} & fields.keys()}
    for name, fields in of_plain_options.items():
        yield Case("kernels", name, mhsa.AttentionSpec(embed_dim=256, num_heads=8, **fields), {})
    plain = mhsa.AttentionSpec(embed_dim=256, num_heads=8)
    for name, word in (("eight bits", "int8"), ("four bits", "int4:zeros"), ("four bits, x", "int4:activations=float")):
        yield Case("kernels", name, plain, {"weights": word})
    for name, (_, nodes) in FILES.items():
        yield Case("kernels", f"file: {name}", file_of(nodes), {"without_attention": "accept"})
    pattern = mhsa.AttentionSpec(embed_dim=256, num_heads=8, static_mask=masks.Longformer(window=64, global_tokens=1))
    yield Case("kernels", "static mask", pattern, {"dims": {"L": 331}}, (331,))
    for name in ("grouped heads, rope", "cache"):
        spec = mhsa.AttentionSpec(embed_dim=256, num_heads=8, **SPECS[name])
        yield Case("kernels", f"{name}, one query", spec, {"dims": {"L": 1}}, (4099,))
    cross = mhsa.AttentionSpec(embed_dim=256, num_heads=8, kv_embed_dim=96)
    yield Case("kernels", "cross, few queries", cross, {"dims": {"L": 5}}, (4099,))
    presents = ("y", "present_key", "present_value")
    grown = operator_models.model({"is_causal": 1}, L="L", S="L", past="P", outputs=presents)
    yield Case("kernels", "cache inside of the operator", grown, {})


def table() -> Iterator[Case]:
    """What was wrong at random before allocations lay inside of parallel loops."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(256, 4, batch_first=True).eval()
    fixed = {"x": {}}
    yield Case("table", "nn.MultiheadAttention, weights wanted", attention, by_example(3, (2, 160, 256)), ())
    yield Case("table", "eager causal attention", EagerCausal(), by_example(3, (2, 4, 144, 32)), ())
    yield Case("table", "softmax of attention", SoftmaxOfAttention(), by_example(3, (1, 4, 512, 64)), ())
    pixels = {"example_inputs": (torch.randn(1, 384, 6, 80),), "dynamic_shapes": fixed}
    yield Case("table", "convolution of one pixel", PixelsThenAttention().eval(), pixels, ())


def by_example(count: int, shape: tuple[int, ...]) -> dict[str, Any]:
    """Options of an export: `count` tensors of this shape as example inputs, and no dim free."""
    return {"example_inputs": tuple(torch.randn(*shape) for _ in range(count)), "dynamic_shapes": ({},) * count}


def models() -> Iterator[Case]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, use_cache=False
    )
    ids = torch.randint(0, 1000, (2, 9))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    yield Case("models", "MiniLM's size", BertModel(config).eval(), {"example_inputs": given}, (128,))
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True), 2).eval()
    yield Case("models", "nn.TransformerEncoder", encoder, {"example_inputs": (torch.randn(2, 7, 256),)})


def run(case: Case, calls: int) -> tuple[int, int, list[str]]:
    """(calls, those that differed, the kernels that ran); a line for each size."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dims that a module fixes
        artifact = mhsa.compile(case.source, **case.options)
    made = different = 0
    for length in case.lengths or (0,):
        inputs = drawn(artifact, length)

        def start(threads: int) -> repeated_runs.Run:
            attention = mhsa.load(artifact, threads=threads)

            def once(given: dict[str, np.ndarray]) -> list[np.ndarray]:
                result = attention(**given)
                return list(result) if isinstance(result, tuple) else [result]

            return once

        began = time.monotonic()
        found = repeated_runs.repeat(start, inputs, calls=calls)
        count, off = sum(one.calls for one in found), sum(one.different for one in found)
        sizes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
        seconds = time.monotonic() - began
        print(f"{case.group:8}{case.name:40}{count:>7,} calls{off:>6,} differ{seconds:>7.1f} s  {sizes}", flush=True)
        made, different = made + count, different + off
    return made, different, [op.kernel for op in artifact.manifest.ops]


def drawn(artifact: mhsa.Artifact, length: int) -> dict[str, np.ndarray]:
    """Random inputs; every free length is `length`, but queries of a cache, which are fewer than its room."""
    subject = SelfCheckInputs(artifact.manifest, 0)
    sizes = subject.sizes | dict.fromkeys(subject.lengths, length) | ({subject.batch: 2} if subject.batch else {})
    return subject.draw_at(sizes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200, help="with each number of threads")
    parser.add_argument("--table-calls", type=int, default=3000, help="of the modules that were wrong once")
    parser.add_argument("--only", default="", help="cases whose group or name holds this")
    options = parser.parse_args()
    made = different = functions = 0
    seen: set[str] = set()
    failed: list[str] = []
    for case in (*rules(), *kernels(), *models(), *table()):
        if options.only not in f"{case.group} {case.name}":
            continue
        try:
            calls, off, names = run(case, options.table_calls if case.group == "table" else options.calls)
        except Exception as error:
            failed.append(f"{case.name}: {type(error).__name__}: {str(error)[:200]}")
            print(f"{case.group:8}{case.name:40}{failed[-1]}", flush=True)
            continue
        made, different, functions = made + calls, different + off, functions + 1
        seen.update(names)
    absent = {kernel.name for kernel in KERNELS["cpu"]} - seen
    ways = f"{repeated_runs.THREADS} threads and {repeated_runs.CALLERS} callers with 2"
    print(f"{functions} functions, {ways}: {made:,} calls")
    print(f"{different:,} differ; {len(failed)} cases failed; kernels that no case ran: {', '.join(absent) or 'none'}")
    return int(bool(different or failed or (absent and not options.only)))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
