"""How compiled code refuses a value that no shape could have told: it ends the call before it touches memory."""

from __future__ import annotations

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.errors import CALL_REFUSED
from mhsa_compile.kernels.interface.ops import Dim


def refuse_unless(holds: Expr, argument: str, expected: str, got: str = "") -> None:
    """Ends the call where `holds` is false, with what the runtime makes an InputError of: see `errors.CALL_REFUSED`."""
    with T.Assert(holds, f"{argument}\n{expected}\n{got}", CALL_REFUSED):
        pass


def spelled(dim: Dim) -> str:
    """A size in such a text; a symbolic one is filled in when the call is refused."""
    return str(dim) if isinstance(dim, int) else f"{{{dim}}}"
