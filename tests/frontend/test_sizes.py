"""Shapes that a graph computes from other tensors, at sizes that are free: against onnx's reference evaluator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError

FAR = 2**62

Case = tuple[str, dict[str, Any], Sequence[dict[str, int]]]

CASES: dict[str, Case] = {
    "a pad to a multiple of a window": (
        """(float[B, L, 8] x) => (float[N, M, K] y) {
        l = Shape <start=1, end=2> (x)
        over = Mod(l, eight)  rest = Sub(eight, over)  some = Mod(rest, eight)
        pads = Concat <axis=0> (none, none, none, none, some, none)
        padded = Pad(x, pads)  windows = Reshape(padded, shape)
        swapped = Transpose <perm=[0, 2, 1]> (windows)  scores = MatMul(windows, swapped)
        p = Softmax <axis=-1> (scores)  z = MatMul(p, windows)
        b = Shape <start=0, end=1> (x)  back = Concat <axis=0> (b, minus, eight)
        whole = Reshape(z, back)  cut = Slice(whole, none, l, one)  y = Add(cut, x) }""",
        {"eight": [8], "none": [0], "one": [1], "minus": [-1], "shape": [-1, 8, 8]},
        [{"B": 2, "L": 13}, {"B": 1, "L": 16}, {"B": 3, "L": 1}],
    ),
    "a relative shift": (
        """(float[B, 2, L, M] r, float[B, 2, L, L] q) => (float[B, H, N, K] y) {
        a = Pad(r, left)
        b = Shape <start=0, end=1> (r)  l = Shape <start=2, end=3> (r)  m = Shape <start=3, end=4> (r)
        more = Add(m, one)  turned = Concat <axis=0> (b, two, more, l)  c = Reshape(a, turned)
        d = Slice(c, one, far, two)  e = Shape(r)  f = Reshape(d, e)  g = Slice(f, none, l, three)  y = Add(q, g) }""",
        {"one": [1], "two": [2], "three": [3], "none": [0], "far": [FAR], "left": [0, 0, 0, 1, 0, 0, 0, 0]},
        [{"B": 1, "L": 6, "M": 11}, {"B": 2, "L": 1, "M": 1}],
    ),
    "lengths by floats, minima and conditions": (
        """(float[B, L, 4] x, float[B, S, 4] c) => (float[B, N, K] y) {
        l = Shape <start=1, end=2> (x)  s = Shape <start=1, end=2> (c)
        lf = Cast <to=1> (l)  half = Div(lf, twof)  up = Ceil(half)  n = Cast <to=7> (up)
        k = Min(n, s)  longer = Greater(k, two)  t = Where(longer, two, k)
        first = Slice(x, none, t, one)  second = Slice(c, none, k, one)  both = Concat <axis=1> (first, second)
        size = Size(both)  sizef = Cast <to=1> (size)  scale = Sqrt(sizef)  y = Div(both, scale) }""",
        {"two": [2], "none": [0], "one": [1], "twof": np.float32([2])},
        [{"B": 2, "L": 7, "S": 5}, {"B": 1, "L": 1, "S": 1}, {"B": 3, "L": 4, "S": 1}],
    ),
    "ranges, expansions and tiles": (
        """(float[B, L, 4] x, float[S, 4] c) => (float[B, N, K] y, int64[I] i) {
        l = Shape <start=1, end=2> (x)  s = Shape <start=0, end=1> (c)  ls = Squeeze(l)  ss = Squeeze(s)
        r = Range(ls_less, ls, by)  r1 = Range(zero, ss, by)  lsum = ReduceSum <keepdims=0> (r)
        ls_less = Sub(ls, ss)  i = Add(r1, lsum)
        to = Shape(x)  to_c = Concat <axis=0> (one, s, four)  c3 = Reshape(c, to_c)
        b = Shape <start=0, end=1> (x)  times = Concat <axis=0> (b, one, one)  many = Tile(c3, times)
        wide = Concat <axis=0> (b, s, one)  flags = ConstantOfShape <value = float[1] {2.0}> (wide)
        y = Mul(many, flags) }""",
        {"zero": 0, "by": 1, "one": [1], "four": [4]},
        [{"B": 2, "L": 7, "S": 5}, {"B": 1, "L": 1, "S": 1}],
    ),
    "rows for weights, reshaped by sizes of another tensor": (
        """(float[B, L, 8] x, float[M, N, 2] other) => (float[O, P, Q] y) {
        two_sizes = Shape <end=2> (other)  shape = Concat <axis=0> (two_sizes, minus)
        rows = Reshape(x, shape)  y = MatMul(rows, weights) }""",
        {"minus": [-1], "weights": np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)},
        [{"B": 2, "L": 7, "M": 2, "N": 7}, {"B": 4, "L": 3, "M": 3, "N": 4}],
    ),
    "lengths that a call counts": (
        """(float[B, L, 4] x, int64[W] ids) => (float[B, N, K] y, float[M, A] z) {
        present = Cast <to=7> (ids)  n = ReduceSum <keepdims=1> (present)  cut = Slice(x, none, n, one)
        turned = Transpose <perm=[0, 2, 1]> (cut)  s = MatMul(cut, turned)
        p = Softmax <axis=-1> (s)  y = MatMul(p, cut)
        count = Squeeze(n)  r = Range(zero, count, by)  rf = Cast <to=1> (r)
        shape = Concat <axis=0> (n, one)  z = Reshape(rf, shape) }""",
        {"zero": 0, "by": 1, "none": [0], "one": [1]},
        [{"B": 2, "L": 9, "W": 5}, {"B": 1, "L": 1, "W": 1}],
    ),
}


def _model(text: str, constants: dict[str, Any]) -> onnx.ModelProto:
    body = parser.parse_graph(f"g {text}")
    body.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in constants.items())
    nodes = {name: node for node in body.node for name in node.output}
    order: list[onnx.NodeProto] = []

    def place(node: onnx.NodeProto) -> None:
        if not any(node is other for other in order):
            for name in node.input:
                if name in nodes:
                    place(nodes[name])
            order.append(node)

    for node in list(body.node):
        place(node)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in order]
    del body.node[:]
    body.node.extend(copies)
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _arrays(model: onnx.ModelProto, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    rng, result = np.random.default_rng(0), {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value or sizes[dim.dim_param] for dim in kind.shape.dim]
        whole = kind.elem_type == TensorProto.INT64
        result[value.name] = np.ones(shape, np.int64) if whole else rng.standard_normal(shape).astype(np.float32)
    return result


@pytest.mark.thorough_but("a pad to a multiple of a window", "ranges, expansions and tiles")
@pytest.mark.parametrize("name", CASES)
def test_computed_shapes(name: str) -> None:
    text, constants, calls = CASES[name]
    model = _model(text, constants)
    compiled = mhsa.load(mhsa.compile(model, without_attention="accept"))
    for sizes in calls:
        arrays = _arrays(model, sizes)
        actual = compiled(**arrays)
        actual = actual if isinstance(actual, tuple) else (actual,)
        for one, other in zip(actual, ReferenceEvaluator(model).run(None, arrays), strict=True):
            assert np.asarray(one).shape == other.shape
            assert np.allclose(one, other, atol=1e-5)


def test_sizes_that_do_not_fit_end_the_call() -> None:
    model = _model(
        """(float[B, L, 4] x, float[A, S] c) => (float[N, M, K] y, float[P, Q] z) {
        y = Reshape(x, windows)
        n = Shape <start=0, end=1> (x)  m = Shape <start=1, end=2> (x)  area = Concat <axis=0> (n, m)
        ones = ConstantOfShape <value = float[1] {1.0}> (area)  z = Add(ones, c) }""",
        {"windows": [-1, 8, 4]},
    )
    compiled = mhsa.load(mhsa.compile(model, without_attention="accept"))
    x, c = np.ones((2, 8, 4), np.float32), np.ones((2, 8), np.float32)
    assert compiled(x=x, c=c)[0].shape == (2, 8, 4)
    assert compiled(x=x, c=c[:1, :1])[1].shape == (2, 8)  # an axis of one broadcasts
    with pytest.raises(InputError, match="Reshape node 'y': expected a shape of as many elements"):
        compiled(x=x[:, :3], c=c[:, :3])
    with pytest.raises(
        InputError, match=r"Add node 'z': expected operands .*\(B, L\) and \(A, S\), got \(2, 8\) and \(2, 3\)"
    ):
        compiled(x=x, c=c[:, :3])


@pytest.mark.thorough_but("float-numbers0")
@pytest.mark.parametrize(
    ("kind", "numbers"), [("float", (0.5, 3.0, 0.75)), ("int64", (9, -2, -3)), ("int64", (4, 4, 1))]
)
def test_a_range_whose_numbers_all_come_by_the_call(kind: str, numbers: tuple[float, ...]) -> None:
    inputs = f"{kind} a, {kind} b, {kind} by"
    source = f'<ir_version: 9, opset_import: ["" : 18]> g ({inputs}) => ({kind}[n] y) {{y = Range(a, b, by)}}'
    call = mhsa.load(mhsa.compile(parser.parse_model(source), without_attention="accept"))
    arrays = [np.array(number, np.float32 if kind == "float" else kind) for number in numbers]
    np.testing.assert_array_equal(call(*arrays), np.arange(*numbers))
