"""matplotlib's figures in one style, each written as one piece. It is imported when something is drawn, without a
display; the same figures give the same file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mhsa_compile.errors import InputError, OutputError
from mhsa_compile.files.atomic_write import atomic_file, check_file
from mhsa_compile.hardware import environment

SUFFIXES = (".svg", ".png", ".pdf")
INK, FAINT, GRID = "#222222", "#777777", "#e4e4e4"
OURS = "#1d66a8"
COLOURS = (OURS, "#d9622b", "#4f8a4b", "#8a63ad", "#b8860b", "#3a9a9a", "#8c8c8c")
"""The colours of what is drawn side by side, in their order."""
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "mhsa",
}


def check_path(path: Path, option: str = "--plot") -> None:
    """Raises InputError, OutputError or InstallationError for a picture that could not be written at the end."""
    if path.suffix not in SUFFIXES:
        raise InputError(option, f"a file named {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}", repr(str(path)))
    check_file(path, option)
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OutputError(
            option, "a folder that can be written to", f"{str(path.parent)!r} ({error.strerror})"
        ) from error
    environment.require("matplotlib", extra="bench")


@contextmanager
def canvas(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """A new figure without axes, which is written to `path` as one piece when the block ends."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        metadata = {"Date": None} if path.suffix == ".svg" else None  # the same figures give the same file
        with atomic_file(path, repr(str(path))) as file:
            form = path.suffix.removeprefix(".")
            figure.savefig(file, format=form, dpi=150, metadata=metadata, bbox_inches="tight", pad_inches=0.12)


@contextmanager
def figure(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """The axes of a new figure, which is written to `path` as one piece when the block ends."""
    with canvas(path, size) as whole:
        yield whole.add_subplot()
