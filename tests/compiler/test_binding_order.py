"""A size that a call brings is named before whoever reads it, whatever TVM joins: a window of so many elements."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

import mhsa_compile as mhsa
from mhsa_compile.compiler.fallback.binding_order import sizes_first
from mhsa_compile.compiler.pipeline import import_source

MODEL = """<ir_version: 9, opset_import: ["" : 17]> g (int32 n) => (float[m] y) {
    whole = HannWindow(n)  half = HannWindow <periodic = 0> (n)  y = Mul(whole, half) }"""


def test_windows_of_a_length_that_comes_by_the_call() -> None:
    call = mhsa.load(mhsa.compile(parser.parse_model(MODEL), without_attention="accept"))
    for n in (7, 400):
        angles = 2 * np.pi * np.arange(n)
        right = (0.5 - 0.5 * np.cos(angles / n)) * (0.5 - 0.5 * np.cos(angles / (n - 1)))
        np.testing.assert_allclose(call(np.array(n, np.int32)), right, atol=1e-5)


def test_what_is_in_order_stays_as_it_is() -> None:
    with pytest.warns(UserWarning, match="holds no attention"):
        module = import_source(parser.parse_model(MODEL)).module
    assert sizes_first(module) is module
