"""Files of this package that are no code: tables, C sources."""

from __future__ import annotations

from pathlib import Path

from mhsa_compile.errors import InstallationError

INCOMPLETE = (
    "The installation is incomplete. Run: pip install --force-reinstall mhsa-compile. A frozen program has to bring "
    "the package's files along: PyInstaller's --collect-data mhsa_compile, and no archive."
)


def beside(module: str, name: str) -> Path:
    """The file `name` in the folder of a module, whose `__file__` is given. Raises InstallationError."""
    path = Path(module).with_name(name)
    if not path.is_file():
        raise InstallationError(f"package file {name!r}", str(path), "no such file", INCOMPLETE)
    return path
