"""How compiled code refuses a value that no shape could have told: it ends the call before it touches memory."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from mhsa_compile.errors import CALL_REFUSED
from mhsa_compile.kernels.cpu.vectors import Expr


def refuse_unless(holds: Expr, argument: str, expected: str) -> None:
    """Ends the call where `holds` is false; the runtime makes an InputError of `argument` and `expected`."""
    with T.Assert(holds, f"{argument}\n{expected}", CALL_REFUSED):
        pass
