"""Writes into a cache: the kernel alone and through compile, into a copy and in place, against NumPy, bit for bit.

Notation: B batch, L new rows, S rows of the cache.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import tvm
from onnx import TensorProto, helper, numpy_helper
from support.kernel_runs import compiled, vector_machine
from support.scatter_cases import BASE, DTYPES, INT64, SHAPES, call_of, drawn, scattered

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.frontend.relax.importer import import_onnx
from mhsa_compile.kernels.cpu.cache_scatter import CpuKvScatterKernel
from mhsa_compile.kernels.interface.ops import KvScatterOp
from mhsa_compile.runtime.compiled_attention import CompiledAttention

KINDS = {"float32": TensorProto.FLOAT, "bfloat16": TensorProto.BFLOAT16}


class Run:
    """A compiled scatter, called with arrays."""

    def __init__(self, op: KvScatterOp, bits: int = 256) -> None:
        profile, kernel = vector_machine(bits, 16), CpuKvScatterKernel()
        assert kernel.why_not(op, profile) is None
        self.op = op
        self.run = compiled(kernel.emit(op, profile, kernel.default_config(op, profile)), profile)["run"]

    def __call__(self, cache: np.ndarray, update: np.ndarray, *indices: np.ndarray) -> np.ndarray:
        given = [tvm.runtime.tensor(array) for array in (cache, update, *indices)]
        if not self.op.in_place:
            given.append(tvm.runtime.tensor(drawn(np.random.default_rng(9), cache.dtype, *cache.shape)))
        self.run(*given)
        return given[0 if self.op.in_place else -1].numpy()


SIZES = ((1, 1, 1), (2, 3, 7), (3, 1, 211), (2, 211, 211))  # B, L, S; the last ones are shared between threads


@pytest.mark.thorough_but("free row-True-True", "row of rows-True-True", "two axes-True-True")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("circular", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel(shape: str, circular: bool, in_place: bool) -> None:
    op = replace(BASE, circular=circular, in_place=in_place, **SHAPES[shape])  # type: ignore[arg-type]
    run, rng = Run(op), np.random.default_rng(0)
    for B, L, S in SIZES:
        arrays, expected = call_of(op, rng, B, L, S)
        assert np.array_equal(run(*arrays), expected)


@pytest.mark.thorough_but("bool", "int8", "uint16", "float16", "bfloat16", "int64")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: np.dtype) -> None:
    rng = np.random.default_rng(0)
    for in_place in (False, True):
        run = Run(replace(BASE, dtype=str(dtype), in_place=in_place))
        cache, update, indices = drawn(rng, dtype, 2, 3, 11, 10), drawn(rng, dtype, 2, 3, 4, 10), np.array([7, 0])
        assert np.array_equal(run(cache, update, indices), scattered(cache, update, indices, 2))


def model(
    dtype: int = TensorProto.FLOAT,
    cache: tuple[Any, ...] = ("B", 3, "S", 10),
    update: tuple[Any, ...] = ("B", 3, "L", 10),
    indices: tuple[Any, ...] | None = ("B",),
    said: Any = None,
    index_dtype: int = TensorProto.INT64,
    update_dtype: int | None = None,
    **attributes: Any,
) -> onnx.ModelProto:
    """past, new and at -> TensorScatter -> present; `said` is the model's entry "mhsa.in_place"."""
    value = helper.make_tensor_value_info
    inputs = [value("past", dtype, cache), value("new", update_dtype or dtype, update)]
    inputs += [] if indices is None else [value("at", index_dtype, indices)]
    node = helper.make_node("TensorScatter", [i.name for i in inputs], ["present"], name="write", **attributes)
    graph = helper.make_graph([node], "g", inputs, [value("present", dtype, cache)])
    result = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    if said is not None:
        helper.set_model_props(result, {"mhsa.in_place": said if isinstance(said, str) else json.dumps(said)})
    return result


def loaded(*args: Any, **fields: Any) -> CompiledAttention:
    return mhsa.load(mhsa.compile(model(*args, **fields)))


@pytest.mark.thorough
def test_the_operator_makes_a_copy() -> None:
    rng = np.random.default_rng(0)
    for fields in ({}, {"mode": "circular"}, {"axis": 2}, {"indices": None}):
        write = loaded(**fields)
        cache, update = drawn(rng, np.dtype("f4"), 2, 3, 11, 10), drawn(rng, np.dtype("f4"), 2, 3, 4, 10)
        indices = np.array([9 if "mode" in fields else 7, 0]) * ("indices" not in fields)
        before = cache.copy()
        present = write(cache, update, *([] if "indices" in fields else [indices]))
        assert np.array_equal(present, scattered(cache, update, indices, 2))
        assert np.array_equal(cache, before)
        assert not np.shares_memory(cache, present)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.thorough), "bfloat16"])
def test_in_place_the_output_is_the_caller_s_own_array(dtype: str) -> None:
    rng = np.random.default_rng(0)
    write = loaded(KINDS[dtype], said={"past": "present"})
    assert write.manifest.in_place == {"present": "past"}
    memory = drawn(rng, np.dtype(dtype), 1 + 2 * 3 * 11 * 10)
    cache, update = memory[1:].reshape(2, 3, 11, 10), drawn(rng, np.dtype(dtype), 2, 3, 4, 10)  # at an odd address
    expected = scattered(cache, update, np.array([7, 0]), 2)
    assert write(cache, update, np.array([7, 0])) is cache
    assert np.array_equal(cache, expected)
    as_torch = torch.zeros(2, 3, 11, 10, dtype=getattr(torch, dtype))
    rows = torch.ones(2, 3, 4, 10, dtype=as_torch.dtype)
    assert write(as_torch, rows, torch.tensor([1, 5])) is as_torch
    assert as_torch.sum() == rows.sum()


def test_in_place_only_the_new_rows_are_touched() -> None:
    """The pages of a cache that were never written stay without memory: a copy of it would take 256 MB."""
    write, rows = loaded(said={"past": "present"}), 1 << 21
    cache = np.zeros((1, 3, rows, 10), np.float32)
    before = resident_bytes()
    assert write(cache, np.ones((1, 3, 1, 10), np.float32), np.array([rows - 1])) is cache
    assert cache[:, :, -1].all()
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_cache_overrun_is_refused_before_anything_is_written() -> None:
    for said in (None, {"past": "present"}):
        write = loaded(said=said)
        cache, update = np.zeros((2, 3, 11, 10), np.float32), np.ones((2, 3, 4, 10), np.float32)
        for wrong in (8, -1, INT64.min, INT64.max):
            with pytest.raises(InputError) as refused:
                write(cache, update, np.array([0, wrong]))
            assert refused.value.argument == "input 'at'"
            assert refused.value.expected == "indices from 0 to 11 - 4, so that the 4 new rows end within the cache"
            assert str(wrong) in refused.value.got
        with pytest.raises(InputError, match="input 'new': expected at most 11 rows, as the cache has, got 12 rows"):
            write(cache, np.ones((2, 3, 12, 10), np.float32), np.array([0, 0]))
        assert not cache.any()
        assert write(cache, update, np.array([0, 7]))[1, :, 7:].all()


def test_a_circular_cache_has_no_end_but_a_size() -> None:
    write = loaded(mode="circular", said={"past": "present"})
    cache = np.zeros((1, 3, 11, 10), np.float32)
    with pytest.raises(InputError, match="input 'new': expected at most 11 rows"):
        write(cache, np.ones((1, 3, 12, 10), np.float32), np.array([0]))
    write(cache, np.ones((1, 3, 4, 10), np.float32), np.array([-2]))
    assert cache[:, :, [9, 10, 0, 1]].all() and not cache[:, :, 2:9].any()


def test_what_is_written_must_be_memory_of_its_own() -> None:
    write, at = loaded(said={"past": "present"}), np.array([0])
    cache, update = np.zeros((1, 3, 11, 10), np.float32), np.ones((1, 3, 4, 10), np.float32)
    frozen = cache.copy()
    frozen.flags.writeable = False
    wrong = {
        "read-only memory": frozen,
        "an array with gaps or unaligned": np.zeros((1, 3, 22, 10), np.float32)[:, :, ::2],
        "a tensor with gaps": torch.zeros(1, 3, 22, 10)[:, :, ::2],
        "a tensor that requires grad": torch.zeros(1, 3, 11, 10, requires_grad=True),
    }
    for got, array in wrong.items():
        with pytest.raises(InputError, match=f"input 'past': expected contiguous memory .* got {got}"):
            write(array, update, at)


def two_caches(dtype: int) -> onnx.ModelProto:
    source = model(dtype, said={"past": "present", "past_v": "present_v"})
    source.graph.node.append(helper.make_node("TensorScatter", ["past_v", "new", "at"], ["present_v"]))
    for values, name in ((source.graph.input, "past_v"), (source.graph.output, "present_v")):
        values.append(values[0])
        values[-1].name = name
    return source


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.thorough), "bfloat16"])
def test_two_caches_are_not_one_memory(dtype: str) -> None:
    write = mhsa.load(mhsa.compile(two_caches(KINDS[dtype])))
    cache, update, at = np.zeros((1, 3, 11, 10), dtype), np.ones((1, 3, 4, 10), dtype), np.array([0])
    for array in (cache, torch.zeros(1, 3, 11, 10, dtype=getattr(torch, dtype))):
        with pytest.raises(
            InputError, match=r"input 'past_v': expected memory of its own: .* got some of that of 'past'"
        ):
            write(past=array, past_v=array, new=update, at=at)
    memory = np.zeros(2 * cache.size, dtype)
    overlapping = [memory[first:][: cache.size].reshape(cache.shape) for first in (0, cache.size - 1)]
    for one, two in (overlapping, overlapping[::-1]):
        with pytest.raises(InputError, match=r"input 'past_v': expected memory of its own: .* some of that of 'past'"):
            write(past=one, past_v=two, new=update, at=at)
    with pytest.raises(InputError, match=r"input 'new': expected memory of its own: .* some of that of 'past_v'"):
        write(past=cache, past_v=overlapping[0], new=memory[-120 - cache.size :][:120].reshape(update.shape), at=at)
    other = cache.copy()
    results = write(past=cache, past_v=other, new=update, at=at)
    assert results[0] is cache and results[1] is other
    assert np.array_equal(cache, other) and cache.sum() == update.sum()


def test_tvm_s_own_code_reads_a_cache_at_any_address() -> None:
    """Here it reads the cache, which is never copied, through a view."""
    source = with_reader("seen", "Neg")
    source.graph.initializer.append(numpy_helper.from_array(np.array([0, 3, -1, 10]), "sizes"))
    source.graph.node.insert(1, helper.make_node("Reshape", ["present", "sizes"], ["seen"]))
    write = mhsa.load(mhsa.compile(source))
    assert write.manifest.has_fallbacks
    memory = np.zeros(3 * 11 * 10 + 32, np.float32)
    first = -memory.__array_interface__["data"][0] // 4 % 16
    update, at = np.ones((1, 3, 4, 10), np.float32), np.array([7])
    for offset in (0, 1, 8):
        cache = memory[first + offset :][: 3 * 11 * 10].reshape(1, 3, 11, 10)
        for array in (cache, torch.from_numpy(cache)):
            present, negative = write(array, update, at)
            assert present is array and np.array_equal(np.asarray(negative), -cache)


def with_reader(name: str, op_type: str) -> onnx.ModelProto:
    source = model(said={"past": "present"})
    source.graph.node.append(helper.make_node(op_type, [name], ["other"]))
    source.graph.output.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, ("B", 3, "S", 10)))
    return source


def without_scatter(said: dict[str, str]) -> onnx.ModelProto:
    source = model(said=said)
    source.graph.node[0].CopyFrom(helper.make_node("Neg", ["past"], ["present"]))
    return source


REFUSED = {
    "mode": (model(mode="round"), 'mode of "linear" or "circular", got \'round\''),
    "batch axis": (model(axis=0), "axis from 1 to 3, or from -3 to -1, as past_cache has 4, got 0"),
    "batch axis from the end": (model(axis=-4), "axis from 1 to 3, .* got -4"),
    "no axis": (model(axis=4), "axis from 1 to 3, .* got 4"),
    "shape": (model(update=("B", 2, "L", 10)), r"an update of the shape of past_cache, .* got \('B', 2, 'L', 10\)"),
    "rank": (model(update=("B", "L", 10)), "an update of the shape of past_cache"),
    "too long": (model(cache=("B", 3, 4, 10), update=("B", 3, 5, 10)), "an update of at most 4 on axis 2, .* got 5"),
    "indices": (
        model(cache=(2, 3, 4, 10), update=(2, 3, 1, 10), indices=(3,)),
        r"write_indices of shape \(2,\), got \(3,\)",
    ),
    "index rank": (model(indices=("B", 1)), "write_indices of known rank 1, got"),
    "index dtype": (model(index_dtype=TensorProto.INT32), "write_indices of int64, got int32"),
    "dtypes": (model(update_dtype=TensorProto.FLOAT16), "past_cache and update of one dtype, got float32 and float16"),
    "not JSON": (model(said="past"), "a JSON object such as"),
    "not names": (model(said={"past": 1}), "a JSON object such as"),
    "no input": (
        model(said={"cache": "present"}),
        "'cache' -> 'present': expected an input that a TensorScatter takes",
    ),
    "no output": (model(said={"past": "y"}), "'past' -> 'y': expected an input that a TensorScatter takes"),
    "not the cache": (model(said={"new": "present"}), "'new' -> 'present': expected an input that a TensorScatter"),
    "nothing written": (without_scatter({"past": "present"}), "'past' -> 'present': expected an input that a TensorSc"),
    "no such name": (without_scatter({"cache": "y"}), "'cache' -> 'y': expected an input that a TensorScatter"),
    "read before": (with_reader("past", "Neg"), "an input that the TensorScatter alone reads, got Neg, too"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    source, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        import_onnx(source)
