"""What a call is held to about numbers that only it knows: code that ends the call, by a message of ours, where they
cannot be what a node reads them as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.sym import Analyzer

from mhsa_compile.errors import CALL_REFUSED, ModelError

CHECK = "mhsa.check"
"""The attribute of functions that give their one number back, 1, and end a call where it is 0. They run on the host:
where numbers lie on a GPU they are left out, and matching the number ends the call, without naming the node."""

OPAQUE = 8  # relax.analysis.OpPatternKind: kOpaque, of functions that TVM fuses with nothing
Entry = Any  # a condition, or a size: an expression of tirx


class CallChecks:
    """Checks for the node that is being imported; `input_name` says which of the graph's inputs a value is."""

    def __init__(self, bb: Any, input_name: Callable[[Any], str | None]) -> None:
        self._bb, self._input_name = bb, input_name
        self.node = "model"

    def hold(self, condition: Entry, expected: str, *values: Any) -> None:
        """Ends every call in which the condition is false. `values`: the tensors that it is about; the first of them
        that the call brings is the one that the message names."""
        condition = Analyzer().simplify(condition)
        if isinstance(condition, tirx.IntImm) and int(condition.value):
            return
        name = next((name for value in values if (name := self._input_name(value)) is not None), None)
        if name is None:
            lines = (self.node, expected, "others")
        else:  # which are the input's own, in its message
            lines = (f"input {name!r}", f"{expected}, for {self.node}", "")
        flag = relax.ShapeExpr([condition.astype("int64")])
        holds = self._bb.emit(relax.op.shape_to_tensor(flag))
        attributes = {"op_pattern": OPAQUE, CHECK: True}
        checked = self._bb.emit_te(_check, holds, _text(lines), primfunc_name_hint="check", primfunc_attrs=attributes)
        # matched, so that nobody takes it for code that nothing reads
        self._bb.match_cast(self._bb.emit(relax.op.tensor_to_shape(checked)), relax.ShapeType([tirx.const(1, "int64")]))

    def unknown(self, expected: str) -> ModelError:
        """The error for a node that reads what only a call knows, in a form that cannot be compiled."""
        hint = "Fix free sizes with dims, or give the model what it computes from them."
        return ModelError(self.node, expected, "what only a call knows", hint)


def _text(lines: tuple[str, str, str]) -> str:
    """The lines of `errors.CALL_REFUSED`; what is in braces there is a size's name, and names are anybody's."""
    return "\n".join(line.replace("\n", " ").replace("{", "(").replace("}", ")") for line in lines)


def _check(flags: Any, text: str) -> Any:
    def body(inputs: list[Any], outputs: list[Any]) -> Any:
        (flag,), (result,) = inputs, outputs
        place = [tirx.const(0, "int64")]
        value = tirx.BufferLoad(flag, place)
        check = tirx.AssertStmt(value != 0, tvm.ir.StringImm(CALL_REFUSED), [tvm.ir.StringImm(text)])
        return tirx.SeqStmt([check, tirx.BufferStore(result, value, place)])

    return te.extern([(1,)], [flags], body, dtype="int64", name="check")
