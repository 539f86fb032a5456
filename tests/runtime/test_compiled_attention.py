"""Loading and calling: weights, threads, processes, and what the process has loaded afterwards."""

import errno
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from support import refused_tiles
from support.this_cpu import with_tiles
from support.tiny_artifact import MASK, W, X, Y, assert_right, draw, make, read_only, reference

import mhsa_compile as mhsa
from mhsa_bench.bench import bench
from mhsa_compile.errors import ArtifactError, InputError
from mhsa_compile.hardware import host
from mhsa_compile.runtime.artifact.artifact import Artifact, OpenArtifact
from mhsa_compile.runtime.compiled_attention import CompiledAttention, load


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return make(tmp_path_factory.mktemp("artifact") / "tiny.mhsa")


@pytest.fixture(scope="module")
def compiled(artifact: Artifact) -> CompiledAttention:
    return load(artifact)


def test_inputs_by_position_and_by_name(compiled: CompiledAttention) -> None:
    x, mask = draw()
    assert_right(compiled(x, mask), x, mask)
    assert_right(compiled(x, mask=mask), x, mask)
    assert_right(compiled(mask=mask, x=x, unknown=None), x, mask)


def test_what_a_loaded_artifact_tells(compiled: CompiledAttention, artifact: Artifact) -> None:
    assert compiled.inputs == (X, MASK)
    assert compiled.outputs == (Y,)
    assert compiled.manifest == artifact.manifest
    assert compiled.threads == host.allowed_cpus()
    assert repr(compiled).startswith("<CompiledAttention x (B, L, 8), mask (mask_B, mask_L) -> y (B, L, 8), threads=")


def test_load_takes_paths(artifact: Artifact) -> None:
    x, mask = draw()
    assert_right(mhsa.load(str(artifact.path), device="cpu", threads=1)(x, mask), x, mask)


def test_weights_from_anywhere(artifact: Artifact, compiled: CompiledAttention, tmp_path: Path) -> None:
    x, mask = draw()
    other = W + 1
    save_file({"w": other}, tmp_path / "layer.safetensors")
    sources = (
        {"w": other},
        {"w": read_only(other.T.copy().T)},
        {"w": torch.nn.Parameter(torch.from_numpy(other))},
        tmp_path / "layer.safetensors",
        str(tmp_path / "layer.safetensors"),
    )
    for weights in sources:
        assert_right(load(artifact, weights=weights)(x, mask), x, mask, other)
        assert_right(compiled.with_weights(weights)(x, mask), x, mask, other)
        assert_right(compiled(x, mask), x, mask)


BAD_WEIGHTS = {
    "missing": ({}, "expected an array for each of w, got none for w"),
    "extra": ({"w": W, "b": W[0]}, "expected only w, got also b"),
    "shape": ({"w": W[:7]}, r"expected float32 of shape \(8, 8\), got .*\(7, 8\)\. `\.manifest\.weights` lists"),
    "masked": ({"w": np.ma.masked_array(W)}, "weight 'w': expected float32 .* without a mask, got a masked array"),
    "dtype": ({"w": W.astype("f2")}, r"weight 'w': expected float32 of shape \(8, 8\), got float16"),
    "file": ("absent.safetensors", r"expected a \.safetensors file, got 'absent"),
    "no safetensors": (__file__, r"expected a \.safetensors file"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weights(artifact: Artifact, compiled: CompiledAttention, case: str) -> None:
    weights, message = BAD_WEIGHTS[case]
    for take in (lambda: load(artifact, weights=weights), lambda: compiled.with_weights(weights)):
        with pytest.raises(InputError, match=message):
            take()


def test_one_code_with_several_weights_from_several_threads(compiled: CompiledAttention) -> None:
    x, mask = draw()
    several = [compiled.with_weights({"w": W + i}) for i in range(3)]

    def work(i: int) -> bool:
        return all(np.array_equal(several[i](x, mask), alone[i]) for _ in range(50))

    alone = [one(x, mask) for one in several]
    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, [0, 1, 2] * 2))


@pytest.mark.parametrize("threads", [0, -1, 1.0, True, "2"])
def test_bad_threads(artifact: Artifact, threads: object) -> None:
    with pytest.raises(InputError, match="threads: expected an integer from 1 on"):
        load(artifact, threads=threads)
    assert load(artifact, threads=np.int64(1)).threads == 1


def test_more_threads_than_anybody_needs_are_refused(artifact: Artifact) -> None:
    most = 16 * os.cpu_count()
    for take in (lambda: load(artifact, threads=20_000), lambda: bench(artifact, dims={}, threads=20_000)):
        with pytest.raises(InputError, match=f"threads: expected at most {most}, 16 for each CPU .* got 20000"):
            take()

    def work() -> int:
        return load(artifact, threads=most).threads

    assert in_a_new_thread(work) == most


def test_a_device_that_is_not_there(artifact: Artifact) -> None:
    with pytest.raises(InputError, match="device: expected \"cpu\", as it was compiled for one, got 'cuda'"):
        load(artifact, device="cuda")


def test_nothing_is_mapped_that_does_not_fit_this_cpu(artifact: Artifact, tmp_path: Path) -> None:
    shutil.copytree(artifact.path, tmp_path / "other")
    (tmp_path / "other" / "module.so").write_bytes(b"not a library")
    target = artifact.manifest.target
    strange = msgspec.structs.replace(target.hardware, features=("time_travel",))
    target = msgspec.structs.replace(target, hardware=strange)
    other = Artifact.assemble(tmp_path / "other", msgspec.structs.replace(artifact.manifest, target=target))
    with pytest.raises(ArtifactError, match="without time_travel"):
        load(other)


@with_tiles
def test_code_with_tiles_is_not_mapped_where_a_sandbox_refuses_them(artifact: Artifact) -> None:
    """Of a real system: elsewhere the answers are made up."""
    refused_tiles.require()
    program = "import sys, mhsa_compile\ntry: mhsa_compile.load(sys.argv[1])\nexcept ValueError as error: print(error)"
    words = refused_tiles.command("EPERM", sys.executable, "-c", program, artifact.path)
    done = subprocess.run(words, capture_output=True, text=True)
    assert "expected a process that may use matrix tiles" in done.stdout and "a sandbox" in done.stdout, done.stderr


def test_load_checks_the_hashes_again(artifact: Artifact, tmp_path: Path) -> None:
    copy = artifact.save(tmp_path / "copy")
    with (copy.path / "module.so").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ArtifactError, match=r"module\.so"):
        load(copy)


def test_a_replaced_artifact_brings_its_new_code(artifact: Artifact, tmp_path: Path) -> None:
    x, mask = draw()
    place = artifact.save(tmp_path / "attention.mhsa").path
    old = load(place)
    make(tmp_path / "new", scale=3.0).save(place, force=True)
    assert_right(load(place)(x, mask), x, mask, 3 * W)
    assert_right(old(x, mask), x, mask)


def test_what_was_checked_is_what_runs(artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are exchanged, or written over, after the check: neither foreign code nor foreign weights."""
    place = tmp_path / "attention.mhsa"
    shutil.copytree(artifact.path, place)
    checked = OpenArtifact.read

    def exchanged(self: OpenArtifact, readers: Any) -> dict[str, Any]:
        found = checked(self, readers)
        for name in self.manifest.files:
            (place / name).write_bytes(b"foreign")
        return found

    monkeypatch.setattr(OpenArtifact, "read", exchanged)
    x, mask = draw()
    assert_right(load(place)(x, mask), x, mask)
    assert (place / "module.so").read_bytes() == b"foreign"


def test_code_is_mapped_once_for_all_who_load_it(artifact: Artifact, tmp_path: Path) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(" r-xp ")

    load(artifact)
    before = mapped()
    load(artifact.save(tmp_path / "copy"))
    assert mapped() == before


def test_code_can_be_mapped_where_the_kernel_hands_out_no_memory_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> int:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    x, mask = draw()
    np.testing.assert_allclose(load(make(tmp_path / "other", scale=3.0))(x, mask), 3 * reference(x, mask), atol=1e-5)


def test_calls_from_several_threads(artifact: Artifact) -> None:
    one, two = load(artifact, threads=1), load(artifact, threads=2)

    def work(seed: int) -> None:
        for i in range(50):
            x, mask = draw(1 + (seed + i) % 7, 1 + i % 11)
            assert_right(one(x, mask), x, mask)
            assert_right(two(x, mask), x, mask)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))


def in_a_new_thread(work: object) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_memory_of_earlier_sizes_is_released(compiled: CompiledAttention) -> None:
    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def call(L: int) -> None:
        compiled(np.zeros((256, L, 8), np.float32), np.zeros((1, L), bool))

    call(300)
    before = resident()
    for L in range(200, 300):  # 2 MiB each
        call(L)
    assert resident() - before < 50


def run_fresh(code: str, artifact: Artifact) -> None:
    done = subprocess.run([sys.executable, "-c", code, str(artifact.path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_a_fresh_process_loads_neither_torch_nor_a_compiler(artifact: Artifact) -> None:
    run_fresh(
        """
import sys
import numpy as np
from mhsa_compile import load
compiled = load(sys.argv[1])
x, mask = np.ones((2, 3, 8), np.float32), np.ones((1, 3), bool)
y = compiled(x, mask)
loaded = {"torch", "onnx", "tvm"} & sys.modules.keys()
assert not loaded, loaded
maps = open("/proc/self/maps").read()
assert "libtvm_runtime.so" in maps and "libtvm_compiler" not in maps and "libtorch" not in maps
import torch  # hidden from tvm_ffi alone
assert isinstance(compiled(torch.from_numpy(x), torch.from_numpy(mask)), torch.Tensor)
import tvm, tvm.relax  # the compiler, beside the runtime that is loaded already
assert tvm.runtime.tensor(x).shape == (2, 3, 8)
np.testing.assert_array_equal(load(sys.argv[1])(x, mask), y)
""",
        artifact,
    )


@pytest.mark.parametrize("threads", ["1", pytest.param("2", marks=pytest.mark.thorough)])
def test_a_process_may_end_while_a_daemon_thread_is_inside_a_call(artifact: Artifact, threads: str) -> None:
    worker = Path(__file__).with_name("daemon_worker.py")
    command = [sys.executable, worker, artifact.path, threads]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_torch_is_hidden_from_one_thread_only() -> None:
    from mhsa_compile.runtime.tvm_runtime import without_torch

    with without_torch():
        finder = sys.meta_path[0]
        assert in_a_new_thread(lambda: finder.find_spec("torch")) is None  # None: ask the next finder
        with pytest.raises(ModuleNotFoundError):
            finder.find_spec("torch")
    assert finder not in sys.meta_path
