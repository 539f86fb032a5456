"""Pow of whole numbers and of floats, of one kind and of two, against NumPy."""

from __future__ import annotations

import numpy as np
from onnx import helper
from support.onnx_models import model_of

import mhsa_compile as mhsa

KINDS = ("int32", "int64", "float32")
PAIRS = [(base, exponent) for base in KINDS for exponent in KINDS]
BASES = np.array([[2], [-3], [7], [1], [-1], [0], [10]])
EXPONENTS = np.array([[0, 1, 2, 3, 5, 9]])


def test_powers_are_of_the_kind_of_the_base() -> None:
    inputs = {f"b_{kind}": ["n", 1] for kind in KINDS} | {f"e_{kind}": [1, "m"] for kind in KINDS}
    nodes = [helper.make_node("Pow", [f"b_{one}", f"e_{other}"], [f"{one}_{other}"]) for one, other in PAIRS]
    kinds = {name: name[2:] for name in inputs} | {f"{one}_{other}": one for one, other in PAIRS}
    outputs = {f"{one}_{other}": ["n", "m"] for one, other in PAIRS}
    model = model_of(nodes, inputs, outputs, kinds=kinds, opset=18, ir_version=9)
    compiled = mhsa.load(mhsa.compile(model, without_attention="accept", check=False))
    feeds = {f"b_{kind}": BASES.astype(kind) for kind in KINDS} | {
        f"e_{kind}": EXPONENTS.astype(kind) for kind in KINDS
    }
    for (one, _), result in zip(PAIRS, compiled(**feeds), strict=True):
        np.testing.assert_allclose(result, (BASES**EXPONENTS).astype(one), rtol=1e-6 if one == "float32" else 0)
    large = {f"e_{kind}": np.array([[40, 62, 63, 64, 65, 1000, 1001]]).astype(kind) for kind in KINDS}
    result = dict(zip(PAIRS, compiled(**feeds | large), strict=True))["int64", "int64"]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(result[:, :3], BASES ** large["e_int64"][:, :3])  # wraps
    np.testing.assert_array_equal(result[3:6, 3:], [[1] * 4, [1, -1, 1, -1], [0] * 4])
    below = {f"e_{kind}": np.array([[-1, -2]]).astype(kind) for kind in KINDS}
    result = dict(zip(PAIRS, compiled(**feeds | below), strict=True))["int32", "int64"]
    np.testing.assert_array_equal(result[[0, 1, 3, 4]], [[0, 0], [0, 0], [1, 1], [-1, 1]])
