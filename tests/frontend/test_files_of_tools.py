"""Files as tools write them beside what ONNX's checker asks for, and of calibrations that saw a mask: against ONNX
Runtime. `campaigns.quantised_files` has whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, parser
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
from onnxruntime.transformers.float16 import convert_float_to_float16
from support.encoder_layers import WIDE, encoder_layer
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.frontend.canonicalize.canonicalize import canonicalize
from mhsa_compile.frontend.onnx_graph import in_order
from mhsa_compile.frontend.reading.dialect import in_one_dialect

N = helper.make_node
RNG = np.random.default_rng(0)


def of_onnx_runtime(model: onnx.ModelProto, feeds: dict[str, Any], *, optimised: bool = True) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


# ---- Nodes in any order

UNSORTED = """<ir_version: 9, opset_import: ["" : 21, "own" : 1]> g (float[B, 3] a, bool c) => (float[B, 3] y) {
    y = own.Twice (u)
    u = If (c) <then_branch = t () => (float[B, 3] p) { p = Relu (q)  q = Add (z, z) },
                else_branch = e () => (float[B, 3] r) { r = Neg (z) }>
    z = Abs (a) }
<domain: "own", opset_import: ["" : 21]> Twice (v) => (w) { w = Add (s, v)  s = Identity (v) }"""


def test_nodes_may_stand_in_any_order() -> None:
    """In the graph, in branches, in functions; ONNX Runtime takes such graphs, and so do we."""
    model = parser.parse_model(UNSORTED)
    before = model.SerializeToString()
    a = RNG.standard_normal((2, 3)).astype(np.float32)
    call = mhsa.load(mhsa.compile(model, without_attention="accept", check=False))
    for c, factor in ((True, 4), (False, -2)):
        assert np.array_equal(call(a=a, c=np.array(c)), factor * np.abs(a))
    assert model.SerializeToString() == before


def test_a_long_chain_backwards_and_a_circle() -> None:
    """No recursion; what stands in order stays as it stands; of a circle each node comes once."""
    chain = [N("Relu", [f"v{i}"], [f"v{i + 1}"]) for i in range(3000)]
    assert in_order(chain[::-1]) == chain and in_order(chain) == chain
    circle = [N("Add", ["a", "z"], ["y"]), N("Relu", ["y"], ["z"])]
    assert sorted(node.op_type for node in in_order(circle)) == ["Add", "Relu"]
    apart = [N("Relu", ["b"], ["d"]), N("Relu", ["a"], ["c"])]
    assert in_order(apart) == apart


@pytest.mark.thorough
@pytest.mark.parametrize("keep_io_types", [True, False])
def test_the_float16_converter_of_onnx_runtime(keep_io_types: bool) -> None:
    """It puts the Cast of an input behind all others."""
    model = encoder_layer(RNG, ["B", "L", WIDE], 0.2, 1.0)
    halves = convert_float_to_float16(
        onnx.ModelProto.FromString(model.SerializeToString()), keep_io_types=keep_io_types
    )
    assert in_one_dialect(halves) is not halves
    x = RNG.standard_normal((2, 9, WIDE)).astype(np.float32 if keep_io_types else np.float16)
    (expected,) = of_onnx_runtime(halves, {"x": x})
    assert np.abs(mhsa.load(mhsa.compile(halves))(x) - expected).max() < 2e-2 * np.abs(expected).max()


# ---- What PyTorch's exporter writes


def test_a_mask_is_looked_up_where_keys_are_a_sum_of_lengths() -> None:
    """A decoder's padding mask (B, P + L) at (batch, key), as transformers has it and PyTorch exports it."""
    nodes = [
        N("Concat", ["past", "new"], ["keys"], axis=1),
        N("Concat", ["mask", "more"], ["whole"], axis=1),
        N("GatherND", ["whole", "places"], ["y"], name="lookup"),
        N("GatherND", ["keys", "places"], ["z"]),
    ]
    dims = {"mask": ["B", "P"], "more": ["B", "L"], "past": ["B", "P"], "new": ["B", "L"], "places": ["B", 1, "T", 2]}
    kinds = {"mask": "bool", "more": "bool", "places": "int64", "y": "bool"}
    model = model_of(nodes, dims, {"y": ["B", 1, "T"], "z": ["B", 1, "T"]}, kinds=kinds, opset=18)
    call = mhsa.load(mhsa.compile(model, without_attention="accept", check=False))
    feeds: dict[str, Any] = {name: RNG.random((3, size)) < 0.5 for name, size in (("mask", 4), ("more", 7))}
    feeds |= {name: RNG.random((3, size)).astype(np.float32) for name, size in (("past", 4), ("new", 7))}
    b, k = RNG.integers(-3, 3, (3, 1, 5)), RNG.integers(-11, 11, (3, 1, 5))
    y, z = call(**feeds, places=np.stack([b, k], -1))
    assert np.array_equal(y, np.concatenate([feeds["mask"], feeds["more"]], 1)[b, k])
    assert np.array_equal(z, np.concatenate([feeds["past"], feeds["new"]], 1)[b, k])
    k[0, 0, 0], b[1, 0, 2] = 11, 3  # beyond the last: NaN of floats, as Gather has it
    assert np.isnan(call(**feeds, places=np.stack([b, k], -1))[1]).sum() == 2


FLAT = """<ir_version: 9, opset_import: ["" : 18]>
g (int64[B, T] ids, bool[B, S] mask, float[B, 4, P, 16] past) => (bool[B, 1, 1, R] y) {
    zero = Constant <value_int = 0> ()    one = Constant <value_int = 1> ()   all = Constant <value_ints = [-1]> ()
    first = Constant <value_ints = [0]> ()  last = Constant <value_ints = [1, 2, 3]> ()
    before = Constant <value_ints = [0, 1, 2]> ()
    b = Shape <start = 0, end = 1> (ids)  t = Shape <start = 1, end = 2> (ids)  s = Shape <start = 1, end = 2> (mask)
    p = Shape <start = 2, end = 3> (past) r = Add (p, t)      rows = Squeeze (b)      keys = Squeeze (r)
    i = Range (zero, rows, one)           j = Range (zero, keys, one)
    e = Unsqueeze (i, last)               f = Unsqueeze (j, before)                   w = Mul (e, s)
    places = Add (w, f)                   flat = Reshape (mask, all)                  y = Gather (flat, places) }"""


def test_a_mask_is_looked_up_by_flat_places() -> None:
    """As TorchScript's exporter has a decoder with a past: batch times a size that no array of the group has, plus a
    key, of which there are a sum of sizes."""
    call = mhsa.load(mhsa.compile(parser.parse_model(FLAT), without_attention="accept", check=False))
    for batch, new, past in ((3, 5, 4), (2, 1, 11), (1, 13, 2)):
        mask = RNG.random((batch, past + new + 3)) < 0.5
        rows = np.zeros((batch, 4, past, 16), np.float32)
        y = call(ids=np.zeros((batch, new), np.int64), mask=mask, past=rows)
        assert np.array_equal(y, mask[:, None, None, : past + new])


HEADS = """<ir_version: 9, opset_import: ["" : 18]> g (float[B, 17, 64] q, float[B, 17, 64] k, float[B, 17, 64] v)
=> (float[B, 17, 64] y) {{
    heads = Constant <value_ints = [{heads}]> ()    rows = Constant <value_ints = [-1, 17, 64]> ()
    a = Reshape <allowzero = 1> (q, heads)   b = Reshape <allowzero = 1> (k, heads)   c = Reshape (v, heads)
    d = Transpose <perm = [0, 2, 1, 3]> (a)  e = Transpose <perm = [0, 2, 3, 1]> (b)
    f = Transpose <perm = [0, 2, 1, 3]> (c)  s = MatMul (d, e)  p = Softmax (s)  h = MatMul (p, f)
    o = Transpose <perm = [0, 2, 1, 3]> (h)  y = Reshape (o, rows) }}"""


@pytest.mark.parametrize(("heads", "fused"), [("-1, 17, 4, 16", True), ("-1, 17, 2, 16", False)])
def test_a_free_batch_may_be_what_is_left_of_a_reshape(heads: str, fused: bool) -> None:
    """As PyTorch exports a ViT; where sizes do not cancel, the batch is another."""
    (block,) = canonicalize(parser.parse_model(HEADS.format(heads=heads))).blocks
    assert block.fused is fused and ("batch" in block.note) is not fused


# ---- Calibrations that saw a mask


class Samples(CalibrationDataReader):
    def __init__(self, fill: float) -> None:
        self.left = [rows(fill) for _ in range(3)]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self.left.pop() if self.left else None


def rows(fill: float) -> dict[str, np.ndarray]:
    mask = np.where(np.arange(9) < 6, 0, fill).astype(np.float32)
    qkv = {name: RNG.standard_normal((2, 4, 9, 16)).astype(np.float32) for name in "qkv"}
    return {**qkv, "mask": np.broadcast_to(mask, (2, 1, 1, 9)).copy()}


def masked_attention(path: Path, fill: float, form: QuantFormat) -> onnx.ModelProto:
    nodes = [
        N("Transpose", ["k"], ["t"], perm=[0, 1, 3, 2], name="transpose"),
        N("MatMul", ["q", "t"], ["s"], name="scores"),
        N("Mul", ["s", "scale"], ["u"], name="scaled"),
        N("Add", ["u", "mask"], ["m"], name="masked"),
        N("Softmax", ["m"], ["p"], axis=-1, name="weights"),
        N("MatMul", ["p", "v"], ["y"], name="values"),
    ]
    dims: dict[str, Any] = {name: ["B", 4, "L", 16] for name in "qkv"} | {"mask": ["B", 1, 1, "L"]}
    model = model_of(nodes, dims, {"y": ["B", 4, "L", 16]}, {"scale": np.float32(0.25)}, opset=18)
    onnx.save(model, path / "float.onnx")
    quantize_static(path / "float.onnx", path / "small.onnx", Samples(fill), quant_format=form)
    return onnx.load(path / "small.onnx")


FILLS = {"as BERT once": -1e4, "the least float": float(np.finfo(np.float32).min), "no more than scores": -6.0}


@pytest.mark.parametrize("form", [QuantFormat.QDQ, pytest.param(QuantFormat.QOperator, marks=pytest.mark.thorough)])
@pytest.mark.thorough_but("the least float-QDQ")
@pytest.mark.parametrize("name", FILLS)
def test_scores_in_coarse_steps_stay_what_the_file_makes_of_them(name: str, form: QuantFormat, tmp_path: Path) -> None:
    """A mask of -3e38 that is rounded with the scores leaves nothing of them: all weights of a row are alike. Floats
    would give what the model was before. In fine steps, attention stays one operation."""
    fill = FILLS[name]
    model = masked_attention(tmp_path, fill, form)
    artifact = mhsa.compile(model, without_attention="accept", check=False)
    (block,) = artifact.manifest.attention
    feeds, coarse = rows(fill), fill < -255
    expected = of_onnx_runtime(model, feeds, optimised=False)[0]
    before = of_onnx_runtime(onnx.load(tmp_path / "float.onnx"), feeds)[0]
    # Of all elements: which of the largest two is larger is chance.
    error = float(np.sqrt(np.mean((mhsa.load(artifact)(**feeds) - expected) ** 2)))
    lost = float(np.sqrt(np.mean((before - expected) ** 2)))
    assert block.fused is not coarse and ("rounds scores in steps of" in block.note) is coarse
    assert error < (lost / 10 if coarse else lost)
