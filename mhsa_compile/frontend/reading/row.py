"""A row of the table: what of one operator is understood."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import onnx

from mhsa_compile.frontend.onnx_graph import GraphView

ANY: Final = "any value"
"""In the place of an attribute's values: whatever it says is understood."""
MANY: Final = 1 << 30
"""In the place of a count of inputs or outputs: as many as there are."""

Mismatch = tuple[str, str] | None
"""None, or what is expected and what came, of a node that is not understood."""
Condition = Callable[[GraphView, onnx.NodeProto], Mismatch]


@dataclass(frozen=True)
class Row:
    """What is understood of one operator. Whatever else a node says is refused.

    inputs      how many inputs, from the first on, are read; a node that brings a later one is refused
    outputs     how many outputs, from the first on, have the operator's values; later ones may be there, but unread
    attributes  name -> the values that are understood, or ANY. One that is not here may only say its default
    dtypes      NumPy's names of the element types that inputs and outputs may have; None is all
    constants   places among the inputs whose values the converter needs: floats there are no weights to bind at load
    unread      places among the inputs that must be empty -> their names
    condition   asked last, for what names and counts cannot say
    hint        what a user can do instead, where the general advice does not fit
    """

    inputs: int = 1
    outputs: int = 1
    attributes: Mapping[str, Any] = ()  # type: ignore[assignment]
    dtypes: frozenset[str] | None = None
    constants: tuple[int, ...] = ()
    unread: Mapping[int, str] = ()  # type: ignore[assignment]
    condition: Condition | None = None
    hint: str = ""


def row(
    *names: str,
    inputs: int = 1,
    outputs: int = 1,
    dtypes: frozenset[str] | None = None,
    constants: tuple[int, ...] = (),
    unread: Mapping[int, str] | None = None,
    condition: Condition | None = None,
    hint: str = "",
    **values: Any,
) -> Row:
    """A Row: attributes of any value by their names, those of some values as name=(value, ...)."""
    attributes = dict.fromkeys(names, ANY) | values
    return Row(inputs, outputs, attributes, dtypes, constants, unread or {}, condition, hint)
