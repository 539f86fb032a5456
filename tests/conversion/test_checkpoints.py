"""Checkpoints of other tools: what is read is what the tool itself multiplies; what means something else is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import mhsa_compile as mhsa
from mhsa_compile.conversion.checkpoints.gguf_file import _TYPES, _blocks
from mhsa_compile.errors import InputError, ModelError

GOLDEN = Path(__file__).parents[1] / "support" / "golden" / "checkpoints"
"""What `make.py` there made with the tools, and the weight (64 inputs, 32 outputs) that each of them multiplies."""
WORDS = {
    "autogptq-4": "int4:block=32,zeros", "autogptq-8-column": "int8:block=64,zeros",
    "gptqmodel-4-v2": "int4:block=32,zeros", "gptqmodel-8-v2": "int8:block=32,zeros",
    "gptqmodel-4-v1": "int4:block=32,zeros", "awq-4": "int4:block=32,zeros",
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_weights_are_those_that_the_tool_multiplies(name: str) -> None:
    expected = np.load(GOLDEN / name / "expected.npy")
    for path in (GOLDEN / name, GOLDEN / name / "model.safetensors"):
        checkpoint = mhsa.read_checkpoint(path)
        assert checkpoint.tool == ("AWQ" if name.startswith("awq") else "GPTQ")
        np.testing.assert_array_equal(checkpoint.linears["layers.0"].floats().numpy(), expected)
        assert checkpoint.word == WORDS[name]
    state = checkpoint.state_dict()
    np.testing.assert_array_equal(state["layers.0.weight"].numpy(), expected)
    assert state["norm.weight"].dtype == torch.float32 and state.keys() == {"layers.0.weight", "norm.weight"}


@pytest.mark.parametrize("name", ["autogptq-4", "gptqmodel-4-v2", "awq-4"])
def test_activations_may_stay_floats(name: str) -> None:
    assert mhsa.read_checkpoint(GOLDEN / name, activations="float").word == f"{WORDS[name]},activations=float"
    with pytest.raises(InputError, match='activations: expected "int8" or "float"'):
        mhsa.read_checkpoint(GOLDEN / name, activations="int4")  # type: ignore[arg-type]


@pytest.mark.thorough
def test_an_artifact_of_its_word_takes_what_was_read() -> None:
    checkpoint = mhsa.read_checkpoint(GOLDEN / "gptqmodel-4-v2", activations="float")
    model = torch.nn.Linear(64, 32, bias=False).eval()
    artifact = mhsa.compile(
        model, example_inputs=(torch.randn(2, 3, 64),), weights=checkpoint.word, without_attention="accept"
    )
    (name,) = {info.name.rpartition(".")[0] for info in artifact.manifest.weights}
    x = np.random.default_rng(0).standard_normal((2, 5, 64), dtype=np.float32)
    y = mhsa.load(artifact, weights=checkpoint.linears["layers.0"].named(name))(x)
    expected = x.astype(np.float64) @ np.load(GOLDEN / "gptqmodel-4-v2" / "expected.npy").astype(np.float64).T
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


# ---- What is refused


def copied(name: str, folder: Path, edit: Callable[[dict[str, Tensor]], object], **words: Any) -> Path:
    """A golden checkpoint with other tensors, and other words in its config."""
    shutil.copytree(GOLDEN / name, folder / name)
    tensors = load_file(folder / name / "model.safetensors")
    edit(tensors)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name / "model.safetensors")
    config = json.loads((folder / name / "config.json").read_text())
    config["quantization_config"] |= words
    (folder / name / "config.json").write_text(json.dumps(config))
    return folder / name


def changed(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"layers.0.{part}"] = change(tensors[f"layers.0.{part}"])

    return edit


def with_scale(number: float) -> Callable[[Tensor], Tensor]:
    def change(scales: Tensor) -> Tensor:
        scales[1, 3] = number
        return scales

    return change


def narrow(tensors: dict[str, Tensor], outputs: int) -> None:
    for part, count in (("qweight", outputs), ("scales", outputs), ("qzeros", outputs // 8)):
        tensors[f"layers.0.{part}"] = tensors[f"layers.0.{part}"][:, :count]


BAD: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], Mapping[str, Any], str]] = {
    "zero scale": ("awq-4", changed("scales", with_scale(0.0)), {}, "positive, finite numbers, got 0.0"),
    "negative scale": ("gptqmodel-4-v2", changed("scales", with_scale(-0.5)), {}, "positive, finite numbers, got -0.5"),
    "NaN scale": ("autogptq-4", changed("scales", with_scale(np.nan)), {}, "positive, finite numbers, got nan"),
    "infinite scale": ("awq-4", changed("scales", with_scale(np.inf)), {}, "positive, finite numbers, got inf"),
    "zeros of floats": ("awq-4", changed("qzeros", torch.Tensor.float), {}, r"layers.0.qzeros: expected a matrix of"),
    "zeros of int64": ("autogptq-4", changed("qzeros", torch.Tensor.long), {}, r"qzeros.*int32.*got torch.int64"),
    "no zeros": ("awq-4", lambda tensors: tensors.pop("layers.0.qzeros"), {}, "got no qzeros"),
    "numbers of floats": ("awq-4", changed("qweight", torch.Tensor.float), {}, r"layers.0.qweight: expected a matrix"),
    "scales of int32": ("awq-4", changed("scales", torch.Tensor.int), {}, r"layers.0.scales: expected a matrix of"),
    "groups do not divide": ("awq-4", lambda tensors: None, {"group_size": 48}, "groups of 48 that divide its inputs"),
    "other groups": ("awq-4", lambda tensors: None, {"group_size": 16}, r"layers.0.scales: expected \[4, 32\]"),
    "groups of 8": ("awq-4", lambda tensors: None, {"group_size": 8}, "group_size: expected 16 terms or more"),
    "3 bits": ("autogptq-4", lambda tensors: None, {"bits": 3}, "bits: expected 4 or 8"),
    "AWQ of 8": ("awq-4", lambda tensors: None, {"bits": 8}, "bits: expected 4, as AutoAWQ packs"),
    "marlin": ("autogptq-4", lambda tensors: None, {"checkpoint_format": "marlin"}, "checkpoint_format: expected"),
    "gemv": ("awq-4", lambda tensors: None, {"version": "GEMV"}, "version: expected"),
    "dynamic": ("gptqmodel-4-v2", lambda tensors: None, {"dynamic": {"-:x": {}}}, "one form for all layers"),
    "another tool": ("awq-4", lambda tensors: None, {"quant_method": "hqq"}, "quant_method: expected"),
    "no linears": ("awq-4", lambda tensors: tensors.pop("layers.0.qweight"), {}, "linears with a qweight"),
    "bits of a float": ("gptqmodel-4-v2", lambda tensors: None, {"bits": 4.0}, "bits: expected 4 or 8, got 4.0"),
    "infinite weights": ("awq-4", changed("scales", lambda s: with_scale(3e38)(s.float())), {}, "numbers, got 3"),
    "no inputs": ("awq-4", changed("qweight", lambda words: words[:0]), {"group_size": -1}, "not empty, got"),
    "28 outputs": ("autogptq-4", lambda tensors: narrow(tensors, 28), {}, "a multiple of 8 outputs.*, got 28"),
    "two weights": ("awq-4", lambda tensors: tensors.update({"layers.0.weight": torch.ones(32, 64)}), {}, "one weight"),
    "meta is text": ("gptqmodel-4-v1", lambda tensors: None, {"meta": "gptqmodel"}, "which tools read differently"),
    "who knows": ("gptqmodel-4-v1", lambda tensors: None, {"meta": {}}, "one of 0, which tools read differently"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_checkpoints_are_refused(what: str, tmp_path: Path) -> None:
    name, edit, words, message = BAD[what]
    path = copied(name, tmp_path, edit, **words)
    with pytest.raises(ModelError, match=message):
        mhsa.read_checkpoint(path)


def test_activation_order_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"layers.0.g_idx: .*activation order \(desc_act\)"):
        mhsa.read_checkpoint(GOLDEN / "gptqmodel-act-order")


def test_an_order_that_came_out_plain_is_none(tmp_path: Path) -> None:
    """desc_act alone says little: inputs in the order of their groups are read."""
    path = copied("gptqmodel-4-v2", tmp_path, lambda tensors: None, desc_act=True)
    assert mhsa.read_checkpoint(path).linears["layers.0"].block == 32


def test_zero_points_in_the_middle_are_not_stored(tmp_path: Path) -> None:
    """0x77777777 less one is 8 for all: weights without zero points, of the same values."""
    path = copied("autogptq-4", tmp_path, changed("qzeros", lambda zeros: torch.full_like(zeros, 0x77777777)))
    checkpoint = mhsa.read_checkpoint(path)
    assert checkpoint.word == "int4:block=32" and checkpoint.linears["layers.0"].zeros is None
    before = mhsa.read_checkpoint(GOLDEN / "autogptq-4").linears["layers.0"]
    numbers = before.floats() / before.scales.repeat_interleave(32, 1) + before.points().repeat_interleave(32, 1)
    expected = (torch.round(numbers) - 8) * before.scales.repeat_interleave(32, 1)
    torch.testing.assert_close(checkpoint.linears["layers.0"].floats(), expected, rtol=0, atol=0)


def test_other_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(InputError, match=r"a \.gguf file, a \.safetensors file"):
        mhsa.read_checkpoint(tmp_path / "a.txt")
    with pytest.raises(InputError, match=r"a config\.json with quantization_config"):
        mhsa.read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ModelError, match="a JSON object"):
        mhsa.read_checkpoint(tmp_path)
    shutil.copy(GOLDEN / "awq-4" / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10" * 40)
    with pytest.raises(ModelError, match="a safetensors file"):
        mhsa.read_checkpoint(tmp_path)
    with pytest.raises(InputError, match="path: expected a safetensors file"):
        mhsa.read_checkpoint(tmp_path / "absent.safetensors")


def test_a_tensor_of_two_files_is_one_and_the_same(tmp_path: Path) -> None:
    """A folder may hold a model twice, whole and in parts; which of two others is meant, nobody says."""
    path = copied("awq-4", tmp_path, lambda tensors: None)
    shutil.copy(path / "model.safetensors", path / "other.safetensors")
    assert len(mhsa.read_checkpoint(path).linears) == 1
    tensors = load_file(path / "model.safetensors")
    tensors["layers.0.scales"] *= 2
    save_file(tensors, path / "other.safetensors")
    with pytest.raises(ModelError, match=r"other.safetensors: expected each tensor in one file, got another layers.0"):
        mhsa.read_checkpoint(path)


# ---- GGUF


def rows_of(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(rows of bytes (7, ...) of 512 terms of a type, the weight that the package makes of them)"""
    gguf = pytest.importorskip("gguf")
    drawn, which = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
    terms, size = gguf.GGML_QUANT_SIZES[which]
    if not kind.endswith("K"):
        weight = drawn.standard_normal((7, 512), dtype=np.float32)
        weight[2, :32], weight[1, :32] = 0, -0.75
        rows = gguf.quantize(weight, which)
    else:  # the package does not make these: any bytes are some, where the float16 numbers are finite
        rows = drawn.integers(0, 256, (7, 512 // terms * size), dtype=np.uint8)
        halves = (drawn.standard_normal((7, 512 // terms, 2)) * 0.01).astype(np.float16)
        blocks = rows.reshape(7, -1, size)
        if kind != "Q6_K":
            blocks[..., :4] = halves.view(np.uint8)
            blocks[0, 0, 4] = blocks[0, 0, 12] = 0  # the first scale and offset
            blocks[1, 0, 4], blocks[1, 0, 12] = 0, blocks[1, 0, 12] & 0xF0  # the first scale alone
        else:
            blocks[..., -2:] = halves[..., :1].copy().view(np.uint8)
    return rows, gguf.dequantize(rows, which)


@pytest.mark.parametrize("kind", _TYPES)
def test_blocks_of_gguf_are_what_the_package_makes_of_them(kind: str) -> None:
    rows, expected = rows_of(kind)
    blocks = _blocks("w", kind, rows)
    result = blocks.floats().numpy()
    if kind in ("Q4_0", "Q5_0", "Q6_K", "Q8_0"):
        np.testing.assert_array_equal(result, expected)
        return
    # W = scale q + offset; the zero point, -offset / scale, is rounded, and the difference and the product are.
    offsets = np.abs(blocks.points().numpy() * blocks.scales.numpy())
    most = 2.0**-23 * (np.repeat(offsets, 32, 1) + 2 * np.abs(expected))
    assert (np.abs(result - expected) <= most).all() and (result[1, :32] == expected[1, :32]).all()
    assert not (result == expected).all()  # so the page says


@pytest.mark.parametrize("kind", _TYPES)
def test_blocks_without_a_finite_scale_are_refused(kind: str) -> None:
    rows, _ = rows_of(kind)
    place = 208 if kind == "Q6_K" else 0
    rows[3, place : place + 2] = np.array([np.nan], np.float16).view(np.uint8)
    with pytest.raises(ModelError, match=f"w: expected finite scales of {kind}, got NaN or infinity"):
        _blocks("w", kind, rows)


def written(path: Path, names: list[str], **words: Any) -> Path:
    """A file whose tensors are all of Q8_0, with some metadata."""
    gguf = pytest.importorskip("gguf")
    which, order = gguf.GGMLQuantizationType.Q8_0, words.pop("order", "LITTLE")
    writer = gguf.GGUFWriter(str(path), "llama", endianess=gguf.GGUFEndian[order])
    for key, number in words.items():
        writer.add_int64(f"llama.{key}", number)
    for name in names:
        weight = np.random.default_rng(len(name)).standard_normal((32, 64), dtype=np.float32)
        writer.add_tensor(name, gguf.quantize(weight, which), raw_dtype=which)
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()
    return path


def test_what_a_gguf_file_states_of_itself_is_not_trusted(tmp_path: Path) -> None:
    """The package makes a table of as many layers as are stated, for hours; heads are those that rows can have."""
    checkpoint = mhsa.read_checkpoint(written(tmp_path / "a.gguf", ["blk.0.attn_q.weight"], block_count=2**62))
    layer = "model.layers.0.self_attn.q_proj"
    weight = checkpoint.linears["blk.0.attn_q"].floats()
    assert checkpoint.aliases[layer] == "blk.0.attn_q"
    assert not isinstance(checkpoint.of_layer(layer, weight), str)
    path = written(tmp_path / "b.gguf", ["blk.0.attn_q.weight"], block_count=1, **{"attention.head_count": -4})
    assert isinstance(mhsa.read_checkpoint(path).of_layer(layer, weight + 1), str)


def test_gguf_of_the_other_byte_order_and_of_one_name_twice_is_refused(tmp_path: Path) -> None:
    """The package swaps numbers of metadata, not the scales within blocks."""
    with pytest.raises(ModelError, match="bytes in this machine's order"):
        mhsa.read_checkpoint(written(tmp_path / "a.gguf", ["up.weight"], order="BIG"))
    with pytest.raises(ModelError, match=r"each weight once, got 'up' and 'up\.weight'"):
        mhsa.read_checkpoint(written(tmp_path / "b.gguf", ["up.weight", "up"]))
