"""What compiles for GPUs, in short: up to the machine code where no compiler is, and of that what a second shows.

Every target as it is compiled in earnest: test_cuda_targets.py, `make test-cuda`."""

from __future__ import annotations

import ctypes.util
import shutil
from typing import Any

import pytest
from support.cuda.cuda_compiler import needs_compiler

import mhsa_compile as mhsa
from mhsa_compile.compiler.codegen import cuda_compiler, embed_cubin
from mhsa_compile.errors import BuildError, InputError, InstallationError, ModelError
from mhsa_compile.hardware import environment
from mhsa_compile.hardware.profile import profile_names
from mhsa_compile.runtime.artifact.manifest import MODULE

KERNEL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.f; }\n'


def test_every_promised_target_is_there() -> None:
    assert {"cuda-sm80", "cuda-sm86", "cuda-sm90a"} <= set(profile_names())


def test_all_but_the_last_step_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine code is made up; the rest of the artifact is not, and loads as far as there is a machine."""
    seen = []

    def compiled(source: str, arch: str) -> bytes:
        seen.append((source.count("__global__"), arch))
        return b"\x7fELF made up"

    monkeypatch.setattr(cuda_compiler, "compiler", lambda: ("nvrtc", "13.0"))
    monkeypatch.setattr(cuda_compiler, "compiled", compiled)
    artifact = mhsa.compile(mhsa.AttentionSpec(embed_dim=64, num_heads=4, causal=True), "cuda-sm90a", dims={"B": 2})
    ((kernels, arch),) = seen
    assert kernels > 3 and arch == "sm_90a"
    assert artifact.manifest.versions["nvrtc"] == "13.0"
    library = (artifact.path / MODULE).read_bytes()
    assert library.count(embed_cubin._text(b"\x7fELF made up")) == 1 and b"__global__" not in library
    with pytest.raises(InputError, match="threads: expected None: a GPU computes, got 2"):
        mhsa.load(artifact, threads=2)
    with pytest.raises(InputError, match="for a GPU, got 'cpu'"):
        mhsa.load(artifact, device="cpu")
    if ctypes.util.find_library("cuda") is None:
        with pytest.raises(InstallationError, match="NVIDIA driver: expected libcuda"):
            mhsa.load(artifact)


def test_what_no_kernel_can_do_yet_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_compiler, "compiler", lambda: ("nvrtc", "13.0"))
    with pytest.raises(ModelError, match="that a kernel can do"):
        mhsa.compile(mhsa.AttentionSpec(embed_dim=64, num_heads=4), "cuda-sm80", dims={"B": 1}, weights="int8")


@needs_compiler
def test_the_architecture_is_in_the_machine_code() -> None:
    assert cuda_compiler.architecture(cuda_compiler.compiled(KERNEL, "sm_90a")) == "sm_90a"


@needs_compiler
def test_the_compilers_words_are_passed_on() -> None:
    with pytest.raises(BuildError, match="nonsense"):
        cuda_compiler.compiled("nonsense;", "sm_80")


@pytest.mark.parametrize("ask", [cuda_compiler.compiler, lambda: cuda_compiler.compiled(KERNEL, "sm_80"),
                                 lambda: mhsa.compile("there_is_no_such_file.onnx", "cuda-sm80")])  # fmt: skip
def test_no_compiler_is_named(monkeypatch: pytest.MonkeyPatch, ask: Any) -> None:
    """The compiler is looked for before the work: the last of these has not looked for its source yet."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(environment, "nvidia_folders", list)
    with pytest.raises(InstallationError, match=r"CUDA compiler: .*got neither.*mhsa-compile\[cuda\]"):
        ask()


def test_what_is_no_machine_code_is_told() -> None:
    for data in (b"", b"#include", b"\x7fELF" + bytes(60)):
        with pytest.raises(BuildError, match="cubin: expected an ELF file of NVIDIA's"):
            cuda_compiler.architecture(data)


def packed(*modules: tuple[bytes, bytes | None]) -> bytes:
    content = b"".join(
        embed_cubin._text(kind) + (b"" if value is None else embed_cubin._text(value)) for kind, value in modules
    )
    tree = bytes(8) * 2  # two empty lists
    return len(tree + content).to_bytes(8, "little") + tree + content


def test_sources_among_packed_imports_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    text: Any = embed_cubin._text
    monkeypatch.setattr(cuda_compiler, "compiled", lambda source, arch: b"\x7fELF" + f"{source}|{arch}".encode())
    functions = b"what is known of the functions"
    source = (b"cuda", text(b"cuda") + functions + text(b"int x;"))
    others = [(b"relax.VMExecutable", b"its bytecode"), (b"_lib", None)]
    compiled = embed_cubin.with_machine_code(packed(*others, source), "sm_80")
    code = (b"cuda", text(b"cubin") + functions + text(b"\x7fELFint x;|sm_80"))
    assert compiled == packed(*others, code)
    assert embed_cubin.machine_code(compiled) == [b"\x7fELFint x;|sm_80"]
    with pytest.raises(BuildError, match="kernels: expected CUDA C"):
        embed_cubin.with_machine_code(packed((b"cuda", text(b"ptx") + text(b"x"))), "sm_80")
