"""What the scores of a block are besides products: scaled, capped, what functions make of them, less for keys further
away; and the sinks, scores of no key.

Plain products become probs in one multiply-add, 2^(factor s - m). Where something is added to the scores or bends
them, they are brought to units of log2 first, and the factor is 1.

The softmax does not mind what is added to all scores of a row. So a distance is counted from where it is largest: from
the last key that the row's band and length leave it, or the first one if the slope is negative. Numbers are small, and
so exact, where probs are not.
"""

from __future__ import annotations

import math

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.score_scale import LOG2_E
from mhsa_compile.kernels.cuda.attention.masking import ScoreMask
from mhsa_compile.kernels.cuda.attention.score_functions import BlockScoreFunctions
from mhsa_compile.kernels.cuda.primitives.fragments import OfRows, of_row
from mhsa_compile.kernels.cuda.primitives.warp import (
    Expr,
    exp2,
    materialize,
    reciprocal,
    registers,
    set_register,
)
from mhsa_compile.kernels.interface.ops import AttentionOp

QUICK_SOFTCAP = 256.0
"""Up to this softcap a quick tanh changes scores by less than 2^-13, so probs by less than half of what rounding to 16
bits does."""


class RowScoreMods:
    """Scale, softcap, ALiBi and sinks of the rows of a thread."""

    def __init__(
        self,
        op: AttentionOp,
        visibility: ScoreMask,
        sink: OfRows[Expr],
        slope: OfRows[Expr],
        functions: BlockScoreFunctions | None = None,
    ) -> None:
        self.op, self.visibility, self.sink, self.slope, self.functions = op, visibility, sink, slope, functions
        adds = op.mask is not None and op.mask.dtype != "bool"
        # A maximum of products is one of scores only if the factor is positive.
        self.is_plain = not (op.softcap or op.slopes or adds or functions) and op.scale > 0
        self.factor = op.scale * LOG2_E if self.is_plain else 1.0
        self._origins = [self._origin(row) for row in range(len(visibility.numbers))] if slope is not None else []

    def _origin(self, row: int) -> Expr:
        """The key that the distances of a row are counted from."""
        keys, number = self.visibility.key_range, self.visibility.numbers[row]
        last = materialize(keys.end_of(number) - 1)
        first = T.int32(0) if keys.left is None else T.max(T.int32(0), number + keys.shift - keys.left)
        return materialize(T.Select(of_row(self.slope, row) >= T.float32(0), last, first))

    def begin(self, row_max: Expr, row_sum: Expr, row: int) -> None:
        """The maximum and the sum of a row before its first key: those of the sink, which one of its threads holds."""
        sink = of_row(self.sink, row)
        if sink is None:
            set_register(row_max, row, T.float32(-math.inf))
            set_register(row_sum, row, T.float32(0))
            return
        if self.slope is not None:
            place = self.visibility.numbers[row] + self.visibility.key_range.shift
            sink = sink - of_row(self.slope, row) * T.cast(self._origins[row] - place, "float32")
        set_register(row_max, row, sink)
        # Sums of the threads that share a row are added up in the end: one of them counts the sink.
        counts = T.And(self.visibility.cells.leads, T.Not(row_max[row] == T.float32(-math.inf)))
        set_register(row_sum, row, T.Select(counts, T.float32(1), T.float32(0)))

    def convert(self, scores: Expr, tiles: int, first_key: Expr) -> None:
        """Products become scores in units of log2, by functions where there are any, with what the distance adds;
        nothing to do for plain ones."""
        if self.is_plain:
            return
        cells = self.visibility.cells
        for row, number in enumerate(self.visibility.numbers):
            functions = None if self.functions is None else self.functions.of_row(number)
            slope, bias = of_row(self.slope, row), None
            if slope is not None:
                bias = materialize(T.cast(first_key + cells.first - self._origins[row], "float32"), "float32")
            for i, offset in enumerate(cells.offsets(tiles)):
                at = cells.at(row, tiles, i)
                score = self._capped(scores, at) if self.op.softcap else scores[at] * T.float32(self.op.scale * LOG2_E)
                if functions is not None:
                    score = functions.score(score, first_key + cells.first + offset)
                if bias is not None:
                    score = score + slope * (bias + T.float32(offset))
                set_register(scores, at, score)

    def _capped(self, scores: Expr, at: int) -> Expr:
        """softcap tanh(s / softcap), where tanh(x) = 1 - 2 / (1 + e^(2 x)): off by 2^-21, whatever x, which the softcap
        makes a part of a score. Where that would be too much, the function of CUDA's library, with its branches."""
        inner, outer = self.op.scale / self.op.softcap, self.op.softcap * LOG2_E
        if self.op.dtype == "float32" or self.op.softcap > QUICK_SOFTCAP:
            return T.tanh(scores[at] * T.float32(inner)) * T.float32(outer)
        part = registers(1)
        # Infinite for large scores, whose reciprocal is 0, and 0 for small ones: both ends come out right.
        exp2(part, 0, scores[at] * T.float32(2 * LOG2_E * inner))
        reciprocal(part, 0, part[0] + T.float32(1))
        return part[0] * T.float32(-2 * outer) + T.float32(outer)
