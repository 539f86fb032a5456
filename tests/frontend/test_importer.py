"""What an Attention node of ONNX becomes: its band, its constant mask, its dtype; and what is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.attention_ops import features
from support.onnx_models import model_of
from support.operator_models import model as operator_model

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.export.export import export
from mhsa_compile.frontend.relax.importer import import_onnx
from mhsa_compile.kernels.interface.ops import AttentionOp, LinearOp
from mhsa_compile.nn.modules import MultiHeadAttention
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.window import WindowSpec

L, S, H = 5, 7, 2
LOWEST = float(np.finfo(np.float32).min)
KINDS = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def model(
    attributes: dict[str, Any] | None = None,
    mask: np.ndarray | None = None,
    *,
    dtypes: tuple[str, str, str] = ("float32",) * 3,
    lengths: tuple[int | str, int | str] = (L, S),
    nonpad: bool = False,
    opset: int = 25,
    as_constant_node: bool = False,
) -> onnx.ModelProto:
    """q (B, H, L, 8), k and v (B, H, S, 8) -> Attention, with a constant mask."""
    shapes = {"q": ["B", H, lengths[0], 8], "k": ["B", H, lengths[1], 8], "v": ["B", H, lengths[1], 8]}
    constants = {} if mask is None else {"mask": mask}
    names = ["q", "k", "v", "mask" if mask is not None else ""]
    nodes = []
    if nonpad:
        names += ["", "", "lengths"]
        nodes = [
            helper.make_node("Shape", ["k"], ["S"], start=2, end=3),
            helper.make_node("Shape", ["k"], ["B"], start=0, end=1),
            helper.make_node("Expand", ["S", "B"], ["lengths"]),
        ]
    if as_constant_node:
        nodes.append(helper.make_node("Constant", [], ["mask"], value=numpy_helper.from_array(constants.pop("mask"))))
    nodes.append(helper.make_node("Attention", names, ["y"], **(attributes or {})))
    kinds = dict(zip("qkv", dtypes, strict=True)) | {"y": dtypes[0]}
    return model_of(nodes, shapes, {"y": ["B", H, lengths[0], 8]}, constants, kinds=kinds, opset=opset)


def attention(source: onnx.ModelProto) -> AttentionOp:
    (op,) = import_onnx(source).ops.values()
    assert isinstance(op, AttentionOp)
    return op


BANDS = [
    ({}, None),
    ({"left_window_size": -1, "right_window_size": -1}, None),
    ({"is_causal": 1}, (None, 0)),
    ({"left_window_size": 3}, (3, None)),
    ({"right_window_size": 0}, (None, 0)),
    ({"left_window_size": 3, "right_window_size": 2}, (3, 2)),
    ({"left_window_size": 3, "right_window_size": 2, "is_causal": 1}, (3, 0)),
]


@pytest.mark.parametrize(("attributes", "expected"), BANDS)
@pytest.mark.parametrize("nonpad", [False, True])
def test_windows_and_causality_are_one_band(attributes: dict[str, int], expected: Any, nonpad: bool) -> None:
    """nonpad_kv_seqlen that says S moves the query to i + S - L, for windows as well as for causality."""
    alignment = "bottom_right" if nonpad else "top_left"
    band = attention(model(attributes, nonpad=nonpad)).window
    assert band == (None if expected is None else WindowSpec(*expected, alignment))


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape) < 0.6


@pytest.mark.parametrize("as_constant_node", [False, True])
@pytest.mark.parametrize("shape", [(L, S), (H, L, S), (1, 1, L, S), (1, H, L, S), (H, 1, S), (1, 1, S), (L, 1), (1, S)])
def test_constant_masks(shape: tuple[int, ...], as_constant_node: bool) -> None:
    mask = drawn(*shape)
    op = attention(model(mask=mask, opset=23, as_constant_node=as_constant_node))
    assert features(op).mask is None
    assert op.pairs is not None
    visible = op.pairs
    assert visible.dtype == np.bool_
    assert visible.shape == (shape[-3] if len(shape) > 2 else 1, L, S)
    assert np.array_equal(np.broadcast_to(visible, (1, H, L, S)), np.broadcast_to(mask, (1, H, L, S)))


def test_a_short_constant_mask_hides_the_rest_from_opset_24_on() -> None:
    mask = np.ones((L, 3), np.bool_)
    op = attention(model(mask=mask, opset=24))
    assert op.pairs is not None
    assert np.array_equal(op.pairs[0], np.arange(S) < np.full((L, 1), 3))
    with pytest.raises(ModelError, match=r"an attn_mask that broadcasts to \(1, 2, 5, 7\), got \(5, 3\)"):
        import_onnx(model(mask=mask, opset=23))


@pytest.mark.parametrize(("dtype", "fill"), [*((dtype, -np.inf) for dtype in KINDS), ("float32", LOWEST)])
def test_a_constant_additive_mask_that_only_hides(dtype: str, fill: float) -> None:
    shown = drawn(L, S) | np.eye(L, S, dtype=np.bool_)
    mask = np.where(shown, 0.0, fill).astype(dtype)
    op = attention(model(mask=mask, dtypes=(dtype,) * 3))
    assert op.pairs is not None
    assert np.array_equal(op.pairs[0], shown)


@pytest.mark.parametrize("fill", [-np.inf, LOWEST])
@pytest.mark.parametrize("heads", [1, H])
def test_a_constant_mask_that_is_causal(heads: int, fill: float) -> None:
    """Only where it is a triangle from the first key on, and says all that is known."""
    shown = np.tri(L, S, dtype=np.bool_)
    mask = np.where(np.broadcast_to(shown, (1, heads, L, S)), 0, fill).astype(np.float32)
    op = attention(model(mask=mask))
    assert op.pairs is None
    assert op.window is not None and (op.window.left, op.window.right, op.window.alignment) == (None, 0, "top_left")
    others = {
        "to the last key": (np.tri(L, S, S - L, dtype=np.bool_), {}),
        "of one head": (np.stack([shown, np.ones_like(shown)]), {}),
        "with a window": (shown, {"left_window_size": 2}),
    }
    for other, attributes in others.values():
        op = attention(model(attributes, mask=other))
        assert op.pairs is not None
        assert np.array_equal(op.pairs, other.reshape(-1, L, S))


def test_constant_masks_that_are_not_static() -> None:
    """A bias, a number for -inf that is too small or all that a row has, and one whose lengths are free: kept as they
    are."""
    shown = drawn(L, S) | np.eye(L, S, dtype=np.bool_)
    hidden = shown & (np.arange(L)[:, None] != 2)
    others = {
        "bias": (np.where(shown, 0.5, -np.inf), (L, S)),
        "small": (np.where(shown, 0.0, -1e38), (L, S)),
        "nothing else in a row": (np.where(hidden, 0.0, LOWEST), (L, S)),
        "free": (np.where(shown, 0.0, -np.inf)[:1, :1], ("L", "S")),
    }
    for mask, lengths in others.values():
        op = attention(model(mask=mask.astype(np.float32), lengths=lengths, opset=23))
        assert op.pairs is None
        assert features(op).mask is not None
        assert features(op).mask.dtype == "float32"


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("precision", [None, "float32", "same"])
def test_dtypes(dtype: str, precision: str | None) -> None:
    """Whatever precision the softmax was asked for in: it is float32, and said to be."""
    attributes = {} if precision is None else {"softmax_precision": KINDS.get(precision, KINDS[dtype])}
    imported = import_onnx(model(attributes, dtypes=(dtype,) * 3))
    (op,) = imported.ops.values()
    assert op.dtype == dtype
    assert op.semantics("op_0").softmax == "float32"
    assert str(imported.module["main"].ret_ty.dtype) == dtype


REFUSED = {
    "window": (model({"left_window_size": -2}), "left_window_size of -1 or more, got -2"),
    "right window": (model({"right_window_size": -3}), "right_window_size of -1 or more, got -3"),
    "causality": (model({"is_causal": 2}), "is_causal of 0 or 1, got 2"),
    "dtypes": (
        model(dtypes=("float32", "float16", "float32")),
        "Q, K and V all of float32, or all of bfloat16, or all of float16, got Q of float32, K of float16, V of float",
    ),
    "precision": (model({"softmax_precision": 6}), "softmax_precision of 1, 10, 16, 11, got 6"),
    "softcap": (model({"softcap": -1.0}), r"softcap of 0 \(none\) or more, got -1.0"),
    "stage": (model({"qk_matmul_output_mode": 4}), "qk_matmul_output_mode of 0, 1, 2, 3, got 4"),
    "mask": (model(mask=np.ones((3, S), np.bool_)), r"an attn_mask that broadcasts to \(1, 2, 5, 7\), got \(3, 7\)"),
    "heads of a mask": (model(mask=np.ones((3, L, S), np.bool_)), r"broadcasts to \(1, 2, 5, 7\), got \(3, 5, 7\)"),
    "length of a mask": (
        model(mask=np.ones((L, S + 1), np.float32)),
        r"broadcasts to \(B, 2, 5, 7\), got \(5, 8\)",
    ),
    "mask's dtype": (model(mask=np.ones((L, S), np.float16)), "a bool or float32 attn_mask, got float16"),
    "heads of four axes": (
        model({"q_num_heads": 2}),
        "no q_num_heads, as Q, K and V have four axes, got q_num_heads=2",
    ),
    "past alone": (operator_model(past=4, outputs=("y",)), "present_key and present_value wherever there is a past"),
    "past with one present": (
        operator_model(past=4, outputs=("y", "present_key")),
        "wherever there is a past, got past_key and past_value with present_key alone",
    ),
    "past and lengths": (
        operator_model(past=4, lengths=True, outputs=("y", "present_key", "present_value")),
        r"a cache inside \(past, present\) or outside \(nonpad_kv_seqlen\) of the operator, got nonpad_kv_seqlen with",
    ),
    "mask that is too long": (
        operator_model(mask=("bool", ["B", 1, 5, 12]), S=11),
        r"an attn_mask that broadcasts to \(B, 6, 5, 11\), got \('B', 1, 5, 12\)",
    ),
    "mask that is too short": (operator_model(mask=("bool", [5, 4]), S=11, opset=23), r"\(B, 6, 5, 11\), got \(5, 4\)"),
}


def changed(
    *,
    inputs: dict[str, int] | None = None,
    attributes: tuple[str, ...] = (),
    shapes: dict[str, list[Any]] | None = None,
) -> onnx.ModelProto:
    """A model with heads side by side and a past, with inputs of other dtypes or shapes, or without attributes."""
    source = operator_model(S=11, past=13, axes=3, lengths=False, outputs=("y", "present_key", "present_value"))
    for value in source.graph.input:
        tensor = value.type.tensor_type
        tensor.elem_type = (inputs or {}).get(value.name, tensor.elem_type)
        if value.name in (shapes or {}):
            value.CopyFrom(helper.make_tensor_value_info(value.name, tensor.elem_type, (shapes or {})[value.name]))
    kept = [a for a in source.graph.node[0].attribute if a.name not in attributes]
    del source.graph.node[0].attribute[:]
    source.graph.node[0].attribute.extend(kept)
    return source


def without(*names: str) -> onnx.ModelProto:
    source = changed()
    for i, name in enumerate(source.graph.node[0].input):
        if name in names:
            source.graph.node[0].input[i] = ""
    return source


REFUSED |= {
    "heads not said": (
        changed(attributes=("q_num_heads", "kv_num_heads")),
        "q_num_heads and kv_num_heads, of 1 or more, as Q, K and V have three axes, got q_num_heads=None",
    ),
    "heads of keys not said": (changed(attributes=("kv_num_heads",)), "got q_num_heads=6, kv_num_heads=None"),
    "heads that do not divide": (
        changed(shapes={"q": ["B", 5, 43]}),
        r"a fixed last axis, which q_num_heads divides, of Q \(q\), got \('B', 5, 43\), q_num_heads=6",
    ),
    "head sizes": (changed(shapes={"k": ["B", 11, 12]}), "queries and keys of one head size, got 7 and 6"),
    "ranks": (changed(shapes={"v": ["B", 2, 11, 5]}), "Q, K and V of one rank, 3 or 4, got Q of 3, K of 3, V of 4"),
    "lengths of keys": (changed(shapes={"v": ["B", 10, 10]}), "equal lengths of K and V, got 11 and 10"),
    "past of keys alone": (without("past_value"), "past_key and past_value together, or neither, got past_key alone"),
    "past's dtype": (
        changed(inputs={"past_value": TensorProto.FLOAT16}),
        "Q, K, V, past_key and past_value all of float32.*past_value of float16",
    ),
    "past's rank": (changed(shapes={"past_key": ["B", 13, 14]}), "past_key of known rank 4, got"),
    "past's heads": (changed(shapes={"past_key": ["B", 3, 13, 7]}), "equal heads of past_key and K, got 3 and 2"),
    "past's head size": (
        changed(shapes={"past_value": ["B", 2, 13, 4]}),
        "equal head sizes of past_value and V, got 4",
    ),
    "past's lengths": (
        changed(shapes={"past_key": ["B", 2, 12, 7]}),
        "equal lengths of past_key and past_value, got 12",
    ),
    "doubles": (
        changed(inputs=dict.fromkeys(("q", "k", "v", "past_key", "past_value"), TensorProto.DOUBLE)),
        "all of float32, or all of bfloat16, or all of float16, got Q of float64",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    """Each error names the node."""
    source, message = REFUSED[case]
    with pytest.raises(ModelError, match=f"Attention node '(y|attention)': expected .*{message}"):
        import_onnx(source)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", KINDS)
def test_linears(dtype: str) -> None:
    source = export(MultiHeadAttention(AttentionSpec(embed_dim=24, num_heads=4, dtype=dtype)))
    for int8 in (False, True):
        imported = import_onnx(source, int8_weights=int8)
        linears = [op for op in imported.ops.values() if isinstance(op, LinearOp)]
        assert [op.widths for op in linears] == [(24, 24, 24), (24,)]
        assert {(op.dtype, op.int8_weights) for op in linears} == {(dtype, int8)}
        assert len(imported.weights) == 8


def test_eight_bits_need_a_linear() -> None:
    with pytest.raises(ModelError, match='weights: expected a model with a linear for "int8", got one without'):
        import_onnx(model(), int8_weights=True)


@pytest.mark.parametrize(
    ("attributes", "bias", "fused"),
    [
        ({}, (5,), True),
        ({"transB": 1}, (5,), True),
        ({"transB": 1}, None, True),
        ({"alpha": 0.5}, (5,), False),
        ({"transA": 1}, (5,), False),
        ({}, (1, 5), False),
    ],
)
def test_a_gemm_with_a_constant_weight_is_a_linear(attributes: dict[str, Any], bias: Any, fused: bool) -> None:
    rng = np.random.default_rng(0)
    shape = (5, 7) if attributes.get("transB") else (7, 5)
    shapes = {"w": shape} | ({} if bias is None else {"b": bias})
    arrays = {name: rng.random(dims, np.float32) for name, dims in shapes.items()}
    node = helper.make_node("Gemm", ["x", *arrays], ["y"], **attributes)
    dims = [7, 3] if attributes.get("transA") else ["N", 7]
    source = model_of([node], {"x": dims}, {"y": [None, 5]}, arrays)
    ops = list(import_onnx(source).ops.values())
    if not fused:
        assert ops == []
        return
    (op,) = ops
    assert isinstance(op, LinearOp) and (op.in_features, op.widths) == (7, (5,))
    assert (op.biased, op.transposed) == ((bias is not None,), ("transB" not in attributes,))


@pytest.mark.thorough
def test_a_length_is_added_to_a_tensor_as_it_is() -> None:
    """In a layer with a cache the length would, as a tensor of its own, be one more step of each call."""
    spec = AttentionSpec(embed_dim=16, num_heads=2, kv_cache=True, causal=True)
    imported = import_onnx(export(MultiHeadAttention(spec)))
    assert "R.shape_to_tensor" not in imported.module.script()


def test_a_symbol_named_as_tvm_s_scripts_name_their_words() -> None:
    source = (
        '<ir_version: 9, opset_import: ["" : 23]> g (float[T,R] x) => (float[T,S] y) {y = Concat <axis = 1> (x, x)}'
    )
    assert import_onnx(onnx.parser.parse_model(source)).outputs == [("T", "R * 2")]


def test_sizes_in_a_message_are_those_of_the_file() -> None:
    """TVM writes 2 as T.int64(2)."""
    graph = "g (float[B, 3] x, int64[M, 5] i) => (float[K, 3] y) { d = Concat <axis=0> (x, x)  y = GatherND (d, i) }"
    with pytest.raises(ModelError, match=r"float32 \(B \* 2, 3\); int64 \(M, 5\)"):
        import_onnx(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {graph}'))
