"""What is installed beside this library, found out without importing it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from mhsa_compile.errors import InputError, InstallationError
from mhsa_compile.files.input_files import text_or_nothing
from mhsa_compile.version import __version__

TESTED_TVM = "0.27.0.post1"
TESTED_TVM_FFI = ">=0.1.14.post0,<0.1.15"
CHANGED = "+changes"
UNKNOWN = "unknown"
_MODULES = {"apache-tvm": "tvm", "apache-tvm-ffi": "tvm_ffi"}  # where a package has another name than its distribution
_STATED_VERSION = re.compile(
    r"""^(?:__version__\s*=\s*)?(?:__version__|version)\s*=\s*["']([^"']+)["']""", re.MULTILINE
)
RUNTIME_LIBRARIES = Path(__file__).parents[1] / "_data" / "tvm"
"""Where the wheel mhsa-runtime has TVM's runtime; not there in any other installation."""
_FITTING_TVM_FFI = re.compile(r"0\.1\.14\.post\d+")


RUNTIME_ALONE = "TVM_USE_RUNTIME_LIB"
"""The variable of the environment by which TVM, where it is 1 at the import, is its runtime without the compiler."""


def leaves_on(switch: str) -> bool:
    """Whether a variable of the environment is not 0, which switches something off. Raises InputError."""
    value = os.environ.get(switch, "1")
    if value not in ("", "0", "1"):
        raise InputError(f"environment variable {switch}", "0 (off) or 1 (on)", repr(value))
    return value != "0"


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Inside, a variable of the environment has this value; then what it had, or none."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def check_tvm_pair() -> None:
    """Refuse, before anything imports them, a TVM and TVM FFI that were not tested together.

    apache-tvm 0.27 with apache-tvm-ffi 0.1.15, which plain pip prefers, ends in segmentation faults.
    Raises InstallationError.
    """
    _check_pair(stated_version("apache-tvm"), f"'apache-tvm=={TESTED_TVM}' 'apache-tvm-ffi{TESTED_TVM_FFI}'")


def tvm_libraries() -> Path:
    """The folder of TVM's libraries: apache-tvm's where that is installed, else that of the wheel mhsa-runtime. Nothing
    else decides it, and nothing is imported for it: `tvm` loads the compiler.

    Raises InstallationError where there is neither, and for a pair that was not tested together.
    """
    spec = find_spec("tvm")
    origin = spec and spec.origin  # None of a folder without code
    if origin is None and RUNTIME_LIBRARIES.is_dir():
        _check_pair(TESTED_TVM, f"'apache-tvm-ffi{TESTED_TVM_FFI}'")
        return RUNTIME_LIBRARIES
    check_tvm_pair()
    return Path(origin or "").parent / "lib"


def _check_pair(tvm: str | None, fitting: str) -> None:
    numbers = {"apache-tvm": tvm, "apache-tvm-ffi": stated_version("apache-tvm-ffi")}
    if all(number is not None and fits(name, number) for name, number in numbers.items()):
        return
    raise InstallationError(
        "the TVM pair",
        f"apache-tvm {TESTED_TVM} with apache-tvm-ffi {TESTED_TVM_FFI}",
        " with ".join(f"{name} {number or 'not installed'}" for name, number in numbers.items()),
        f"Run: pip install {fitting}",
    )


def check_compiler() -> None:
    """As `check_tvm_pair`, and refuse an environment that asks for TVM's runtime alone. Raises InstallationError."""
    check_tvm_pair()
    base = sys.modules.get("tvm.base")  # TVM reads the variable once, when it is imported
    if os.environ.get(RUNTIME_ALONE) == "1" and (base is None or base._RUNTIME_ONLY):
        raise InstallationError(
            "the environment", "a TVM that compiles", f"{RUNTIME_ALONE}=1: its runtime alone", "Unset that variable."
        )


def fits(name: str, number: str) -> bool:
    """Whether a version of apache-tvm or apache-tvm-ffi is of the pair that was tested together."""
    return number == TESTED_TVM if name == "apache-tvm" else _FITTING_TVM_FFI.fullmatch(number) is not None


def require(*modules: str, extra: str) -> None:
    """Raise InstallationError unless all these top-level modules can be imported; `extra` is what brings them."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise InstallationError(
            "installation", ", ".join(modules), f"no {', '.join(missing)}", f"Run: pip install 'mhsa-compile[{extra}]'"
        )


def nvidia_folders() -> list[Path]:
    """The folders into which NVIDIA's packages for CUDA 13 put their files, lib/ and include/."""
    spec = find_spec("nvidia")
    return [Path(folder, "cu13") for folder in (spec and spec.submodule_search_locations) or ()]


@cache  # what is imported stays what it was, whatever pip installs meanwhile
def installed_version(distribution: str) -> str | None:
    """The version that pip installed or, where a packer dropped its notes (*.dist-info), the one that the package's own
    files say; UNKNOWN where they do not, None where there is no such package."""
    from importlib import metadata  # a load asks the packages' own files alone, and is quicker without

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return _version_in_files(distribution)


def stated_version(distribution: str) -> str | None:
    """The version that a package's own files say, which are what an import takes; else as `installed_version`."""
    own = _version_in_files(distribution)
    return installed_version(distribution) if own in (None, UNKNOWN) else own


def _version_in_files(distribution: str) -> str | None:
    """The version in the files of a package, which is not imported: TVM's loads its compiler."""
    spec = find_spec(_MODULES.get(distribution, distribution.replace("-", "_")))
    if spec is None or spec.origin is None:  # a folder of that name without code is no package
        return None
    for folder in spec.submodule_search_locations or ():
        for name in ("_version.py", "version.py", "__init__.py"):
            if match := _STATED_VERSION.search(text_or_nothing(Path(folder, name))):
                return match[1]
    return UNKNOWN


def versions() -> dict[str, str]:
    """Versions of what generates code here, as records keep them: this library, its commit in a checkout, TVM."""
    numbers = {"mhsa-compile": __version__, "source": source()}
    numbers |= {name: installed_version(name) for name in ("apache-tvm", "apache-tvm-ffi")}
    return {name: number for name, number in numbers.items() if number is not None}


def source() -> str | None:
    """The commit of the checkout that this library runs from, followed by CHANGED where the package is not what that
    commit holds. None where the library is installed, or git is not."""
    import subprocess

    package = Path(__file__).resolve().parents[1]
    if not (package.parent / ".git").exists():
        return None
    try:
        commit, changes = (
            subprocess.run(["git", "-C", str(package), *words], capture_output=True, text=True, check=True).stdout
            for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--", "."))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + (CHANGED if changes else "")
