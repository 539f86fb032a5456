"""The wheels of `release/wheels.py`, built once for a process, and environments that have nothing else of this one."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest

import mhsa_compile as mhsa
from release import wheels

REPOSITORY = Path(__file__).parents[2]
DEPENDENCIES = ("numpy", "ml_dtypes", "msgspec", "apache-tvm-ffi", "typing_extensions")
"""What pip installs beside the wheel mhsa-runtime."""
RUN = """
import sys, numpy as np, mhsa_compile
np.save(sys.argv[2], mhsa_compile.load(sys.argv[1], threads=1)(np.load(sys.argv[3])))
print(mhsa_compile.__file__)
print(*(name for name in ("tvm", "torch", "onnx", "safetensors") if name in sys.modules))
print(*{line.split()[-1] for line in open("/proc/self/maps") if "libtvm_runtime" in line})
"""
"""Runs the artifact argv[1] on the array argv[3], and writes argv[2]; prints where the package is, what it should not
have imported, and which of TVM's libraries is mapped."""


@functools.cache
def whole() -> wheels.Whole:
    """The wheel that `pip install .` builds."""
    with tempfile.TemporaryDirectory() as folder:
        return wheels.Whole.built(Path(folder))


def tvm(machine: str) -> wheels.Tvm:
    """TVM of a platform; skips where it is not this machine's, and the index does not answer."""
    try:
        return wheels.tvm_of(machine, metadata.version("apache-tvm"))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs a network: pip did not bring apache-tvm for {machine} ({error})")


def unpacked(wheel: Path, folder: Path) -> Path:
    """The files of a wheel, as pip installs them."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def linked(folder: Path, distributions: Iterable[str]) -> Path:
    """A folder that has these installed distributions of this environment, and no others."""
    folder.mkdir(exist_ok=True)
    for name in distributions:
        installed = metadata.distribution(name)
        tops = {path.parts[0] for path in installed.files or () if path.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            (folder / top).symlink_to(Path(str(installed.locate_file(top))))
    return folder


def python(*folders: Path) -> tuple[list[str], dict[str, str]]:
    """A Python that has these folders and the standard library only: its command, and its environment."""
    path = ":".join(map(str, folders))
    return [sys.executable, "-S"], {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def small_artifact(folder: Path, target: str = "native") -> Path:
    """A layer with a window, grouped heads and a norm of its own, so that several kernels run."""
    spec = mhsa.AttentionSpec(embed_dim=24, num_heads=4, num_kv_heads=2, causal="top_left", window=(5, 0))
    return mhsa.compile(spec, target=target).save(folder / "layer.mhsa").path
