"""A whole layer with memory from its caller: a cache that is written in place, and outputs that one kernel gives
together.

The layer is compiled for this CPU, its memory planned as for a GPU; tensors of PyTorch's on the CPU stand for a GPU's.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

import mhsa_compile as mhsa
from mhsa_compile.compiler.codegen import caller_memory
from mhsa_compile.compiler.codegen.build import _linker, _lowering, _planning, pass_context
from mhsa_compile.compiler.codegen.object_files import ObjectFiles
from mhsa_compile.compiler.lower import schedule
from mhsa_compile.frontend.export.source import read_source
from mhsa_compile.frontend.relax.importer import import_onnx
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.records.record import RecordSet
from mhsa_compile.runtime import cuda_launch, kv_cache, tvm_runtime
from mhsa_compile.runtime.artifact.manifest import WEIGHTS, Manifest
from mhsa_compile.runtime.compiled_attention import CompiledAttention
from mhsa_compile.runtime.cuda_arguments import DeviceArgument, DeviceSignature
from mhsa_compile.runtime.cuda_devices import Gpu
from mhsa_compile.spec.position_encoding import Rope

pytestmark = pytest.mark.cuda
SPEC = mhsa.AttentionSpec(
    embed_dim=40,
    num_heads=4,
    num_kv_heads=2,
    causal=True,
    kv_cache=True,
    rope=Rope(max_length=17),
    window=(11, 0),
    outputs=("y", "lse", "top_k:3"),
)


class Here(Gpu):
    """A GPU whose memory is the host's."""

    def __str__(self) -> str:
        return "cpu:0"


GPU = Here(0, "made up", (9, 0), 132, 227)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the host's memory a GPU's, and PyTorch one for CUDA."""
    on_gpu = lambda self, arrays, gpu: list(map(self.ffi.from_dlpack, arrays))  # noqa: E731
    monkeypatch.setattr(tvm_runtime, "start_cuda", tvm_runtime.start)
    monkeypatch.setattr(tvm_runtime.Runtime, "on_gpu", on_gpu)
    monkeypatch.setattr(tvm_runtime.Runtime, "wait", lambda self, gpu: None)
    monkeypatch.setattr(kv_cache, "torch_of_cuda", lambda: torch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda_launch, "_current_device_guard", lambda gpu: torch.inference_mode(False))
    monkeypatch.setattr(DeviceArgument, "_adopt", lambda self, value: value)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[mhsa.Artifact, Path]:
    """(the layer for this CPU, the same with memory from its caller)."""
    torch.manual_seed(0)
    source, profile = read_source(SPEC, {}, None), load_profile("native")
    scheduled = schedule(import_onnx(source.model), profile, RecordSet([], profile))
    inputs = len(scheduled.module["main"].params) - scheduled.packed
    planned = caller_memory.from_caller(tvm.transform.Sequential(_planning())(scheduled.module), inputs)
    with pass_context():
        target, lowering = tvm.target.Target(profile.tvm_config()), tvm.transform.Sequential(_lowering())
        executable = relax.build(planned, target, relax_pipeline=lowering)
    path = tmp_path_factory.mktemp("library") / "module.so"
    with ObjectFiles(path.parent) as objects:
        linker = _linker(profile.link.triple, objects)
        executable.export_library(str(path), fcompile=linker, workspace_dir=str(path.parent))
    return mhsa.compile(source.model), path


def loaded(compiled: tuple[mhsa.Artifact, Path]) -> CompiledAttention:
    """The artifact, loaded as `load` does it for a GPU."""
    from safetensors.numpy import load_file

    artifact, path = compiled
    code = path.read_bytes()
    library = tvm_runtime.start().library(code, sha256(code).hexdigest())
    on_cpu: Any = type("OnCpu", (), {"new_vm": lambda self, gpu: library.new_vm()})()
    manifest: Manifest = artifact.manifest
    signature = DeviceSignature(manifest, GPU)
    weights = load_file(artifact.path / WEIGHTS)
    return CompiledAttention(
        manifest,
        signature,
        cuda_launch.Launches(on_cpu, manifest, signature, GPU),
        [weights[info.name] for info in manifest.weights],
    )


@pytest.mark.usefixtures("pretended")
def test_steps_of_ragged_sequences_are_those_of_the_cpu(compiled: tuple[mhsa.Artifact, Path]) -> None:
    there, here = loaded(compiled), mhsa.load(compiled[0], threads=1)
    caches = [attention.new_cache(batch=3, capacity=17) for attention in (there, here)]
    x = torch.randn(3, 12, 40)
    memory = caches[0].key.data_ptr()
    for part in (x[:, :7], "truncate", x[:, 7:8], x[:, 8:11], x[:, 11:]):
        if isinstance(part, str):
            for cache in caches:
                cache.truncate([7, 1, 4])
            continue
        found, expected = (
            attention(part.contiguous(), cache=cache) for attention, cache in zip((there, here), caches, strict=True)
        )
        assert found._fields == expected._fields == ("y", "lse", "top_k_weights", "top_k_keys")
        for mine, other in zip(found, expected, strict=True):
            assert isinstance(mine, torch.Tensor) and torch.equal(mine, other)
    assert caches[0].key.data_ptr() == memory
    for mine, other in ((caches[0].key, caches[1].key), (caches[0].value, caches[1].value)):
        assert np.array_equal(mine.numpy(), other)
