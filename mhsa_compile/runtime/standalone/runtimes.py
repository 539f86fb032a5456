"""TVM's runtime for a bundle: from the packages installed here, from others at hand, or built from the sources that
those packages bring. Nothing is fetched from the network.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mhsa_compile.errors import InputError, InstallationError
from mhsa_compile.files import input_files, places
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.hardware import environment, host
from mhsa_compile.runtime.artifact.manifest import Manifest
from mhsa_compile.runtime.standalone import build_runtime

BUILD = "build"
LIBRARIES = {"libtvm_ffi.so": "apache_tvm_ffi", "libtvm_runtime.so": "apache_tvm"}  # and the wheels that bring them
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183, "arm": 40, "riscv64": 243}


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
    architecture = manifest.target.tvm.mtriple.partition("-")[0]
    if source is None and architecture == host.architecture():
        environment.check_tvm_pair()
        folders = [package_folder(name) / "lib" for name in ("tvm_ffi", "tvm")]
        return _prebuilt(architecture, folders, "the packages installed where it was made")
    if source in (None, BUILD):
        triple = manifest.target.link.triple
        library = build_runtime.built(triple, package_folder("tvm"), package_folder("tvm_ffi"), progress)
        origin = f"Zig, by the sources of apache-tvm {environment.TESTED_TVM}"
        return RuntimeLibraries({library.name: library.read_bytes()}, origin, f"glibc {_glibc(triple)}")
    place = Path(source)
    if not places.is_there(place):
        expected = f'"{BUILD}", a wheel, or a folder with wheels or libraries'
        raise InputError("--runtime", expected, f"nothing at {str(place)!r}")
    return _prebuilt(architecture, [place], str(place))


def _glibc(triple: str) -> str:
    """The C library that a triple asks for: "2.17 or later" of aarch64-linux-gnu.2.17."""
    number = re.search(r"\.(\d+\.\d+)", triple)
    return f"{number[1]} or later" if number else "as old as that of Zig's default for it"


def _prebuilt(architecture: str, places: list[Path], origin: str) -> RuntimeLibraries:
    needs = "glibc 2.28 or later and libstdc++ of GCC 8 or later"  # manylinux_2_28
    return RuntimeLibraries({name: _library(name, architecture, places) for name in LIBRARIES}, origin, needs)


def _library(name: str, architecture: str, places: list[Path]) -> bytes:
    """The first library that is for that architecture. Raises InputError, which says what there was instead."""
    found = [candidate for place in places for candidate in _candidates(name, place)]
    for _, data in found:
        if _is_for(architecture, data):
            return data
    wheel = LIBRARIES[name]
    version = environment.TESTED_TVM if wheel == "apache_tvm" else environment.TESTED_TVM_FFI
    where = ", ".join(map(str, places))
    raise InputError(
        "--runtime",
        f"{name} for {architecture} in {where}, or the wheel of {wheel} {version} that holds it",
        f"only {', '.join(label for label, _ in found)}, for another architecture" if found else "neither",
        f"Fetch it: pip download --no-deps --only-binary :all: --platform manylinux_2_28_{architecture} "
        f"'{wheel.replace('_', '-')}{version if version[0] in '<>' else f'=={version}'}'; or use --runtime {BUILD}.",
    )


def _candidates(name: str, place: Path) -> list[tuple[str, bytes]]:
    """(what it is called, its bytes) of every library of that name, in wheels and beside them."""
    paths = [place] if places.is_file(place) else sorted((*place.rglob("*.whl"), *place.rglob(name)))
    found = []
    for path in paths:
        if path.suffix != ".whl":
            found += (
                [(str(path), input_files.read(path, InputError, "--runtime", "a library"))] if path.name == name else []
            )
        elif path.name.startswith(f"{LIBRARIES[name]}-"):
            found += _in_wheel(name, path)
    return found


def _in_wheel(name: str, wheel: Path) -> list[tuple[str, bytes]]:
    version = wheel.name.split("-")[1]
    if not environment.fits(LIBRARIES[name].replace("_", "-"), version):
        return []
    argument, expected = "--runtime", f"a wheel that can be read, {str(wheel)!r}"
    with (
        input_files.opened(wheel, InputError, argument, expected) as file,
        reading(InputError, argument, expected),
        zipfile.ZipFile(file) as archive,
    ):
        inside = [entry for entry in archive.namelist() if entry.endswith(f"/lib/{name}")]
        return [(f"{wheel}/{entry}", archive.read(entry)) for entry in inside]


def _is_for(architecture: str, library: bytes) -> bool:
    """Whether a library is for an architecture, by the field e_machine of its ELF header."""
    machine = next((number for name, number in _ELF_MACHINES.items() if architecture.startswith(name)), None)
    return library[:4] == b"\x7fELF" and int.from_bytes(library[18:20], "little") == machine
