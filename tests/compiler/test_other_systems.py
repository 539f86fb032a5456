"""Libraries and programs for macOS and Windows, linked here by Zig: inspected, and those for Windows run by Wine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import wine

import mhsa_compile as mhsa
from mhsa_compile.errors import ArtifactError, InputError
from mhsa_compile.hardware import host, zig
from mhsa_compile.hardware.profile import load_profile, system_of
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.load_checks import check_cpu
from mhsa_compile.runtime.standalone import runtimes
from mhsa_compile.runtime.standalone.bundle import bundle
from mhsa_compile.verification.verify import verify_run

STRESS = Path(__file__).parents[1] / "support" / "pool_stress.c"
SOURCES = Path(mhsa.__file__).parent / "runtime" / "threads"
TARGETS = {"apple-m1": "macos", "x86-64-v3-macos": "macos", "x86-64-v3-windows": "windows"}
FORMATS = {"macos": bytes.fromhex("cffaedfe"), "windows": b"MZ"}
OURS = {"__tvm_ffi_f", "__tvm_ffi_mhsa_threads", "__tvm_ffi_mhsa_cpu_features", "__tvm_ffi_mhsa_openmp"}
OF_TVM = {
    f"_TVMFFI{name}"
    for name in (
        *("ErrorMoveFromRaised", "ErrorSetRaised", "ErrorSetRaisedFromCStr", "ErrorSetRaisedFromCStrParts"),
        "ObjectDecRef",
    )
}
BLOCK = mhsa.AttentionSpec(embed_dim=66, num_heads=6, head_dim=11, num_kv_heads=2, causal=True, mask="key_padding")
BUILD = """
import sys, tvm
from pathlib import Path
from tvm.script import tirx as T
from mhsa_compile.compiler.codegen import build
from mhsa_compile.hardware.profile import load_profile

@T.prim_func
def f(x: T.Buffer((1024,), "float32"), y: T.Buffer((1024,), "float32")):
    for i in T.parallel(64):
        for j in T.vectorized(16):
            y[i * 16 + j] = T.exp(x[i * 16 + j]) + x[i * 16 + j]

for target in sys.argv[2:]:
    Path(sys.argv[1], target).write_bytes(build.library({"f": f}, load_profile(target)))
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A parallel loop for each target, made by two processes."""
    folders = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")
    script = tmp_path_factory.mktemp("script") / "build.py"
    script.write_text(BUILD)  # TVM reads a function's source
    for folder, targets in zip(folders, (TARGETS, reversed(TARGETS)), strict=True):
        subprocess.run([sys.executable, script, folder, *targets], check=True, timeout=280)
    return folders


def symbols(library: Path, *options: str) -> set[str]:
    """What llvm-nm names in a library for macOS."""
    program = next(filter(None, map(shutil.which, ("llvm-nm-19", "llvm-nm"))), None)
    if program is None:
        pytest.skip("no llvm-nm on this machine: apt-get install llvm-19")
    listed = subprocess.run([program, "-j", *options, library], capture_output=True, text=True, check=True)
    return set(listed.stdout.split())


@pytest.mark.thorough
@pytest.mark.parametrize("target", TARGETS)
def test_two_processes_make_the_same_library(libraries: tuple[Path, Path], target: str) -> None:
    one, other = ((folder / target).read_bytes() for folder in libraries)
    assert one == other
    assert load_profile(target).system == TARGETS[target]
    assert one.startswith(FORMATS[TARGETS[target]])
    assert {path.name for path in libraries[0].iterdir()} == set(TARGETS)  # nothing lies beside them


@pytest.mark.thorough
@pytest.mark.parametrize("target", [target for target, system in TARGETS.items() if system == "macos"])
def test_a_library_for_macos_names_what_it_has_and_needs(libraries: tuple[Path, Path], target: str) -> None:
    library = libraries[0] / target
    assert {f"_{name}" for name in OURS} <= symbols(library, "--extern-only", "--defined-only")
    undefined = symbols(library, "--undefined-only")
    assert {name for name in undefined if "TVM" in name} <= OF_TVM
    text = library.read_bytes()
    assert b"@rpath/module.so" in text and b"/usr/lib/libSystem.B.dylib" in text
    assert text.count(b".dylib") == 1  # and no other library


@pytest.mark.thorough
def test_a_library_for_windows_names_what_it_has_and_needs(libraries: tuple[Path, Path]) -> None:
    text = (libraries[0] / "x86-64-v3-windows").read_bytes()
    for name in (*OURS, "__TVMBackendParallelLaunch"):
        assert b"\0" + name.encode() + b"\0" in text
    needed = {word.lower() for word in text.split(b"\0") if word.lower().endswith(b".dll")}
    of_system = {name for name in needed if name.startswith(b"api-ms-win-") or name == b"kernel32.dll"}
    assert needed - of_system <= {b"tvm_ffi.dll", b"tvm_runtime.dll"}  # which it searches for in the process
    assert b"KERNEL32.dll" in text


@pytest.mark.thorough_but("x86_64-windows-gnu")
@pytest.mark.parametrize("triple", ["x86_64-linux-gnu", "x86_64-windows-gnu"])
def test_the_pool_of_other_systems(triple: str, tmp_path: Path) -> None:
    """That of macOS, which is POSIX's, runs on Linux as well; that of Windows under Wine."""
    if triple.endswith("windows-gnu"):
        wine.program()
    name = tmp_path / "pool_stress.exe"
    system = ["-lapi-ms-win-core-synch-l1-2-0"] if system_of(triple) == "windows" else ["-DMHSA_PORTABLE_POOL"]
    words = ["-O1", "-fno-sanitize=undefined", f"-I{SOURCES}", STRESS, *system, "-o", name]
    zig.run("cc", triple, words, "a test of the pool")
    for callers, limit, launches, pauses in ((1, 2, 1000, 1), (4, 2, 500, 1), (8, 8, 200, 0)):
        options = list(map(str, (callers, limit, launches, pauses)))
        if system_of(triple) == "windows":
            done = wine.run(tmp_path, name, *options, home=tmp_path / "wine")
        else:
            done = subprocess.run([name, *options], capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith(f"{callers * launches} launches, 0 wrong, 0 errors left")


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    return mhsa.compile(BLOCK, "x86-64-v3")


@pytest.mark.parametrize(("target", "system"), TARGETS.items())
def test_an_artifact_for_another_system_says_so(
    artifact: Artifact, target: str, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import msgspec

    profile = load_profile(target)
    architecture = profile.tvm.mtriple.partition("-")[0]
    monkeypatch.setattr(host, "architecture", lambda: architecture)
    with pytest.raises(ArtifactError, match=f"expected {system}, as it was compiled for it, got linux") as refused:
        check_cpu(msgspec.structs.replace(artifact.manifest, target=profile))
    relative = {"x86_64": "graniterapids", "aarch64": "aarch64-generic"}[architecture]
    assert f"--target native here. Or elsewhere: --target {relative}" in str(refused.value)


def test_packages_of_linux_are_no_runtime_for_windows(artifact: Artifact, tmp_path: Path) -> None:
    import msgspec

    manifest = msgspec.structs.replace(artifact.manifest, target=load_profile("x86-64-v3-windows"))
    with pytest.raises(InputError, match='--runtime: expected "build", for an artifact for windows'):
        runtimes.find(manifest, tmp_path, lambda stage: None)


HIDDEN = """
import builtins, os, sys
everything = builtins.__import__

def portable(name, globals=None, *words):
    if name in ("fcntl", "resource") and (globals or {}).get("__name__", "").startswith("mhsa_"):
        raise ImportError(name)
    return everything(name, globals, *words)

builtins.__import__ = portable
for name in ("memfd_create", "sched_getaffinity", "posix_fallocate", "pread", "pwrite", "O_NOFOLLOW", "geteuid"):
    delattr(os, name)
import numpy as np, mhsa_compile as mhsa
import mhsa_compile.cli.app, mhsa_compile.records.append_log, mhsa_compile.compiler.cache.artifact_store
import mhsa_compile.bench.timing, mhsa_compile.hardware.zig, mhsa_compile.hardware.host
attention = mhsa.load(sys.argv[1], threads=2)
x = np.load(sys.argv[2])
np.save(sys.argv[3], attention(x, mask=np.ones(x.shape[:2], bool)))
"""


def test_it_loads_and_calls_without_what_only_linux_has(artifact: Artifact, tmp_path: Path) -> None:
    artifact.save(tmp_path / "a.mhsa")
    x = np.random.default_rng(0).standard_normal((2, 37, 66), np.float32)
    np.save(tmp_path / "x.npy", x)
    words = [tmp_path / "a.mhsa", tmp_path / "x.npy", tmp_path / "y.npy"]
    subprocess.run([sys.executable, "-c", HIDDEN, *words], check=True, timeout=240)
    expected = mhsa.load(artifact, threads=2)(x, mask=np.ones((2, 37), bool))
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["apple-m1", "x86-64-v3-windows"])
def test_a_bundle_runs_or_links(target: str, tmp_path: Path) -> None:
    """That for Windows runs under Wine, and is held against the float64 oracle; the program for macOS is linked."""
    if TARGETS[target] == "windows":
        wine.program()
    compiled = mhsa.compile(BLOCK, target)
    made = bundle(compiled, tmp_path / "bundle", build=True)
    if TARGETS[target] == "macos":
        program = (made.path / "attention").read_bytes()
        assert program.startswith(FORMATS["macos"]) and b"@executable_path/lib" in program
        assert b"@rpath/libtvm_runtime.dylib" in program
        return
    home = tmp_path / "wine"

    def run(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        save_file(dict(inputs), made.path / "in.safetensors")
        words = ["--inputs", "in.safetensors", "--outputs", "out.safetensors", "--threads", "2", "--repeat", "2"]
        done = wine.run(made.path, "attention.exe", *words, home=home)
        assert done.returncode == 0, done.stdout + done.stderr
        outputs = load_file(made.path / "out.safetensors")
        return [outputs[info.name] for info in compiled.manifest.outputs]

    verdict = verify_run(compiled, run, cases=[{"B": 3, "L": 7}, {"B": 1, "L": 67}], self_checks=False)
    assert verdict.ok, verdict.worst
    module = made.path / "artifact" / "module.so"
    module.write_bytes(module.read_bytes()[:-1] + b"?")
    refused = wine.run(made.path, "attention.exe", home=home)
    assert refused.returncode == 2 and "The artifact is damaged" in refused.stderr
