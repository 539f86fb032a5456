"""Graphs without their large weights: the same graph, and what is missing in a file's weights is said by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support.onnx_models import model_of

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.detach_weights import LARGE, contents_as_inputs, light, whole, without_contents
from mhsa_compile.frontend.export.source import read_onnx

WIDTH = 96
assert WIDTH * WIDTH > LARGE


def model() -> onnx.ModelProto:
    weights = {"large": np.ones((WIDTH, WIDTH), np.float32), "small": np.ones(WIDTH, np.float32)}
    nodes = [helper.make_node("MatMul", ["x", "large"], ["p"]), helper.make_node("Add", ["p", "small"], ["y"])]
    return model_of(nodes, {"x": ["B", WIDTH]}, {"y": ["B", WIDTH]}, weights, opset=20)


def test_large_weights_keep_dims_and_dtype_alone() -> None:
    large, small = without_contents(model()).graph.initializer
    assert (large.name, list(large.dims), large.data_type) == ("large", [WIDTH, WIDTH], TensorProto.FLOAT)
    assert not large.raw_data and small == model().graph.initializer[1]


def test_whole_undoes_light() -> None:
    assert whole(*light(model())) == model()


def test_as_inputs_a_graph_is_as_valid_as_it_is() -> None:
    as_inputs = contents_as_inputs(model())
    onnx.checker.check_model(as_inputs)
    assert [value.name for value in as_inputs.graph.input] == ["x", "large"]
    broken = model()
    broken.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_model(contents_as_inputs(broken))


@pytest.mark.parametrize("lost", [4, 1000, WIDTH * WIDTH * 4])
def test_weights_that_are_cut_off_are_named(tmp_path: Path, lost: int) -> None:
    damaged, path = model(), tmp_path / "damaged.onnx"
    damaged.graph.initializer[0].raw_data = damaged.graph.initializer[0].raw_data[:-lost]
    path.write_bytes(damaged.SerializeToString())
    with pytest.raises(ModelError, match="'large'"):
        read_onnx(path)
