"""Rotary embeddings: the kernel alone and through compile, against NumPy in float64, within the project's budget.

Notation: B batch, L length, D embed, H heads, G key/value heads, E head dim, R the elements of a head that turn.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.kernel_runs import call, compiled, vector_machine
from support.rope_cases import BASE, NUMPY, SHAPES, TABLE, angles, assert_right, check

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.frontend.relax.importer import import_onnx
from mhsa_compile.kernels.cpu.rope import CpuRotaryKernel
from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout, LinearOp, RotaryOp
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.verify import eager, oracle

MACHINES = [((512, 32), "float32"), ((128, 32), "float32"), ((256, 16), "bfloat16"), ((32, 8), "float16")]
KINDS = {"float32": TensorProto.FLOAT, "bfloat16": TensorProto.BFLOAT16, "float16": TensorProto.FLOAT16}


@pytest.mark.thorough_but(
    "(512, 32)-float32-heads to heads",
    "(512, 32)-float32-of each place",
    "(512, 32)-float32-whole, interleaved",
    "(256, 16)-bfloat16-heads to heads",
    "(256, 16)-bfloat16-one for all",
    "(256, 16)-bfloat16-whole, interleaved",
    "(32, 8)-float16-rows to heads",
    "(32, 8)-float16-whole, of each place",
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("machine", "dtype"), MACHINES, ids=str)
def test_the_kernel(machine: tuple[int, int], shape: str, dtype: str) -> None:
    """What lies between the heads is NaN, and so is the output before: all of it is written, of nothing else."""
    op = replace(BASE, dtype=dtype, **SHAPES[shape])  # type: ignore[arg-type]
    profile, kernel = vector_machine(*machine), CpuRotaryKernel()
    assert kernel.why_not(op, profile) is None
    run = compiled(kernel.emit(op, profile, kernel.default_config(op, profile)), profile)["run"]
    check(op, partial(call, run), ((1, 1), (2, 7), (3, 197)))  # the last is shared between threads


def model(
    dims: tuple[Any, ...] = ("B", 3, "L", 10),
    positions: tuple[Any, ...] | None = ("B", "L"),
    table: tuple[Any, ...] = (TABLE, 5),
    dtypes: tuple[str, str, str, str] = ("float32", "float32", "float32", "int64"),
    **attributes: int,
) -> onnx.ModelProto:
    shapes = {"x": dims, "cos": table, "sin": table, **({} if positions is None else {"positions": positions})}
    kinds = KINDS | {"int64": TensorProto.INT64, "int32": TensorProto.INT32, "float64": TensorProto.DOUBLE}
    inputs = [
        helper.make_tensor_value_info(name, kinds[dtype], shape)
        for (name, shape), dtype in zip(shapes.items(), dtypes, strict=False)
    ]
    node = helper.make_node("RotaryEmbedding", list(shapes), ["y"], name="turn", **attributes)
    y = helper.make_tensor_value_info("y", kinds[dtypes[0]], dims)
    graph = helper.make_graph([node], "g", inputs, [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


@pytest.mark.thorough_but("3-None-float16", "3-positions1-bfloat16", "4-positions1-float16")
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("positions", [("B", "L"), (1, "L"), None])
@pytest.mark.parametrize("rank", [3, 4])
def test_the_operator(rank: int, positions: tuple[Any, ...] | None, dtype: str) -> None:
    interleaved = rank == 3
    dims = ("B", "L", 30) if rank == 3 else ("B", 3, "L", 10)
    said = {"num_heads": 3, "rotary_embedding_dim": 6} if rank == 3 else {}
    half = 3 if rank == 3 else 5
    table = ("B", "L", half) if positions is None else (TABLE, half)
    source = model(dims, positions, table, (dtype, dtype, dtype, "int64"), interleaved=int(interleaved), **said)
    turn = mhsa.load(mhsa.compile(source))
    rng = np.random.default_rng(0)
    for B, L in ((1, 5), (3, 13)):
        places = rng.integers(0, TABLE, (1 if positions == (1, "L") else B, L))
        cos, sin = angles(rng, *((B, L) if positions is None else (TABLE,)), half, dtype=dtype)
        x = rng.standard_normal((B, L, 3, 10)).astype(NUMPY[dtype])
        given = x.reshape(B, L, 30) if rank == 3 else np.ascontiguousarray(x.swapaxes(1, 2))
        y = turn(given, cos, sin, *([] if positions is None else [places]))
        y = y.reshape(B, L, 3, 10) if rank == 3 else y.swapaxes(1, 2)
        if positions is not None:
            cos, sin = cos[places], sin[places]
        assert_right(y, x, cos, sin, 2 * half, interleaved)


def test_positions_beyond_the_tables_are_refused() -> None:
    turn = mhsa.load(mhsa.compile(model(table=("P", 5))))
    rng = np.random.default_rng(0)
    x, tables = rng.standard_normal((2, 3, 4, 10), np.float32), angles(rng, TABLE, 5)
    right = np.array([[0, 1, 2, 3], [0, 7, 9, TABLE - 1]])
    for wrong in (TABLE, -1, np.iinfo(np.int64).min, np.iinfo(np.int64).max):
        places = right.copy()
        places[1, 2] = wrong
        with pytest.raises(InputError) as refused:
            turn(x, *tables, places)
        assert refused.value.argument == "input 'positions'"
        assert refused.value.expected == f"positions below {TABLE}, and from 0 on"
        assert str(wrong) in refused.value.got
    assert np.isfinite(turn(x, *tables, right)).all()


def test_positions_that_the_graph_computes_are_refused_by_their_node() -> None:
    source = model()
    source.graph.node.insert(0, helper.make_node("Add", ["positions", "positions"], ["twice"]))
    source.graph.node[1].input[3] = "twice"
    turn = mhsa.load(mhsa.compile(source))
    tables = angles(np.random.default_rng(0), TABLE, 5)
    with pytest.raises(InputError, match="position_ids of RotaryEmbedding node 'turn': expected positions below 41"):
        turn(np.ones((1, 3, 1, 10), np.float32), *tables, np.full((1, 1), TABLE // 2 + 1))


def test_positions_that_the_graph_counts() -> None:
    source = model()
    source.graph.initializer.append(numpy_helper.from_array(np.array(1), "axis"))
    source.graph.node.insert(0, helper.make_node("CumSum", ["positions", "axis"], ["counted"], exclusive=1))
    source.graph.node[1].input[3] = "counted"
    turn = mhsa.load(mhsa.compile(source))
    rng = np.random.default_rng(0)
    x, (cos, sin) = rng.standard_normal((2, 13, 3, 10), np.float32), angles(rng, TABLE, 5)
    y = turn(np.ascontiguousarray(x.swapaxes(1, 2)), cos, sin, np.ones((2, 13), np.int64))
    assert_right(y.swapaxes(1, 2), x, cos[:13][np.newaxis], sin[:13][np.newaxis], 10, False)


REFUSED = {
    "no heads": (model(("B", "L", 30)), "num_heads that divides the fixed last dim of X, as X has three axes, got 0"),
    "heads": (model(("B", "L", 30), num_heads=4), "num_heads that divides .* got 4"),
    "other heads": (model(num_heads=2), "num_heads of 3, as X has, got 2"),
    "odd": (model(("B", 3, "L", 9)), "an even number of elements to turn, at most the 9 of a head, got all 9"),
    "odd part": (model(rotary_embedding_dim=3), "an even number .* got rotary_embedding_dim=3"),
    "too many": (model(rotary_embedding_dim=12), "at most the 10 of a head, got rotary_embedding_dim=12"),
    "interleaved": (model(interleaved=2), "interleaved of 0 or 1, got 2"),
    "table": (model(table=(TABLE, 4)), r"cos_cache of shape \(41, 5\), got \(41, 4\)"),
    "angles": (model(positions=None, table=("B", 9, 4)), r"cos_cache of shape \('B', 'L', 5\), got \('B', 9, 4\)"),
    "ranks": (model(positions=None), "cos_cache of known rank 3, got"),
    "positions": (model(positions=(2,)), "position_ids of known rank 2, got"),
    "batch": (model(("B", 3, 4, 10), (1, 5)), r"position_ids of shape \(1, 4\), got \(1, 5\)"),
    "dtypes": (
        model(dtypes=("float16", "float32", "float32", "int64")),
        "X, cos_cache and sin_cache all of float32, .* got X of float16, cos_cache of float32",
    ),
    "dtype": (model(dtypes=("float64",) * 3 + ("int64",)), "all of float32, .* got X of float64"),
    "position dtype": (model(dtypes=("float32",) * 3 + ("int32",)), "position_ids of int64, got int32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    source, message = REFUSED[case]
    with pytest.raises(ModelError, match=f"RotaryEmbedding node 'turn': expected .*{message}"):
        import_onnx(source)


H, G, E, D = 4, 2, 10, 36


FORMS = (
    "three axes",
    "four axes",
    "Slice",
    "Split",
    "pairs",
    "pairs of rows, part",
    "Split, part",
    "pairs, unbound",
    "Split, apart",
    "pairs, apart",
)
"""The operator, or its words written out."""
PART = 6  # of E
Nodes = list[onnx.NodeProto]


def block(form: str, *, shows: str = "") -> onnx.ModelProto:
    """x (B, L, D) -> q, k, v; q and k turned; causal attention; y (B, L, D). `shows`: a value to be an output, too."""
    node, rng, four_axes = helper.make_node, np.random.default_rng(0), form != "three axes"
    shapes = {"q_w": (D, H * E), "k_w": (D, G * E), "v_w": (D, G * E), "v_b": (G * E,), "o_w": (H * E, D)}
    tensors = {name: rng.standard_normal(shape, np.float32) / 6 for name, shape in shapes.items()}
    tensors |= dict(zip(("cos", "sin"), angles(rng, TABLE, columns_of(form)), strict=True))
    nodes = [] if form in FORMS[:2] else gathered(tensors, heads_axis=2 if "rows" in form else 1)
    for name, heads in {"q": H, "k": G, "v": G}.items():  # in this order q is turned before there is a v
        nodes.append(node("MatMul", ["x", f"{name}_w"], [f"{name}_rows"]))
        rows = f"{name}_rows"
        if name == "v":
            nodes.append(node("Add", [rows, "v_b"], ["v_biased"]))
            rows = "v_biased"
        if four_axes:
            tensors[f"{name}_split"] = np.array([0, 0, heads, E])
            nodes.append(node("Reshape", [rows, f"{name}_split"], [f"{name}_parts"]))
            rows = f"{name}_parts"
            if name == "v" or "rows" not in form:
                nodes.append(node("Transpose", [rows], [f"{name}_heads"], perm=[0, 2, 1, 3]))
                rows = f"{name}_heads"
        if name != "v" and form in FORMS[:2]:
            said = {} if four_axes else {"num_heads": heads}
            nodes.append(node("RotaryEmbedding", [rows, "cos", "sin", "positions"], [f"{name}_turned"], **said))
        elif name != "v":
            nodes += written_out(form, rows, name, tensors)
    said = {} if four_axes else {"q_num_heads": H, "kv_num_heads": G}
    nodes.append(node("Attention", ["q_turned", "k_turned", rows], ["attended"], is_causal=1, **said))
    if four_axes:
        tensors["join"] = np.array([0, 0, H * E])
        nodes.append(node("Transpose", ["attended"], ["parts"], perm=[0, 2, 1, 3]))
        nodes.append(node("Reshape", ["parts", "join"], ["joined"]))
    nodes.append(node("MatMul", ["joined" if four_axes else "attended", "o_w"], ["y"]))
    value = helper.make_tensor_value_info
    inputs = [value("x", TensorProto.FLOAT, ("B", "L", D)), value("positions", TensorProto.INT64, ("B", "L"))]
    outputs = [value("y", TensorProto.FLOAT, ("B", "L", D))]
    outputs += [value(shows, TensorProto.FLOAT, None)] if shows else []
    weights = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def columns_of(form: str) -> int:
    """The number of columns of the tables of angles."""
    return E // 2 if form in FORMS[:2] or "apart" in form else PART if form.endswith(", part") else E


def gathered(tensors: dict[str, np.ndarray], heads_axis: int) -> Nodes:
    """The angles of each place, (B, 1, L, E) or (B, L, 1, E); the elements of a pair have angles of their own."""
    tensors["heads_axis"] = np.array([heads_axis])
    return [
        node
        for name in ("cos", "sin")
        for node in (
            helper.make_node("Gather", [name, "positions"], [f"{name}_rows"]),
            helper.make_node("Unsqueeze", [f"{name}_rows", "heads_axis"], [f"{name}_heads"]),
        )
    ]


def written_out(form: str, x: str, name: str, tensors: dict[str, np.ndarray]) -> Nodes:
    """x cos + across sin, as exporters leave it, of part of x or of all of it; k's operands the other way."""
    node, part, rows = helper.make_node, form.endswith(", part"), "rows" in form
    bounds = {"zero": 0, "one": 1, "two": 2, "half": E // 2, "end": np.iinfo(np.int64).max, "last": 3, "part": PART}
    tensors |= {bound: np.array([value]) for bound, value in bounds.items()}
    tensors["cut"] = np.array([PART, E - PART])
    whole, x = x, f"{name}_part" if part else x
    nodes, step = [], 1 if name == "q" else -1
    if rows:
        nodes = [
            node("Slice", [whole, "zero", "part", "last"], [x]),
            node("Slice", [whole, "part", "end", "last"], [f"{name}_rest"]),
        ]
    elif part:
        nodes = [node("Split", [whole, "cut"], [x, f"{name}_rest"], axis=-1)]
    turned = f"{name}_first" if part else f"{name}_turned"
    nodes += taken_apart(form, x, name, tensors)
    if "apart" in form:
        factors = {"a": ("1", "cos"), "b": ("2", "sin"), "c": ("2", "cos"), "d": ("1", "sin")}
        nodes += [
            *(node("Mul", [f"{name}_{i}", f"{t}_heads"][::step], [f"{name}_{p}"]) for p, (i, t) in factors.items()),
            node("Sub", [f"{name}_a", f"{name}_b"], [f"{name}_less"]),
            node("Add", [f"{name}_c", f"{name}_d"][::step], [f"{name}_more"]),
            *joined(form, f"{name}_less", f"{name}_more", turned, tensors),
        ]
    else:
        nodes += [
            node("Neg", [f"{name}_2"], [f"{name}_negative"]),
            *joined(form, f"{name}_negative", f"{name}_1", f"{name}_across", tensors),
            node("Mul", [x, "cos_heads"][::step], [f"{name}_straight"]),
            node("Mul", [f"{name}_across", "sin_heads"][::step], [f"{name}_sine"]),
            node("Add", [f"{name}_straight", f"{name}_sine"][::step], [turned]),
        ]
    if part:
        nodes.append(node("Concat", [turned, f"{name}_rest"], [f"{name}_all" if rows else f"{name}_turned"], axis=-1))
    return [*nodes, *([node("Transpose", [f"{name}_all"], [f"{name}_turned"], perm=[0, 2, 1, 3])] if rows else [])]


def taken_apart(form: str, x: str, name: str, tensors: dict[str, np.ndarray]) -> Nodes:
    """The two elements of each pair: halves of x, or every other element, as {name}_1 and {name}_2."""
    node, both = helper.make_node, [f"{name}_1", f"{name}_2"]
    if "unbound" in form:
        tensors |= {"two_last": np.array([0, 0, 0, -1, 2]), "behind": np.array([-1])}
        return [
            node("Reshape", [x, "two_last"], [f"{name}_view"]),
            node("Split", [f"{name}_view"], [f"{name}_0th", f"{name}_1st"], axis=-1, num_outputs=2),
            *(node("Squeeze", [f"{name}_{i}", "behind"], [one]) for i, one in zip(("0th", "1st"), both, strict=True)),
        ]
    if "pairs" in form:
        return [
            node("Slice", [x, first, "end", "last", "two"], [one])
            for first, one in zip(("zero", "one"), both, strict=True)
        ]
    if form == "Slice":
        return [
            node("Slice", [x, "zero", "half", "last"], [both[0]]),
            node("Slice", [x, "half", "end", "last"], [both[1]]),
        ]
    return [node("Split", [x], both, axis=-1, num_outputs=2)]


def joined(form: str, one: str, two: str, result: str, tensors: dict[str, np.ndarray]) -> Nodes:
    """concat(one, two), or stack(one, two), flat."""
    node = helper.make_node
    if "pairs" not in form:
        return [node("Concat", [one, two], [result], axis=-1)]
    tensors |= {"behind": np.array([-1]), "flat": np.array([0, 0, 0, PART if form.endswith(", part") else E])}
    name = result[0]
    return [
        node("Unsqueeze", [one, "behind"], [f"{name}_odd"]),
        node("Unsqueeze", [two, "behind"], [f"{name}_even"]),
        node("Concat", [f"{name}_odd", f"{name}_even"], [f"{name}_stack"], axis=-1),
        node("Reshape", [f"{name}_stack", "flat"], [result]),
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_decoder_s_block_turns_rows_of_its_one_projection(form: str) -> None:
    """The three projections are one, and nothing of the embeddings is left to TVM but the look-up of the angles."""
    imported = import_onnx(block(form))
    assert [type(op) for op in imported.ops.values()] == [LinearOp, RotaryOp, RotaryOp, AttentionOp, LinearOp]
    qkv, q, k, *_ = imported.ops.values()
    assert isinstance(qkv, LinearOp) and qkv.widths == (H * E, G * E, G * E)
    assert isinstance(q, RotaryOp) and (q.num_heads, q.x) == (H, HeadLayout(0, "rows", qkv.pitch))
    assert isinstance(k, RotaryOp) and (k.num_heads, k.x) == (G, HeadLayout(0, "rows", qkv.pitch, H * E))
    main = imported.module["main"].script()
    assert not [op for op in ("multiply", "negative", "concat", "strided_slice", "split", "permute") if op in main]


@pytest.mark.thorough
def test_a_decoder_s_block_agrees() -> None:
    source = block("pairs of rows, part")
    attend = mhsa.load(mhsa.compile(source))
    for B, L in ((1, 7), (2, 33)):
        rng = np.random.default_rng(L)
        inputs = {"x": rng.standard_normal((B, L, D), np.float32), "positions": rng.integers(0, TABLE, (B, L))}
        (expected,), (yardstick,) = oracle(source, inputs), eager(source, inputs)
        assert max_error(expected, attend(**inputs)) <= budget(expected, yardstick, "float32")


def test_what_others_read_stays() -> None:
    """A projection that is an output is not merged; part of an embedding that is one is computed beside it."""
    ops = import_onnx(block("four axes", shows="k_rows")).ops.values()
    assert [op.widths for op in ops if isinstance(op, LinearOp)] == [(H * E, G * E), (G * E,), (D,)]
    imported = import_onnx(block("Slice", shows="k_across"))
    assert [op.num_heads for op in imported.ops.values() if isinstance(op, RotaryOp)] == [H, G]
    assert imported.outputs[1] == ("B", G, "L", E)


def changed(values: dict[str, list[str]]) -> onnx.ModelProto:
    """The block of slices, or of pairs, with other inputs where `values` are made."""
    kinds = {"pairs": {"q_stack", "q_even"}, "Split, apart": {"q_less", "q_c"}}
    source = block(next((form for form, made in kinds.items() if made & values.keys()), "Slice"))
    for node in source.graph.node:
        if node.output[0] in values:
            del node.input[:]
            node.input.extend(values[node.output[0]])
    return source


ALMOST = {
    "halves in their order": {"q_across": ["q_1", "q_negative"]},
    "one half twice": {"q_2": ["q_heads", "zero", "half", "last"]},
    "nothing negated": {"q_across": ["q_2", "q_1"]},
    "pairs in their order": {"q_stack": ["q_even", "q_odd"]},
    "one of a pair twice": {"q_even": ["q_2", "behind"]},
    "sines the wrong way": {"q_less": ["q_b", "q_a"]},
    "one element's cosine twice": {"q_c": ["q_1", "cos_heads"]},
    "both terms turned": {"q_straight": ["q_across", "cos_heads"]},
}


@pytest.mark.parametrize("case", ALMOST)
def test_what_is_almost_a_rotary_embedding_is_none(case: str) -> None:
    ropes = [op for op in import_onnx(changed(ALMOST[case])).ops.values() if isinstance(op, RotaryOp)]
    assert [op.num_heads for op in ropes] == [G]
