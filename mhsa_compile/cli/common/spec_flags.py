"""The flags that state a spec: one for each field of AttentionSpec whose note has words for it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, Literal, get_args

import msgspec
import typer

from mhsa_compile.cli.common.option_groups import OPTION
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.field_notes import SpecField, fields_with_notes

_PARSE = "parse"
_OFF = {one.name for one in msgspec.structs.fields(AttentionSpec) if one.default is False}


def _flag(name: str, spec_field: SpecField) -> tuple[str, Any, Any]:
    """A flag named after its field; a bool has its --no- form where it is true if nothing is stated."""
    note = spec_field.note
    names = [f"--{name.replace('_', '-')}"] if name in _OFF else []
    option = typer.Option(
        None, *names, help=note.help, rich_help_panel="The spec, instead of SOURCE", show_default=False
    )
    kind = (get_args(spec_field.type) or (spec_field.type,))[0]
    if note.choices:
        kind = Literal[note.choices]
    elif note.parse is not None:
        kind = str
    return name, kind | None, field(default=None, metadata={OPTION: option, _PARSE: note.parse})


_Flags: Any = make_dataclass(
    "_Flags",
    [_flag(name, spec_field) for name, spec_field in fields_with_notes(AttentionSpec).items() if spec_field.note.help],
    frozen=True,
    kw_only=True,
)


@dataclass(frozen=True, kw_only=True)
class SpecFlags(_Flags):  # type: ignore[misc]  # made of the fields of AttentionSpec
    """The fields of AttentionSpec as a command line states them, in their order; None was not stated."""

    def stated(self) -> dict[str, Any]:
        """What AttentionSpec takes of the flags that were stated. Raises SpecError.

        An empty text stays one, for the spec to refuse.
        """
        stated = {}
        for flag in fields(self):
            value, parse = getattr(self, flag.name), flag.metadata[_PARSE]
            if value is not None:
                stated[flag.name] = parse(value) if parse and value else value
        return stated
