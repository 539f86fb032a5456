"""offline/: what goes to a machine with a GPU and without a network, and what it says is missing there."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from campaigns.offline import check, pack

OFFLINE = Path(__file__).parents[1] / "campaigns" / "offline"
TARGET = f"{platform.machine()}-linux-gnu.2.17"
CODE = "int answer(void) { return 42; }\n"


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler of the system's")
def test_the_systems_compiler_links_in_the_place_of_zig(tmp_path: Path) -> None:
    (tmp_path / "answer.c").write_text(CODE)
    words = ["cc", "-target", TARGET, "-shared", "-fPIC", "-O1", "-s", "-o", "answer.so", "answer.c"]
    environment = {**os.environ, "PYTHONPATH": str(OFFLINE)}
    subprocess.run([sys.executable, "-m", "ziglang", *words], cwd=tmp_path, env=environment, check=True)
    load = "import ctypes; print(ctypes.CDLL('./answer.so').answer())"
    found = subprocess.run([sys.executable, "-c", load], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout == "42\n"


def test_it_links_for_no_other_machine(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ziglang", "cc", "-target", "riscv64-linux-gnu.2.27", "-o", "answer.so"]
    environment = {**os.environ, "PYTHONPATH": str(OFFLINE)}
    found = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 1 and "got riscv64-linux-gnu.2.27" in found.stderr


FILES = {
    "tvm/__init__.py": True,
    "tvm/lib/libtvm_runtime.so": True,
    "tvm/relax/frontend/onnx/onnx_frontend.py": True,
    "tvm/relax/frontend/tflite/tflite_frontend.py": False,
    "tvm/include/tvm/ir.h": False,
    "tvm_ffi/include/tvm/ffi/any.h": False,
    "sqlalchemy/engine/_row_cy.cpython-312-x86_64-linux-gnu.so": False,
    "sqlalchemy/engine/_row_cy.py": True,
    "apache_tvm-0.27.0.post1.dist-info/METADATA": True,  # its version is asked for
    "apache_tvm-0.27.0.post1.dist-info/RECORD": False,
}


def test_what_is_unpacked_is_what_was_packed_and_says_what_is_missing(tmp_path: Path) -> None:
    site, folder = tmp_path / "site", tmp_path / "pack"
    for name in FILES:
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("")
    folder.mkdir()
    pack.write_site(site, folder / pack.SITE)
    with tarfile.open(folder / pack.SITE) as tar:
        names = {member.name for member in tar.getmembers()}
    assert {name for name, wanted in FILES.items() if wanted} <= names
    assert not {name for name, wanted in FILES.items() if not wanted} & names
    assert "ziglang/__main__.py" in names and not any("__pycache__" in name for name in names)

    with pack.compressed(folder / pack.COMPILER, 1) as library:
        library.write(b"a library")
    (folder / "unpack").write_text(pack.UNPACK)
    there = tmp_path / "there"
    words = f'python3() {{ "{sys.executable}" -S "$@"; }}; . {folder}/unpack {there}; echo "$PYTHONPATH"'
    found = subprocess.run(["bash", "-c", words], cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True)
    assert (there / "tvm/lib/libtvm_compiler.so").read_bytes() == b"a library"
    *said, path = found.stdout.decode().splitlines()
    assert path == f"{tmp_path}:{there}"
    assert any(line.startswith("torch: ModuleNotFoundError") for line in said)


def test_nothing_is_missing_where_all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_refused", lambda name: None)
    monkeypatch.setattr(check, "_gpu", lambda: [])
    assert check.missing() == []
    monkeypatch.setattr(check, "_refused", lambda name: f"{name}: not here" if name == "xdist" else None)
    assert check.missing() == ["xdist: not here"]


def test_the_packages_that_travel_have_pins() -> None:
    pins = (pack.ROOT / "constraints.txt").read_text()
    assert all(f"\n{name}==" in pins for name in (*pack.RUN, *pack.COMPILE))
