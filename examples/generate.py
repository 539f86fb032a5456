"""Two decoders, shaped as GPT-2 and as Llama, generate 256 tokens with a cache; their weights are random.

Each layer's attention is compiled twice, for prompts of any length and for one token at a time; both write into one
cache. Afterwards every step of every layer is held against the whole sequence at once, in float64: the exit code is 1
if one is over its error budget. Then a step is timed against the length of the cache. Run it with `make demo`, or:
python examples/generate.py
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field

import msgspec
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import mhsa_compile as mhsa
from mhsa_compile.frontend.export.export import export
from mhsa_compile.nn.modules import MultiHeadAttention, weights
from mhsa_compile.runtime.compiled_attention import CompiledAttention
from mhsa_compile.runtime.kv_cache import KVCache
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.position_encoding import Rope
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.verify import eager, oracle

LAYERS, PROMPT, STEPS, VOCABULARY = 3, 17, 256, 1000
TIMED_AT = (128, 256, 512, 1024, 2048, 4095)
"""Positions in the cache when a step is timed."""
GPT2 = AttentionSpec(embed_dim=768, num_heads=12, causal=True, kv_cache=True)
LLAMA = AttentionSpec(
    embed_dim=1024, num_heads=16, num_kv_heads=4, bias=False, causal=True, kv_cache=True,
    rope=Rope(theta=500000.0, max_length=TIMED_AT[-1] + 1),
)  # fmt: skip

console = Console()


class GptBlock(nn.Module):
    """What stands around attention in a layer of GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )


class GatedFeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """What stands around attention in a layer of Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.feed_forward = GatedFeedForward(width, 8 * width // 3)


@dataclass
class Layer:
    """One layer: what is around attention, the attention itself, compiled, and what went through it."""

    block: GptBlock | LlamaBlock
    attention: MultiHeadAttention
    prefill: CompiledAttention
    step: CompiledAttention
    cache: KVCache
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def __call__(self, x: Tensor) -> Tensor:
        h = self.block.before(x)
        y = (self.step if h.shape[1] == 1 else self.prefill)(h, cache=self.cache)
        self.inputs.append(h)
        self.outputs.append(y)
        x = x + y
        return x + self.block.feed_forward(self.block.between(x))

    def error(self) -> tuple[float, float]:
        """The largest error of all steps against one call on the whole sequence in float64, and what is allowed."""
        whole = MultiHeadAttention(msgspec.structs.replace(self.attention.spec, kv_cache=False, causal="top_left"))
        whole.load_state_dict(self.attention.state_dict())
        model, inputs = export(whole.eval()), {"x": torch.cat(self.inputs, dim=1).numpy()}
        (expected,), (yardstick,) = oracle(model, inputs), eager(model, inputs)
        return max_error(expected, torch.cat(self.outputs, dim=1).numpy()), budget(expected, yardstick, "float32")


class Decoder:
    """Embeddings, layers, and the scores of the next token."""

    def __init__(self, spec: AttentionSpec, block: type[GptBlock] | type[LlamaBlock]) -> None:
        self.embedding = nn.Embedding(VOCABULARY, spec.embed_dim)
        self.places = None if spec.rope else nn.Embedding(PROMPT + STEPS, spec.embed_dim)
        self.head = nn.Linear(spec.embed_dim, VOCABULARY, bias=False)
        modules = [MultiHeadAttention(spec).eval() for _ in range(LAYERS)]
        prefill, step = mhsa.compile(modules[0]), mhsa.compile(modules[0], dims={"B": 1, "L": 1})
        self.layers = []
        for module in modules:  # compiled once, bound to the weights of each
            functions = [mhsa.load(artifact, weights=weights(module)) for artifact in (prefill, step)]
            cache = functions[0].new_cache(batch=1, capacity=PROMPT + STEPS)
            self.layers.append(Layer(block(spec.embed_dim), module, *functions, cache))

    def __call__(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.places is not None:
            first = int(self.layers[0].cache.length[0])
            x = x + self.places(torch.arange(first, first + tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, -1])


def generate(decoder: Decoder) -> tuple[list[int], float]:
    """The tokens, drawn by their scores, and seconds for all."""
    tokens = torch.randint(VOCABULARY, (1, PROMPT))
    drawn, started = [], time.perf_counter()
    for _ in range(STEPS):
        tokens = torch.multinomial(decoder(tokens).softmax(dim=-1), 1)
        drawn.append(int(tokens))
    return drawn, time.perf_counter() - started


def step_times(layer: Layer) -> list[tuple[int, float]]:
    """(positions in the cache, median microseconds of attention on one more)."""
    cache = layer.prefill.new_cache(batch=1, capacity=TIMED_AT[-1] + 1)
    times = []
    for length in TIMED_AT:
        more = length - int(cache.length[0])
        layer.prefill(torch.randn(1, more, layer.attention.spec.embed_dim), cache=cache)
        times.append((length, _median_us(layer, cache)))
    return times


def _median_us(layer: Layer, cache: KVCache) -> float:
    x, length, times = torch.randn(1, 1, layer.attention.spec.embed_dim), cache.length, []
    for _ in range(50):
        started = time.perf_counter()
        layer.step(x, cache=cache)
        times.append(time.perf_counter() - started)
        cache.truncate(length)
    return statistics.median(times) * 1e6


def report(layer: Layer) -> Table:
    spec = layer.attention.spec
    per_position = 4 * spec.num_kv_heads * (spec.head_dim + spec.v_head_dim)
    table = Table(title="attention of one layer, one token", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("positions", "time", "cache read"):
        table.add_column(column, justify="right")
    for length, us in step_times(layer):
        table.add_row(str(length), f"{us:.0f} us", f"{length * per_position / 2**20:.2f} MiB")
    return table


@torch.no_grad()
def run(name: str, spec: AttentionSpec, block: type[GptBlock] | type[LlamaBlock]) -> bool:
    """Generates, checks and times; whether every step was right."""
    console.rule(f"[bold]A decoder shaped as {name}: D {spec.embed_dim}, H {spec.num_heads}, G {spec.num_kv_heads}")
    decoder, right = Decoder(spec, block), True
    tokens, seconds = generate(decoder)
    console.print(f"{STEPS} tokens, {seconds / STEPS * 1e3:.1f} ms each: {' '.join(map(str, tokens[:12]))} ...")
    for i, layer in enumerate(decoder.layers):
        error, allowed = layer.error()
        right &= error <= allowed
        verdict = "[green]ok[/]" if error <= allowed else "[red]FAIL[/]"
        console.print(f"layer {i}: error {error:.1e} against the whole sequence, budget {allowed:.1e} {verdict}")
    console.print(report(decoder.layers[0]))
    return right


def main() -> int:
    torch.manual_seed(0)
    right = [run(*decoder) for decoder in (("GPT-2", GPT2, GptBlock), ("Llama", LLAMA, LlamaBlock))]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
