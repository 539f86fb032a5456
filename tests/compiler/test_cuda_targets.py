"""Artifacts for GPUs, compiled where there is none: every target, its machine code, the same bytes twice.

`make test-cuda`; a quick part of it is in test_cuda_builds.py, and what runs on a GPU in test_on_gpu.py."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import onnx
import pytest
import torch
from support.cuda import cuda_compiler

import mhsa_compile as mhsa
from mhsa_compile.compiler.codegen import cuda_compiler as cubin
from mhsa_compile.compiler.codegen import embed_cubin
from mhsa_compile.frontend.export.source import read_source
from mhsa_compile.hardware.profile import CudaProfile, load_profile, profile_names
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.manifest import MODULE

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("cuda_compiler")]

PROFILES = [profile for name in profile_names() if isinstance(profile := load_profile(name), CudaProfile)]
by_target = pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
SMALL = mhsa.AttentionSpec(embed_dim=64, num_heads=4, causal=True, mask="key_padding")
KERNEL = '#include <cuda_bf16.h>\nextern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.f; }\n'


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "small.onnx"
    onnx.save(read_source(SMALL, {"B": 2}, None).model, path)
    return path


@pytest.fixture(scope="module")
def compiled(small: Path) -> Callable[[str], Artifact]:
    """The block compiled for a target, once."""
    return cache(lambda target: mhsa.compile(small, target))


def machine_code(artifact: Artifact) -> bytes:
    library = (artifact.path / MODULE).read_bytes()
    assert library.count(embed_cubin._text(b"cubin")) == 1
    return library[library.index(b"\x7fELF", library.index(embed_cubin._text(b"cubin"))) :]


@pytest.mark.thorough_only("cuda-sm80")
@by_target
def test_a_block_compiles(compiled: Callable[[str], Artifact], profile: CudaProfile) -> None:
    artifact = compiled(profile.name)
    assert cubin.architecture(machine_code(artifact)) == profile.tvm.arch
    manifest = artifact.manifest
    assert manifest.target.tvm.arch == profile.tvm.arch
    assert {"nvcc", "nvrtc"} & manifest.versions.keys()
    assert b"__global__" not in (artifact.path / MODULE).read_bytes()  # nothing is left to compile
    assert {op.name for op in manifest.ops} >= {"op_0", "op_1", "op_2"}


def test_two_builds_are_equal(small: Path, compiled: Callable[[str], Artifact]) -> None:
    first, second = compiled("cuda-sm80"), mhsa.compile(small, "cuda-sm80")
    assert first.manifest == second.manifest
    assert (first.path / MODULE).read_bytes() == (second.path / MODULE).read_bytes()


@by_target
def test_nvrtc_stands_in_for_nvcc(monkeypatch: pytest.MonkeyPatch, profile: CudaProfile) -> None:
    cuda_compiler.require_nvrtc()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert cubin.compiler()[0] == "nvrtc"
    code = cubin.compiled(KERNEL, profile.tvm.arch)
    assert cubin.architecture(code) == profile.tvm.arch
    assert code == cubin.compiled(KERNEL, profile.tvm.arch)
