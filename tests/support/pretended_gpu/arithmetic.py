"""Whole artifacts for GPUs, computed on the CPU from the CUDA C++ that a GPU would run, and held against float64.

TVM's runtime for CUDA launches them over the made-up driver: arguments, workspace and tails are those of a GPU.
Only what is written in C++ can be computed so: kernels of this project, which speak to tensor cores in assembly, are
left out, and TVM's schedules take their place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import node_cases
from support.cases import PARITY, ParityCase
from support.pretended_gpu import emulator
from support.pretended_gpu.libraries import FOLDER, Pretended

import mhsa_compile as mhsa
from mhsa_compile.compiler.codegen import cuda_compiler
from mhsa_compile.kernels.registry import KERNELS
from mhsa_compile.runtime import tvm_runtime
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.verify import verify_run

NAMES = ("h1-e7-d11", "bool-cross", "bottom-right-cross", "f24", "longformer-cross", "bf16-key-padding-cross",
         "fp16-scale-1")  # fmt: skip
"""Cases of the parity matrix: odd widths, masks of every kind, queries that see nothing, values of another width, each
dtype. Not float32 at D = 192: TVM's schedule of a product adds term after term: an error of 1.3 budgets."""
CHECKED_AGAINST_ITSELF = "bool-cross"
NODES = (
    "test_attention_4d_gqa_causal",
    "test_attention_3d_diff_heads_sizes_softcap",
    "test_attention_4d_with_qk_matmul",
)


@pytest.fixture(scope="session")
def gpu() -> Pretended:
    return Pretended(Path(os.environ[FOLDER]))


def compiled_apart(source: str, arch: str) -> bytes:
    """The source compiled by a process of its own: NVRTC crashes in one that has the made-up driver."""
    take, give = "sys.stdin.read(), sys.argv[1]", "sys.stdout.buffer.write"
    code = (
        f"import sys; from mhsa_compile.compiler.codegen import cuda_compiler; {give}(cuda_compiler.compiled({take}))"
    )
    words = [sys.executable, "-P", "-c", code, arch]
    return subprocess.run(words, input=source.encode(), stdout=subprocess.PIPE, check=True).stdout


class Computed:
    """Compiles for a GPU, and has the driver compute what it launches."""

    def __init__(self, gpu: Pretended, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._gpu, self._folder, self._sources = gpu, folder, list[str]()

        def noted(source: str, arch: str) -> bytes:
            self._sources.append(source)
            return compiled_apart(source, arch)

        patch.setattr(cuda_compiler, "compiled", noted)
        patch.setitem(KERNELS, "cuda", ())

    def artifact(self, source: Any, **words: Any) -> mhsa.Artifact:
        self._sources.clear()
        artifact = mhsa.compile(source, "cuda-sm90a", **words)
        folder = self._folder / str(len(list(self._folder.iterdir())))  # a library's path is its name once it is loaded
        folder.mkdir()
        for library in emulator.build(self._sources, folder):
            self._gpu.compute(library)
        return artifact


@pytest.fixture
def computed(gpu: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Computed:
    return Computed(gpu, tmp_path, monkeypatch)


def runs(artifact: mhsa.Artifact) -> Any:
    attention = mhsa.load(artifact)

    def run(inputs: Any) -> list[np.ndarray]:
        outputs = attention.from_host(*inputs) if isinstance(inputs, tuple) else attention.from_host(**inputs)
        return list(outputs) if isinstance(outputs, tuple) else [outputs]

    return run


@pytest.mark.parametrize("case", [case for case in PARITY if case.name in NAMES], ids=lambda case: case.name)
def test_parity(case: ParityCase, computed: Computed) -> None:
    torch.manual_seed(7)
    module = mhsa.MultiHeadAttention(case.spec).eval()
    for fixed, cases in case.builds:
        small = [sizes for sizes in cases if sizes.get("L", 0) * sizes.get("S", 0) <= 197 * 197]
        artifact = computed.artifact(module, dims=fixed)
        verdict = verify_run(artifact, runs(artifact), cases=small, self_checks=case.name == CHECKED_AGAINST_ITSELF)
        worst = verdict.worst
        assert verdict.ok, f"error {worst.error:.3g}, budget {worst.budget:.3g} at {worst.dims}; {verdict.checks}"


@pytest.mark.parametrize("name", NODES)
def test_node(name: str, computed: Computed) -> None:
    case = node_cases.cases()[name]
    node_cases.compare(case, runs(computed.artifact(case.model)))


def test_nobody_to_look_at_gives_zeros(computed: Computed) -> None:
    """Kernels whose grid has no blocks are left out, the rest of the call is not: what is left is the last bias."""
    torch.manual_seed(0)
    module = mhsa.MultiHeadAttention(mhsa.AttentionSpec(embed_dim=24, num_heads=3, kv_embed_dim=16)).eval()
    (y,) = runs(computed.artifact(module))(
        {"x": np.ones((2, 5, 24), np.float32), "context": np.ones((2, 0, 16), np.float32)}
    )
    bias = module.state_dict()["out_proj.bias"].numpy()
    np.testing.assert_array_equal(y, np.broadcast_to(bias, (2, 5, 24)))


def test_keys_and_values_apart_and_a_mask_of_integers(computed: Computed) -> None:
    """Memory of the GPU is the host's here: what is copied and converted is what the kernels then read."""
    torch.manual_seed(0)
    spec = mhsa.AttentionSpec(embed_dim=24, num_heads=3, kv_embed_dim=16, v_embed_dim=11, mask="key_padding")
    module = mhsa.MultiHeadAttention(spec).eval()
    attention = mhsa.load(computed.artifact(module))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, np.float32) for shape in ((2, 5, 24), (2, 7, 16), (2, 7, 11))]
    visible = np.arange(7) < np.array([[7], [3]])
    expected = attention.from_host(*arrays, visible)
    with torch.no_grad():
        exact = module.double()(*(torch.from_numpy(a).double() for a in arrays), torch.from_numpy(visible)).numpy()
        eager = module.float()(*map(torch.from_numpy, arrays), torch.from_numpy(visible)).numpy()
    assert max_error(exact, expected) <= budget(exact, eager, "float32")
    runtime = tvm_runtime.start_cuda()
    for dtype in ("int64", "int32", "int8", "uint8"):
        there = runtime.on_gpu([*arrays, visible.astype(dtype)], 0)
        for _ in range(3):
            actual = np.from_dlpack(runtime.to_host(attention(*there)))
            np.testing.assert_array_equal(actual, expected)
        np.testing.assert_array_equal(attention.from_host(*arrays, mask=visible.astype(dtype)), expected)


def test_what_is_wrong_is_seen(computed: Computed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that computes one thing more than it should fails: it is the kernels that are looked at."""
    emulated = emulator.emulated
    monkeypatch.setattr(emulator, "emulated", lambda source: emulated(source.replace("* 0.25", "* 0.26")))
    artifact = computed.artifact(mhsa.AttentionSpec(embed_dim=32, num_heads=2, causal=True))
    assert not verify_run(artifact, runs(artifact), cases=[{"B": 2, "L": 7}], self_checks=False).ok
