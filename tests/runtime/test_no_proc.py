"""Artifacts where /proc is not mounted: what is said there alone is refused by name, and the rest runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mhsa_compile as mhsa
from mhsa_compile.errors import ArtifactError, InstallationError
from mhsa_compile.files import proc, user_folders
from mhsa_compile.hardware import host
from mhsa_compile.runtime import tvm_runtime
from mhsa_compile.runtime.artifact import load_checks

_JAIL = 'mount -t tmpfs none /proc && exec "$@"'
_PROGRAM = """
import os, sys
import numpy as np, mhsa_compile as mhsa
from mhsa_compile.hardware import host
from mhsa_compile.errors import InputError
folder = sys.argv[1]
assert not os.path.exists("/proc/self")
attention = mhsa.load(folder + "/a.mhsa")
np.save(folder + "/y.npy", attention(np.load(folder + "/x.npy")))
again = mhsa.load(folder + "/a.mhsa", weights=folder + "/a.mhsa/weights.safetensors")
np.save(folder + "/z.npy", again(np.load(folder + "/x.npy")))
try:
    attention(np.zeros((1, 2, 3), np.float32))
except InputError:
    print(host.features_from(), attention.threads, *host.cpu_features(), sep="\\n")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jail")
    mhsa.compile(mhsa.AttentionSpec(embed_dim=32, num_heads=2), check=False).save(folder / "a.mhsa")
    np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((2, 5, 32), np.float32))
    return folder


def test_an_artifact_loads_and_computes_the_same(folder: Path) -> None:
    words = ["unshare", "-rm", "sh", "-c", _JAIL, "sh", sys.executable, "-c", _PROGRAM, folder]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no such jail here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    source, threads, *features = done.stdout.split("\n")[:-1]
    attention = mhsa.load(folder / "a.mhsa")
    assert (source, int(threads), set(features)) == (host.features_from(), attention.threads, host.cpu_features())
    expected = attention(np.load(folder / "x.npy"))
    for name in ("y.npy", "z.npy"):
        assert np.array_equal(np.load(folder / name), expected)


def test_code_is_mapped_from_the_first_folder_that_lets_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runtime, tried = tvm_runtime.start(), []
    places = [tmp_path / name for name in ("first", "second", "third")]

    def load(path: str, kind: str) -> str:
        assert (Path(path).read_bytes(), Path(path).parent.stat().st_mode & 0o777, kind) == (b"code", 0o700, "so")
        tried.append(Path(path).parents[1])
        if len(tried) < 2:
            raise RuntimeError("failed to map segment\nfrom shared object")
        return "a library"

    monkeypatch.setattr(proc, "is_mounted", lambda: False)
    monkeypatch.setattr(user_folders, "temporary_place", lambda: places[0])
    monkeypatch.setattr(user_folders, "cache_home", lambda: places[2])
    monkeypatch.setattr(tvm_runtime, "_SHARED_MEMORY", places[1])
    mapping = tvm_runtime.Runtime(**{**vars(runtime), "_load": load})
    for place in places[:2]:
        place.mkdir()
    assert mapping._map(b"code", "0f" * 32) == "a library"
    assert tried == places[:2] and not any(list(place.iterdir()) for place in places[:2])
    tried.clear()
    monkeypatch.setattr(tvm_runtime, "_SHARED_MEMORY", places[2])
    with pytest.raises(InstallationError, match=r"/proc: expected mounted.*first: failed to map.*noexec"):
        mapping._map(b"code", "0f" * 32)


def test_what_is_said_in_proc_alone_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(proc.thread_numbers())
    monkeypatch.setattr(proc, "_SELF", "/nowhere")
    with pytest.raises(InstallationError, match="/proc: expected mounted"):
        proc.thread_numbers()


def test_a_cpu_of_which_nobody_tells_is_not_said_to_lack_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cpu_features", lambda root=host.ROOT: frozenset())
    with pytest.raises(ArtifactError, match=r"nobody tells.*/proc/cpuinfo cannot be read.*Mount /proc") as said:
        load_checks.check_features({"avx2"})
    assert "without" not in str(said.value) and "Compile" not in str(said.value)
    load_checks.check_features(set())
