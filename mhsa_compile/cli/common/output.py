"""What commands print: results on stdout (a table, or JSON), progress on stderr."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import msgspec
import typer

from mhsa_compile.errors import printable


def line(words: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints a line. All words that reach a terminal are `printable`: here, in `text`, and beside a bar."""
    typer.echo(printable(words), err=err, nl=nl)


def warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Prints a warning, as `warnings.showwarning` does; one of this package's own as a sentence, without a path."""
    own = category is UserWarning and Path(filename).is_relative_to(Path(__file__).parents[2])
    words = str(message) if own else warnings.formatwarning(message, category, filename, lineno, line).rstrip()
    if own:
        typer.secho("Warning: ", fg="yellow", err=True, nl=False)
        words = words[:1].upper() + words[1:] + ("" if words.endswith(".") else ".")
    typer.echo(printable(words), err=True)


def text(words: str, style: str = "") -> Any:
    """Text for a table's cell or title, in which nothing is markup."""
    from rich.text import Text

    return Text(printable(words), style)


def print_json(value: Any) -> None:
    """`value` (builtins, structs and dataclasses of them; NumPy scalars and paths too) as indented JSON."""
    encoded = msgspec.json.encode(value, enc_hook=lambda other: other.item() if hasattr(other, "item") else str(other))
    line(msgspec.json.format(encoded, indent=2).decode())


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table; a column whose name ends in ">" is aligned to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else text(str(cell)) for cell in row))
    # A pipe has no width: wide enough that files and logs keep their rows whole.
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(text(title, "bold"), table, sep="\n")


def ok_cell(ok: bool) -> Any:
    """A coloured cell."""
    from rich.text import Text

    return Text("ok", "green") if ok else Text("FAIL", "bold red")


def assignments(pairs: Mapping[str, object]) -> str:
    """B=1 L=128"""
    return " ".join(f"{name}={value}" for name, value in pairs.items())


@contextmanager
def stages(seconds: dict[str, float] | None = None) -> Iterator[Callable[[str], None]]:
    """A function to call at the start of each stage: spinners with times on a terminal, plain lines elsewhere.

    `seconds` is told how long each took.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(finished_text="[green]✓"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        clock: list[tuple[str, float]] = []

        def start(stage: str) -> None:
            if not console.is_terminal:
                line(stage, err=True)
            finish()
            clock.append((stage, time.perf_counter()))
            progress.add_task(printable(stage), total=1)

        def finish() -> None:
            if clock and seconds is not None:
                stage, began = clock[-1]
                seconds[stage] = time.perf_counter() - began
            for task in progress.task_ids:
                progress.update(task, completed=1)

        yield start
        finish()


@contextmanager
def counter(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """A function to call with how many are done, of how many, and a word on them: a bar on a terminal, else nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        *(TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total, word: progress.update(task, completed=done, total=total, description=printable(word))
