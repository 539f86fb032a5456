"""environment.py: wrong packages are named before anything imports them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from support.command import mhsa, refused

from mhsa_compile.errors import InstallationError
from mhsa_compile.hardware import environment as installation


def pretend(monkeypatch: pytest.MonkeyPatch, tvm: str | None, ffi: str | None) -> None:
    versions = {"apache-tvm": tvm, "apache-tvm-ffi": ffi}
    monkeypatch.setattr(installation, "stated_version", versions.get)


@pytest.mark.parametrize("ffi", ["0.1.14.post0", "0.1.14.post1", "0.1.14.post12"])
def test_tested_pairs_pass(monkeypatch: pytest.MonkeyPatch, ffi: str) -> None:
    pretend(monkeypatch, "0.27.0.post1", ffi)
    installation.check_tvm_pair()


@pytest.mark.parametrize(
    ("tvm", "ffi"),
    [
        ("0.27.0.post1", "0.1.15"),
        ("0.27.0.post1", "0.1.14"),
        ("0.27.0.post1", "0.1.14rc1"),
        ("0.27.0", "0.1.14.post1"),
        ("0.28.0", "0.1.14.post1"),
        ("0.27.0.post1", None),
        (None, None),
    ],
)
def test_other_pairs_are_refused(monkeypatch: pytest.MonkeyPatch, tvm: str | None, ffi: str | None) -> None:
    pretend(monkeypatch, tvm, ffi)
    with pytest.raises(InstallationError) as refusal:
        installation.check_tvm_pair()
    message = str(refusal.value)
    assert f"apache-tvm {tvm or 'not installed'} with apache-tvm-ffi {ffi or 'not installed'}" in message
    assert "pip install 'apache-tvm==0.27.0.post1' 'apache-tvm-ffi>=0.1.14.post0,<0.1.15'" in message


def test_this_environment_passes() -> None:
    installation.check_tvm_pair()


def test_a_missing_extra_is_named() -> None:
    installation.require("json", "re", extra="compile")
    with pytest.raises(InstallationError, match=r"pip install 'mhsa-compile\[compile\]'") as refusal:
        installation.require("json", "no_such_module_here", extra="compile")
    assert refusal.value.got == "no no_such_module_here"


def test_the_check_imports_neither_of_the_pair() -> None:
    code = (
        "import sys; from mhsa_compile.hardware import environment; environment.check_tvm_pair(); "
        "sys.exit(any(name in sys.modules for name in ('tvm', 'tvm_ffi', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_wheel_brings_its_data(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=root, check=True, capture_output=True)
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(unpacked)
    code = "from mhsa_compile.hardware import data_paths as data, profile; "
    code += "print(data.targets_folder(), profile.load_profile('znver4').tvm.mcpu)"
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert child.stdout.split() == [str(unpacked / "mhsa_compile/_data/targets"), "znver4"]
    assert (unpacked / "mhsa_compile/_data/schedules").is_dir()
    for package in ("mhsa_compile", "mhsa_analysis", "mhsa_bench"):
        files = {path.relative_to(root) for path in (root / package).rglob("*") if path.is_file()}
        files = {path for path in files if "__pycache__" not in path.parts}
        assert root.joinpath(package, "py.typed").relative_to(root) in files
        assert {path for path in files if not (unpacked / path).is_file()} == set()


def test_an_editable_installation_leaves_no_folder_of_this_packages_name(tmp_path: Path) -> None:
    """Data without code in site-packages would be found in its place."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel:editable", "-d", str(tmp_path)]
    subprocess.run(build, cwd=Path(__file__).parents[2], check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = {Path(name).parts[0] for name in wheel.namelist()}
        path = next(name for name in names if name.endswith(".pth"))
        assert wheel.read(path).decode().strip() == str(Path(__file__).parents[2])
    assert not {"mhsa_compile", "mhsa_analysis", "mhsa_bench"} & names


def test_versions_are_read_from_packages_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    version = installation.installed_version.__wrapped__  # as at its first call
    kept = {name: version(name) for name in ("apache-tvm", "apache-tvm-ffi", "numpy", "msgspec")}

    def dropped(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", dropped)
    assert {name: version(name) for name in kept} == kept
    assert version("ziglang") == installation.UNKNOWN
    assert version("no-such-package") is None


def test_a_runtime_without_its_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(installation.RUNTIME_ALONE, "1")
    monkeypatch.delitem(sys.modules, "tvm.base", raising=False)  # as before the import
    with pytest.raises(InstallationError, match=r"TVM_USE_RUNTIME_LIB=1: its runtime alone\. Unset that variable"):
        installation.check_compiler()
    monkeypatch.delenv(installation.RUNTIME_ALONE)
    installation.check_compiler()


def test_the_command_that_measures_leaves_the_environment_as_it_was(tmp_path: Path) -> None:
    """Processes that were started later had a TVM that cannot compile."""
    before = dict(os.environ)
    refused(mhsa("measure", tmp_path / "none.zip", "-o", tmp_path / "results.json"))
    assert dict(os.environ) == before


_SHORT = """
import resource, sys
import numpy, onnx
import mhsa_compile as mhsa
from mhsa_compile.errors import InstallationError
from mhsa_compile.compiler import tvm_compiler

pages = int(open("/proc/self/statm").read().split()[0])
limit = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (100 << 20), limit))
try:
    tvm_compiler.load()
except InstallationError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    tvm_compiler.load()
except InstallationError as error:
    print(error)
"""


def test_a_compiler_that_memory_has_no_room_for_is_named() -> None:
    """TVM goes on with its runtime alone, without a word, also when there is room again."""
    child = subprocess.run([sys.executable, "-c", _SHORT], capture_output=True, text=True, check=True)
    first, second = child.stdout.splitlines()
    assert re.search(r"expected its compiler, which can be loaded, got .*libtvm_compiler\.so.*ulimit -v", first)
    assert second.startswith("apache-tvm: expected its compiler, got the runtime alone")
