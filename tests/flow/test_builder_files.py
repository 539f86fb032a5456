"""Decoders as onnxruntime-genai's builder writes them compile as they are: caches that grow, and buffers of one length.

SimplifiedLayerNormalization stands in the standard's domain, lengths are computed from the attention mask, and no
metadata says anything about caches. The reference is ONNX Runtime.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.frontend.canonicalize.caches_in_place import with_caches_in_place

V, D, H, G, E, P = 40, 64, 4, 2, 16, 16  # ids, width, heads, key/value heads, head dim, a buffer's length
MICROSOFT = "com.microsoft"
VALUE = helper.make_tensor_value_info
Arrays = dict[str, np.ndarray[Any, Any]]


def decoder(past: str | int, present: str | int | None, *, packed: bool = False) -> onnx.ModelProto:
    """One layer; the lengths of its cache as they are declared. Queries, keys and values of one product if `packed`."""
    rng = np.random.default_rng(0)
    weights: Arrays = {"one": np.array([1], np.int64), "axis": np.array(1, np.int64)}

    def weight(name: str, *shape: int) -> str:
        weights[name] = (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        return name

    angles = np.arange(64)[:, None] * 10000.0 ** (-np.arange(E // 2) / (E // 2))
    weights |= {"cos_cache": np.cos(angles).astype("f4"), "sin_cache": np.sin(angles).astype("f4")}
    N = helper.make_node
    heads = {"qkv": H + 2 * G} if packed else {"q": H, "k": G, "v": G}
    last, total, caches = (
        "mask/Sub/Cast",
        "mask/Gather/Cast",
        [f"past_key_values.0.{role}" for role in ("key", "value")],
    )
    nodes = [
        N("Gather", [weight("table", V, D), "input_ids"], ["x"]),
        N("ReduceSum", ["attention_mask", "one"], ["mask/ReduceSum"], keepdims=0),
        N("Sub", ["mask/ReduceSum", "one"], ["mask/Sub"]),
        N("Cast", ["mask/Sub"], [last], to=TensorProto.INT32),
        N("Shape", ["attention_mask"], ["mask/Shape"]),
        N("Gather", ["mask/Shape", "axis"], ["mask/Gather"], axis=0),
        N("Cast", ["mask/Gather"], [total], to=TensorProto.INT32),
        N("SimplifiedLayerNormalization", ["x", weight("norm", D)], ["n"], axis=-1, epsilon=1e-5, stash_type=1),
        *(N("MatMul", ["n", weight(f"w{role}", D, count * E)], [role]) for role, count in heads.items()),
        N(
            "GroupQueryAttention",
            [*heads, *[""] * (3 - len(heads)), *caches, last, total, "cos_cache", "sin_cache"],
            ["a", "present.0.key", "present.0.value"],
            name="gqa", domain=MICROSOFT, num_heads=H, kv_num_heads=G, scale=E**-0.5, softcap=0.0, do_rotary=1,
            rotary_interleaved=0, local_window_size=-1,
        ),
        N("MatMul", ["a", weight("wo", H * E, D)], ["o"]),
        N("SkipSimplifiedLayerNormalization", ["x", "o", "norm"], ["y"], domain=MICROSOFT, epsilon=1e-5),
        N("MatMul", ["y", weight("head", D, V)], ["logits"]),
    ]  # fmt: skip
    ids, mask = ["batch_size", "sequence_length"], ["batch_size", "total_sequence_length"]
    cache = ["batch_size", G, past, E]
    inputs = [VALUE("input_ids", TensorProto.INT64, ids), VALUE("attention_mask", TensorProto.INT64, mask)]
    inputs += [VALUE(f"past_key_values.0.{role}", TensorProto.FLOAT, cache) for role in ("key", "value")]
    grown = None if present is None else ["batch_size", G, present, E]
    outputs = [VALUE("logits", TensorProto.FLOAT, [*ids, V])]
    outputs += [VALUE(f"present.0.{role}", TensorProto.FLOAT, grown) for role in ("key", "value")]
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "main_graph", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="onnxruntime-genai")


def feeds(batch: int, length: int, past: int, total: int) -> Arrays:
    rng = np.random.default_rng(length)
    caches = {f"past_key_values.0.{role}": rng.standard_normal((batch, G, past, E)) for role in ("key", "value")}
    ids = {"input_ids": rng.integers(0, V, (batch, length)), "attention_mask": np.ones((batch, total), np.int64)}
    return ids | {name: array.astype(np.float32) for name, array in caches.items()}


def theirs(model: onnx.ModelProto, arrays: Arrays) -> list[np.ndarray[Any, Any]]:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return list(session.run(None, {name: array.copy() for name, array in arrays.items()}))


@pytest.mark.thorough
@pytest.mark.parametrize("present", ["total_sequence_length", None])
def test_a_cache_that_grows(present: str | None) -> None:
    model = decoder("past_sequence_length", present)
    artifact = mhsa.compile(model)
    (block,) = artifact.manifest.attention
    assert block.fused and ("has no length in the file" in block.note) == (present is None)
    call = mhsa.load(artifact)
    for batch, length, past in ((2, 5, 0), (1, 3, 4), (2, 1, 9)):
        arrays = feeds(batch, length, past, past + length)
        for got, expected in zip(call(**arrays), theirs(model, arrays), strict=True):
            np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-5, atol=1e-5)


def test_a_prompt_and_a_step_pack_their_weights_alike() -> None:
    """One product for queries, keys and values is one for each, at any length and at one."""
    model = decoder(P, P, packed=True)
    artifacts = [mhsa.compile(model, in_place=True, dims=dims) for dims in ({}, {"sequence_length": 1})]
    many, one = (artifact.manifest for artifact in artifacts)
    assert many.packing == one.packing and "split" not in {op.name for op in (*many.ops, *one.ops)}
    for artifact, new in zip(artifacts, (3, 1), strict=True):
        arrays = feeds(1, new, P, P)
        expected = theirs(model, arrays)
        for got, wanted in zip(mhsa.load(artifact)(**arrays), expected, strict=True):
            np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("length", ["cache_length", P])
def test_a_buffer_is_written_where_it_lies_if_asked_for(length: str | int) -> None:
    model = decoder(length, length)
    call = mhsa.load(mhsa.compile(model, in_place=True))
    for batch, new, total in ((1, 3, 9), (2, 1, 12)):
        arrays = feeds(batch, new, P, total)
        expected = theirs(model, arrays)
        logits, *presents = call(**arrays)
        np.testing.assert_allclose(logits, expected[0], rtol=1e-5, atol=1e-5)
        for role, present, wanted in zip(("key", "value"), presents, expected[1:], strict=True):
            assert present is arrays[f"past_key_values.0.{role}"]
            np.testing.assert_allclose(present[:, :, :total], wanted[:, :, :total], rtol=1e-5, atol=1e-5)


def test_what_cannot_be_written_in_place_is_refused() -> None:
    with pytest.raises(ModelError, match="in_place: expected a cache that a call can write into"):
        with_caches_in_place(decoder("past_sequence_length", "total_sequence_length"))
    shared = decoder(P, P)
    shared.graph.node.append(helper.make_node("Neg", ["past_key_values.0.key"], ["other"]))
    pairs = with_caches_in_place(shared).metadata_props[0].value
    assert "value" in pairs and "key_values.0.key" not in pairs  # somebody else reads that one
    with pytest.raises(InputError, match="in_place: expected it with an ONNX model"):
        mhsa.compile(mhsa.AttentionSpec(embed_dim=32, num_heads=4), in_place=True)
