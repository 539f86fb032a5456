"""TVM's runtime for a bundle: from the packages installed here, from others at hand, or built from the sources that
those packages bring. Nothing is fetched from the network.

It is built with Zig, for any target: one library of 2 MB that needs no C++ library on the device, of Linux, macOS or
Windows. The packages lack a few headers, most of which are there for what a compiled module never does (files of
executables, tensors in JSON, a profiler's marks). `sources/` has small ones in their place.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mhsa_compile.errors import InputError, InstallationError
from mhsa_compile.files import input_files, places, user_folders
from mhsa_compile.files.atomic_write import Unfinished
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.hardware import environment, host, zig
from mhsa_compile.hardware.profile import system_of
from mhsa_compile.runtime.artifact.manifest import Manifest

BUILD = "build"
LIBRARIES = {"libtvm_ffi.so": "apache_tvm_ffi", "libtvm_runtime.so": "apache_tvm"}  # and the wheels that bring them
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183, "arm": 40, "riscv64": 243}
BUILT = {"linux": "libtvm_runtime.so", "macos": "libtvm_runtime.dylib", "windows": "tvm_runtime.dll"}
"""What is built, by operating system: all of the runtime in one library."""
IMPORTS = "tvm_runtime.lib"
"""What a program for Windows is linked with, in place of the library."""
WINDOWS_MEMORY = "windows_memory.h"
_SOURCES, PROGRAM_FILES = Path(__file__).parent / "sources", Path(__file__).parent / "program"
UNITS = ("tvm_runtime.cc", "tvm_ffi.cc")
_FLAGS = (
    *("-std=c++17", "-Os", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-ffunction-sections"),
    *("-DTVM_FFI_EXPORTS", "-DTVM_FFI_USE_LIBBACKTRACE=0", "-DTVM_FFI_BACKTRACE_ON_SEGFAULT=0"),
    *("-shared", "-s"),
)
_SYSTEM_FLAGS = {
    "linux": (f"-Wl,-soname,{BUILT['linux']}", "-Wl,-z,defs", "-Wl,--gc-sections"),
    "macos": (f"-Wl,-install_name,@rpath/{BUILT['macos']}", "-Wl,-dead_strip"),
    "windows": (
        *("-include", WINDOWS_MEMORY, "-DTVM_FFI_DLL=__declspec(dllexport)"),
        *("-Wl,--gc-sections", f"-Wl,--out-implib,{IMPORTS}"),
    ),
}


@dataclass(frozen=True)
class RuntimeLibraries:
    """Shared libraries by name, and what the device needs beside them."""

    libraries: dict[str, bytes]
    origin: str
    needs: str


def package_folder(name: str) -> Path:
    """The folder in which `tvm` or `tvm_ffi` is installed; neither is imported. Raises InstallationError."""
    spec = find_spec(name)
    for folder in (spec and spec.submodule_search_locations) or ():
        return Path(folder)
    raise InstallationError(name, "an installed package", "none", "Run: pip install -c constraints.txt mhsa-compile")


def find(manifest: Manifest, source: str | Path | None, progress: Callable[[str], None]) -> RuntimeLibraries:
    """The runtime for an artifact's target.

    source   None: what is installed here where the architecture is this machine's, else as "build"; "build": with Zig,
             from the sources in the installed packages; or a wheel, or a folder with the two wheels or libraries

    Raises InputError, InstallationError and BuildError.
    """
    architecture, system = manifest.target.tvm.mtriple.partition("-")[0], manifest.target.system
    if source is None and architecture == host.architecture() and system == host.system() == "linux":
        environment.check_tvm_pair()
        folders = [package_folder(name) / "lib" for name in ("tvm_ffi", "tvm")]
        return _prebuilt(architecture, folders, "the packages installed where it was made")
    if source in (None, BUILD):
        triple = manifest.target.link.triple
        library = build_library(triple, package_folder("tvm"), package_folder("tvm_ffi"), progress)
        origin = f"Zig, by the sources of apache-tvm {environment.TESTED_TVM}"
        parts = [library, library.with_name(IMPORTS)] if system == "windows" else [library]
        return RuntimeLibraries({part.name: part.read_bytes() for part in parts}, origin, _needs(system, triple))
    if system != "linux":
        raise InputError("--runtime", f'"{BUILD}", for an artifact for {system}', repr(str(source)))
    place = Path(source)
    if not places.is_there(place):
        expected = f'"{BUILD}", a wheel, or a folder with wheels or libraries'
        raise InputError("--runtime", expected, f"nothing at {str(place)!r}")
    return _prebuilt(architecture, [place], str(place))


def _needs(system: str, triple: str) -> str:
    """What a triple asks of the machine: "glibc 2.17 or later" of aarch64-linux-gnu.2.17."""
    if system == "windows":
        return "Windows 10 or later"
    of = {"linux": "glibc", "macos": "macOS"}[system]
    number = re.search(r"\.(\d+\.\d+)", triple)
    return f"{of} {number[1]} or later" if number else f"{of} as old as that of Zig's default for it"


def _prebuilt(architecture: str, places: list[Path], origin: str) -> RuntimeLibraries:
    needs = "glibc 2.28 or later and libstdc++ of GCC 8 or later"  # manylinux_2_28
    return RuntimeLibraries({name: _library(name, architecture, places) for name in LIBRARIES}, origin, needs)


def _library(name: str, architecture: str, places: list[Path]) -> bytes:
    """The first library that is for that architecture. Raises InputError, which says what there was instead."""
    candidates = [candidate for place in places for candidate in _candidates(name, place)]
    for _, data in candidates:
        if _is_for(architecture, data):
            return data
    wheel = LIBRARIES[name]
    version = environment.TESTED_TVM if wheel == "apache_tvm" else environment.TESTED_TVM_FFI
    where = ", ".join(map(str, places))
    raise InputError(
        "--runtime",
        f"{name} for {architecture} in {where}, or the wheel of {wheel} {version} that holds it",
        f"only {', '.join(label for label, _ in candidates)}, for another architecture" if candidates else "neither",
        f"Fetch it: pip download --no-deps --only-binary :all: --platform manylinux_2_28_{architecture} "
        f"'{wheel.replace('_', '-')}{version if version[0] in '<>' else f'=={version}'}'; or use --runtime {BUILD}.",
    )


def _candidates(name: str, place: Path) -> list[tuple[str, bytes]]:
    """(what it is called, its bytes) of every library of that name, in wheels and beside them."""
    paths = [place] if places.is_file(place) else sorted((*place.rglob("*.whl"), *place.rglob(name)))
    candidates = []
    for path in paths:
        if path.suffix != ".whl":
            candidates += (
                [(str(path), input_files.read(path, InputError, "--runtime", "a library"))] if path.name == name else []
            )
        elif path.name.startswith(f"{LIBRARIES[name]}-"):
            candidates += _in_wheel(name, path)
    return candidates


def _in_wheel(name: str, wheel: Path) -> list[tuple[str, bytes]]:
    version = wheel.name.split("-")[1]
    if not environment.fits(LIBRARIES[name].replace("_", "-"), version):
        return []
    argument, expected = "--runtime", f"a wheel that can be read, {str(wheel)!r}"
    with (
        input_files.open_file(wheel, InputError, argument, expected) as file,
        reading(InputError, argument, expected),
        zipfile.ZipFile(file) as archive,
    ):
        inside = [entry for entry in archive.namelist() if entry.endswith(f"/lib/{name}")]
        return [(f"{wheel}/{entry}", archive.read(entry)) for entry in inside]


def _is_for(architecture: str, library: bytes) -> bool:
    """Whether a library is for an architecture, by the field e_machine of its ELF header."""
    machine = next((number for name, number in _ELF_MACHINES.items() if architecture.startswith(name)), None)
    return library[:4] == b"\x7fELF" and int.from_bytes(library[18:20], "little") == machine


def build_library(triple: str, tvm: Path, tvm_ffi: Path, progress: Callable[[str], None]) -> Path:
    """The library for a Zig triple, from the user's cache if it was built before: it takes a minute or two.

    tvm, tvm_ffi   the folders of the two packages

    Raises InstallationError and BuildError.
    """
    environment.require("ziglang", extra="compile")
    environment.check_tvm_pair()
    home = user_folders.cache_home() / "mhsa_compile" / "runtimes"
    system = system_of(triple)
    entry = f"{triple}-{_recipe(system)}"
    folder = (home if user_folders.can_write(home) else user_folders.spare() / "runtimes") / entry
    library = folder / BUILT[system]
    if not library.is_file():
        progress(f"build TVM's runtime for {triple}: a minute or two, once")
        folder.mkdir(parents=True, exist_ok=True)
        with Unfinished(folder, "build") as place:
            output = _build(triple, tvm, tvm_ffi, place)
            if system == "windows":
                (place / IMPORTS).replace(folder / IMPORTS)
            output.replace(library)  # two builds at once give the same bytes
    return library


def _recipe(system: str) -> str:
    """A hash of all that the library is made of: another one for another library."""
    digest = hashlib.sha256(" ".join((*_FLAGS, *_SYSTEM_FLAGS[system])).encode())
    ours = sorted(path for path in _SOURCES.rglob("*") if path.is_file())
    for path in [*ours, PROGRAM_FILES / WINDOWS_MEMORY] if system == "windows" else ours:
        digest.update(path.read_bytes())
    for package in ("apache-tvm", "apache-tvm-ffi", "ziglang"):
        digest.update((environment.installed_version(package) or "").encode())
    return digest.hexdigest()[:12]


def _build(triple: str, tvm: Path, tvm_ffi: Path, place: Path) -> Path:
    stage(tvm, tvm_ffi, place)
    # In that folder: absolute paths would be in the bytes.
    system = system_of(triple)
    words = [*_FLAGS, *_SYSTEM_FLAGS[system], "-Iinclude", *UNITS, "-o", BUILT[system]]
    zig.run("c++", triple, words, "TVM's runtime", folder=place)
    return place / BUILT[system]


def stage(tvm: Path, tvm_ffi: Path, place: Path) -> None:
    """Makes one tree of the packages' sources and ours, which include each other by relative names, with UNITS to
    compile.

    Raises InstallationError.
    """
    try:
        for source, target in (
            *((tvm / "include", place / "include"), (tvm / "src/runtime", place / "src/runtime")),
            *((tvm_ffi / "include", place / "include"), (tvm_ffi / "src/ffi", place / "src/ffi")),
            (_SOURCES, place),
        ):
            shutil.copytree(source, target, dirs_exist_ok=True)
        shutil.copyfile(PROGRAM_FILES / WINDOWS_MEMORY, place / WINDOWS_MEMORY)
    except (OSError, shutil.Error) as error:
        hint = "Reinstall it, or name wheels or libraries: --runtime FOLDER."
        raise InstallationError("apache-tvm", "the sources of its runtime in its package", str(error), hint) from error
