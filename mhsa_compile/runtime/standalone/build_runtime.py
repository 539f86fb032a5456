"""TVM's runtime built with Zig from the sources that its packages bring, for any target: one library of 2 MB that needs
no C++ library on the device.

The packages lack a few headers, most of which are there for what a compiled module never does (files of executables,
tensors in JSON, a profiler's marks). `sources/` has small ones in their place.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from mhsa_compile.errors import InstallationError
from mhsa_compile.files import user_folders
from mhsa_compile.files.atomic_write import Unfinished
from mhsa_compile.hardware import environment, zig

LIBRARY = "libtvm_runtime.so"
_SOURCES = Path(__file__).parent / "sources"
UNITS = ("tvm_runtime.cc", "tvm_ffi.cc")
_FLAGS = (
    *("-std=c++17", "-Os", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-ffunction-sections"),
    *("-DTVM_FFI_EXPORTS", "-DTVM_FFI_USE_LIBBACKTRACE=0", "-DTVM_FFI_BACKTRACE_ON_SEGFAULT=0"),
    *("-shared", "-s", f"-Wl,-soname,{LIBRARY}", "-Wl,-z,defs", "-Wl,--gc-sections"),
)


def built(triple: str, tvm: Path, tvm_ffi: Path, progress: Callable[[str], None]) -> Path:
    """The library for a Zig triple, from the user's cache if it was built before: it takes a minute or two.

    tvm, tvm_ffi   the folders of the two packages

    Raises InstallationError and BuildError.
    """
    environment.require("ziglang", extra="compile")
    environment.check_tvm_pair()
    home = user_folders.cache_home() / "mhsa_compile" / "runtimes"
    folder = (home if user_folders.can_write(home) else user_folders.spare() / "runtimes") / f"{triple}-{_recipe()}"
    library = folder / LIBRARY
    if not library.is_file():
        progress(f"build TVM's runtime for {triple}: a minute or two, once")
        folder.mkdir(parents=True, exist_ok=True)
        with Unfinished(folder, "build") as place:
            made = _build(triple, tvm, tvm_ffi, place)
            made.replace(library)  # two builds at once give the same bytes
    return library


def _recipe() -> str:
    """A hash of all that the library is made of: another one for another library."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sorted(path for path in _SOURCES.rglob("*") if path.is_file()):
        digest.update(path.read_bytes())
    for package in ("apache-tvm", "apache-tvm-ffi", "ziglang"):
        digest.update((environment.installed_version(package) or "").encode())
    return digest.hexdigest()[:12]


def _build(triple: str, tvm: Path, tvm_ffi: Path, place: Path) -> Path:
    stage(tvm, tvm_ffi, place)
    # In that folder: absolute paths would be in the bytes.
    zig.run("c++", triple, [*_FLAGS, "-Iinclude", *UNITS, "-o", LIBRARY], "TVM's runtime", folder=place)
    return place / LIBRARY


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
    except (OSError, shutil.Error) as error:
        hint = "Reinstall it, or name wheels or libraries: --runtime FOLDER."
        raise InstallationError("apache-tvm", "the sources of its runtime in its package", str(error), hint) from error
