"""What is expected to be slow is said: functions of TVM's own that take much of a call, far from the CPU's limit."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from support.onnx_models import model_of
from torch import nn
from typer.testing import CliRunner

import mhsa_compile as mhsa
from mhsa_compile.cli.app import app
from mhsa_compile.runtime.artifact.manifest import Manifest, SlowOperation


def product(kind: int, inner: int = 64, length: int | str = "L") -> onnx.ModelProto:
    """Y = A B of this dtype, by a node named `scores`, and a softmax that no product needs."""
    factors = {"a": (kind, ["B", length, inner]), "b": (kind, ["B", inner, length])}
    node = helper.make_node("MatMul", ["a", "b"], ["y"], "scores")
    return model_of([node], factors, {"y": (kind, ["B", length, length])}, opset=21)


def compiled(source: Any, **options: Any) -> mhsa.Artifact:
    return mhsa.compile(source, without_attention="accept", check=False, **options)


@pytest.fixture(scope="module")
def of_integers() -> mhsa.Artifact:
    return compiled(product(TensorProto.INT32))


def test_a_product_in_loops_is_named(of_integers: mhsa.Artifact) -> None:
    (slow,) = of_integers.manifest.slow
    assert slow.name == "matmul" and slow.runs == 1 and slow.share == 1
    assert slow.times_limit > 10 and slow.sizes == {"B": 1, "L": 128}
    assert "no kernel claims it" in slow.sentence() and "cast both factors to float32" in slow.sentence()
    assert "at B=1 L=128" in slow.sentence()


def test_a_product_of_bytes_in_vectors_is_named_too() -> None:
    """Of such as wide as they are summed it would not be: those have no faster instructions."""
    factors, y = dict.fromkeys("ab", (TensorProto.INT8, [512, 512])), (TensorProto.INT32, [512, 512])
    model = model_of([helper.make_node("MatMulInteger", ["a", "b"], ["y"])], factors, {"y": y}, opset=21)
    (slow,) = compiled(model).manifest.slow
    assert "matmul" in slow.name
    assert compiled(product(TensorProto.INT32, inner=96, length=96), dims={"B": 1}).manifest.slow == ()


@pytest.mark.thorough
def test_what_is_small_kernels_or_elementwise_is_not() -> None:
    """Controls: the same product of floats, one with nothing to sum over again, an encoder layer."""
    assert compiled(product(TensorProto.FLOAT)).manifest.slow == ()
    assert compiled(product(TensorProto.INT32, inner=1)).manifest.slow == ()
    assert compiled(product(TensorProto.INT32, inner=4, length=4)).manifest.slow == ()
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    assert compiled(layer, example_inputs=(torch.randn(2, 7, 64),)).manifest.slow == ()


def test_its_cost_counts_each_run_and_its_fixed_sizes() -> None:
    model = product(TensorProto.INT32, inner=61, length=97)
    node = model.graph.node.add()
    node.CopyFrom(helper.make_node("MatMul", ["y", "a"], ["z"], "values"))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.INT32, ["B", 97, 61]))
    rows = compiled(model, dims={"B": 2}).manifest.slow
    assert sum(row.runs for row in rows) == 2 and all(row.sizes == {} for row in rows)
    assert sum(row.share for row in rows) == pytest.approx(1, abs=0.01)


def test_the_report_says_so(of_integers: mhsa.Artifact, tmp_path: Any) -> None:
    folder = tmp_path / "a.mhsa"
    of_integers.save(folder)
    sentence = of_integers.manifest.slow[0].sentence()
    shown = CliRunner().invoke(app, ["inspect", str(folder)])
    assert f"slow: {sentence}" in " ".join(shown.output.split())
    told = CliRunner().invoke(app, ["inspect", str(folder), "--json"])
    rows = msgspec.json.decode(told.output.encode())["manifest"]["slow"]
    assert msgspec.convert(rows, tuple[SlowOperation, ...]) == of_integers.manifest.slow


def test_a_manifest_without_the_field_is_read(of_integers: mhsa.Artifact) -> None:
    fields = msgspec.to_builtins(of_integers.manifest)
    del fields["slow"]
    assert msgspec.convert(fields, Manifest).slow == ()


def test_the_integers_are_right(of_integers: mhsa.Artifact) -> None:
    drawn = np.random.default_rng(0)
    a, b = (drawn.integers(-50, 50, shape, np.int32) for shape in ((2, 5, 64), (2, 64, 5)))
    np.testing.assert_array_equal(mhsa.load(of_integers)(a=a, b=b), a @ b)
