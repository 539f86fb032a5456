"""What a rotary embedding is called with besides its input."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.arguments import Dims, Expr, argument
from mhsa_compile.kernels.operations import RotaryOp


def angle_arguments(op: RotaryOp, dim: Dims) -> tuple[Expr, Expr, Expr | None]:
    """(cos, sin, positions): the angles of each place or, where there are positions, tables that these point into."""
    places = [T.int64(1) if op.shared_angles else dim(op.batch), dim(op.length)]
    rows = places if op.max_positions is None else [dim(op.max_positions)]
    columns = T.int64(op.rotary_dim if op.whole_angles else op.rotary_dim // 2)
    cos, sin = (argument(name, [*rows, columns], op.dtype) for name in ("cos", "sin"))
    return cos, sin, None if op.max_positions is None else argument("positions", places, "int64")
