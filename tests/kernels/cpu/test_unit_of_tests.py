"""A unit that only tests have, of a shape that no machine has: four rows at once, in words of two bfloat16. The class
is here, and the linear knows nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from support import this_cpu
from support.kernel_runs import compiled, vector_machine
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.formats.choice import FORMATS
from mhsa_compile.kernels.cpu.linear.kernel import linear
from mhsa_compile.kernels.cpu.linear.packed_layout import PackedLayout
from mhsa_compile.kernels.cpu.simd.vectors import RegisterTile, load, part, splat, vector_type
from mhsa_compile.kernels.cpu.units.unit import Unit
from mhsa_compile.kernels.interface.ops import LinearOp

ROWS = 4


class FourRows(Unit):
    """Sums of a line are those of its first row, of its second, ...; a factor has a word of each."""

    @property
    def word(self) -> str:
        return "int32"

    def words(self, buffer: Any, index: Sequence[Any], count: int) -> Any:
        return T.reinterpret(vector_type("int32", count), load(buffer, index, count * self.group))

    def multiply(self, sums: RegisterTile, a: Sequence[Any], b: Sequence[Any], columns_first: bool) -> None:
        def accumulate(total: Any, factor: Any, columns: Any) -> Any:
            rows = []
            for r, old in enumerate(self.parted(total)):
                word = splat(T.Shuffle([factor], [T.int32(r)]), self.lanes)
                pairs = (half(word, i, self.lanes) * half(columns, i, self.lanes) for i in range(self.group))
                rows.append(reduce(add, pairs, old))
            return T.Shuffle(rows, [T.int32(i) for i in range(self.rows * self.lanes)])

        sums.outer_product(a.__getitem__, b.__getitem__, accumulate)

    def parted(self, sums: Any) -> list[Any]:
        return [part(sums, r * self.lanes, self.lanes, self.rows * self.lanes) for r in range(self.rows)]


def half(words: Any, place: int, lanes: int) -> Any:
    """The bfloat16 at one of the places of words, as float32."""
    raised = words << splat(T.int32(16), lanes) if place == 0 else words & splat(T.int32(-65536), lanes)
    return T.reinterpret(vector_type("float32", lanes), raised)


@pytest.mark.parametrize("rows", [4, 8])
def test_a_linear_takes_a_unit_of_another_shape(rows: int) -> None:
    """Rows that fill no line, a last step and a last panel that are not whole, parts, groups and blocks."""
    profile = vector_machine(256, 16, this_cpu.level("x86-64-v3"))
    unit = FourRows("bfloat16", "float32", profile.vector_lanes("float32"), group=2, rows=ROWS)
    assert unit.why_not_tile(6, 2, 16) == "a tile of 6 rows, where an instruction takes 4 at once"
    assert unit.why_not_tile(4, 2, 16) == "a tile of 1 x 8 needs 17 registers of 16"
    op = LinearOp(("B", "L"), 101, (37,), (True,), (False,), dtype="bfloat16")
    config = {"rows": rows, "columns": 2, "block": 3, "depth": 16, "group": 2}
    emitted = linear(PackedLayout(op, FORMATS["bfloat16"], unit, config["columns"]), profile, config)
    library = compiled(emitted, profile)

    rng, numpy = np.random.default_rng(2), ml_dtypes.bfloat16
    weight, bias = (rng.standard_normal(shape, np.float32).astype(numpy) for shape in ((37, 101), (37,)))
    packed = [tvm.runtime.tensor(np.full(shape, 3, kind)) for shape, kind in emitted.packed]
    library["pack"](tvm.runtime.tensor(weight), tvm.runtime.tensor(bias), *packed)
    for L in (1, 4, 7, 45):
        x = rng.standard_normal((1, L, 101), np.float32).astype(numpy)
        y = tvm.runtime.tensor(np.full((1, L, 37), np.nan, numpy))
        library["run"](tvm.runtime.tensor(x), *packed, y)
        expected = x.astype(np.float64) @ weight.astype(np.float64).T + bias.astype(np.float64)
        allowed = 4e-6 * np.abs(expected).max() + 2.0**-8 * np.abs(expected)
        assert (np.abs(y.numpy().astype(np.float64) - expected) <= allowed).all()
