"""Divisions of whole numbers at which a processor would end the process."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper
from support.onnx_models import model_of

import mhsa_compile as mhsa

KINDS = ("int32", "int64", "uint8")


def test_a_divisor_of_0_gives_0_and_the_least_number_wraps() -> None:
    kinds = {f"{name}_{kind}": kind for kind in KINDS for name in "xw"}
    inputs, nodes, outputs = dict.fromkeys(kinds, ("n",)), [], {}
    for kind in KINDS:
        for name, attributes in (("Div", {}), ("Mod", {}), ("Mod", {"fmod": 1})):
            result = f"{name}_{len(attributes)}_{kind}"
            nodes.append(helper.make_node(name, [f"x_{kind}", f"w_{kind}"], [result], **attributes))
            outputs[result], kinds[result] = ["n"], kind
    model = model_of(nodes, inputs, outputs, kinds=kinds, opset=18, ir_version=9)
    feeds = {}
    for kind in KINDS:
        least = np.iinfo(kind).min
        feeds |= {f"x_{kind}": np.array([7, 0, least, least, 7, 200], kind if least else "int64").astype(kind)}
        feeds |= {f"w_{kind}": np.array([0, 0, -1 if least else 255, 0, 2, 3]).astype(kind)}
    results = mhsa.load(mhsa.compile(model, without_attention="accept"))(**feeds)
    for kind, (quotient, remainder, rest) in zip(KINDS, zip(*[iter(results)] * 3, strict=True), strict=True):
        least = np.iinfo(kind).min
        np.testing.assert_array_equal(quotient, np.array([0, 0, least, 0, 3, 66]))
        np.testing.assert_array_equal(remainder, [0, 0, 0, 0, 1, 2])
        np.testing.assert_array_equal(rest, remainder)


@pytest.mark.thorough_but("-1")
@pytest.mark.parametrize("divisor", [0, -1])
def test_a_constant_divisor(divisor: int) -> None:
    nodes = [helper.make_node("Constant", [], ["w"], value_ints=[divisor]), helper.make_node("Div", ["x", "w"], ["y"])]
    model = model_of(nodes, {"x": ["n"]}, {"y": ["n"]}, kinds=dict.fromkeys("xy", "int64"), opset=18, ir_version=9)
    x = np.array([5, -3, np.iinfo("int64").min])
    result = mhsa.load(mhsa.compile(model, without_attention="accept"))(x)
    np.testing.assert_array_equal(result, 0 * x if divisor == 0 else -x)
