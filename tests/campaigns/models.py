"""Other people's models, a row each: attention, blocks fused, error as a share of its budget, seconds; then the count.

python -m campaigns.models [--families gpt2 bloom] [--kinds eager sdpa] [--threads 2]
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings

from rich.console import Console
from rich.table import Table
from support.model_families import FAMILIES, run

from mhsa_compile.errors import MhsaError

KINDS = ("eager", "sdpa")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), metavar="NAME")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.* is deprecated", FutureWarning)
    table = Table("family", "attention", "fused", "error / budget", "seconds", "what stayed, or went wrong")
    crashes = over = 0
    for name in asked.families:
        for kind in asked.kinds:
            row = _row(name, kind, asked.threads)
            crashes += row[2] == CRASHED
            over += row[2] not in (CRASHED, ABSENT, REFUSED) and float(row[3]) > 1
            print(*row, sep="\t", file=sys.stderr, flush=True)
            table.add_row(*row)
    Console(width=160 if not sys.stdout.isatty() else None).print(table)
    print(f"{crashes} crashes, {over} over their budget")
    return 1 if crashes or over else 0


CRASHED, ABSENT, REFUSED = "crash", "-", "refused"


def _row(name: str, kind: str, threads: int) -> tuple[str, ...]:
    family, began = FAMILIES[name], time.monotonic()
    try:
        family.build(kind)
    except ValueError as error:  # transformers has no such attention for it
        return name, kind, ABSENT, "", "", str(error).partition(". ")[0]
    try:
        outcome = run(family, kind, threads)
    except Exception as error:  # whatever it is, it is what is counted here
        said = str(error) if isinstance(error, MhsaError) else f"{type(error).__name__}: {error}"
        expected = isinstance(error, MhsaError) and family.refused and family.refused in said
        return name, kind, REFUSED if expected else CRASHED, "", f"{time.monotonic() - began:.0f}", said[:300]
    fused = sum(block.fused for block in outcome.blocks)
    why = "; ".join(dict.fromkeys(block.note for block in outcome.blocks if not block.fused))
    return (
        name,
        kind,
        f"{fused} of {len(outcome.blocks)}",
        f"{outcome.worst:.2f}",
        f"{time.monotonic() - began:.0f}",
        why,
    )


if __name__ == "__main__":
    sys.exit(main())
