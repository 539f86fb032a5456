"""The tiles of keys that a block of attention visits, and of which of them it sees everything."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.attention_mask import Visibility
from mhsa_compile.kernels.cuda.warp import Expr, settle
from mhsa_compile.kernels.operations import AttentionOp


class TileOrder:
    """Those of a plan, or all from the first to the last that some row sees. `count` is how many there are."""

    def __init__(self, op: AttentionOp, visibility: Visibility, keys: int) -> None:
        self.op, self.visibility, self.keys = op, visibility, keys
        if visibility.visits is not None:
            self.count = visibility.visits.count
            return
        first, end = visibility.seen_by_any()
        self.first_tile = settle(T.truncdiv(first, T.int32(keys)))
        beyond = T.truncdiv(end + (keys - 1), T.int32(keys))
        self.count = settle(T.max(T.int32(0), beyond - self.first_tile))

    @property
    def hides_values(self) -> bool:
        """Whether a row may not see what another does; beyond the last key there are zeros."""
        return self.op.band is not None or self.op.mask is not None or self.visibility.visits is not None

    def tile(self, turn: Expr) -> Expr:
        """The number of a tile."""
        return self.first_tile + turn if self.visibility.visits is None else self.visibility.visits.tile(turn)

    def hides(self, turn: Expr, first_key: Expr) -> tuple[Expr | None, Expr]:
        """(the tile's row of bits, whether anything of it is hidden from any row)."""
        seen = self.visibility.seen_by_all(first_key, self.keys)
        if self.visibility.visits is None:
            return None, settle(T.Not(seen), "bool")
        bits_row = self.visibility.visits.bits_row(turn)
        late = self.op.lengths or self.op.band is not None
        return bits_row, settle(T.Or(bits_row >= 0, T.Not(seen)) if late else bits_row >= 0, "bool")
