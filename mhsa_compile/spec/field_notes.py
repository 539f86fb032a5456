"""What there is to say of a field of a spec beside its type, next to the field: its check, its flag on a command line,
its words in a picture, and its meaning where that is a formula. Whoever goes over fields asks these, and names none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from mhsa_compile.spec.checks import checked_flag, checked_positive_float

Formula = Callable[[Any, Any, Any], Any]
"""(np or torch, scores, the field's value) -> what becomes of scores by themselves."""


@dataclass(frozen=True)
class Note:
    """
    help        of the flag; "" is no flag
    choices     the texts that the flag takes
    parse       how the flag's text becomes the field's value, where that is not the text
    form        (key, texts) of a value beside True, {key: text}, which has a flag of its own, named after both
    check       (field, value) -> the value as the spec keeps it; not asked of None. Raises SpecError. A bool and a
                positive number have theirs
    otherwise   what None means where a number may be, in words
    row         of the picture: "sees", "positions" or "scores"; "" where the field has no words of its own there
    words       the value in words: a format of it, or a function
    turn        places words in their row behind those of a lower number
    formula     what becomes of scores by themselves, in the order of the fields: the field is an attribute of
                `mhsa.Attention`, too, a number, absent where it is None
    tables      how the names of a module's buffers begin that follow from the field: nobody brings them as weights
    parameters  the field that says how many numbers a module holds for this one
    """

    help: str = ""
    choices: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    form: tuple[str, tuple[str, ...]] | None = None
    check: Callable[[str, Any], Any] | None = None
    otherwise: str = ""
    row: str = ""
    words: str | Callable[[Any], str] = ""
    turn: int = 0
    formula: Formula | None = None
    tables: tuple[str, ...] = ()
    parameters: str = ""

    def in_words(self, value: Any) -> str:
        return self.words.format(value) if isinstance(self.words, str) else self.words(value)


@dataclass(frozen=True)
class SpecField:
    """A field's type, as the spec resolves it, and its note."""

    type: Any
    note: Note

    @property
    def may_be_none(self) -> bool:
        return type(None) in get_args(self.type)

    @property
    def check(self) -> Callable[[str, Any], Any] | None:
        if self.type is bool:
            return checked_flag
        if float in get_args(self.type):
            return functools.partial(checked_positive_float, otherwise=self.note.otherwise)
        return self.note.check


@functools.cache
def fields_with_notes(spec: type) -> Mapping[str, SpecField]:
    """The fields of a spec that have a note, in their order."""
    hints = get_type_hints(spec, include_extras=True)
    kinds = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Annotated}
    return {name: SpecField(kind, note) for name, (kind, note) in kinds.items()}


@functools.cache
def tables_of(spec: type) -> tuple[str, ...]:
    """How the names of buffers begin that follow from a spec."""
    return tuple(name for field in fields_with_notes(spec).values() for name in field.note.tables)


def formulas_of(spec: type) -> dict[str, Formula]:
    """What may become of scores by themselves, in the order in which it does."""
    return {
        name: field.note.formula for name, field in fields_with_notes(spec).items() if field.note.formula is not None
    }
