"""The tiles of keys that a block of attention visits, and of which of them it sees everything."""

from __future__ import annotations

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.attention.key_range import BlockKeyRange
from mhsa_compile.kernels.cuda.primitives.warp import materialize
from mhsa_compile.kernels.interface.ops import AttentionOp


class KeyTiles:
    """The tiles of keys that a block visits: those of a plan, or all from the first to the last that some row sees.
    `count` is how many there are."""

    def __init__(self, op: AttentionOp, key_range: BlockKeyRange, keys: int) -> None:
        self.op, self.key_range, self.keys, self.visits = op, key_range, keys, key_range.visits
        if self.visits is not None:
            self.count = self.visits.count
            return
        first, end = key_range.visible_to_any()
        # Tiles are counted from key 0, wherever a window begins.
        self._first = materialize(T.truncdiv(first, T.int32(keys)))
        self.count = materialize(T.max(T.int32(0), T.truncdiv(end + (keys - 1), T.int32(keys)) - self._first))

    def first_key(self, turn: Expr) -> Expr:
        tile = self._first + turn if self.visits is None else self.visits.tile(turn)
        return materialize(tile * self.keys)

    def hides(self, turn: Expr, first_key: Expr) -> tuple[Expr | None, Expr]:
        """(the tile's row of bits, whether anything of it is hidden from any row)."""
        visible = self.key_range.visible_to_all(first_key, self.keys)
        if self.visits is None:
            return None, materialize(T.Not(visible), "bool")
        bits_row = self.visits.bits_row(turn)
        # The plan knows neither lengths nor what is counted from them.
        late = self.op.any_step("counts_keys") or self.op.window is not None or self.op.any_step("blind")
        return bits_row, materialize(T.Or(bits_row >= 0, T.Not(visible)) if late else bits_row >= 0, "bool")


def hides_values(op: AttentionOp, *, copied_to_length: bool) -> bool:
    """Whether a value in shared memory may be hidden from a row, so that a prob of 0 meets what may not be finite.

    `copied_to_length` says who copies: threads stop at the length of the batch entry and write zeros beyond it. The
    copy engine knows only the tensor's own last key: from there on it makes zeros, but keys between an entry's length
    and that one are copied as they are, and hidden.
    """
    return op.any_step("hides") or (op.any_step("counts_keys") and not copied_to_length)
