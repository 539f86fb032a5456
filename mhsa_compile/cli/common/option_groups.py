"""Options in groups: a command takes a dataclass whose fields are options, and Typer sees the options.

    @dataclass(frozen=True, kw_only=True)
    class Lengths:
        length: Annotated[int | None, typer.Option(help="Query length.")] = None

    def run(artifact: Path, *, lengths: Lengths) -> None: ...

    app.command("run")(ungrouped(run))  # mhsa run ARTIFACT --length 5

Where the options of a group are of one form, a field may have its own in its metadata instead, under OPTION.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter
from typing import Any, get_type_hints

OPTION = "option"


def flatten_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of each group in the group's place. A group may hold groups."""
    parameters = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def run(**options: Any) -> None:
        command(**{parameter.name: _value(parameter, options) for parameter in parameters})

    flat = [option for parameter in parameters for option in _options(parameter)]
    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]  # what `inspect` looks for first
    run.__annotations__ = {option.name: option.annotation for option in flat}
    return run


def _options(parameter: Parameter) -> Iterator[Parameter]:
    if not is_dataclass(parameter.annotation):
        yield parameter
        return
    for member in _members(parameter.annotation):
        yield from _options(member)


def _value(parameter: Parameter, options: Mapping[str, Any]) -> Any:
    group = parameter.annotation
    if not is_dataclass(group):
        return options[parameter.name]
    return group(**{member.name: _value(member, options) for member in _members(group)})  # type: ignore[operator]


def _members(group: Any) -> list[Parameter]:
    """The fields of a group as parameters."""
    types = get_type_hints(group, include_extras=True)
    return [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=_default(field), annotation=types[field.name])
        for field in fields(group)
    ]


def _default(field: Field[Any]) -> Any:
    """A field's option, which knows the default; where it has none, its default."""
    default = Parameter.empty if field.default is MISSING else field.default
    return field.metadata.get(OPTION, default)
