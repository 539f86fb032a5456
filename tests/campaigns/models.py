"""Other people's models in one table, a row each: accelerated in place, and compiled whole; then what went wrong.

python -m campaigns.models [--only gpt2 bloom] [--ways place eager sdpa] [--json FILE] [--markdown]

place         what `mhsa.accelerate` makes of the model: attentions of a forward on artifacts, tokens of eager attention
eager, sdpa   the model as one artifact, exported with that attention: attentions that were fused
error         the largest, as a share of its budget; s: seconds of CPUs that compiling took

With --json, rows are added to those that the file has, so the table can be made in pieces.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["MHSA_CACHE"] = "0"  # seconds are those of compiling

from rich.console import Console
from rich.table import Table
from support import models_in_place
from support.model_families import FAMILIES, run

from mhsa_compile.errors import MhsaError
from mhsa_compile.files.foreign_errors import first_line

Cell = dict[str, Any]
"""What one way made of one family: ours, left, error, seconds, tokens, note; and bad, what is wrong with it."""
COLUMNS = ("family", "in place", "error", "tokens", "s", "eager, fused", "error", "s", "sdpa, fused", "error", "s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--json", type=Path, help="a file to keep the rows in, and to add to")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.* is deprecated", FutureWarning)
    rows: dict[str, dict[str, Cell]] = {}
    if asked.json and asked.json.exists():
        rows = json.loads(asked.json.read_text())
    for family in asked.only:
        for way in asked.ways:
            cell = _cell(WAYS[way], family)
            rows.setdefault(family, {})[way] = cell
            print(family, way, cell, sep="\t", file=sys.stderr, flush=True)
            if asked.json:
                asked.json.parent.mkdir(parents=True, exist_ok=True)
                asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    table = [_row(family, rows[family]) for family in FAMILIES if family in rows]
    _print(table, asked.markdown)
    cells = [(f"{family}, {way}", cell) for family in rows for way, cell in rows[family].items()]
    bad = [f"{name}: {cell['bad']}" for name, cell in cells if cell["bad"]]
    print(*(f"{name}: {cell['note']}" for name, cell in cells if cell["note"]), sep="\n")
    print(*bad, f"{len(bad)} of {len(cells)} went wrong", sep="\n")
    return 1 if bad else 0


def _cell(way: Callable[[str], Cell], family: str) -> Cell:
    try:
        return way(family)
    except Exception as error:  # whatever it is, it is what is counted here
        said = str(error) if isinstance(error, MhsaError) else f"{type(error).__name__}: {error}"
        expected = FAMILIES[family].refused
        if isinstance(error, MhsaError) and expected and expected in said:
            return _said("refused", said)
        return _said("crash", said, said[:300])


def _said(kind: str, note: str, bad: str = "") -> Cell:
    return {"kind": kind, "note": note, "bad": bad}


def _in_place(name: str) -> Cell:
    found = models_in_place.run(FAMILIES[name])
    if not found.ours:
        return _said("kept", found.kept)
    others = [cache for cache, equal in found.tokens.items() if not equal]
    bad = ["over its budget"] * (found.worst > 1) + [f"other tokens with a {cache} cache" for cache in others]
    bad += [f"{found.left} attentions stayed with PyTorch"] * (found.left > 0)
    bad += ["nothing was generated"] * bool(FAMILIES[name].generates and not found.tokens)
    tokens = ", ".join(found.tokens) if found.tokens and not others else "other" if others else ""
    counts = {"ours": found.ours, "left": found.left, "error": found.worst, "seconds": found.seconds}
    return {**_said("done", found.kept, "; ".join(bad)), **counts, "tokens": tokens}


def _whole(name: str, kind: str) -> Cell:
    family = FAMILIES[name]
    try:
        family.build(kind)
    except ValueError as error:  # transformers has no such attention for it
        return _said("absent", first_line(error).partition(". ")[0])
    outcome = run(family, kind)
    fused = sum(block.fused for block in outcome.blocks)
    note = "; ".join(dict.fromkeys(block.note for block in outcome.blocks if not block.fused))
    counts = {"ours": fused, "left": len(outcome.blocks) - fused, "error": outcome.worst, "seconds": outcome.seconds}
    return {**_said("done", note, "over its budget" if outcome.worst > 1 else ""), **counts}


WAYS: dict[str, Callable[[str], Cell]] = {
    "place": _in_place,
    "eager": lambda name: _whole(name, "eager"),
    "sdpa": lambda name: _whole(name, "sdpa"),
}


def _row(family: str, cells: dict[str, Cell]) -> tuple[str, ...]:
    part = f" ({FAMILIES[family].part})" if FAMILIES[family].part else ""
    found: list[str] = [family + part]
    for way in WAYS:
        cell = cells.get(way, _said("", ""))
        done = cell["kind"] == "done"
        found.append(f"{cell['ours']} of {cell['ours'] + cell['left']}" if done else cell["kind"])
        found.append(f"{cell['error']:.2f}" if done else "")
        found += [cell.get("tokens", "")] * (way == "place")
        found.append(f"{cell['seconds']:.0f}" if cell.get("seconds") else "")
    return tuple(found)


def _print(rows: list[tuple[str, ...]], as_markdown: bool) -> None:
    if as_markdown:
        for row in (COLUMNS, ("---",) * len(COLUMNS), *rows):
            print("|", " | ".join(row), "|")
        return
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*row)
    Console(width=160 if not sys.stdout.isatty() else None).print(table)


if __name__ == "__main__":
    sys.exit(main())
