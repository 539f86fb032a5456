"""Asking for weights before they are multiplied: packed panels lie one behind the other, and go by once a call.

A core has so many lines of its first cache under way at a time, and that many from memory is a third of what memory
would give. Its second cache goes ahead by itself, in each page of memory that lines are asked for in. So where
`pages` is more than one, lines are asked for in so many pages in turn (docs/lab/2026-11-27-weights-from-memory.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import DTYPE_BYTES
from mhsa_compile.kernels.cpu.linear.packed_layout import PackedLayout
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import materialize
from mhsa_compile.kernels.interface.kernel import CACHE_LINE

PAGE = 4096 // CACHE_LINE
"""Lines of a page of memory. Where a page is larger, it has several of them."""
AHEAD = 192
"""Bytes from the weights that are multiplied to those that are asked for, where pages do not take turns."""


@dataclass(frozen=True)
class Lookahead:
    """The packed weights as lines of the cache, those of `pages` pages in turn."""

    layout: PackedLayout
    weights: Expr
    pages: int

    def ask_beyond(self, p: Expr, word: Expr, words: int) -> None:
        """Asks for as many lines as so many words of each feature take, from `word` of panel p on, which are multiplied
        now: for those AHEAD of them, or as many pages ahead as take turns."""
        lines = -(-words * self.layout.panel // self.elements)
        first = (p * self.layout.words + word) * self.layout.panel
        if self.pages == 1:
            self._ask(materialize(first + AHEAD // DTYPE_BYTES[self.layout.weight]), range(lines))
            return
        line = materialize(T.truncdiv(first, T.int64(self.elements)))
        place = materialize(T.truncmod(line, T.int64(self.pages * PAGE)))
        self._ask_in_turn(line - place + self.pages * PAGE, place, lines, self.pages, PAGE, soon=True)

    def ask_for_panel(self, p: Expr, number: Expr, lines: int, *, soon: bool = True) -> None:
        """Asks for `lines` lines of panel p, the `number`th and those behind it of all of them in the order in which
        they are asked for, or for the last ones; number is a multiple of `lines`."""
        count = self.layout.words * self.layout.panel // self.elements
        number = T.min(number, T.int64(count - lines))
        pages = self.runs
        if pages == 1 or count % pages:
            first = p * (self.layout.words * self.layout.panel)
            self._ask(materialize(first + number * self.elements), range(lines), soon=soon)
            return
        self._ask_in_turn(p * count, materialize(number), lines, pages, count // pages, soon=soon)

    def _ask_in_turn(self, first: Expr, number: Expr, lines: int, pages: int, run: int, *, soon: bool) -> None:
        """Asks for lines `number` and behind of those from `first` on, of `pages` runs of so many lines in turn."""
        for begin in range(0, lines, pages):
            place = vectors.in_turn(number + begin, pages, run)
            lines_apart = range(0, min(pages, lines - begin) * run, run)
            self._ask(materialize((first + place) * self.elements), lines_apart, soon=soon)

    @property
    def runs(self) -> int:
        """Those of a panel that take turns: half of the pages, since the core follows what is multiplied, too."""
        return max(1, self.pages // 2)

    @property
    def elements(self) -> int:
        """Weights, or words of them, of a line of the cache."""
        return CACHE_LINE // DTYPE_BYTES[self.layout.weight]

    def _ask(self, start: Expr, lines: range, *, soon: bool = True) -> None:
        """Asks for lines, counted from the one of element `start`."""
        size = self.layout.panels * self.layout.words * self.layout.panel
        flat = T.decl_buffer((T.int64(size),), self.weights.dtype, data=self.weights.data)
        for line in lines:
            vectors.prefetch(flat, [start + line * self.elements], soon=soon)
