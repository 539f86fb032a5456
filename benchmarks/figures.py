"""What benchmarks publish: figures beside the machine they are of, as JSON and as tables."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from mhsa_compile.hardware import host
from mhsa_compile.hardware.environment import installed_version

PACKAGES = ("mhsa-compile", "apache-tvm", "torch")
Kind = TypeVar("Kind")


@dataclass
class Figures:
    """What a published figure must state beside its numbers; `missing` says what was not measured, and why."""

    cpu: str
    versions: dict[str, str | None]
    date: date
    missing: dict[str, str] = field(default_factory=dict, kw_only=True)

    @classmethod
    def here(cls, packages: Iterable[str], *more: Any) -> Self:
        """Figures to come, of this machine and day, with the versions of these packages; `more` are other fields."""
        versions = {package: installed_version(package) for package in (*PACKAGES, *packages)}
        return cls(host.cpu_model(), versions, date.today(), *more)


@dataclass
class TurnFigures(Figures):
    """Seconds of the median call of each turn, by what was called and by the candidate."""

    threads: int
    load: float = field(default_factory=lambda: os.getloadavg()[0], kw_only=True)
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict, kw_only=True)


def command_line(program: str | None, *, turns: int | None = None) -> argparse.ArgumentParser:
    """A parser of what most programs are told: --json, and of those that take turns --threads and --turns."""
    parser = argparse.ArgumentParser(description=program, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure, with machine and versions")
    if turns is not None:
        parser.add_argument("--threads", type=int, default=host.allowed_cpus())
        parser.add_argument("--turns", type=int, default=turns, help="of each candidate")
    return parser


def read(path: Path, kind: type[Kind]) -> Kind:
    return msgspec.json.decode(path.read_bytes(), type=kind)


def write(figures: Any, path: Path | None) -> None:
    """Figures as JSON, if there is a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2))


def show(tables: Iterable[Table], missing: Mapping[str, str]) -> None:
    """Prints tables, and what is missing from them."""
    console = Console(width=None if sys.stdout.isatty() else 170)
    for table in tables:
        console.print(table)
    for what, words in missing.items():
        console.print(f"{what}: {words}", markup=False)
