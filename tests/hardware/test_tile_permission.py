"""The permission for matrix tiles: granted, held, inherited, and refused in each way."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.pretended_cpu import pretend
from support.refused_tiles import command, require
from support.this_cpu import with_tiles

from mhsa_compile.hardware import host, profile, tile_permission
from mhsa_compile.hardware.tile_permission import refusal
from mhsa_compile.runtime.standalone import bundle

on_x86 = pytest.mark.skipif(host.architecture() != "x86_64", reason="asks Linux on x86-64")
HEADERS = Path(bundle.__file__).parent / "program"
WORDS = {
    "EINVAL": "5.16", "EOPNOTSUPP": "on this CPU", "ENOSPC": "sigaltstack", "EPERM": "sandbox", "ENOSYS": "sandbox",
    "EIO": "Input/output error",
}  # fmt: skip
SAYS = "from mhsa_compile.hardware import tile_permission; print(tile_permission.refusal())"


def system(monkeypatch: pytest.MonkeyPatch, *answers: int) -> list[int]:
    """A system that gives these answers, one a call; the options that it was called with."""
    asked: list[int] = []

    def answer(option: int, _argument: object) -> int:
        asked.append(option)
        return answers[len(asked) - 1]

    monkeypatch.setattr(tile_permission.sys, "platform", "linux")
    monkeypatch.setattr(tile_permission.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(tile_permission, "_arch_prctl", answer)
    return asked


def refuse(monkeypatch: pytest.MonkeyPatch, error: str = "ENOSYS") -> None:
    monkeypatch.setattr(tile_permission, "_arch_prctl", lambda option, argument: getattr(errno, error))


@pytest.mark.parametrize(("error", "words"), WORDS.items())
def test_each_refusal_has_its_reason(monkeypatch: pytest.MonkeyPatch, error: str, words: str) -> None:
    asked = system(monkeypatch, errno.EINVAL, getattr(errno, error))
    assert words in refusal()
    assert asked == [0x1022, 0x1023]


def test_what_is_not_held_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = system(monkeypatch, 0, 0)
    assert (refusal(), asked) == ("", [0x1022, 0x1023])


def test_what_is_held_is_not_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(option: int, argument: object) -> int:
        asked.append(option)
        argument._obj.value = 1 << 18  # type: ignore[attr-defined]
        return 0

    system(monkeypatch)
    monkeypatch.setattr(tile_permission, "_arch_prctl", answer)
    assert (refusal(), asked) == ("", [0x1022])


@pytest.mark.parametrize(("platform", "machine"), [("darwin", "x86_64"), ("linux", "aarch64"), ("linux", "")])
def test_other_systems_are_not_asked(monkeypatch: pytest.MonkeyPatch, platform: str, machine: str) -> None:
    asked = system(monkeypatch)
    monkeypatch.setattr(tile_permission.sys, "platform", platform)
    monkeypatch.setattr(tile_permission.platform, "machine", lambda: machine)
    assert refusal().startswith("only Linux grants tiles") and f"this is {platform} on {machine}" in refusal()
    assert asked == []


def test_native_has_tiles_where_they_are_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "sapphirerapids")
    system(monkeypatch, 0, 0)
    native = profile.detect()
    assert ("amx_tile" in native.hardware.features, "+amx-tile" in native.tvm.mattr) == (True, True)


def test_native_has_none_where_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "sapphirerapids")
    refuse(monkeypatch)
    native = profile.detect()
    assert not [word for word in (*native.hardware.features, *native.tvm.mattr) if "amx" in word]
    assert native.tvm.mattr == ("+avx512vnni",)
    assert "amx_tile" in host.cpu_features() and host.usable_features() == host.cpu_features() - {"amx_tile"}


def test_products_of_tiles_without_tiles_are_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cpu_features", lambda root=host.ROOT: frozenset({"avx2", "amx_bf16", "amx_int8"}))
    assert host.usable_features() == {"avx2"}


@with_tiles
def test_a_small_signal_stack_refuses_them() -> None:
    """And `native` goes without; where the stack is gone, they are granted."""
    program = """
import ctypes
from mhsa_compile.hardware import profile, tile_permission

class Stack(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

libc, disabled = ctypes.CDLL(None, use_errno=True), 2
memory = ctypes.create_string_buffer(8192)
before = Stack()
assert libc.sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 8192)), ctypes.byref(before)) == 0
print(tile_permission.refusal())
print(*profile.detect().tvm.mattr)
assert libc.sigaltstack(ctypes.byref(Stack(None, disabled, 0)), None) == 0
print(tile_permission.refusal())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    small, native, none = done.stdout.split("\n")[:3]
    assert "sigaltstack" in small and "amx" not in native and none == ""


@with_tiles
def test_a_forked_child_has_what_its_parent_has_and_a_new_program_asks_anew(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("""
import ctypes, os, sys
from mhsa_compile.hardware import tile_permission

def say(who):
    word = ctypes.c_uint64()
    assert tile_permission._arch_prctl(0x1022, ctypes.byref(word)) == 0
    print(who, word.value >> 18 & 1, flush=True)

say(sys.argv[1])
if sys.argv[1] == "parent":
    assert tile_permission.refusal() == ""
    if os.fork() == 0:
        say("child")
        os.execv(sys.executable, [sys.executable, __file__, "program"])
    os.wait()
""")
    words = [sys.executable, tmp_path / "program.py", "parent"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout.split("\n")[:3] == ["parent 0", "child 1", "program 0"], done.stderr


@on_x86
def test_a_sandbox_refuses_them() -> None:
    require()
    done = subprocess.run(command("EPERM", sys.executable, "-c", SAYS), capture_output=True, text=True)
    assert "sandbox" in done.stdout, done.stderr


@on_x86
def test_a_bundles_program_has_the_same_reasons(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    require()
    source = (
        '#include <cstdio>\n#include "tile_permission.h"\nint main() { std::puts(mhsa::tile_refusal().c_str()); }\n'
    )
    words = [compiler, "-std=c++17", "-Wall", "-Werror", f"-I{HEADERS}", "-x", "c++", "-", "-o", str(tmp_path / "asks")]
    subprocess.run(words, input=source, text=True, check=True)
    for error in WORDS:
        ways = (tmp_path / "asks",), (sys.executable, "-c", SAYS)
        theirs, ours = (subprocess.run(command(error, *way), capture_output=True, text=True) for way in ways)
        assert (theirs.returncode, ours.returncode) == (0, 0), ours.stderr
        assert theirs.stdout == ours.stdout and WORDS[error] in ours.stdout
    plain = [subprocess.run(way, capture_output=True, text=True).stdout for way in ways]
    assert plain[0] == plain[1]
    text = (HEADERS / "tile_permission.h").read_text()
    assert f'"{tile_permission.TILES}"' in text and f'"{tile_permission.WITHOUT_TILES}"' in text
