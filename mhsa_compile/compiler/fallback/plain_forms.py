"""Which operations can be written out in TVM's operators, and by what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mhsa_compile.compiler.fallback import attention, linear
from mhsa_compile.kernels.interface.ops import (
    AttentionOp,
    AttentionProbsOp,
    LinearOp,
    Op,
    ScoresOp,
)

Emit = Callable[[Any, Any, list[Any]], Any]
"""A relax.BlockBuilder, the operation and its inputs -> its value."""


@dataclass(frozen=True)
class _PlainForm:
    emit: Emit
    takes: Callable[[Any], bool] = lambda op: True


_PLAIN_FORMS: dict[type[Op], _PlainForm] = {
    LinearOp: _PlainForm(linear.emit, takes=lambda op: not op.int8_weights and op.epilogue is None),
    AttentionOp: _PlainForm(attention.emit),
    ScoresOp: _PlainForm(attention.emit),
    AttentionProbsOp: _PlainForm(attention.emit, takes=lambda op: op.whole),
}


def plain_form(op: Op) -> Emit | None:
    """What writes an operation out in TVM's operators, or None."""
    form = _PLAIN_FORMS.get(type(op))
    return form.emit if form is not None and form.takes(op) else None
