"""What a call costs by arithmetic is said, and what of it is expected to be slow: functions of TVM's own that take much
of a call, far from the CPU's limit."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from support.onnx_models import model_of
from torch import nn
from typer.testing import CliRunner

import mhsa_compile as mhsa
from mhsa_compile.cli.app import app
from mhsa_compile.compiler import lower
from mhsa_compile.compiler.kernel_work import kernel_flops, kernel_flops_a_cycle, weight_bytes
from mhsa_compile.compiler.pipeline import import_source
from mhsa_compile.hardware.profile import CpuProfile, load_profile
from mhsa_compile.kernels.interface.ops import BlockLinearOp, LinearOp
from mhsa_compile.records.record import RecordSet
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


def test_a_manifest_without_the_fields_is_read(of_integers: mhsa.Artifact) -> None:
    fields = msgspec.to_builtins(of_integers.manifest)
    del fields["slow"], fields["cost"]
    manifest = msgspec.convert(fields, Manifest)
    assert manifest.slow == () and manifest.cost is None and manifest.cost_lines() == []


# ---- The cost of a call


def on(features: tuple[str, ...] = (), **hardware: Any) -> CpuProfile:
    """A machine of vectors of 512 bits, with these features beside."""
    profile = load_profile("x86-64-v4")
    assert isinstance(profile, CpuProfile)
    fields = {"features": profile.hardware.features + features, "vector_bits": 512, "cores": 4} | hardware
    return msgspec.structs.replace(profile, hardware=msgspec.structs.replace(profile.hardware, **fields))


def linear(**fields: Any) -> LinearOp:
    return LinearOp(("B", "L"), 256, (512,), (True,), (False,), **fields)


def test_the_work_of_a_linear_is_its_own() -> None:
    op = linear()
    assert kernel_flops(op, {"B": 3}, 7) == 2 * 3 * 7 * 256 * 512
    assert weight_bytes(op) == 4 * 256 * 512 and weight_bytes(linear(dtype="bfloat16")) == 2 * 256 * 512
    assert weight_bytes(linear(int8_weights=True)) == 256 * 512
    blocks = BlockLinearOp(("L",), 256, (512,), (False,), (False,), bits=4, block=64, zeros=("bytes",))
    assert weight_bytes(blocks) == 256 * 512 // 2 + 512 * 4 * (4 + 1)


@pytest.mark.parametrize(
    ("op", "features", "on_tiles", "each"),
    [
        (linear(), (), False, 64),  # two multiply-adds of 16 lanes
        (linear(int8_weights=True), (), False, 64),
        (linear(int8_weights=True), ("avx512_vnni",), False, 256),
        (linear(dtype="bfloat16"), ("avx512_bf16",), False, 128),
        (linear(dtype="bfloat16"), (), True, 1024),
        (linear(float32_products="bf16x6"), (), True, 1024 / 6),
        (linear(int8_weights=True), (), True, 2048),
    ],
)
def test_the_limit_is_that_of_the_unit(op: LinearOp, features: tuple[str, ...], on_tiles: bool, each: float) -> None:
    assert kernel_flops_a_cycle(op, on_tiles, on(features)) == pytest.approx(4 * each)


def test_a_call_costs_its_operations_over_the_peak_or_its_bytes_over_the_bandwidth() -> None:
    """By hand, on 4 cores of 64 FLOPs a cycle: a product of one row is its weights, one of 4096 rows its FLOPs."""
    weight = numpy_helper.from_array(np.zeros((1024, 1024), np.float32), "w")
    for rows in (1, 4096):
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, 1024]) for name in "xy")
        graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        with pytest.warns(UserWarning, match="no attention"):
            cost = lower.schedule(import_source(model), on(), RecordSet((), on())).cost
        assert cost is not None and cost.sizes == {} and cost.loops_us == 0
        assert cost.flops == 2 * rows * 1024**2 and cost.bytes == 4 * (1024**2 + 2 * rows * 1024)
        assert cost.kernels_us == pytest.approx((cost.flops / 256 / 0.5 + 3000) / 3e3, abs=0.1)
        assert cost.memory_us == pytest.approx(cost.bytes / 48e3, abs=0.1)  # 4 cores, 4 bytes a cycle at 3 GHz
        assert cost.us == (cost.memory_us if rows == 1 else cost.kernels_us)


def test_the_report_ends_with_it(of_integers: mhsa.Artifact, tmp_path: Any) -> None:
    cost = of_integers.manifest.cost
    assert cost is not None and cost.flops == 0 and cost.loops_us > cost.memory_us
    assert "by arithmetic" in cost.sentence() and "at B=1 L=128" in cost.sentence()
    onnx.save(product(TensorProto.INT32), tmp_path / "a.onnx")
    arguments = ["compile", str(tmp_path / "a.onnx"), "-o", str(tmp_path / "a.mhsa"), "--no-check"]
    with pytest.warns(UserWarning, match="no attention"):
        shown = CliRunner().invoke(app, arguments)
    lines = " ".join(shown.output.split())
    assert lines.endswith(f"a call: {cost.sentence()}") and "slow: matmul" in lines


def test_the_integers_are_right(of_integers: mhsa.Artifact) -> None:
    drawn = np.random.default_rng(0)
    a, b = (drawn.integers(-50, 50, shape, np.int32) for shape in ((2, 5, 64), (2, 64, 5)))
    np.testing.assert_array_equal(mhsa.load(of_integers)(a=a, b=b), a @ b)
