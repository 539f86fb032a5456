"""ScatterND and ScatterElements: of places that a call counts, and of places that there are not."""

from __future__ import annotations

import numpy as np
from onnx import parser
from onnx.reference import ReferenceEvaluator

import mhsa_compile as mhsa

HEADER = '<ir_version: 10, opset_import: ["" : 20]>'
SHIFT = f"""{HEADER}
g (float[L, 3] x) => (float[L, 3] y)
<int64[1] axis = {{0}}, int64[1] from = {{0}}, int64[1] last = {{-1}}, int64[1] columns = {{-1}},
 int64 one = {{1}}, float zero = {{0}}>
{{
  n = Shape <start = 0, end = 1> (x)
  L = Squeeze (n, axis)
  counted = Range (one, L, one)
  places = Unsqueeze (counted, columns)
  part = Slice (x, from, last, axis)
  zeros = Mul (x, zero)
  y = ScatterND (zeros, places, part)
}}"""
PLACES = f"""{HEADER}
g (float[R, 4, 2] x, int64[N, 2] at, float[N, 2] rows, int64[K, 4, 2] along, float[K, 4, 2] elements,
   int64[R, 4, 2] whole) => (float[R, 4, 2] y, float[R, 4, 2] z, int64[R, 4, 2] w)
{{
  y = ScatterND (x, at, rows)
  z = ScatterElements <axis = 0> (x, along, elements)
  w = ScatterElements <axis = 0, reduction = "add"> (whole, along, along)
}}"""


def test_a_range_counts_the_places_of_what_a_slice_took() -> None:
    """As PyTorch writes y[1:] = x[:-1], whose updates and places have sizes of their own."""
    source = parser.parse_model(SHIFT)
    shift = mhsa.load(mhsa.compile(source, without_attention="accept"), threads=1)
    for length in (1, 2, 7):
        x = np.random.default_rng(0).standard_normal((length, 3), np.float32)
        assert np.array_equal(shift(x), ReferenceEvaluator(source).run(None, {"x": x})[0])


def test_no_place_is_written_that_there_is_not() -> None:
    """Memory beside an array stays as it was: floats show it by NaN, whole numbers go to the nearest place."""
    source = parser.parse_model(PLACES)
    scatter = mhsa.load(mhsa.compile(source, without_attention="accept"), threads=1)
    rng = np.random.default_rng(0)
    x, rows = rng.standard_normal((5, 4, 2), np.float32), rng.standard_normal((2, 2), np.float32)
    elements, whole = rng.standard_normal((1, 4, 2), np.float32), rng.integers(-9, 9, (5, 4, 2))
    at, along = np.array([[1, 3], [-2, -4]]), np.array([[[0, 1], [2, 3], [4, -1], [-5, -2]]])
    right = dict(
        zip(("x", "at", "rows", "along", "elements", "whole"), (x, at, rows, along, elements, whole), strict=True)
    )
    for result, truth in zip(scatter(**right), ReferenceEvaluator(source).run(None, right), strict=True):
        assert np.array_equal(result, truth)
    for beyond, nearest in ((5, 4), (2**40, 4), (-6, 0), (-(2**40), 0)):
        wrong_at, wrong_along = at.copy(), along.copy()
        wrong_at[1, 0] = wrong_along[0, 0, 0] = beyond
        y, z, w = scatter(**right | {"at": wrong_at, "along": wrong_along})
        expected = x.copy()
        expected[1, 3], expected[nearest, 0] = rows[0], np.nan
        assert np.array_equal(y, expected, equal_nan=True)
        assert np.isnan(z).sum() == 1 and np.isnan(z[nearest, 0, 0])
        assert w[nearest, 0, 0] == whole[nearest, 0, 0] + beyond
