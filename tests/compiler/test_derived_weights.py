"""What depends on weights alone is computed once a binding, for weights that are bound later as well."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import mhsa_compile as mhsa

V, D = 211, 96


def _weights(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"head": (D, V), "one": (V,), "other": (V,), "down": (D, 4), "up": (4, D), "row": (1, D)}
    return {name: rng.standard_normal(shape).astype("f4") for name, shape in shapes.items()}


def _right(weights: dict[str, Any], ids: Any) -> Any:
    wide = {name: value.astype(np.float64) for name, value in weights.items()}
    x = wide["head"].T[ids] @ (wide["down"] @ wide["up"])
    return (x + wide["row"]) @ wide["head"] * (wide["one"] * wide["other"])


@pytest.fixture(scope="module")
def artifact() -> Any:
    node = helper.make_node
    nodes = [
        node("Transpose", ["head"], ["table"], perm=[1, 0]),
        node("Gather", ["table", "ids"], ["x"]),
        node("MatMul", ["down", "up"], ["low"]),
        node("MatMul", ["x", "low"], ["y"]),
        node("Expand", ["row", "sizes"], ["spread"]),
        node("ReduceMax", ["spread", "first"], ["highest"], keepdims=1),
        node("Add", ["y", "highest"], ["z"]),
        node("MatMul", ["z", "head"], ["logits"]),
        node("Mul", ["one", "other"], ["scale"]),
        node("Mul", ["logits", "scale"], ["out"]),
    ]
    constants = {"sizes": np.array([4096, D]), "first": np.array([0])}
    graph = helper.make_graph(
        nodes,
        "tied",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", V])],
        [numpy_helper.from_array(value, name) for name, value in {**_weights(0), **constants}.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return mhsa.compile(model, without_attention="accept")


def test_none_of_it_is_in_the_call(artifact: Any) -> None:
    operators = [op.op for op in artifact.manifest.ops]
    assert "permute_dims" not in operators
    assert "broadcast_to" in operators  # 4096 times its weight: not kept


def test_weights_bound_later(artifact: Any) -> None:
    ids = np.array([3, 0, V - 1])
    for call, weights in (
        (mhsa.load(artifact), _weights(0)),
        (mhsa.load(artifact, weights=_weights(1)), _weights(1)),
    ):
        right = _right(weights, ids)
        assert np.abs(np.asarray(call(ids)) - right).max() < 1e-4 * np.abs(right).max()
