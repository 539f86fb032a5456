"""Checks exercises, and says what is wrong with an answer.

    python -m exercises.check              # all of them
    python -m exercises.check 3            # one
    python -m exercises.check 3 --solution # the solution instead of your file

Beside an exercise `exercises/e03_counts.py` with a function `counts` lies `exercises/solutions/e03_counts.py` with

    counts               the solution
    cases()              arguments for it, a tuple each
    expected(*case)      what is right, by a compiled artifact where there is one
    observed(answer, *case)   optional: what is compared in place of the answer itself, as where several are right
    MISTAKES             message -> a function that makes this mistake
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

FOLDER = Path(__file__).parent
FILES = sorted(path.stem for path in FOLDER.glob("e[0-9][0-9]_*.py"))
RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""How far off an answer may be: float32, which artifacts compute in, is off by less than a tenth of it."""

Answer = Callable[..., Any]


@dataclass(frozen=True)
class Verdict:
    solved: bool
    message: str


def name_of(number: int) -> str:
    """The module of an exercise, such as e03_counts; ends the program for one that is not there."""
    names = [name for name in FILES if int(name[1:3]) == number]
    if not names:
        sys.exit(f"exercise: expected 1 to {len(FILES)}, got {number}")
    return names[0]


def answer_of(module: ModuleType) -> Answer:
    """The function to complete, which has the name of its file."""
    answer: Answer = getattr(module, module.__name__.rpartition(".")[2][4:])
    return answer


def check(name: str, answer: Answer) -> Verdict:
    """What the function gives, beside what is right, and beside what each typical mistake gives."""
    solution = import_module(f"exercises.solutions.{name}")
    cases = solution.cases()
    try:
        ours = _results(solution, answer, cases)
    except NotImplementedError as hint:
        return Verdict(False, f"not solved yet. Hint: {hint}")
    except Exception as error:
        return Verdict(False, f"{type(error).__name__}: {error}")
    right = [solution.expected(*copy.deepcopy(case)) for case in cases]
    if _same(ours, right):
        return Verdict(True, "right")
    for message, mistake in solution.MISTAKES.items():
        if _same(ours, _results(solution, mistake, cases)):
            return Verdict(False, message)
    return Verdict(False, _difference(ours, right))


def _results(solution: ModuleType, answer: Answer, cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What is compared of each case; every call has arguments of its own."""
    observed = getattr(solution, "observed", lambda result, *case: result)
    answers = [answer(*copy.deepcopy(case)) for case in cases]
    if any(result is None for result in answers):
        raise ValueError("it returns None, where a result is expected: is there a `return`?")
    return [observed(result, *copy.deepcopy(case)) for result, case in zip(answers, cases, strict=True)]


def _same(a: Any, b: Any) -> bool:
    """Whether numbers, arrays, and tuples of them are equal, up to rounding. NaN equals NaN: a mistake has it."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    try:
        first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
    except (TypeError, ValueError):
        return False
    return first.shape == second.shape and bool(np.allclose(first, second, RELATIVE, ABSOLUTE, equal_nan=True))


def _difference(ours: Any, right: Any) -> str:
    """What is different about an answer that no typical mistake gives."""
    if isinstance(right, list | tuple):
        if not isinstance(ours, list | tuple) or len(ours) != len(right):
            return f"expected {len(right)} results, got {ours!r}"
        pairs = [(a, b) for a, b in zip(ours, right, strict=True) if not _same(a, b)]
        return _difference(*pairs[0])
    try:
        a, b = np.asarray(ours, np.float64), np.asarray(right, np.float64)
    except (TypeError, ValueError):
        return f"expected numbers, got {type(ours).__name__}"
    if a.shape != b.shape:
        return f"expected shape {b.shape}, got {a.shape}"
    if np.isnan(a).any():
        return f"{int(np.isnan(a).sum())} of {a.size} numbers are NaN"
    place = tuple(int(i) for i in np.unravel_index(int(np.abs(a - b).argmax()), a.shape))
    where = f" at {list(place)}" if place else ""
    return f"expected {b[place]:.6g}{where}, got {a[place]:.6g}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m exercises.check", description="Checks exercises.")
    parser.add_argument("exercise", nargs="?", type=int, help=f"1 to {len(FILES)}; all of them if it is left out")
    parser.add_argument("--solution", action="store_true", help="check the solution instead")
    options = parser.parse_args(arguments)
    names = FILES if options.exercise is None else [name_of(options.exercise)]
    console, solved = Console(), 0
    for name in names:
        with console.status(f"check {name}"):
            module = import_module(f"exercises.{'solutions.' if options.solution else ''}{name}")
            verdict = check(name, answer_of(module))
        solved += verdict.solved
        console.print(f"[{'green' if verdict.solved else 'red'}]{name}[/]: {escape(verdict.message)}", soft_wrap=True)
    if len(names) > 1:
        console.print(f"{solved} of {len(names)} solved")
    return 0 if solved == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
