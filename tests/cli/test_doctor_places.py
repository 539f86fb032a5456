"""What `mhsa doctor` says of a machine where something is missing."""

from __future__ import annotations

import errno
import os
import tempfile
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
from support.pretended_cpu import pretend
from support.records_made import DEVICE, made

from mhsa_compile.cli.commands import doctor
from mhsa_compile.cli.commands.doctor import Finding
from mhsa_compile.compiler.codegen import cuda_compiler
from mhsa_compile.files import proc, user_folders
from mhsa_compile.hardware import cpuid, data_paths, environment, host, tile_permission
from mhsa_compile.records import record_files


def by_name(*checks) -> dict[str, Finding]:
    found = {finding.check: finding for check in checks for finding in check()}
    assert all(finding.advice for finding in found.values() if finding.status != "ok")
    return found


def test_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_name(doctor._proc)["/proc"].status == "ok"
    monkeypatch.setattr(proc, "_SELF", "/nowhere")
    finding = by_name(doctor._proc)["/proc"]
    assert (finding.status, finding.found) == ("warn", "not mounted")


def test_what_compiles_for_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    finding = by_name(doctor._cuda_compiler)["CUDA compiler"]
    assert (finding.status, finding.found) == ("ok", f"nvcc 12.4 at {nvcc}: compiles for --target cuda-...")
    nvcc.write_text("#!/bin/sh\nexit 3\n")
    assert by_name(doctor._cuda_compiler)["CUDA compiler"].status == "warn"
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(environment, "nvidia_folders", lambda: [])
    finding = by_name(doctor._cuda_compiler)["CUDA compiler"]
    assert finding.found == f"neither: nvcc on the path, or NVRTC 13 ({', '.join(cuda_compiler._PACKAGES)})"
    assert "pip install 'mhsa-compile[cuda]'" in finding.advice


def test_who_tells_of_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, "zen4")
    found = by_name(doctor._cpu)
    assert "AMD EPYC (x86_64), microarchitecture zen4" in found["CPU"].found
    assert (found["CPU features"].status, found["CPU features"].found[-13:]) == ("ok", "CPUID says so")
    monkeypatch.setattr(cpuid, "read", lambda: None)
    monkeypatch.setattr(host, "_cpuinfo", lambda root: iter([{"flags": "avx avx2", "model name": "AMD EPYC"}]))
    found = by_name(doctor._cpu)
    assert found["CPU features"].status == "warn" and "/proc/cpuinfo says so" in found["CPU features"].found
    assert found["CPU"].status == "warn" and "of no known microarchitecture" in found["CPU"].found
    monkeypatch.setattr(host, "_cpuinfo", lambda root: iter([{}]))
    finding = by_name(doctor._cpu)["CPU features"]
    assert finding.status == "fail" and "nobody tells" in finding.found and "Mount /proc" in finding.advice


def test_the_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "zen4")
    assert by_name(doctor._cpu)["matrix unit"] == Finding("matrix unit", "ok", "none: no tiles (AMX)")
    pretend(monkeypatch, "sapphirerapids")
    monkeypatch.setattr(tile_permission, "refusal", lambda: "")
    granted = by_name(doctor._cpu)["matrix unit"]
    assert granted.status == "ok" and granted.found == "amx_tile; the permission is granted; native has all of them"
    monkeypatch.setattr(tile_permission, "refusal", lambda: "a sandbox forbids it")
    refused = by_name(doctor._cpu)["matrix unit"]
    assert refused.status == "warn" and refused.found == "amx_tile, refused to this process: a sandbox forbids it"
    assert "native is compiled without tiles" in refused.advice
    pretend(monkeypatch, "sapphirerapids", saved_state=0b111 | 0b11 << 17)  # no AVX-512: a level without tiles
    monkeypatch.setattr(tile_permission, "refusal", lambda: "")
    assert by_name(doctor._cpu)["matrix unit"].found.endswith("native has none of them")


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "home" not in by_name(doctor._folders)
    monkeypatch.setattr(user_folders, "has_home", lambda: False)
    assert by_name(doctor._folders)["home"].status == "warn"


@pytest.mark.parametrize(
    ("reason", "status"),
    [(errno.EDQUOT, "Disk quota exceeded"), (errno.EROFS, "Read-only"), (errno.ENOSPC, "No space")],
)
def test_folders_into_which_nothing_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: int, status: str
) -> None:
    """A quota is seen only by who writes: the disk itself has room."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("ZIG_GLOBAL_CACHE_DIR", raising=False)

    def allocate(handle: int, offset: int, size: int) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    found = by_name(doctor._folders)
    for name, folder in (("artifact cache", "cache/mhsa_compile/artifacts"), ("own records", "data/mhsa_compile")):
        assert found[name].status == "warn" and str(tmp_path / folder) in found[name].found
        assert status in found[name].found
    assert found["temporary files"].status == "fail" and found["cache folder"].status == "warn"


def test_a_limit_on_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "size_limit", lambda: 1000)
    assert "1000 bytes" in by_name(doctor._folders)["file sizes"].found


def test_no_place_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    finding = by_name(doctor._folders)["temporary files"]
    assert finding.status == "fail" and "No usable temporary directory" in finding.found and "TMPDIR" in finding.advice


def test_own_records_that_do_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert by_name(doctor._own_records) == {}
    path = data_paths.own_records("native")
    record_files.append(path, made())
    assert by_name(doctor._own_records)["records"].status == "ok"
    record_files.append(path, made(device=msgspec.structs.replace(DEVICE, microarchitecture="")))
    finding = by_name(doctor._own_records)["records"]
    assert (finding.status, finding.found) == (
        "warn", "2 of your own, 1 of which do not tell the microarchitecture, and do not count",
    )  # fmt: skip
    assert f"mhsa records measured-on {path} NAME" in finding.advice
    path.write_text("my notes\n")
    assert "line 1" in by_name(doctor._own_records)["records"].found


def test_the_light_runtime_beside_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "mhsa-runtime" not in by_name(doctor._packages)
    monkeypatch.setattr(environment, "installed_version", lambda name: "0.1.0")
    for own, status in (("mhsa_compile/errors.py", "warn"), ("mhsa_compile/cli/app.py", "ok")):
        monkeypatch.setattr(metadata, "files", {"mhsa-compile": [Path(own)]}.get)
        assert by_name(doctor._packages)["mhsa-runtime"].status == status
