"""What linears, rotary embeddings and scatters are called with, on a CPU and on a GPU, and when a call is refused.

A scatter sees its cache as (batch, heads, rows, row), whatever its rank: the axes between the batch and the rows are
one, and so are those behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.assertions import refuse_unless, spelled
from mhsa_compile.kernels.common.buffers import DTYPE_BYTES, SizeVars, argument
from mhsa_compile.kernels.interface.ops import KvScatterOp, LinearOp, RotaryOp

# Linears and the packing of their weights.


def weight_arguments(op: LinearOp) -> tuple[list[Expr], list[Expr | None]]:
    """(weights, biases), one of each for each projection; None where it has no bias."""
    weights, biases = [], []
    for i, width in enumerate(op.widths):
        shape = (op.in_features, width) if op.transposed[i] else (width, op.in_features)
        weights.append(argument(f"weight{i}", [T.int64(n) for n in shape], op.dtype))
    for i, width in enumerate(op.widths):
        biases.append(argument(f"bias{i}", [T.int64(width)], op.dtype) if op.biased[i] else None)
    return weights, biases


def packed_arguments(packed: Iterable[tuple[tuple[int, ...], str]]) -> list[Expr]:
    """Arguments of the shapes and dtypes that `Emitted.packed` has."""
    return [argument(f"packed{i}", [T.int64(n) for n in shape], dtype) for i, (shape, dtype) in enumerate(packed)]


def epilogue_arguments(op: LinearOp, rows: Sequence[Expr]) -> list[Expr]:
    """The operands of the epilogue, of y's shape, then those of one number for each feature; `rows` are all axes of y
    but the last."""
    if op.epilogue is None:
        return []
    pitch = T.int64(op.pitch)
    operands = [argument(f"operand{i}", [*rows, pitch], op.dtype) for i in range(op.epilogue.operands)]
    return [*operands, *(argument(f"feature{i}", [pitch], op.dtype) for i in range(op.epilogue.features))]


# Rotary embeddings.


def angle_arguments(op: RotaryOp, dim: SizeVars) -> tuple[Expr, Expr, Expr | None]:
    """(cos, sin, positions): the angles of each place or, where there are positions, tables that these point into."""
    places = [T.int64(1) if op.shared_angles else dim(op.batch), dim(op.length)]
    rows = places if op.max_positions is None else [dim(op.max_positions)]
    columns = T.int64(op.rotary_dim if op.whole_angles else op.rotary_dim // 2)
    cos, sin = (argument(name, [*rows, columns], op.dtype) for name in ("cos", "sin"))
    return cos, sin, None if op.max_positions is None else argument("positions", places, "int64")


# Scatters.


def why_not_scatter(op: KvScatterOp, *, rounds: bool = False) -> str | None:
    """Why the elements of a scatter cannot be copied as they are, or None if they can. `rounds`: whether the kernel
    brings floats into another dtype."""
    if op.rounds and not rounds:
        return f"no rows of {op.update_dtype} into a cache of {op.dtype}"
    if op.dtype not in DTYPE_BYTES:
        return f"no elements of {op.dtype}"
    return None


@dataclass(frozen=True)
class Scatter:
    """What a scatter is called with: cache and result are (B, heads, S, row), and in place the same; the update is
    (B, heads, L, row), or rows of a wider buffer (B, L, width); the indices are (B,). `lanes` elements are copied at
    once."""

    op: KvScatterOp
    cache: Expr
    update: Expr
    indices: Expr | None
    result: Expr
    lanes: int

    @property
    def new(self) -> Expr:
        """L, the number of new rows."""
        return self.update.shape[2 if self.op.update is None else 1]

    @property
    def rows(self) -> Expr:
        """S, the number of rows of the cache."""
        return self.cache.shape[2]

    def check_rows(self) -> None:
        """Ends a call that brings more new rows than the cache has."""
        most, brought = spelled(self.op.cache[self.op.axis]), spelled(self.op.length)
        refuse_unless(
            self.new <= self.rows, self.op.update_name, f"at most {most} rows, as the cache has", f"{brought} rows"
        )


def scatter_arguments(op: KvScatterOp) -> tuple[Expr, Expr, Expr | None, Expr]:
    """The cache, the update, the indices and the result of a `Scatter`."""
    dim = SizeVars()
    cache = argument("cache", [dim(size) for size in op.cache], op.dtype)
    update = argument("update", _update_shape(op, dim), op.update_dtype or op.dtype)
    indices = argument("indices", [dim(op.cache[0])], "int64") if op.indexed else None
    result = cache if op.in_place else argument("result", [dim(size) for size in op.cache], op.dtype)
    cache_rows = _as_rows(cache, op)
    result_rows = cache_rows if op.in_place else _as_rows(result, op)
    rows = update if op.update is not None else _as_rows(update, op)
    return cache_rows, rows, indices, result_rows


def _update_shape(op: KvScatterOp, dim: SizeVars) -> list[Expr]:
    if op.update is not None:
        return [dim(op.cache[0]), dim(op.length), T.int64(op.update.width)]
    return [dim(op.length if i == op.axis else size) for i, size in enumerate(op.cache)]


def _as_rows(buffer: Expr, op: KvScatterOp) -> Expr:
    """A buffer of the cache's rank as (batch, heads, rows, row)."""
    shape = list(buffer.shape)
    heads, row = (math.prod(part, start=T.int64(1)) for part in (shape[1 : op.axis], shape[op.axis + 1 :]))
    sizes = [shape[0], heads, shape[op.axis], row]
    return T.decl_buffer(sizes, buffer.dtype, data=buffer.data, align=DTYPE_BYTES[str(buffer.dtype)])
