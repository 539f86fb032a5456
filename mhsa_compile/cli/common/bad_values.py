"""What a value of an option must be, and what came, where Typer refuses it: its own words are its validator's
("Input should be a valid integer, unable to parse string as an integer")."""

from __future__ import annotations

import re
from typing import Any

import typer

from mhsa_compile.errors import InputError, did_you_mean

_LONGEST = 60  # characters of a value that a message repeats


def refusal_of_value(error: Exception) -> InputError | None:
    """The error for a value that an option cannot take; None for every other error, and where it is not known why."""
    problems = getattr(error.__cause__, "errors", None)  # of pydantic's ValidationError
    if not isinstance(error, typer.BadParameter) or problems is None:
        return None
    problem, parameter = problems()[0], error.param
    value = str(problem["input"])
    name = max(getattr(parameter, "opts", None) or ["arguments"], key=len)
    choices = re.findall(r"'([^']*)'", str(problem["msg"]).partition(" is not one of ")[2])
    if choices:
        return InputError(
            name, f"one of {', '.join(map(repr, choices))}", repr(value[:_LONGEST]), did_you_mean(value, choices)
        )
    return InputError(name, _number(str(problem["type"]), parameter), repr(value[:_LONGEST]))


def _number(kind: str, parameter: Any) -> str:
    """A number as an option takes it, with its bounds."""
    least, most = getattr(parameter, "min", None), getattr(parameter, "max", None)
    bounds = [bound for bound in (least, most) if bound is not None]
    whole = kind.startswith("int") or (bool(bounds) and all(isinstance(bound, int) for bound in bounds))
    noun = "a whole number" if whole else "a number"
    if least is not None and most is not None:
        return f"{noun} from {least} to {most}"
    return noun if least is None else f"{noun} of {least} or more"
