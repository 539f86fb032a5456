"""The example with a trained model, its attention compiled here for an ARM CPU and run there: `make test-arm`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.arm import runs
from support.arm.runs import There
from support.examples import loaded, needs_the_model

import mhsa_compile as mhsa
from mhsa_compile.runtime.artifact.artifact import Artifact

pytestmark = [pytest.mark.arm, needs_the_model]
TARGET = "cortex-a76"


@dataclass(frozen=True)
class LoadedThere:
    """Stands for a CompiledAttention: torch in, torch out."""

    there: There
    artifact: Artifact
    weights: dict
    threads: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "_call", self.there.load(self.artifact, self.weights))

    def __call__(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        (y,) = self._call({"x": x.numpy(), "mask": mask.numpy()})
        return torch.from_numpy(y)


@pytest.mark.thorough
def test_sentence_embeddings(record_property) -> None:
    """Six layers with their own weights; every call of each against float64, and the embeddings against PyTorch's."""
    example = loaded("sentence_embeddings.py")
    folder = example.model_folder()
    reference = example.load_reference(folder)
    sentences = example.SENTENCES.read_text(encoding="utf-8").splitlines()
    batches = example.padded_batches(example.Tokenizer.from_file(str(folder / "tokenizer.json")), sentences)
    artifact = mhsa.compile(mhsa.from_bert(reference.encoder.layer[0].attention), f"aarch64-{TARGET}")
    with runs.runs(TARGET) as there:
        load = lambda artifact, weights: LoadedThere(there, artifact, weights)  # noqa: E731
        ours = example.with_compiled_attention(reference, artifact, load)
        recorded, embedded = example.recording(ours, lambda: example.embed(ours, batches))
    expected = example.embed(reference, batches)
    layers = example.layer_errors(reference, artifact, recorded)
    for number, layer in enumerate(layers):
        runs.note(record_property, f"MiniLM's layer {number} on {TARGET}", layer)
    cosine = torch.nn.functional.cosine_similarity(embedded.double(), expected.double()).min().item()
    assert len(layers) == 6
    assert example.verdict(layers, cosine) == 0
    assert example.nearest(embedded) == example.nearest(expected)
