"""Where the data folders are: inside an installed wheel, or at the top level of a checkout (editable installs too)."""

from __future__ import annotations

from pathlib import Path

from mhsa_compile.errors import InstallationError

_PACKAGE = Path(__file__).resolve().parent


def targets_folder() -> Path:
    """The folder of target profiles, `<name>.toml`. Raises InstallationError."""
    return _folder("targets")


def schedules_folder() -> Path:
    """The folder of tuned records, `<target>.jsonl`. Raises InstallationError."""
    return _folder("schedules")


def _folder(name: str) -> Path:
    candidates = (_PACKAGE / "_data" / name, _PACKAGE.parent / name)
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise InstallationError(
        f"data folder {name!r}",
        " or ".join(map(str, candidates)),
        "neither",
        "The installation is incomplete. Run: pip install --force-reinstall mhsa-compile",
    )
