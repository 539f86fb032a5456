"""Bundles run: built with Zig, on this machine, and under QEMU as aarch64, 32-bit ARM and RISC-V.

Each architecture has one program, which loads every artifact: the runtime and Zig's C++ library take a minute to
compile the first time. `make test-arm` runs these.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file
from support.arm import machine, other_machines, runs

import mhsa_compile as mhsa
from mhsa_compile.hardware import host
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.standalone.bundle import bundle
from mhsa_compile.verification.random_inputs import Arrays
from mhsa_compile.verification.verify import verify_run

pytestmark = pytest.mark.arm

BLOCK = mhsa.AttentionSpec(embed_dim=66, num_heads=6, head_dim=11, num_kv_heads=2, causal=True, mask="key_padding")
SPECS = {
    "a causal block": (BLOCK, [{"B": 3, "L": 7}, {"B": 1, "L": 67}]),
    "rotary and capped, a window": (
        mhsa.AttentionSpec(embed_dim=40, num_heads=5, causal=True, rope=True, softcap=20.0, window=(13, 0)),
        [{"B": 2, "L": 41}],
    ),
    "cross-attention": (mhsa.AttentionSpec(embed_dim=24, num_heads=3, kv_embed_dim=17), [{"B": 2, "L": 5, "S": 37}]),
    "keys and values apart": (
        mhsa.AttentionSpec(embed_dim=24, num_heads=3, kv_embed_dim=17, v_embed_dim=11, mask="key_padding"),
        [{"B": 2, "L": 5, "S": 37}],
    ),
    "decoding from a cache": (
        mhsa.AttentionSpec(embed_dim=32, num_heads=4, num_kv_heads=2, causal=True, kv_cache=True),
        [{"B": 3, "L": 1, "C": 29}],
    ),
    "bfloat16": (mhsa.AttentionSpec(embed_dim=48, num_heads=4, dtype="bfloat16", bias=False), [{"B": 1, "L": 23}]),
    "float16": (mhsa.AttentionSpec(embed_dim=48, num_heads=4, dtype="float16"), [{"B": 1, "L": 23}]),
    "what a softmax is like": (
        mhsa.AttentionSpec(embed_dim=24, num_heads=3, outputs=("y", "lse", "top_k:2")),
        [{"B": 2, "L": 19}],
    ),
}
INT8 = "eight bits"
Command = Callable[..., list[str]]


class Device:
    """A target, the program of its bundle, and how it is started here."""

    def __init__(self, target: str, folder: Path, runtime: str | Path | None, command: Command, cpu: str = "") -> None:
        self.target, self.folder, self._command, self._cpu = target, folder, command, cpu
        self.machine = load_profile(target).tvm.mtriple.partition("-")[0]
        self._program = folder / "bundle/attention"
        self.made = bundle(self.compiled("a causal block"), folder / "bundle", runtime=runtime, build=True)

    def compiled(self, name: str) -> Artifact:
        spec = BLOCK if name == INT8 else SPECS[name][0]
        weights = "int8" if name == INT8 else None
        return mhsa.compile(spec, runs.emulable(self.target), weights=weights)

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **({"QEMU_CPU": self._cpu} if self._cpu else {})}
        return subprocess.run(
            self._command(self._program, *words), env=environment, capture_output=True, text=True, timeout=240
        )

    def runner(self, artifact: Artifact) -> Callable[[Arrays], list[np.ndarray]]:
        """What `judged` calls: inputs and outputs are files."""
        given, got = self.folder / "in.safetensors", self.folder / "out.safetensors"

        def run(inputs: Arrays) -> list[np.ndarray]:
            save_file({name: np.ascontiguousarray(array) for name, array in inputs.items()}, given)
            files = ("--inputs", given, "--outputs", got, "--repeat", "1", "--threads", "2")
            done = self.run("--artifact", artifact.path, *files)
            assert done.returncode == 0, done.stderr
            outputs = load_file(got)
            return [outputs[info.name] for info in artifact.manifest.outputs]

        return run


def emulated_aarch64(program: Path, *words: str | Path) -> list[str]:
    qemu = other_machines.emulator("aarch64")
    return [qemu, "-L", str(machine.require()), str(program), *map(str, words)]


def native(program: Path, *words: str | Path) -> list[str]:
    return [str(program), *map(str, words)]


def device(kind: str, folder: Path) -> Device:
    if kind == "this machine":
        return Device("native", folder, None, native)
    if kind == "this machine, built":
        return Device("native", folder, "build", native)
    if kind == "aarch64, its wheels":
        return Device("neoverse-n1", folder, machine.require() / "site", emulated_aarch64, "neoverse-n1")
    if kind == "aarch64, built":
        return Device("aarch64-generic", folder, None, emulated_aarch64, "cortex-a53")
    other_machines.require(kind.partition(",")[0])
    if kind == "riscv64, vectors":
        return Device("riscv64-v", folder, None, partial(other_machines.command, "riscv64"), "rv64,v=true,vlen=128")
    return Device(f"{kind}-generic", folder, None, partial(other_machines.command, kind))


KINDS = (
    "this machine", "this machine, built", "aarch64, its wheels", "aarch64, built", "armv7", "riscv64",
    "riscv64, vectors",
)  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def there(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Device:
    return device(request.param, tmp_path_factory.mktemp("device"))


@pytest.mark.thorough_but("riscv64", "riscv64, vectors")
def test_the_program_of_a_bundle_runs(there: Device) -> None:
    """The program runs as its README says, with no file but the bundle's; all of it is less than 12 MB."""
    assert there.made.bytes < 12e6
    done = there.run("--dim", "L=13", "--repeat", "2")
    assert done.returncode == 0, done.stderr
    assert "ms a call, the median of 2" in done.stdout
    assert "y: float32 (1, 13, 66), sum " in done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("there", ["this machine"], indirect=True)
@pytest.mark.skipif(shutil.which("make") is None or shutil.which("c++") is None, reason="needs make and a C++ compiler")
def test_its_makefile_takes_the_compiler_of_the_device(there: Device, tmp_path: Path) -> None:
    copied = shutil.copytree(there.folder / "bundle", tmp_path / "bundle")
    (copied / "attention").unlink()
    subprocess.run(["make"], cwd=copied, check=True, capture_output=True)
    done = subprocess.run([copied / "attention", "--dim", "L=13", "--repeat", "1"], capture_output=True, text=True)
    assert done.returncode == 0 and "y: float32 (1, 13, 66), sum " in done.stdout, done.stderr


@pytest.mark.thorough_only(
    "this machine-a causal block",
    "this machine-cross-attention",
    "this machine-eight bits",
    "this machine, built-a causal block",
    "this machine, built-rotary and capped, a window",
    "this machine, built-cross-attention",
    "this machine, built-decoding from a cache",
    "this machine, built-bfloat16",
    "this machine, built-float16",
    "this machine, built-what a softmax is like",
    "aarch64, its wheels-a causal block",
    "aarch64, its wheels-rotary and capped, a window",
    "aarch64, its wheels-cross-attention",
    "aarch64, its wheels-decoding from a cache",
    "aarch64, its wheels-bfloat16",
    "aarch64, its wheels-float16",
    "aarch64, its wheels-eight bits",
    "aarch64, built-a causal block",
    "aarch64, built-cross-attention",
    "aarch64, built-float16",
    "aarch64, built-eight bits",
    "armv7-cross-attention",
)
@pytest.mark.parametrize("name", [*SPECS, INT8])
def test_its_outputs_are_right(there: Device, name: str, record_property) -> None:
    artifact = there.compiled(name)
    cases = SPECS["a causal block" if name == INT8 else name][1]
    verdict = verify_run(artifact, there.runner(artifact), cases=cases, self_checks=False)
    if there.machine != host.architecture():
        what = f"{name}, in C++ on {there.target}"
        runs.note(record_property, what, *verdict.cases, machine=there.machine)
    assert verdict.ok, verdict.worst


@pytest.mark.thorough_only("this machine, built", "aarch64, its wheels")
def test_it_says_what_it_expected_and_what_it_got(there: Device, tmp_path: Path) -> None:
    save_file({"x": np.zeros((1, 5, 67), np.float32)}, tmp_path / "in.safetensors")
    done = there.run("--inputs", tmp_path / "in.safetensors")
    assert done.returncode == 2
    expected = "input 'x': expected float32 of shape (B, L, 66), got float32 of shape (1, 5, 67)."
    assert expected in done.stderr
    save_file({"z": np.zeros((1, 5, 66), np.float32)}, tmp_path / "in.safetensors")
    assert "--inputs: expected one of mask, x, got z." in there.run("--inputs", tmp_path / "in.safetensors").stderr
    assert re.search(r"--dim: expected one of B, L, .*got T\.", there.run("--dim", "T=5").stderr)
    (tmp_path / "in.safetensors").write_bytes(b"no safetensors")
    assert "expected safetensors" in there.run("--inputs", tmp_path / "in.safetensors").stderr
    foreign = mhsa.compile(BLOCK, "aarch64-generic" if there.machine == "x86_64" else "x86-64-v3")
    done = there.run("--artifact", foreign.path)
    assert done.returncode == 2
    assert re.search(rf"expected a CPU of \w+, .*got {there.machine}\. ", done.stderr)


@pytest.mark.parametrize("there", ["this machine"], indirect=True)
def test_sizes_that_do_not_fit_are_refused_in_our_words(there: Device) -> None:
    graph = "(float[n, 5] a, float[m, 5] b) => (float[r, 5] y) { y = Add (a, b) }"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 21]> g {graph}')
    artifact = mhsa.compile(model, without_attention="accept", check=False)
    assert there.run("--artifact", artifact.path, "--dim", "n=3", "--dim", "m=3").returncode == 0
    done = there.run("--artifact", artifact.path, "--dim", "n=3", "--dim", "m=4")
    assert done.returncode == 2
    assert done.stderr == (
        "Error: inputs: expected sizes that fit each other inside the model, got m = 4, n = 3. Correct the inputs.\n"
    )


@pytest.mark.parametrize("there", ["this machine"], indirect=True)
def test_it_runs_where_proc_is_not_mounted(there: Device, tmp_path: Path) -> None:
    """The code goes through a file, which is gone afterwards; where none may be mapped, the error names /proc."""
    words, outputs = ("--dim", "L=13", "--repeat", "1", "--outputs"), [tmp_path / "a", tmp_path / "b"]
    assert there.run(*words, outputs[0]).returncode == 0
    folder = tmp_path / "temporary"
    folder.mkdir()
    environment = {**os.environ, "LD_LIBRARY_PATH": str(there.folder / "bundle/lib"), "TMPDIR": str(folder)}

    def jailed(mounts: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
        shell = ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs none /proc && {mounts} exec "$@"', "sh"]
        program = str(there.folder / "bundle/attention")
        done = subprocess.run(
            [*shell, program, *map(str, words)], env=environment, capture_output=True, text=True, timeout=240
        )
        if "unshare:" in done.stderr or "mount:" in done.stderr:
            pytest.skip(f"no such jail here: {done.stderr.strip()}")
        return done

    done = jailed("", *words, outputs[1])
    assert done.returncode == 0, done.stderr
    assert outputs[0].read_bytes() == outputs[1].read_bytes() and list(folder.iterdir()) == []
    noexec = f"mount -t tmpfs -o noexec none {folder} && mount -t tmpfs -o noexec none /dev/shm &&"
    done = jailed(noexec, *words, tmp_path / "c")
    assert done.returncode == 2 and "/proc: expected mounted" in done.stderr and "noexec" in done.stderr
    assert not (tmp_path / "c").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("there", ["aarch64, built"], indirect=True)
def test_a_cpu_without_the_features_is_refused_before_any_code_runs(there: Device) -> None:
    """The error says what is needed and what is missing."""
    artifact = mhsa.compile(BLOCK, "neoverse-n1")
    done = there.run("--artifact", artifact.path)
    needed = " ".join(artifact.manifest.target.hardware.features)
    assert f"expected a CPU with {needed}, got one without asimddp asimdhp " in done.stderr
