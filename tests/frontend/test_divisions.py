"""Divisions of whole numbers at which a processor would end the process."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

import mhsa_compile as mhsa

CODES = {"int32": TensorProto.INT32, "int64": TensorProto.INT64, "uint8": TensorProto.UINT8}


def test_a_divisor_of_0_gives_0_and_the_least_number_wraps() -> None:
    inputs = [helper.make_tensor_value_info(f"{v}_{kind}", code, ["n"]) for kind, code in CODES.items() for v in "xw"]
    nodes, outputs = [], []
    for kind, code in CODES.items():
        for name, attributes in (("Div", {}), ("Mod", {}), ("Mod", {"fmod": 1})):
            result = f"{name}_{len(attributes)}_{kind}"
            nodes.append(helper.make_node(name, [f"x_{kind}", f"w_{kind}"], [result], **attributes))
            outputs.append(helper.make_tensor_value_info(result, code, ["n"]))
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    feeds = {}
    for kind in CODES:
        least = np.iinfo(kind).min
        feeds |= {f"x_{kind}": np.array([7, 0, least, least, 7, 200], kind if least else "int64").astype(kind)}
        feeds |= {f"w_{kind}": np.array([0, 0, -1 if least else 255, 0, 2, 3]).astype(kind)}
    results = mhsa.load(mhsa.compile(model, without_attention="accept"))(**feeds)
    for kind, (quotient, remainder, rest) in zip(CODES, zip(*[iter(results)] * 3, strict=True), strict=True):
        least = np.iinfo(kind).min
        np.testing.assert_array_equal(quotient, np.array([0, 0, least, 0, 3, 66]))
        np.testing.assert_array_equal(remainder, [0, 0, 0, 0, 1, 2])
        np.testing.assert_array_equal(rest, remainder)


@pytest.mark.parametrize("divisor", [0, -1])
def test_a_constant_divisor(divisor: int) -> None:
    graph = helper.make_graph(
        [helper.make_node("Constant", [], ["w"], value_ints=[divisor]), helper.make_node("Div", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, ["n"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    x = np.array([5, -3, np.iinfo("int64").min])
    result = mhsa.load(mhsa.compile(model, without_attention="accept"))(x)
    np.testing.assert_array_equal(result, 0 * x if divisor == 0 else -x)
