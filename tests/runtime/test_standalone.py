"""`mhsa bundle`: what it gathers and what it refuses. That bundles run is in test_standalone_runs.py."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
from support.tiny_artifact import MASK, X, Y
from typer.testing import CliRunner

from mhsa_compile.cli.app import app
from mhsa_compile.errors import InputError, OutputError
from mhsa_compile.hardware import host
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.manifest import Manifest
from mhsa_compile.runtime.standalone.bundle import bundle
from mhsa_compile.runtime.standalone.runtimes import LIBRARIES

MACHINES = {"x86_64": 62, "aarch64": 183}
FOREIGN = "aarch64" if host.architecture() == "x86_64" else "x86_64"


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    """An artifact for this machine, whose code nobody runs."""
    folder = tmp_path / "an.mhsa"
    folder.mkdir()
    for name in ("module.so", "weights.safetensors", "model.onnx"):
        (folder / name).write_bytes(name.encode())
    manifest = Manifest(
        mhsa_version="0.1.0", inputs=(X, MASK), outputs=(Y,), weights=(), semantics=(), spec=None,
        target=load_profile("native"), versions={}, ops=(), files={},
    )  # fmt: skip
    return Artifact.assemble(folder, manifest)


def wheel(folder: Path, package: str, version: str, architecture: str) -> Path:
    """A wheel that holds a library of 64 bytes, all of them header."""
    path = folder / f"{package}-{version}-py3-none-manylinux_2_28_{architecture}.whl"
    library = next(name for name, owner in LIBRARIES.items() if owner == package)
    header = b"\x7fELF".ljust(18, b"\0") + MACHINES[architecture].to_bytes(2, "little")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"tvm/lib/{library}", header.ljust(64, b"\0"))
    return path


def wheels(folder: Path, architecture: str) -> Path:
    folder.mkdir()
    wheel(folder, "apache_tvm", "0.27.0.post1", architecture)
    wheel(folder, "apache_tvm_ffi", "0.1.14.post2", architecture)
    return folder


def test_it_gathers_all_that_a_device_needs(artifact: Artifact, tmp_path: Path) -> None:
    made = bundle(artifact, tmp_path / "out")
    folder = tmp_path / "out"
    assert Artifact.open(folder / "artifact").manifest == artifact.manifest
    assert {path.name for path in (folder / "lib").iterdir()} == {*LIBRARIES, "LICENSE", "NOTICE"}
    assert made.bytes == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 12e6
    compiled = [folder / "main.cpp", *folder.glob("*.h"), *(folder / "include").rglob("*.h")]
    included = {name for path in compiled for name in re.findall(r"#include <((?:tvm|dlpack)/.*?)>", path.read_text())}
    assert included
    assert not [name for name in included if not (folder / "include" / name).is_file() and "windows" not in name]
    assert "| `mask` | bool | mask_B, mask_L |" in (folder / "README.md").read_text()
    assert made.command in (folder / "README.md").read_text()


def test_the_runtime_of_another_machine_comes_from_its_wheels(artifact: Artifact, tmp_path: Path) -> None:
    own = wheels(tmp_path / "own", host.architecture())
    wheel(own, "apache_tvm", "0.27.0.post1", FOREIGN)  # that of another architecture beside it does no harm
    made = bundle(artifact, tmp_path / "out", runtime=own)
    assert made.runtime == str(own)
    for name in LIBRARIES:
        library = (tmp_path / "out/lib" / name).read_bytes()
        assert (len(library), library[18]) == (64, MACHINES[host.architecture()])


@pytest.mark.parametrize(
    ("version", "architecture", "got"),
    [("0.27.0.post1", FOREIGN, "for another architecture"), ("0.26.0", host.architecture(), "got neither")],
)
def test_wheels_that_do_not_fit_are_refused(
    artifact: Artifact, tmp_path: Path, version: str, architecture: str, got: str
) -> None:
    wheel(tmp_path, "apache_tvm_ffi", "0.1.14.post2", host.architecture())
    wheel(tmp_path, "apache_tvm", version, architecture)
    expected = (
        rf"(?s)--runtime: expected libtvm_runtime.so for {host.architecture()}.*{got}.*pip download .*apache-tvm=="
    )
    with pytest.raises(InputError, match=expected):
        bundle(artifact, tmp_path / "out", runtime=tmp_path)
    assert not (tmp_path / "out").exists()


def test_what_is_no_runtime_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--runtime: expected \"build\", a wheel, or a folder .* got nothing at"):
        bundle(artifact, tmp_path / "out", runtime=tmp_path / "nowhere")
    torn = tmp_path / "apache_tvm_ffi-0.1.14.post1-py3-none-any.whl"
    torn.write_bytes(b"PK")
    with pytest.raises(InputError, match="expected a wheel that can be read"):
        bundle(artifact, tmp_path / "out", runtime=torn)


def test_force_replaces_bundles_and_nothing_else(artifact: Artifact, tmp_path: Path) -> None:
    bundle(artifact, tmp_path / "out")
    with pytest.raises(OutputError, match="expected one that does not exist yet"):
        bundle(artifact, tmp_path / "out")
    bundle(artifact, tmp_path / "out", force=True)
    artifact.save(tmp_path / "another.mhsa")
    with pytest.raises(OutputError, match=r"expected a bundle to replace, got .*something else"):
        bundle(artifact, tmp_path / "another.mhsa", force=True)
    with pytest.raises(OutputError, match="expected an artifact to replace"):
        artifact.save(tmp_path / "out", force=True)


def test_the_command_says_what_it_wrote_and_what_to_type(artifact: Artifact, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bundle", str(artifact.path), "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "include" in done.stdout
    assert "ziglang c++ -target" in done.stdout
    assert CliRunner().invoke(app, ["bundle", str(artifact.path), "-o", str(tmp_path / "out")]).exit_code == 2
