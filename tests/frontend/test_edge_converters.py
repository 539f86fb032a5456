"""Edges of operators that TVM's importer converts otherwise, all in one graph, against ONNX's reference evaluator, or
ONNX Runtime where that is at odds with the standard."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import mhsa_compile as mhsa

RNG = np.random.default_rng(0)
FLOATS = RNG.uniform(-0.9, 0.9, (3, 4))


class Nodes:
    """Nodes, each with inputs and outputs of its own."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.feeds: dict[str, np.ndarray[Any, Any]] = {}
        self.names: dict[str, str] = {}

    def add(
        self, name: str, op_type: str, *arrays: Any, constants: tuple[int, ...] = (), n: int = 1, **said: Any
    ) -> None:
        inputs = []
        for place, array in enumerate(arrays):
            inputs.append(f"{name}_{place}" if array is not None else "")
            if array is None:
                continue
            if place in constants:
                self.weights.append(numpy_helper.from_array(array, inputs[-1]))
            else:
                self.inputs.append(helper.make_tensor_value_info(inputs[-1], dtype_of(array), array.shape))
                self.feeds[inputs[-1]] = array
        outputs = [f"{name}_y{i}" for i in range(n)]
        self.names |= dict.fromkeys(outputs, name)
        self.nodes.append(helper.make_node(op_type, inputs, outputs, name=name, **said))

    def model(self, opset: int = 28, outputs: list[str] | None = None) -> onnx.ModelProto:
        """The nodes, or those of these outputs."""
        names = outputs or list(self.names)
        nodes = [node for node in self.nodes if set(node.output) & set(names)]
        read = {name for node in nodes for name in node.input}
        inputs = [value for value in self.inputs if value.name in read]
        weights = [tensor for tensor in self.weights if tensor.name in read]
        values = [helper.make_empty_tensor_value_info(name) for name in names]
        graph = helper.make_graph(nodes, "edges", inputs, values, weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        return onnx.shape_inference.infer_shapes(model)


def dtype_of(array: np.ndarray[Any, Any]) -> int:
    return int(helper.np_dtype_to_tensor_dtype(array.dtype))


def whole(*numbers: int) -> np.ndarray[Any, Any]:
    return np.array(numbers, np.int64)


def cases() -> Nodes:
    nodes = Nodes()
    for operator in ("Acos", "Asin", "Atan", "Atanh", "Asinh", "Cosh", "Sinh", "Tan"):
        nodes.add(operator, operator, FLOATS.astype(np.float16))
    nodes.add("IsNaN", "IsNaN", np.array([1, np.nan, np.inf], np.float16))
    nodes.add("flags", "Equal", np.array([True, False, True]), np.array([True, True, False]))
    for direction in ("LEFT", "RIGHT"):
        for kind in (np.uint8, np.uint32, np.int32, np.int8):
            bits = np.dtype(kind).itemsize * 8
            amounts = np.array([0, 1, bits - 1, bits, bits + 3], kind)
            name = f"{direction}_{np.dtype(kind).name}"
            nodes.add(name, "BitShift", np.array([5, 100, 3, 77, 1], kind), amounts, direction=direction)
    signed = np.array([-5, -100, -3, -77, -1, 9], np.int32)
    nodes.add("sign_stays", "BitShift", signed, np.array([1, 31, 32, 40, -1, -1], np.int32), direction="RIGHT")
    nodes.add("sign_goes", "BitShift", signed, np.array([1, 31, 32, 40, -1, -1], np.int32), direction="LEFT")
    nodes.add("one_hot", "OneHot", whole(0, 2, -1), np.array(4), np.array([-1.5, 3], "f4"), constants=(1, 2), axis=0)
    nodes.add(
        "modulo", "Mod", np.array([-5, 7.5, -4, 4, 0, -3, 3], "f4"), np.array([3, -2, 2, -2, -3, np.inf, np.inf], "f4")
    )
    nodes.add("zeros", "DynamicQuantizeLinear", np.zeros((2, 3), "f4"), n=3)
    nodes.add("numbers", "DynamicQuantizeLinear", FLOATS.astype("f4"), n=3)
    for operator in ("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceSum"):
        nodes.add(f"{operator}_of_none", operator, FLOATS.astype("f4"), noop_with_empty_axes=1)
    nodes.add("any", "ReduceMax", FLOATS > 0.5, whole(1), constants=(1,), keepdims=0)
    nodes.add("all", "ReduceMin", FLOATS > -0.5, whole(1), constants=(1,), keepdims=0)
    endless = np.array([[-np.inf, -np.inf], [np.inf, -1], [np.finfo("f4").min] * 2, [np.inf, np.inf]], "f4")
    for operator in ("ReduceMax", "ReduceMin"):
        for kind in (np.float32, np.float64, np.float16):
            with np.errstate(over="ignore"):
                array = endless.astype(kind)
            nodes.add(f"{operator}_{np.dtype(kind).name}", operator, array, whole(1), constants=(1,), keepdims=0)
    for operator in ("ArgMax", "ArgMin"):
        for array in (np.full((2, 3), np.inf, "f4"), np.full((2, 3), -np.inf, "f4")):
            nodes.add(f"{operator}_of_{array[0, 0]}", operator, array, axis=1)
            nodes.add(f"last_{operator}_of_{array[0, 0]}", operator, array, axis=1, select_last_index=1)
    nodes.add("lowest", "Max", np.full(3, -np.inf, "f4"), np.full((2, 1), -np.inf, "f4"), np.full(1, -np.inf, "f4"))
    nodes.add("highest", "Min", np.full(3, np.inf, "f4"), np.full((2, 1), np.inf, "f4"))
    nodes.add("every_axis", "ReduceMax", FLOATS.astype("f4"), whole(), constants=(1,))
    nodes.add("threshold", "ThresholdedRelu", endless, alpha=-2.0)
    nodes.add("threshold_in_double", "ThresholdedRelu", FLOATS)
    image = RNG.standard_normal((1, 2, 9, 8)).astype("f4")
    for kind in ("SAME_LOWER", "SAME_UPPER"):
        for steps in ([2, 3], [3, 2]):
            said: dict[str, Any] = {"auto_pad": kind, "strides": steps, "kernel_shape": [3, 3], "ceil_mode": 1}
            nodes.add(f"pool_{kind}_{steps[0]}", "MaxPool", image, **said)
    for name, bounds in {
        "backwards": (whole(-1), whole(-100), whole(1), whole(-1)),
        "below": (whole(50), whole(0), whole(1), whole(-2)),
        "part": (whole(1), whole(2**63 - 1), whole(1), whole(2)),
    }.items():
        nodes.add(name, "Slice", image, *bounds, constants=(1, 2, 3, 4))
    return nodes


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Output -> (ours, the reference's)."""
    nodes = cases()
    ours = mhsa.load(mhsa.compile(nodes.model(), without_attention="accept"))(**nodes.feeds)
    theirs = dict(zip(nodes.names, ReferenceEvaluator(nodes.model()).run(None, nodes.feeds), strict=True))
    some = [name for name in nodes.names if name.startswith(("pool", "zeros"))]
    session = onnxruntime.InferenceSession(nodes.model(21, some).SerializeToString())
    feeds = {value.name: nodes.feeds[value.name] for value in session.get_inputs()}
    theirs |= dict(zip(some, session.run(some, feeds), strict=True))  # onnx.reference rounds sizes of SAME_LOWER down
    pairs = zip(nodes.names, ours, strict=True)
    return {name: (np.asarray(our), np.asarray(theirs[name])) for name, our in pairs}


@pytest.mark.parametrize("name", cases().names)
def test_an_edge_is_as_the_reference_has_it(name: str, results: dict[str, tuple[Any, Any]]) -> None:
    ours, theirs = results[name]
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    least = 2e-3 if ours.dtype == np.float16 else 1e-6
    if name.startswith("modulo"):
        np.testing.assert_array_equal(np.signbit(ours), np.signbit(theirs))
    np.testing.assert_allclose(ours.astype(np.float64), theirs.astype(np.float64), rtol=least, atol=least)
