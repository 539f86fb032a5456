"""Convolutions over all channels are patches and a linear; the transposes between them and what follows are gone."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

import numpy as np
import onnx
import pytest
import torch
import transformers
from onnx import TensorProto, helper
from support.onnx_models import model_of
from torch import nn
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import mhsa_compile as mhsa
from mhsa_compile.compiler import pipeline
from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.fusion.convolutions import as_products
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.verify import eager, oracle

WIDTH = 12


def model(
    layers: Sequence[tuple[onnx.NodeProto, tuple[int, ...]]], channels: int, sizes: Sequence[int | str], *more: str
) -> onnx.ModelProto:
    """x -> convolutions, each with the shape of its weights, and what `more` names between -> rows -> attention."""
    rng = np.random.default_rng(len(layers))
    nodes, constants, value = [], {"flat": np.array([0, WIDTH, -1])}, "x"
    for i, (layer, shape) in enumerate(layers):
        node = onnx.NodeProto()
        node.CopyFrom(layer)
        names = [f"w{i}", f"b{i}"][: 2 if "b" in layer.input else 1]
        constants[names[0]] = (rng.standard_normal(shape) / np.prod(shape[1:]) ** 0.5).astype("f4")
        if len(names) > 1:
            constants[names[1]] = rng.standard_normal(shape[:1]).astype("f4")
        del node.input[:], node.output[:]
        node.input.extend([value, *names])
        node.output.append(f"y{i}")
        nodes.append(node)
        value = f"y{i}"
        for kind in more:
            nodes.append(helper.make_node(kind, [value], [f"{value}_{kind}"]))
            value = f"{value}_{kind}"
    nodes.append(helper.make_node("Reshape", [value, "flat"], ["flattened"]))
    nodes.append(helper.make_node("Transpose", ["flattened"], ["rows"], perm=[0, 2, 1]))
    nodes.append(helper.make_node("Attention", ["rows"] * 3, ["y"], q_num_heads=2, kv_num_heads=2))
    return model_of(nodes, {"x": ["B", channels, *sizes]}, {"y": ["B", None, WIDTH]}, constants)


def conv(bias: bool = True, **said: object) -> onnx.NodeProto:
    return helper.make_node("Conv", ["x", "w", "b"] if bias else ["x", "w"], ["y"], **said)


def check(source: onnx.ModelProto, shapes: Sequence[tuple[int, ...]], *, convolutions: int, moves: int = 0) -> None:
    """Compiles, and calls it with inputs of these shapes. `moves`: transposes that a call computes."""
    artifact = mhsa.compile(source)
    found = [row.op.rstrip("0123456789d") for row in artifact.manifest.ops]
    assert (found.count("linear"), found.count("patches")) == (convolutions, convolutions)
    assert (found.count("permute_dims"), found.count("nn.conv")) == (moves, 0)
    one, two = (mhsa.load(artifact, threads=threads) for threads in (1, 2))
    for shape in shapes:
        inputs = {"x": np.random.default_rng(shape[-1]).standard_normal(shape).astype("f4")}
        (truth,), (yardstick,) = oracle(source, inputs), eager(source, inputs)
        y = one(**inputs)
        assert y.shape == truth.shape
        assert max_error(truth, y) <= budget(truth, yardstick, "float32")
        for _ in range(3):
            assert np.array_equal(two(**inputs), y)


FORMS = {
    "patches of an image": ([(conv(strides=[4, 2]), (WIDTH, 3, 4, 2))], (3, 13, 10)),
    "without a bias": ([(conv(bias=False, strides=[2, 2]), (WIDTH, 3, 2, 2))], (3, 8, 6)),
    "whisper's": ([(conv(pads=[1, 1]), (9, 5, 3)), (conv(pads=[1, 1], strides=[2]), (WIDTH, 9, 3))], (5, 31)),
    "pads of two kinds": ([(conv(pads=[2, 0, 1, 3], strides=[2, 1]), (WIDTH, 4, 3, 3))], (4, 9, 7)),
    "dilated": ([(conv(pads=[0, 4], dilations=[2]), (WIDTH, 3, 5))], (3, 17)),
    "small images": ([(conv(pads=[1] * 4), (7, 3, 3, 3)), (conv(auto_pad="VALID"), (WIDTH, 7, 3, 2))], (3, 9, 11)),
    "volumes": ([(conv(strides=[2, 3, 2]), (WIDTH, 2, 2, 3, 2))], (2, 5, 9, 4)),
    "one channel": ([(conv(strides=[5]), (WIDTH, 1, 10))], (1, 64)),
}


@pytest.mark.thorough_but("one channel-fixed")
@pytest.mark.parametrize("free", [False, True], ids=["fixed", "free"])
@pytest.mark.parametrize(("layers", "sizes"), FORMS.values(), ids=FORMS.keys())
def test_convolutions_are_linears(
    layers: list[tuple[onnx.NodeProto, tuple[int, ...]]], sizes: tuple[int, ...], free: bool
) -> None:
    channels, *lengths = sizes
    symbols = ["Z", "Y", "X"][-len(lengths) :]
    source = model(layers, channels, symbols if free else lengths, "Sigmoid")
    shapes = [(1, *sizes), (3, *sizes)]
    shapes += [(2, channels, *(2 * size + 5 for size in lengths))] if free else []
    check(source, shapes, convolutions=len(layers), moves=int(channels >= 4))


@pytest.mark.thorough
def test_rows_that_come_as_rows_are_read_as_they_are() -> None:
    """A sequence (B, T, C) whose channels are put first for a convolution, as speech models write it."""
    source = model([(conv(pads=[1, 1]), (WIDTH, 6, 3))], 6, ["T"], "Relu")
    dims = source.graph.input[0].type.tensor_type.shape.dim
    dims[1].dim_param, dims[2].dim_value = "T", 6
    source.graph.node.insert(0, helper.make_node("Transpose", ["x"], ["first"], perm=[0, 2, 1]))
    source.graph.node[1].input[0] = "first"
    check(source, [(2, 7, 6), (1, 40, 6)], convolutions=1)


@pytest.mark.thorough
def test_a_value_that_others_read_with_its_channels_first_is_there_for_them() -> None:
    source = model([(conv(pads=[1, 1]), (WIDTH, 6, 3))], 6, ["T"], "Relu")
    source.graph.output.append(helper.make_tensor_value_info("y0_Relu", TensorProto.FLOAT, ["B", WIDTH, None]))
    x = np.random.default_rng(0).standard_normal((2, 6, 19)).astype("f4")
    compiled = mhsa.load(mhsa.compile(source))
    for truth, yardstick, found in zip(oracle(source, {"x": x}), eager(source, {"x": x}), compiled(x), strict=True):
        assert max_error(truth, found) <= budget(truth, yardstick, "float32")


LEFT = {
    "padding that follows from the sizes": (conv(auto_pad="SAME_UPPER", strides=[2]), (WIDTH, 4, 3), (4, "T")),
    "one to one": (conv(), (1, 1, 3), (1, 20)),
    "too many patches": (conv(pads=[3] * 4), (WIDTH, 64, 7, 7), (64, 512, 512)),
}


@pytest.mark.parametrize(("layer", "shape", "sizes"), LEFT.values(), ids=LEFT.keys())
def test_others_stay_as_they_are(layer: onnx.NodeProto, shape: tuple[int, ...], sizes: tuple[int, int | str]) -> None:
    source = model([(layer, shape)], int(sizes[0]), sizes[1:])
    assert as_products(source) is source


@pytest.mark.parametrize(("channels", "functions"), [(1, 2), (5, 2), (16, 1)])
def test_few_channels_get_their_edges_first(channels: int, functions: int) -> None:
    """Where few elements lie side by side, no element of a patch is asked whether it lies outside."""
    source = model([(conv(pads=[1, 1]), (WIDTH, channels, 3))], channels, ["T"])
    module = pipeline.import_source(source).module
    scripts = {str(variable.name_hint): function.script() for variable, function in module.functions_items()}
    scripts = {name: script for name, script in scripts.items() if name in ("edges", "patches")}
    assert len(scripts) == functions
    assert ("if_then_else" in scripts["patches"]) == (functions == 1)


def test_a_convolution_longer_than_its_input_is_refused() -> None:
    with pytest.raises(ModelError):
        mhsa.compile(model([(conv(), (WIDTH, 3, 9))], 3, [8]))


@pytest.mark.thorough
def test_callers_on_threads_of_their_own_get_the_same_bits() -> None:
    layers = [(conv(pads=[1, 1]), (40, 16, 3)), (conv(pads=[1, 1], strides=[2]), (WIDTH, 40, 3))]
    artifact = mhsa.compile(model(layers, 16, ["T"], "Gelu"))
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((1 + i % 2, 16, 801 + 130 * i)).astype("f4") for i in range(4)]
    alone = mhsa.load(artifact, threads=1)
    first = [alone(x) for x in inputs]
    for threads in (2, 3, 8):
        compiled = mhsa.load(artifact, threads=threads)
        with ThreadPoolExecutor(4) as callers:
            found = list(callers.map(compiled, inputs * 10))
        assert all(np.array_equal(y, first[i % 4]) for i, y in enumerate(found))


class _Whole(nn.Module):
    """A whole encoder of transformers, its last hidden state."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.encoder(x)[0]
        return y


def vit() -> tuple[nn.Module, tuple[int, ...], list[int]]:
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40}
    config = transformers.ViTConfig(**sizes, image_size=42, patch_size=6)
    return transformers.ViTModel(config, add_pooling_layer=False), (3, 42, 42), [6]


def whisper() -> tuple[nn.Module, tuple[int, ...], list[int]]:
    sizes = {"d_model": 24, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 40}
    config = transformers.WhisperConfig(**sizes, max_source_positions=51, num_mel_bins=10)
    return WhisperEncoder(config), (10, 102), [3, 3]


@pytest.mark.thorough
@pytest.mark.parametrize("family", [vit, whisper])
def test_a_whole_encoder(family: Callable[[], tuple[nn.Module, tuple[int, ...], list[int]]], tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder, shape, kernels = family()
    module, path = _Whole(encoder), tmp_path / "encoder.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example = torch.ones(2, *shape)
        program = torch.onnx.export(
            module, (example,), input_names=["x"], dynamo=True, dynamic_shapes=({0: torch.export.Dim("B")},),
            opset_version=23, verbose=False,
        )  # fmt: skip
    assert program is not None
    program.save(path)
    artifact = mhsa.compile(path)
    found = [row.op for row in artifact.manifest.ops]
    assert sum(op.startswith("patches") for op in found) == len(kernels)
    assert not {"nn.conv1d", "nn.conv2d"} & set(found)
    assert found.count("permute_dims") == int(shape[0] >= 4), "a transpose that nothing undid, behind x itself"
    assert [block.fused for block in artifact.manifest.attention] == [True]
    source, compiled = onnx.load(path), [mhsa.load(artifact, threads=threads) for threads in (1, 2, 3)]
    for batch in (1, 3):
        inputs = {"x": np.random.default_rng(batch).standard_normal((batch, *shape)).astype("f4")}
        (truth,), (yardstick,) = oracle(source, inputs), eager(source, inputs)
        results = [call(**inputs) for call in compiled for _ in range(20)]
        assert max_error(truth, results[0]) <= budget(truth, yardstick, "float32")
        assert all(np.array_equal(results[0], y) for y in results)
