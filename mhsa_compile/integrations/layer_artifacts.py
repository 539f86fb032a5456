"""The artifacts of replaced layers: compiled once in a process for each kind, loaded with a layer's weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from mhsa_compile.compiler import pipeline
from mhsa_compile.errors import BuildError, MhsaError, ModelError
from mhsa_compile.files.patience import shown_stages
from mhsa_compile.hardware.profile import TargetProfile
from mhsa_compile.integrations import torch_linear
from mhsa_compile.integrations.acceleration_report import AccelerationReport
from mhsa_compile.integrations.layers.export import ExportedKind, check_bound
from mhsa_compile.integrations.layers.graph import WholeLayerKind, graph_of
from mhsa_compile.integrations.torch_linear import LinearKind
from mhsa_compile.nn.modules import MultiHeadAttention
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.compiled_attention import CompiledAttention, load
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.float32_products import Float32Request

if TYPE_CHECKING:
    import onnx

_Kind: TypeAlias = AttentionSpec | LinearKind | WholeLayerKind | ExportedKind
"""What is compiled once, whatever the number of layers."""


class _Artifacts:
    """The artifacts of this process: one for each spec or kind of linear, target and word of `float32_products`,
    whatever the number of layers and models; weights are bound at load."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: dict[tuple[str, Float32Request, _Kind], Artifact | MhsaError] = {}

    def get(
        self, profile: TargetProfile, kind: _Kind, source: Callable[[], Any], products: Float32Request, **options: Any
    ) -> Artifact:
        """That of what a source is; it is compiled where it is new. Raises MhsaError, the same again for what has no
        artifact."""
        key = (profile.to_toml(), products, kind)
        with self._lock:
            if key not in self._compiled:
                try:
                    options |= {"without_attention": "accept", "float32_products": products}
                    with shown_stages("mhsa.accelerate, a first call") as begin:
                        begin("export the layer")
                        graph = source()
                        artifact = pipeline.compile(graph, profile, progress=begin, **options)
                    if isinstance(kind, ExportedKind):
                        check_bound(graph, artifact.manifest)
                    self._compiled[key] = artifact
                except (ModelError, BuildError) as error:
                    self._compiled[key] = error
            if isinstance(outcome := self._compiled[key], MhsaError):
                raise outcome
            return outcome

    def __reduce__(self) -> str:  # a copy of a model, here or in another process, shares what is compiled there
        return "_ARTIFACTS"


_ARTIFACTS = _Artifacts()


class LayerArtifacts:
    """Gives the layers of a model their artifacts, for a target, and notes in its report what they got."""

    def __init__(self, profile: TargetProfile, report: AccelerationReport) -> None:
        self._profile, self._report, self._artifacts = profile, report, _ARTIFACTS

    def attention(self, module: MultiHeadAttention, weights: Mapping[str, Any]) -> CompiledAttention:
        """The layer that a module is, with these weights."""
        return self._load(module.spec, lambda: module, weights)

    def linear(self, kind: LinearKind, weights: Mapping[str, Any]) -> CompiledAttention:
        """A linear of a kind, with these weights."""
        word = None if kind.form is None else str(kind.form)
        return self._load(kind, lambda: torch_linear.graph_of(kind), weights, weights_word=word)

    def layer(self, kind: WholeLayerKind, weights: Mapping[str, Any]) -> CompiledAttention:
        """A whole layer of a kind, with these weights. Its first calls are held against PyTorch's, not its graph."""
        return self._load(kind, lambda: graph_of(kind), weights, check=False)

    def exported(
        self, exported: tuple[ExportedKind, Callable[[], onnx.ModelProto]], weights: Mapping[str, Any]
    ) -> CompiledAttention:
        """A layer of transformers, with those of these weights that its graph has."""
        kind, source = exported
        return self._load(kind, source, weights, check=False)

    def _load(
        self,
        kind: _Kind,
        source: Callable[[], Any],
        weights: Mapping[str, Any],
        *,
        weights_word: str | None = None,
        check: bool | None = None,
    ) -> CompiledAttention:
        products = self._report.float32_products
        artifact = self._artifacts.get(self._profile, kind, source, products, weights=weights_word, check=check)
        self._report.count_outcome(artifact.manifest)
        if isinstance(kind, ExportedKind):
            weights = {info.name: weights[info.name] for info in artifact.manifest.weights}
        return load(artifact, weights=weights)
