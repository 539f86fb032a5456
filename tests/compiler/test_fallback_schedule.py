"""What no kernel claims: elementary functions to the last digits, and schedules that change no result."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
import torch
import tvm
import tvm_ffi
from onnx import helper, numpy_helper
from support.kernel_runs import call, vector_machine
from support.onnx_models import model_of
from torch.nn import functional
from tvm import relax, te

import mhsa_compile as mhsa
from mhsa_compile.compiler import pipeline
from mhsa_compile.compiler.codegen.build import pass_context
from mhsa_compile.compiler.fallback import cpu_schedule
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.cpu.simd import scalar_math
from mhsa_compile.records.record import RecordSet
from mhsa_compile.verification.error_budget import budget, max_error

PROFILE = vector_machine(256, 16)
POINTS = np.concatenate(
    [np.linspace(-6, 6, 120_001), np.linspace(-130, 130, 20_001), np.geomspace(1e-37, 1e-2, 20_001)]
).astype(np.float32)


def built(function: Any) -> Any:
    module = tvm.IRModule({"run": function.with_attr("global_symbol", "run")})
    with pass_context():
        return tvm.compile(module, target=tvm.target.Target(PROFILE.tvm_config()))["run"]


def lowered(graph: Callable[[Any], Any], *dims: Any, dtype: str = "float32") -> Any:
    """A module whose `main` takes x of these dims."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(dims, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            output = builder.emit_output(builder.emit(graph(x)))
        builder.emit_func_output(output)
    return cpu_schedule.lower(builder.get(), PROFILE, RecordSet([], PROFILE)).module


def rows_of(graph: Callable[[Any], Any], width: int) -> Any:
    """The same of x (B, L, width)."""
    return lowered(graph, te.var("B", "int64"), te.var("L", "int64"), width)


def only_function(module: Any) -> Any:
    (function,) = (one for _, one in module.functions_items() if isinstance(one, tvm.tirx.PrimFunc))
    return function


def main_of(module: Any) -> Any:
    """`main`, compiled."""
    with pass_context():
        return relax.VirtualMachine(relax.build(module, tvm.target.Target(PROFILE.tvm_config())), tvm.cpu())["main"]


def applied(formula: Callable[[Any], Any], x: np.ndarray) -> np.ndarray:
    X = te.placeholder((te.var("n", "int64"),), "float32")
    function = te.create_prim_func([X, te.compute(X.shape, lambda i: formula(X[i]))])
    return call(built(function), x, np.empty_like(x)).astype(np.float64)


def test_elementary_functions() -> None:
    exact = torch.from_numpy(POINTS.astype(np.float64))
    for formula, function, units in ((scalar_math.erf, torch.erf, 1.3), (scalar_math.tanh, torch.tanh, 4)):
        expected = function(exact).numpy()
        error = np.abs(applied(formula, POINTS) - expected)
        assert (error / np.spacing(np.abs(expected).astype(np.float32))).max() < units
    error = np.abs(applied(scalar_math.sigmoid, POINTS) - torch.sigmoid(exact).numpy())
    assert error.max() <= 2 * np.finfo(np.float32).eps / 2


@pytest.mark.thorough_but("log-log-1")
@pytest.mark.parametrize(
    ("formula", "function", "units"), [(scalar_math.log, np.log, 1), (scalar_math.log1p, np.log1p, 2.5)]
)
def test_logarithms_of_every_kind_of_float(formula: Callable[[Any], Any], function: Any, units: float) -> None:
    bits = np.arange(0, 1 << 32, 50_021, dtype=np.uint32).view(np.float32)
    bits = bits[~np.isnan(bits)]
    x = np.concatenate([bits, np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -1, 1, 1e-45, 3.4e38], np.float32)])
    with np.errstate(all="ignore"):
        expected = function(x.astype(np.float64))
        y, is_finite = applied(formula, x), np.isfinite(expected)
    np.testing.assert_array_equal(y[~is_finite], expected[~is_finite])
    error = np.abs(y[is_finite] - expected[is_finite]) / np.spacing(np.abs(expected[is_finite]).astype(np.float32))
    assert error.max() < units


ARCS = [(scalar_math.asin, np.arcsin), (scalar_math.acos, np.arccos), (scalar_math.atan, np.arctan)]


@pytest.mark.parametrize(("formula", "function"), ARCS, ids=["asin", "acos", "atan"])
def test_arcs(formula: Callable[[Any], Any], function: Any) -> None:
    """Of asin and acos NaN beyond 1; signs of zeros stay."""
    x = np.concatenate([POINTS, POINTS / 130, [np.inf, -np.inf, np.nan, 1, -1, 0, -0.0, 0.5, 1e30, 1e-40]])
    x = x.astype(np.float32)
    with np.errstate(invalid="ignore"):
        expected = function(x.astype(np.float64))
    y, is_known = applied(formula, x), ~np.isnan(expected)
    np.testing.assert_array_equal(~np.isnan(y), is_known)
    error = np.abs(y - expected)[is_known] / np.spacing(np.abs(expected[is_known]).astype(np.float32))
    assert error.max() < 3
    np.testing.assert_array_equal(np.signbit(y[is_known]), np.signbit(expected[is_known]))


def test_exponentials_to_the_smallest_and_the_largest_float() -> None:
    x = POINTS[np.abs(POINTS) < 120]
    exact = np.exp(x.astype(np.float64))
    with np.errstate(over="ignore"):
        nearest = exact.astype(np.float32)
    y, is_finite = applied(scalar_math.exp, x), np.isfinite(nearest)
    np.testing.assert_array_equal(np.isinf(y), ~is_finite)
    assert (np.abs(y - exact)[is_finite] / np.spacing(nearest[is_finite])).max() < 1.3


@pytest.mark.parametrize(
    ("formula", "ends"),
    [
        pytest.param(scalar_math.erf, (-1, 1), marks=pytest.mark.thorough),
        (scalar_math.exp, (0, np.inf)),
        (scalar_math.tanh, (-1, 1)),
        (scalar_math.sigmoid, (0, 1)),
    ],
)
def test_elementary_functions_at_their_ends(formula: Callable[[Any], Any], ends: tuple[int, int]) -> None:
    low, high, unknown = applied(formula, np.array([-np.inf, np.inf, np.nan], np.float32))
    assert (low, high) == ends
    assert np.isnan(unknown)


@pytest.mark.thorough_but(
    "bfloat16-sigmoid-sigmoid-",
    "bfloat16-silu-silu-",
    "float16-exp-exp-",
    "float16-sigmoid-sigmoid-",
    "float16-silu-silu-",
    "float16-tanh-tanh-",
)
@pytest.mark.parametrize(
    ("operator", "function", "most"),
    [
        (relax.op.erf, torch.erf, 0.75),
        (relax.op.nn.gelu, functional.gelu, 0.75),  # the tail of float32's is a difference of nearly equal numbers
        (relax.op.nn.silu, functional.silu, 0.75),
        (relax.op.sigmoid, torch.sigmoid, 0.75),
        (relax.op.tanh, torch.tanh, 0.75),
        (relax.op.exp, torch.exp, 0.75),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_elementary_functions_of_16_bits_are_rounded_once(
    operator: Any, function: Any, most: float, dtype: Any
) -> None:
    """Of all numbers. TVM's own steps in float16 lose up to all digits of a small result."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        numbers = numbers[np.isfinite(numbers.astype(np.float64))]
    module = lowered(operator, numbers.size, dtype=np.dtype(dtype).name)
    y = call(built(only_function(module)), numbers, np.empty_like(numbers))
    exact = function(torch.from_numpy(numbers.astype(np.float64))).numpy()
    with np.errstate(all="ignore"):
        nearest = exact.astype(dtype)
        steps = np.spacing(np.abs(nearest)).astype(np.float64)
        assert np.array_equal(np.isinf(y), np.isinf(nearest))
    finite = np.isfinite(steps)
    wide, float32 = np.maximum(np.abs(numbers.astype(np.float64)), 1), np.finfo(np.float32)
    allowed = most * steps + wide * (float32.eps if operator is relax.op.nn.gelu else float32.tiny)
    assert (np.abs(y[finite].astype(np.float64) - exact[finite]) < allowed[finite]).all()


def in_steps_of_bfloat16(x: np.ndarray) -> np.ndarray:
    """Values as a bfloat16 holds them, by NumPy, widened again."""
    with np.errstate(invalid="ignore"):
        return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)


def test_bfloat16_is_rounded_where_it_is_stored_or_cast() -> None:
    """Also where a formula reads another's result, and where rows have arrays of their own for what is summed."""

    def graph(x: Any) -> Any:
        powers = relax.op.exp(x)
        return relax.op.where(relax.op.greater(x, powers), x, relax.op.tanh(relax.op.add(powers, x)))

    def rows(x: Any) -> Any:
        powers = relax.op.exp(x)
        return relax.op.multiply(powers, relax.op.max(powers, -1, keepdims=True))

    def cast(x: Any) -> Any:
        return relax.op.add(relax.op.astype(relax.op.astype(relax.op.add(x, x), "float32"), "bfloat16"), x)

    x = np.random.default_rng(0).standard_normal((37, 40)).astype(ml_dtypes.bfloat16)
    wide = x.astype(np.float32)
    powers = in_steps_of_bfloat16(np.exp(wide))
    larger = np.tanh(in_steps_of_bfloat16(powers + wide))
    for made, expected in (
        (graph, np.where(wide > powers, wide, in_steps_of_bfloat16(larger))),
        (rows, in_steps_of_bfloat16(powers * powers.max(-1, keepdims=True))),
        (lambda x: relax.op.add(relax.op.add(x, x), x), in_steps_of_bfloat16(3 * wide)),
        (cast, in_steps_of_bfloat16(in_steps_of_bfloat16(2 * wide) + wide)),
    ):
        start = time.process_time()
        run = main_of(lowered(made, 37, 40, dtype="bfloat16"))
        assert time.process_time() - start < 5  # one expression of the first took TVM twenty times as long
        y = run(tvm.runtime.tensor(x)).numpy().astype(np.float32)
        assert (y == expected).mean() > 0.99  # but for ties


def test_casts_to_bfloat16_keep_what_is_no_number() -> None:
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800000, 0x3F808000, 0x3F818000], np.uint32)
    x = np.resize(bits, 64).view(np.float32)
    run = built(only_function(lowered(lambda x: relax.op.astype(x, "bfloat16"), 64)))
    y = call(run, x, np.empty(64, ml_dtypes.bfloat16))
    np.testing.assert_array_equal(y.astype(np.float32), in_steps_of_bfloat16(x))


@pytest.mark.thorough_but("1024")
@pytest.mark.parametrize("rows", [7, 1024])
def test_arithmetic_read_twice(rows: int) -> None:
    """The same names in both places are two values each, also where no choice of threads is left."""

    def graph(x: Any) -> Any:
        powers = relax.op.exp(x)
        return relax.op.multiply(powers, relax.op.subtract(powers, x))

    function = only_function(lowered(graph, rows, 64))
    values = np.random.default_rng(0).standard_normal((rows, 64)).astype(np.float32)
    powers = np.exp(values.astype(np.float64))
    np.testing.assert_allclose(call(built(function), values, np.empty_like(values)), powers * (powers - values), 1e-5)


def test_arithmetic_of_arithmetic_compiles_in_no_time() -> None:
    """Three formulas of each other as one expression took TVM more than a minute."""
    operators = (relax.op.tanh, relax.op.erf, relax.op.sigmoid, relax.op.exp, relax.op.log)
    module = lowered(lambda x: reduce(lambda value, operator: operator(value), operators, x), te.var("n", "int64"), 40)
    start = time.process_time()
    run = main_of(module)
    assert time.process_time() - start < 10
    numbers = np.random.default_rng(0).standard_normal((37, 40)).astype(np.float32)
    wide = torch.from_numpy(numbers.astype(np.float64))
    expected = torch.sigmoid(torch.erf(torch.tanh(wide))).numpy()
    np.testing.assert_allclose(run(tvm.runtime.tensor(numbers)).numpy(), expected, 1e-5)


def test_what_is_read_several_times_is_computed_once() -> None:
    """A chain of roundings, each chosen by comparisons of its own, was one expression with each 4^n times."""

    def rounded(x: Any, _: int) -> Any:
        fifth = relax.op.floor(x / relax.const(5.0))
        return relax.op.where(relax.op.isfinite(fifth), fifth, x) + relax.const(1.0)

    def chain(count: int) -> Any:
        return lowered(lambda x: reduce(rounded, range(count), x), te.var("n", "int64"), 40)

    count = str(only_function(chain(5))).count("floor(")
    assert count < 500  # else 6,248
    numbers = np.random.default_rng(0).standard_normal((7, 40)).astype(np.float32) * 10000
    numbers[0, :3] = np.nan, np.inf, -np.inf
    expected = numbers
    for _ in range(3):
        fifth = np.floor(expected / np.float32(5))
        expected = np.where(np.isfinite(fifth), fifth, expected) + 1
    np.testing.assert_array_equal(main_of(chain(3))(tvm.runtime.tensor(numbers)).numpy(), expected)


def reduced(dims: tuple[int, ...], axes: tuple[int, ...], operator: Any, keepdims: bool) -> Any:
    """The function of a sum of squares or of a maximum, scheduled."""
    elements = relax.op.square if operator is relax.op.sum else lambda x: x
    return only_function(lowered(lambda x: operator(elements(x), axes, keepdims), *dims))


@pytest.mark.thorough_but("sum-sum-axes1-False", "sum-sum-axes4-False")
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axes", [(2,), (1,), (0,), (1, 2), (0, 1, 2), (0, 2)])
@pytest.mark.parametrize(("operator", "expected"), [(relax.op.sum, np.sum), (relax.op.max, np.max)])
def test_sums_that_nothing_follows(operator: Any, expected: Any, axes: tuple[int, ...], keepdims: bool) -> None:
    """Along each axis and several, of few elements and many, which threads share."""
    for dims in ((3, 5, 16), (7, 131, 48)):
        function = reduced(dims, axes, operator, keepdims)
        x = np.random.default_rng(0).standard_normal(dims).astype(np.float32)
        elements = x.astype(np.float64) ** (2 if operator is relax.op.sum else 1)
        value = expected(elements, axis=axes, keepdims=keepdims)
        y = call(built(function), x, np.full(np.shape(value), np.nan, np.float32))
        np.testing.assert_allclose(y, value, 1e-5)


def test_large_sums_are_shared_and_in_vectors() -> None:
    for axes in ((2,), (1,), (1, 2)):
        loops: list[Any] = []
        tvm_ffi.structural_walk(reduced((64, 512, 64), axes, relax.op.sum, True), (tvm.tirx.For, loops.append))
        assert {tvm.tirx.ForKind.PARALLEL, tvm.tirx.ForKind.VECTORIZED} <= {loop.kind for loop in loops}


def layer_norm(x: Any) -> Any:
    ones, zeros = (relax.const(fill(int(x.ty.shape[2]), dtype=np.float32)) for fill in (np.ones, np.zeros))
    return relax.op.nn.layer_norm(x, ones, zeros, [-1])


def rms_norm(x: Any) -> Any:
    squares = relax.op.power(x, relax.const(2.0, "float32"))
    mean = relax.op.mean(squares, axis=[-1], keepdims=True)
    return relax.op.divide(x, relax.op.sqrt(relax.op.add(mean, relax.const(1e-6, "float32"))))


def weighted_rms_norm(x: Any) -> Any:
    """TVM's operator, which casts the weight to the dtype that it has: a block of a row's length alone."""
    return relax.op.nn.rms_norm(x, relax.const(np.full(int(x.ty.shape[2]), 2, np.float32)), [-1], 1e-6)


GRAPHS = {
    "gelu": (relax.op.nn.gelu, functional.gelu),
    "silu": (relax.op.nn.silu, functional.silu),
    "softmax": (lambda x: relax.op.nn.softmax(x, axis=-1), lambda x: x.softmax(-1)),
    "layer_norm": (layer_norm, lambda x: functional.layer_norm(x, x.shape[-1:])),
    "rms_norm": (rms_norm, lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()),
    "weighted_rms_norm": (weighted_rms_norm, lambda x: 2 * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()),
    "means of rows": (lambda x: relax.op.mean(x, axis=[-1]), lambda x: x.mean(-1)),
    "not along rows": (lambda x: relax.op.nn.softmax(x, axis=1), lambda x: x.softmax(1)),
}


@pytest.mark.thorough_but("means of rows")
@pytest.mark.parametrize("name", GRAPHS)
def test_schedules_change_no_result(name: str) -> None:
    """Widths of whole vectors, of shorter ones and prime; few rows, by one thread, and many."""
    graph, function = GRAPHS[name]
    for width, shapes in ((48, ((2, 3), (5, 79))), (60, ((1, 7),)), (13, ((1, 1), (7, 197)))):
        run = main_of(rows_of(graph, width))
        for shape in shapes:
            x = torch.randn((*shape, width), generator=torch.Generator().manual_seed(width))
            expected, yardstick = function(x.double()).numpy(), function(x).numpy()
            y = run(tvm.runtime.tensor(x.numpy())).numpy()
            assert max_error(expected, y) <= budget(expected, yardstick, "float32")


@pytest.mark.thorough_but("[0, 1, 2]")
@pytest.mark.parametrize("axes", [[1], [1, 2], [0, 1, 2]], ids=str)
def test_numbers_of_sums_over_other_axes_than_a_row(axes: list[int]) -> None:
    """What follows the sums has fewer axes than they, or none; a chain of n additions is off by n roundings at most."""
    run = main_of(rows_of(lambda x: relax.op.sqrt(relax.op.sum(relax.op.abs(x), axis=axes)), 13))
    for shape in ((1, 1), (7, 19)):
        x = np.random.default_rng(0).standard_normal((*shape, 13)).astype(np.float32)
        sums = np.abs(x).sum(tuple(axes), dtype=np.float64)
        y = run(tvm.runtime.tensor(x)).numpy()
        assert y.shape == sums.shape
        np.testing.assert_allclose(y, np.sqrt(sums), rtol=(x.size / sums.size + 2) * 2.0**-24)


def test_plain_code_behind_loops_has_no_rows() -> None:
    """TVM's ScatterND is one block without axes, behind that of its indices, turned."""
    text = """<ir_version: 10, opset_import: ["" : 20]>
    g (float[5, 7] x, int64[B, 2] at, float[B] rows) => (float[5, 7] y) { y = ScatterND (x, at, rows) }"""
    model = onnx.parser.parse_model(text)
    call = mhsa.load(mhsa.compile(model, without_attention="accept", check=False))
    x, rows = np.zeros((5, 7), np.float32), np.array([2.0, 3.0], np.float32)
    y = call(x, np.array([[1, 2], [4, 6]]), rows)
    assert y[1, 2] == 2 and y[4, 6] == 3 and np.count_nonzero(y) == 2


@pytest.mark.thorough_but("weighted_rms_norm")
@pytest.mark.parametrize("name", ["gelu", "layer_norm", "weighted_rms_norm"])
def test_many_rows_are_shared_among_threads(name: str) -> None:
    script = rows_of(GRAPHS[name][0], 48).script()
    assert "T.parallel(B * L)" in script
    assert f"> T.int64({cpu_schedule.WORTH_SHARING})" in script


@pytest.mark.parametrize(("width", "shared"), [(8, "B * L"), (100, "B * L * T.int64(3)")])
def test_a_stretch_of_known_length_is_loops_inside_of_the_shared_one(width: int, shared: str) -> None:
    """The place in loops that are one is found by divisions: once for 24 elements here, and never for over 256."""
    module = lowered(relax.op.nn.relu, te.var("B", "int64"), te.var("L", "int64"), 3, width)
    assert f"T.parallel({shared})" in module.script()
    x = np.random.default_rng(0).standard_normal((5, 7, 3, width)).astype(np.float32)
    np.testing.assert_array_equal(main_of(module)(tvm.runtime.tensor(x)).numpy(), np.maximum(x, 0))


def test_a_sum_of_rows_is_several_sums_at_first_where_its_axis_stays() -> None:
    """With a single element it would be a chain of additions, which cannot be a vector."""
    script = rows_of(rms_norm, 48).script()
    assert "_rf = " in script
    assert "T.vectorized(T.int64(8))" in script.split("_rf = ")[1]


def test_reshapes_between_sizes_that_nobody_can_show_to_be_equal_are_views() -> None:
    """As loops, which divide by these sizes, one took LLVM a minute."""
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Shape", ["w"], ["sizes"])]
    nodes.append(helper.make_node("Reshape", ["r", "sizes"], ["y"]))
    nodes.append(helper.make_node("Relu", ["y"], ["z"]))
    model = model_of(nodes, {"x": ["a", "b", "c"], "w": ["d", "e", "f", "g"]}, {"z": None}, opset=18)
    with pytest.warns(UserWarning, match="no attention"):
        module = pipeline.import_source(model).module
    assert not [name for name in cpu_schedule.primitives(module, load_profile("x86-64-v3")) if "reshape" in name]
    x = np.random.default_rng(0).standard_normal((6, 5, 4)).astype(np.float32)
    z = mhsa.load(mhsa.compile(model, without_attention="accept"))(x, np.zeros((3, 2, 4, 5), np.float32))
    np.testing.assert_array_equal(z, np.maximum(x, 0).reshape(3, 2, 4, 5))


@pytest.mark.parametrize("number", [-np.inf, np.inf, np.nan])
def test_an_array_of_what_is_no_number(number: float) -> None:
    """As a causal mask begins in a file of PyTorch's: `torch.full((L, L), -inf)`."""
    value = numpy_helper.from_array(np.array([number], "f4"))
    nodes = [
        helper.make_node("Shape", ["x"], ["size"]),
        helper.make_node("ConstantOfShape", ["size"], ["full"], value=value),
        helper.make_node("Mul", ["full", "x"], ["y"]),
    ]
    model = model_of(nodes, {"x": ["L", "S"]}, {"y": ["L", "S"]})
    x = np.arange(-3, 12, dtype=np.float32).reshape(3, 5)
    y = mhsa.load(mhsa.compile(model, without_attention="accept"))(x)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(y, x * np.float32(number))
