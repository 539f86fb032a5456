"""MatMulNBits and GatherBlockQuantized: what they become means what ONNX Runtime computes in float32 or float16.

N out-features, K in-features, V rows of a table, D its columns.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError
from mhsa_compile.kernels.cpu.linear.blocks import CpuBlockLinearKernel

MICROSOFT = "com.microsoft"
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
V, D = 50, 64


def in_bytes(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of so many bits, the first in the lowest bits of a byte."""
    apart = numbers.reshape(*numbers.shape[:-1], -1, 8 // bits).astype(np.uint8)
    return np.bitwise_or.reduce(apart << (bits * np.arange(8 // bits, dtype=np.uint8)), axis=-1)


def zero_points(rng: np.random.Generator, rows: int, blocks: int, bits: int, kind: str, dtype: str) -> np.ndarray:
    if kind == "floats":
        return (rng.random((rows, blocks)) * (1 << bits)).astype(dtype)
    whole = -(-blocks * bits // 8) * 8 // bits
    return in_bytes(rng.integers(0, 1 << bits, (rows, whole)), bits)


def product(
    bits: int = 4,
    *,
    K: int = 72,
    N: int = 40,
    block: int = 16,
    zeros: str = "",
    bias: bool = False,
    dtype: str = "float32",
    **attributes: Any,
) -> onnx.ModelProto:
    rng, n = np.random.default_rng(0), -(-K // block)
    names = ["x", "q", "s"]
    arrays = {"q": in_bytes(rng.integers(0, 1 << bits, (N, n * block)), bits).reshape(N, n, -1)}
    arrays["s"] = (rng.random((N, n)) * 0.02 + 0.01).astype(dtype)
    if zeros:
        arrays["z"] = zero_points(rng, N, n, bits, zeros, dtype)
        names.append("z")
    if bias:
        arrays["b"] = rng.standard_normal(N).astype(dtype)
        names += [*[""] * (5 - len(names)), "b"]
    words = {"K": K, "N": N, "bits": bits, "block_size": block, **attributes}
    node = helper.make_node("MatMulNBits", names, ["y"], name="product", domain=MICROSOFT, **words)
    dims, kinds = [{name: ["B", "L", size]} for name, size in (("x", K), ("y", N))], dict.fromkeys("xy", dtype)
    return model_of([node], *dims, arrays, kinds=kinds, opset=21, domain=MICROSOFT)


def table(
    bits: int = 4, *, block: int = 16, zeros: bool = False, dtype: str = "float32", **attributes: Any
) -> onnx.ModelProto:
    rng, n, names = np.random.default_rng(1), D // block, ["q", "i", "s"]
    arrays = {"q": in_bytes(rng.integers(0, 1 << bits, (V, D)), bits)}
    arrays["s"] = (rng.random((V, n)) * 0.02 + 0.01).astype(dtype)
    if zeros:
        arrays["z"] = zero_points(rng, V, n, bits, "bytes", dtype)
        names.append("z")
    words = {"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": 1, **attributes}
    node = helper.make_node("GatherBlockQuantized", names, ["y"], name="table", domain=MICROSOFT, **words)
    dims, kinds = [{"i": ["B", "L"]}, {"y": ["B", "L", D]}], {"i": "int64", "y": dtype}
    return model_of([node], *dims, arrays, kinds=kinds, opset=21, domain=MICROSOFT)


def check(model: onnx.ModelProto, feed: np.ndarray, tolerance: float) -> None:
    """The proof of `compile` has held it against ONNX Runtime; here it is called at other sizes."""
    artifact = mhsa.compile(model, without_attention="accept", check=True)
    assert artifact.manifest.check is not None and "ONNX Runtime" in artifact.manifest.check.against[0]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {model.graph.input[0].name: feed})
    actual = mhsa.load(artifact)(feed)
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


PRODUCTS: dict[str, tuple[int, dict[str, Any]]] = {
    "4": (4, {}),
    "4, a bias": (4, {"zeros": "bytes", "bias": True}),
    "4, zero points of floats": (4, {"zeros": "floats"}),
    "4, float16": (4, {"zeros": "bytes", "K": 96, "block": 32, "dtype": "float16"}),
    "8": (8, {"zeros": "bytes"}),
    "2": (2, {"zeros": "bytes"}),
}


@pytest.mark.thorough_but("4, float16")
@pytest.mark.parametrize(("bits", "words"), PRODUCTS.values(), ids=PRODUCTS)
def test_products(bits: int, words: dict[str, Any]) -> None:
    """K is no multiple of the block, and blocks are no whole bytes of zero points, but in one case."""
    model = product(bits, **words)
    x = np.random.default_rng(2).standard_normal((2, 3, words.get("K", 72))).astype(words.get("dtype", "float32"))
    check(model, x, 2e-3 if x.dtype == np.float16 else 2e-6)


@pytest.mark.thorough_but("4")
@pytest.mark.parametrize(
    ("words", "rounds"),
    [
        ({"zeros": "bytes", "bias": True}, True),
        ({"bits": 8, "block": 64, "K": 128}, True),
        ({"zeros": "floats"}, False),
        ({"bits": 2}, False),
        ({"dtype": "float16", "K": 96, "block": 32}, True),
    ],
    ids=["4", "8", "zero points of floats", "2", "float16"],
)
def test_a_level_of_four_rounds_activations_as_onnx_runtime_does(words: dict[str, Any], rounds: bool) -> None:
    """To eight bits by the same blocks: its value and no other, on which the exact one is half a per cent off."""
    model, exact = product(accuracy_level=4, **words), product(**words)
    x = np.random.default_rng(3).standard_normal((2, 3, words.get("K", 72))).astype(words.get("dtype", "float32"))
    check(model, x, 2e-3 if x.dtype == np.float16 else 2e-6)
    results = [mhsa.load(mhsa.compile(one, without_attention="accept"))(x) for one in (model, exact)]
    assert np.array_equal(*results) is not rounds


@pytest.mark.thorough_but("1")
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_rows_of_other_ranks(rank: int) -> None:
    model, axes = product(accuracy_level=4), ["A", "B", "C"][: rank - 1]
    for value, size in ((model.graph.input[0], 72), (model.graph.output[0], 40)):
        value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, [*axes, size]))
    check(model, np.random.default_rng(0).standard_normal((*(2, 1, 3)[: rank - 1], 72)).astype(np.float32), 2e-6)


@pytest.mark.thorough
def test_projections_of_one_input_lie_side_by_side() -> None:
    """Two products that only an attention reads, of different widths and zero points, are one operation."""
    nodes, arrays, infos = [], {}, []
    rng = np.random.default_rng(0)
    for name, N in (("q", 64), ("k", 64), ("v", 32)):
        arrays[f"{name}q"] = in_bytes(rng.integers(0, 16, (N, 96)), 4).reshape(N, 3, 16)
        arrays[f"{name}s"] = (rng.random((N, 3)) * 0.02).astype(np.float32)
        arrays[f"{name}z"] = zero_points(rng, N, 3, 4, "bytes", "float32")
        inputs = ["x", f"{name}q", f"{name}s", *([f"{name}z"] if name != "k" else [])]
        words = {"K": 96, "N": N, "bits": 4, "block_size": 32}
        nodes.append(helper.make_node("MatMulNBits", inputs, [name], domain=MICROSOFT, **words))
        infos.append(name)
    nodes.append(helper.make_node("Attention", infos, ["y"], q_num_heads=4, kv_num_heads=4))
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["B", "L", size]) for n, size in (("x", 96), ("y", 32)))
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], weights), opset_imports=opsets, ir_version=10)
    artifact = mhsa.compile(model, check=True)
    assert artifact.manifest.check is not None and artifact.manifest.check.against
    assert [op.kernel for op in artifact.manifest.ops] == ["cpu.linear_of_blocks", "cpu.attention"]


def test_without_a_kernel_weights_become_floats_when_they_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBlockLinearKernel, "why_not", lambda *_: "a machine that is not this one")
    model = product(zeros="bytes", bias=True)
    artifact = mhsa.compile(model, without_attention="accept", check=True)
    assert [op.kernel for op in artifact.manifest.ops] == ["cpu.linear"]
    check(model, np.random.default_rng(2).standard_normal((2, 3, 72)).astype(np.float32), 2e-6)


TABLES: dict[str, tuple[int, dict[str, Any]]] = {
    "4": (4, {}),
    "4, zero points": (4, {"zeros": True}),
    "8": (8, {"zeros": True}),
    "4, float16": (4, {"zeros": True, "block": 32, "dtype": "float16"}),
}


@pytest.mark.thorough_but("4, zero points")
@pytest.mark.parametrize(("bits", "words"), TABLES.values(), ids=TABLES)
def test_rows_of_tables(bits: int, words: dict[str, Any]) -> None:
    ids = np.random.default_rng(4).integers(0, V, (2, 3))
    check(table(bits, **words), ids, 2e-3 if words.get("dtype") == "float16" else 1e-6)


@pytest.mark.thorough_but("int4")
@pytest.mark.parametrize(
    ("kind", "zeros", "axis"),
    [("int4", False, 1), ("int4", True, -1), ("uint4", False, 1), ("uint4", True, 1)],
    ids=["int4", "int4, zero points", "uint4", "uint4, zero points"],
)
def test_rows_of_tables_of_four_bits(kind: str, zeros: bool, axis: int) -> None:
    """As MatMulNBitsQuantizer writes a Gather: of INT4 and of UINT4, both of which have 0 at 0."""
    check(table_of_four_bits(kind, zeros, quantize_axis=axis), np.random.default_rng(4).integers(0, V, (2, 3)), 1e-6)


OF_FLOATS: dict[str, tuple[tuple[int, ...], dict[str, int], str, bool]] = {
    "blocks of columns": ((32, 48), {"quantize_axis": 0}, "int4", True),
    "rows that end within a block": ((32, 40), {"quantize_axis": 1}, "uint4", False),
    "three axes": ((32, 3, 32), {"quantize_axis": 2}, "int4", True),
    "columns": ((32, 48), {"gather_axis": 1, "quantize_axis": 0}, "uint4", True),
}


@pytest.mark.parametrize("name", OF_FLOATS)
def test_tables_of_other_forms(name: str) -> None:
    dims, words, kind, zeros = OF_FLOATS[name]
    rng, shape = np.random.default_rng(6), list(dims)
    shape[words["quantize_axis"]] = -(-dims[words["quantize_axis"]] // 16)
    least = 0 if kind == "uint4" else -8

    def numbers(*sizes: int) -> np.ndarray:
        return rng.integers(least, least + 16, sizes).astype(getattr(ml_dtypes, kind))

    constants = {"q": numbers(*dims), "s": rng.uniform(0.01, 1, shape).astype(np.float32)}
    constants |= {"z": numbers(*shape)} if zeros else {}
    node = helper.make_node(
        "GatherBlockQuantized", ["q", "ids", *list(constants)[1:]], ["y"], domain=MICROSOFT, block_size=16, **words
    )
    model = model_of([node], {"ids": (TensorProto.INT64, ["B", 3])}, {"y": None}, constants, domain=MICROSOFT, opset=21)
    check(model, rng.integers(0, 32, (2, 3)), 1e-6)


def table_of_four_bits(kind: str, zeros: bool, points: str = "", **attributes: Any) -> onnx.ModelProto:
    """The table of `table` with its numbers, and zero points, of another dtype; `points` is that of zero points."""
    model, rng = table(zeros=zeros, **attributes), np.random.default_rng(5)
    dtypes, sizes = {"q": kind, "z": points or kind}, {"q": D, "z": D // 16}
    for tensor in model.graph.initializer:
        if tensor.name in sizes:
            dtype = getattr(ml_dtypes, dtypes[tensor.name])
            numbers = rng.integers(-8, 8, (V, sizes[tensor.name])) + 8 * dtypes[tensor.name].startswith("u")
            tensor.CopyFrom(numpy_helper.from_array(numbers.astype(dtype), tensor.name))
    return model


def other_blocks(model: onnx.ModelProto, block: int) -> onnx.ModelProto:
    """The model, whose scales are then too many or too few."""
    next(word for word in model.graph.node[0].attribute if word.name == "block_size").i = block
    return model


def test_what_is_stored_is_the_files_bytes(tmp_path) -> None:
    """Float weights are made when they are bound; the artifact holds those of the file."""
    model = product(K=256, N=256, block=32)
    mhsa.compile(model, without_attention="accept").save(tmp_path / "a.mhsa")
    assert (tmp_path / "a.mhsa" / "weights.safetensors").stat().st_size < 256 * 256


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (product(accuracy=1), "attribute 'accuracy'"),
        (product(bits=4, weight_prepacked=1), "weight_prepacked"),
        (product(block=24), "a power of two"),
        (table(gather_axis=1), "gather_axis=0 and .* got gather_axis=1"),
        (table(quantize_axis=0), "quantize_axis=1 of numbers in bytes"),
        (table_of_four_bits("int4", True, points="uint4"), "the zero points 'z' of int4, as 'q', got uint4"),
        (other_blocks(table_of_four_bits("int4", False), 32), r"'s' of \(50, 2\), got \(50, 4\)"),
    ],
    ids=["unknown", "prepacked", "blocks of 24", "gathered by columns", "scales by columns", "two dtypes", "scales"],
)  # fmt: skip
def test_what_is_not_understood_is_refused(model: onnx.ModelProto, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        mhsa.compile(model, without_attention="accept")


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("q", np.zeros((39, 5, 8), np.uint8), r"'product'.*'q' of 1600 elements, for 40 rows of 5 blocks of 16"),
        ("q", np.zeros((40, 5, 8), np.int8), "'q' of uint8, got int8"),
        ("s", np.ones((40, 4), np.float32), "'s' of 200 elements"),
        ("s", np.full((40, 5), np.nan, np.float32), "'s' of finite numbers, got NaN"),
        ("z", np.zeros((40, 2), np.uint8), "'z' of 120 elements"),
        ("z", np.zeros((40, 5), np.float16), "'z' of uint8, or of the scales' float32, got float16"),
    ],
    ids=["rows", "signed", "scales", "NaN", "zero points", "halves"],
)
def test_weights_that_do_not_fit_are_refused(name: str, array: np.ndarray, message: str) -> None:
    model = product(zeros="bytes")
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    with pytest.raises(ModelError, match=message):
        mhsa.compile(model, without_attention="accept")


def in_groups(groups: np.ndarray, **words: Any) -> onnx.ModelProto:
    """`product` with the block of each column."""
    model = product(**words)
    model.graph.initializer.append(numpy_helper.from_array(groups.astype(np.int32), "g"))
    inputs = [*model.graph.node[0].input, *[""] * 4][:4]
    model.graph.node[0].input[:] = [*inputs, "g"]
    return model


OF_COLUMNS = np.random.default_rng(7).permutation(np.arange(72) // 16)
"""A block for each of 72 columns, as GPTQ's act-order leaves them."""


@pytest.mark.parametrize("zeros", [pytest.param("", marks=pytest.mark.thorough), "floats"])
def test_blocks_of_columns_in_another_order(zeros: str) -> None:
    """They keep their four bits: the columns of x are taken in the order of blocks."""
    model = in_groups(OF_COLUMNS, zeros=zeros)
    check(model, np.random.default_rng(2).standard_normal((2, 3, 72)).astype(np.float32), 2e-6)
    report = mhsa.compile(model, without_attention="accept").manifest.ops
    assert "cpu.linear_of_blocks" in [op.kernel for op in report]


@pytest.mark.parametrize(
    ("groups", "words", "message"),
    [
        (OF_COLUMNS, {"zeros": "bytes"}, "zero points of floats, or none, beside g_idx"),
        (OF_COLUMNS, {"bits": 8}, "bits=4 beside g_idx"),
        (np.zeros(72), {}, "g_idx of 72 columns, 16 for each of 5 blocks"),
        (OF_COLUMNS[1:], {}, "g_idx of 72 columns"),
        (OF_COLUMNS - 1, {}, "g_idx of 72 columns"),
    ],
    ids=["bytes", "8", "one block", "too few", "negative"],
)
def test_orders_that_are_refused(groups: np.ndarray, words: dict[str, Any], message: str) -> None:
    """ONNX Runtime takes zero points of bytes for 8 there, and has no eight bits."""
    with pytest.raises(ModelError, match=message):
        mhsa.compile(in_groups(groups, **words), without_attention="accept")


def of_a_table(kind: int, K: int, N: int, *, numbers: int = 0) -> onnx.ModelProto:
    """MatMulBnb4 with blocks of 16 numbers."""
    rng, inputs = np.random.default_rng(8), ["x", "q", "s"]
    arrays = {"q": rng.integers(0, 256, numbers or -(-K * N // 2)).astype(np.uint8)}
    arrays["s"] = rng.uniform(0.5, 1, -(-K * N // 16)).astype(np.float32)
    words = {"K": K, "N": N, "block_size": 16, "quant_type": kind}
    node = helper.make_node("MatMulBnb4", inputs, ["y"], name="product", domain=MICROSOFT, **words)
    return model_of([node], {"x": ["B", K]}, {"y": ["B", N]}, arrays, opset=21, domain=MICROSOFT)


@pytest.mark.thorough_but("NF4-33-5")
@pytest.mark.parametrize(("K", "N"), [(64, 8), (33, 5)])
@pytest.mark.parametrize("kind", [0, 1], ids=["FP4", "NF4"])
def test_numbers_of_bitsandbytes(kind: int, K: int, N: int) -> None:
    """Also where rows end within a block, and all of them within a byte."""
    model, x = of_a_table(kind, K, N), np.random.default_rng(2).standard_normal((3, K)).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    actual = mhsa.load(mhsa.compile(model, without_attention="accept"))(x)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def test_numbers_of_bitsandbytes_that_do_not_fit() -> None:
    with pytest.raises(ModelError, match="'q' of 256 elements, for 8 rows of 64"):
        mhsa.compile(of_a_table(1, 64, 8, numbers=255), without_attention="accept")
