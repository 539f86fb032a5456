"""The scales of a block's rows of K or V, for vectors of scores: applied to scores and to probs, once a row."""

from __future__ import annotations

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.head_layout import HeadView
from mhsa_compile.kernels.cpu.decode.query_key import ScoreLayout
from mhsa_compile.kernels.cpu.simd.vectors import load, materialize, splat, store


class RowScales:
    """Those of up to `keys` rows of `view`, in scratch; 1 where rows have none."""

    def __init__(self, view: HeadView, layout: ScoreLayout, keys: int) -> None:
        self.view, self.layout = view, layout
        # A vector more: the last vector of scores is whole.
        self.scratch = None if view.scales is None else T.alloc_buffer((keys + layout.lanes,), "float32")

    def read(self, begin: Expr, count: Expr) -> None:
        """Brings those of rows begin .. begin + count; what lies behind them is any number."""
        source, at, lanes = self.view.scales, self.view.scale_at, self.layout.lanes
        if self.scratch is None or source is None or at is None:
            return
        whole = materialize(T.truncdiv(count, T.int64(lanes)))
        with T.serial(whole) as i:
            first = materialize(i * lanes)
            store(self.scratch, [first], load(source, at(begin + first), lanes), lanes)
        with T.serial(materialize(whole * lanes), count) as j:
            store(self.scratch, [j], load(source, at(begin + j), 1), 1)

    def scaled(self, vector: Expr, key: Expr) -> Expr:
        """A vector of scores or probs times the scales of its keys, the block's from `key` on."""
        if self.scratch is None:
            return vector
        keys, rows, lanes = self.layout.keys_per_vector, self.layout.padded_rows, self.layout.lanes
        scales = load(self.scratch, [key], keys)
        if keys == 1:
            return vector * splat(scales, lanes)
        if rows == 1:
            return vector * scales
        return vector * T.Shuffle([scales] * rows, [T.int32(lane // rows) for lane in range(lanes)])
