"""Where data is: folders inside an installed wheel, or at the top level of a checkout (editable installs too), and the
user's own: records, and artifacts that were compiled before."""

from __future__ import annotations

from pathlib import Path

from mhsa_compile.errors import InstallationError
from mhsa_compile.files import user_folders
from mhsa_compile.files.package_files import INCOMPLETE

NATIVE = "native"
"""The target that is detected, and not a file."""
_PACKAGE = Path(__file__).resolve().parents[1]


def targets_folder() -> Path:
    """The folder of target profiles, `<name>.toml`. Raises InstallationError."""
    return _folder("targets")


def schedules_folder() -> Path:
    """The folder of tuned records, `<target>.jsonl`. Raises InstallationError."""
    return _folder("schedules")


def artifact_cache() -> Path:
    """The folder that keeps artifacts compiled before; it need not exist yet."""
    return user_folders.cache_home() / "mhsa_compile" / "artifacts"


def own_records(target: str) -> Path:
    """The file that keeps this user's records of a target; it need not exist yet."""
    return user_folders.data_home() / "mhsa_compile" / "schedules" / f"{target}.jsonl"


def shipped_records(target: str) -> Path:
    """The file of a target's records that come with this library; it need not exist. Raises InstallationError."""
    return schedules_folder() / f"{target}.jsonl"


def records_for(target: str) -> list[Path]:
    """The files that hold records of a target: the user's own, then what is shipped. For the native target that is all
    that is shipped: each record says which machines it fits. Raises InstallationError."""
    shipped = sorted(schedules_folder().glob("*.jsonl")) if target == NATIVE else [shipped_records(target)]
    return [path for path in (own_records(target), *shipped) if path.is_file()]


def _folder(name: str) -> Path:
    candidates = (_PACKAGE / "_data" / name, _PACKAGE.parent / name)
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise InstallationError(
        f"data folder {name!r}",
        " or ".join(map(str, candidates)),
        "neither",
        INCOMPLETE,
    )
