"""What the scores of a block are besides products: what the steps of scores make of them, and scores of no key.

Plain products become probs in one multiply-add, 2^(factor s - m). Where something is added to the scores or bends
them, they are brought to units of log2 first, and the factor is 1.
"""

from __future__ import annotations

import math

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.score_scale import LOG2_E
from mhsa_compile.kernels.cuda.attention.masking import ScoreMask
from mhsa_compile.kernels.cuda.primitives.warp import set_register
from mhsa_compile.kernels.interface.ops import AttentionOp


class RowScoreMods:
    """The scores of the rows of a thread."""

    def __init__(self, op: AttentionOp, visibility: ScoreMask) -> None:
        self.op, self.visibility, self.parts = op, visibility, visibility.parts
        # A maximum of products is one of scores only if the factor is positive.
        self.is_plain = not op.any_step("bends") and op.scale > 0
        self.factor = op.scale * LOG2_E if self.is_plain else 1.0
        for part in self.parts:
            part.read()
        for part in self.parts:
            part.begin(visibility)

    def begin(self, row_max: Expr, row_sum: Expr, row: int) -> None:
        """The maximum and the sum of a row before its first key: those of the score of no key, which one of its threads
        holds."""
        sink = next((sink for part in self.parts if (sink := part.sink(row)) is not None), None)
        if sink is None:
            set_register(row_max, row, T.float32(-math.inf))
            set_register(row_sum, row, T.float32(0))
            return
        for part in self.parts:
            if (lack := part.lack(row)) is not None:
                sink = sink - lack
        set_register(row_max, row, sink)
        # Sums of the threads that share a row are added up in the end: one of them counts the sink.
        counts = T.And(self.visibility.cells.leads, T.Not(row_max[row] == T.float32(-math.inf)))
        set_register(row_sum, row, T.Select(counts, T.float32(1), T.float32(0)))

    def convert(self, scores: Expr, tiles: int, first_key: Expr) -> None:
        """Products become scores in units of log2, before anything is masked; nothing to do for plain ones."""
        if self.is_plain:
            return
        cells = self.visibility.cells
        for row in range(len(self.visibility.numbers)):
            changes = [change for part in self.parts if (change := part.of_row(row, first_key)) is not None]
            for i, offset in enumerate(cells.offsets(tiles)):
                at = cells.at(row, tiles, i)
                score = self._of_product(scores[at])
                for change in changes:
                    score = change(score, offset)
                set_register(scores, at, score)

    def _of_product(self, product: Expr) -> Expr:
        own = (part.of_product(product) for part in self.parts)
        return next((score for score in own if score is not None), product * T.float32(self.op.scale * LOG2_E))
