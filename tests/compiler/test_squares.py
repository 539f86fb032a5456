"""Transposes of float32 in squares that are turned in registers: the same numbers as NumPy's, whatever the sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.compiler.fallback import cpu_schedule

FIXED = {
    "last first": ((2, 17, 9, 5), (0, 2, 3, 1)),
    "first last": ((1, 66, 3, 67), (0, 3, 1, 2)),
    "a matrix": ((130, 71), (1, 0)),
    "several beside several": ((2, 4, 9, 5, 19), (0, 3, 4, 1, 2)),
}
OTHERS = {"heads": ((2, 17, 3, 64), (0, 2, 1, 3)), "few": ((2, 40, 3), (0, 2, 1)), "mixed": ((18, 19, 20), (2, 1, 0))}


@pytest.fixture
def in_squares(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each function that was asked about became squares."""
    outcomes: list[bool] = []
    own = cpu_schedule.in_squares

    def noted(*arguments: Any) -> Any:
        function = own(*arguments)
        outcomes.append(function is not None)
        return function

    monkeypatch.setattr(cpu_schedule, "in_squares", noted)
    return outcomes


def turned(shape: list[int | str], order: tuple[int, ...]) -> Any:
    node = helper.make_node("Transpose", ["x"], ["y"], perm=order)
    model = model_of([node], {"x": shape}, {"y": [shape[axis] for axis in order]}, opset=21)
    return mhsa.load(mhsa.compile(model, without_attention="accept", check=False))


def numbers(shape: tuple[int, ...]) -> np.ndarray:
    """All different, with NaN and infinities among them."""
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    x.reshape(-1)[: min(x.size, 3)] = [np.nan, np.inf, -0.0][: min(x.size, 3)]
    return x


@pytest.mark.parametrize("name", [*FIXED, *OTHERS])
def test_fixed_sizes(name: str, in_squares: list[bool]) -> None:
    shape, order = (FIXED | OTHERS)[name]
    x = numbers(shape)
    y = turned(list(shape), order)(x)
    np.testing.assert_array_equal(y.view(np.int32), x.transpose(order).view(np.int32))
    assert in_squares == [name in FIXED]


def test_free_sizes(in_squares: list[bool]) -> None:
    """Fewer than a vector, more, none, and several tasks each way."""
    compiled = turned(["B", "C", "H", "W"], (0, 2, 3, 1))
    for shape in ((2, 5, 7, 3), (1, 16, 16, 16), (3, 33, 9, 70), (1, 1, 1, 1), (2, 0, 3, 4), (1, 200, 40, 30)):
        x = numbers(shape)
        np.testing.assert_array_equal(compiled(x), x.transpose(0, 2, 3, 1))
    assert in_squares == [True]


@pytest.mark.parametrize("first", [0, 17])
def test_a_part_of_the_rows_is_no_whole_array(first: int) -> None:
    """What PyTorch's decoder does with the weight of its queries, the first rows of one for keys and values, too."""
    ends = {"first": np.array([first]), "end": np.array([first + 32]), "axis": np.array([0])}
    nodes = [
        helper.make_node("Slice", ["x", "first", "end", "axis"], ["part"]),
        helper.make_node("Transpose", ["part"], ["y"], perm=(1, 0)),
    ]
    model = model_of(nodes, {"x": [96, 33]}, {"y": [33, 32]}, ends, opset=21)
    x = numbers((96, 33))
    y = mhsa.load(mhsa.compile(model, without_attention="accept", check=False))(x)
    np.testing.assert_array_equal(y, x[first : first + 32].T)
