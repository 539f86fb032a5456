"""compile(weights="int4"): of specs, modules and files; what is stored, what is computed, what is refused."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.nn.weight_blocks import in_blocks, rounded
from mhsa_compile.spec.weight_words import BlockForm
from mhsa_compile.verification.verify import verify

SPEC = mhsa.AttentionSpec(embed_dim=96, num_heads=4)
WORDS = {"int4": BlockForm(), "int4:block=16,zeros": BlockForm(4, 16, "bytes"),
         "int4:activations=float": BlockForm(rounds_x=False), "int8:block=32": BlockForm(8),
         "int8:zeros=float": BlockForm(8, 32, "floats", rounds_x=False)}  # fmt: skip


def product(K: int = 96, N: int = 40, *, gemm: bool = False) -> tuple[onnx.ModelProto, torch.Tensor]:
    """(x times a weight (N, K), which is stored turned but in a Gemm, and a bias; that weight)."""
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    stored = weight if gemm else weight.T
    bias = numpy_helper.from_array(np.arange(N, dtype=np.float32), "b")
    weights = [numpy_helper.from_array(stored.contiguous().numpy(), "w"), bias]
    if gemm:
        nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)]
    else:
        nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "b"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["R", size]) for name, size in (("x", K), ("y", N)))
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), weight


@pytest.mark.thorough_but("int8:zeros=float-MatMul")
@pytest.mark.parametrize("gemm", [False, True], ids=["MatMul", "Gemm"])
@pytest.mark.parametrize("word", WORDS)
def test_products_of_a_file(word: str, gemm: bool) -> None:
    form, (model, weight) = WORDS[word], product(gemm=gemm)
    artifact = mhsa.compile(model, weights=word, without_attention="accept", check=True)
    assert artifact.manifest.check is not None and artifact.manifest.check.against
    assert [op.kernel for op in artifact.manifest.ops] == ["cpu.linear_of_blocks"]
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
    rows = rounded(x, form.block) if form.rounds_x else x
    expected = rows.double() @ in_blocks(weight, form).floats(96).double().T + torch.arange(40)
    y = mhsa.load(artifact)(x.numpy())
    np.testing.assert_allclose(y, expected.numpy(), rtol=0, atol=2e-6 * float(expected.abs().max()))


@pytest.mark.thorough
def test_an_encoder_of_a_file_keeps_its_attention() -> None:
    """Shapes behind products of few bits are known as before."""
    layer = torch.nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    free = ({0: "B", 1: "L"},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            encoder, (torch.randn(2, 9, 64),), dynamo=True, opset_version=18, dynamic_shapes=free, verbose=False
        )
    assert program is not None
    artifact = mhsa.compile(program.model_proto, weights="int4", check=True)
    assert artifact.manifest.check is not None and artifact.manifest.check.against
    kernels = [op.kernel for op in artifact.manifest.ops]
    assert kernels.count("cpu.attention") == 1 and kernels.count("cpu.linear_of_blocks") == 4
    x = torch.randn(3, 17, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = encoder(x).numpy()
    assert 1e-3 < np.abs(mhsa.load(artifact)(x.numpy()) - exact).mean() < 0.2


@pytest.mark.thorough_but("int4")
@pytest.mark.parametrize("word", ["int4", "int4:block=64,zeros"])
def test_a_spec_is_verified_and_small(word: str, tmp_path) -> None:
    module = mhsa.MultiHeadAttention(SPEC)
    artifact = mhsa.compile(module, weights=word)
    artifact.save(tmp_path / "a.mhsa")
    assert verify(tmp_path / "a.mhsa").ok
    floats = sum(parameter.numel() * 4 for parameter in module.parameters())
    assert (tmp_path / "a.mhsa" / "weights.safetensors").stat().st_size < floats / 4
    x = np.random.default_rng(0).standard_normal((2, 50, 96), dtype=np.float32)
    results = [mhsa.load(tmp_path / "a.mhsa", threads=threads)(x) for threads in (1, 2, 3)]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
    with torch.no_grad():
        exact = module(torch.from_numpy(x)).numpy()
    assert 1e-3 < np.linalg.norm(results[0] - exact) / np.linalg.norm(exact) < 0.15


@pytest.mark.thorough
def test_a_weight_of_two_products_is_stored_once() -> None:
    model, _ = product(K=96, N=96)
    del model.graph.node[:]
    model.graph.node.extend(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])]
    )
    artifact = mhsa.compile(model, weights="int4", without_attention="accept", check=True)
    assert [info.name for info in artifact.manifest.weights] == ["w.numbers", "w.scales"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("int2", 'expected None, "int8", "int4"'),
        ("int4:block=48", "blocks of 16, 32, 64, 128, 256 terms"),
        ("int4:group=32", "block=32, zeros, zeros=float or activations=float behind int4"),
        ("int8:block=48", "blocks of 16, 32, 64, 128, 256 terms"),
        ("int4:zeros=float,activations=int8", "activations=float with zeros=float"),
        ("int16:block=32", 'expected None, "int8", "int4"'),
        (4, 'expected None, "int8", "int4"'),
    ],
)
def test_other_words_are_refused(word: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        mhsa.compile(SPEC, weights=word)  # type: ignore[arg-type]


def test_weights_that_four_bits_cannot_hold_are_refused() -> None:
    model, weight = product()
    weight[3, 5] = torch.nan
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight.T.contiguous().numpy(), "w"))
    with pytest.raises(ModelError, match=r"weight 'w'.*finite numbers"):
        mhsa.compile(model, weights="int4", without_attention="accept")


def test_a_model_without_linears_is_refused() -> None:
    with pytest.raises(ModelError, match="a model with a linear for 4 bits"):
        mhsa.compile(mhsa.ScaledDotProductAttention(SPEC), weights="int4")


@pytest.mark.thorough
def test_weights_of_another_layer_come_in_the_same_arrays() -> None:
    """What `load` asks for is what is stored; `in_blocks(...).named(name)` makes it of a layer's matrix."""
    artifact, other = mhsa.compile(mhsa.MultiHeadAttention(SPEC), weights="int4"), mhsa.MultiHeadAttention(SPEC)
    with pytest.raises(InputError, match=r"q_proj\.weight\.numbers"):
        mhsa.load(artifact, weights=dict(other.named_parameters()))
    arrays = {}
    for name, parameter in other.named_parameters():
        arrays |= in_blocks(parameter.detach(), BlockForm()).named(name) if parameter.ndim == 2 else {name: parameter}
    x = np.random.default_rng(0).standard_normal((1, 9, 96), dtype=np.float32)
    expected = mhsa.load(mhsa.compile(other, weights="int4"))(x)
    np.testing.assert_array_equal(mhsa.load(artifact, weights=arrays)(x), expected)
