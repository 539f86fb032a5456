"""The linear kernel alone: every dtype and instruction, every vector width and tail, the code it becomes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm
from support import this_cpu
from support.kernel_runs import assembly, call, compiled, inner_loops, stack_stores, vector_machine

from mhsa_compile.hardware import host
from mhsa_compile.hardware.profile import TargetProfile, load_profile
from mhsa_compile.kernels.cpu.linear import microkernel
from mhsa_compile.kernels.cpu.linear.kernel import MOST_INT8_TERMS, CpuLinearKernel
from mhsa_compile.kernels.interface.epilogue import Epilogue, EpilogueStep
from mhsa_compile.kernels.interface.kernel import Config, Emitted
from mhsa_compile.kernels.interface.ops import LinearOp

KERNEL = CpuLinearKernel()
MACHINES = {  # bits, registers, LLVM's CPU, features beyond it
    "avx2": (256, 16, "x86-64-v3", ()),
    "avx512": (512, 32, "x86-64-v4", ()),
    "neon": (128, 32, "x86-64-v3", ()),
    "scalar": (64, 8, "x86-64-v3", ()),
    "dots512": (512, 32, "x86-64-v4", ("avx512_bf16", "avx512_vnni")),
    "dots256": (256, 16, "x86-64-v3", ("avx_vnni",)),
}
READ_FOR = {"dots512": "znver4", "dots256": "alderlake"}  # CPUs that have them, where assembly is read and not run
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
KINDS = [*((dtype, False) for dtype in DTYPES), ("float32", True), ("bfloat16", True)]  # (dtype, int8 weights)
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # of storing y, as a share of it
RTOL = 4e-6  # of the largest value: float32 sums of up to 200 terms
SHAPES = [((5,), 7), ((64, 64, 64), 33), ((5, 11, 200), 197)]


def machine(name: str) -> TargetProfile:
    """A machine of MACHINES whose code runs here: without AVX-512 the code of "avx512" is for this CPU, whose vectors
    are shorter."""
    bits, registers, mcpu, features = MACHINES[name]
    profile = vector_machine(bits, registers, this_cpu.level(mcpu), features)
    this_cpu.require(profile.tvm_config())
    return profile


def test_machines_are_those_that_this_cpu_runs(monkeypatch):
    features = frozenset(load_profile("x86-64-v3").hardware.features)
    monkeypatch.setattr(host, "cpu_features", lambda root=host.ROOT: features)
    monkeypatch.setattr(host, "architecture", lambda: "x86_64")
    assert machine("avx512") == vector_machine(512, 32)
    with pytest.raises(pytest.skip.Exception, match="this CPU lacks avx512_bf16"):
        machine("dots512")


@dataclass
class Linear:
    """One operation, compiled, with random weights packed."""

    op: LinearOp
    weights: list[np.ndarray]
    biases: list[np.ndarray]
    packed: list[tvm.runtime.Tensor]
    run: object

    def __call__(self, x: np.ndarray) -> np.ndarray:
        y = tvm.runtime.tensor(np.full((*x.shape[:-1], self.op.out_features), np.nan, x.dtype))
        self.run(tvm.runtime.tensor(x), *self.packed, y)
        return y.numpy()

    def expected(self, x: np.ndarray) -> np.ndarray:
        """float64, of the values as they are stored; where weights are int8, of the values as they are quantised."""
        x = x.astype(np.float64)
        x = quantised(x) if self.op.int8_weights else x
        outputs = []
        for weight, bias in zip(self.weights, self.biases, strict=True):
            weight = weight.astype(np.float64)
            weight = quantised(weight) if self.op.int8_weights else weight
            outputs.append(x @ weight.T + bias.astype(np.float64))
        return np.concatenate(outputs, axis=-1)

    def check(self, x: np.ndarray) -> None:
        y, expected = self(x).astype(np.float64), self.expected(x)
        allowed = RTOL * np.abs(expected).max() + ROUNDING[self.op.dtype] * np.abs(expected)
        assert np.isfinite(y).all()
        assert (np.abs(y - expected) <= allowed).all()


def quantised(rows: np.ndarray) -> np.ndarray:
    """The rows, each rounded to 127 steps of its largest magnitude, in the arithmetic that the documentation
    promises."""
    largest = np.abs(rows).max(axis=-1, keepdims=True).astype(np.float32)
    factor = np.float32(127) / np.where(largest == 0, np.float32(np.inf), largest)
    return np.rint(rows * factor.astype(np.float64)) * (largest / np.float32(127)).astype(np.float64)


def random_linear(op: LinearOp, profile: TargetProfile, config: Config | None = None) -> Linear:
    emitted = KERNEL.emit(op, profile, config or KERNEL.default_config(op, profile))
    library = compiled(emitted, profile)
    rng, dtype = np.random.default_rng(0), DTYPES[op.dtype]
    weights = [rng.standard_normal((n, op.in_features), np.float32).astype(dtype) for n in op.widths]
    biases = [
        rng.standard_normal(n, np.float32).astype(dtype) * has for n, has in zip(op.widths, op.biased, strict=True)
    ]
    given = [np.ascontiguousarray(w.T) if flip else w for w, flip in zip(weights, op.transposed, strict=True)]
    given += [b for b, has in zip(biases, op.biased, strict=True) if has]
    packed = empty_packed(emitted)
    library["pack"](*map(tvm.runtime.tensor, given), *packed)
    return Linear(op, weights, biases, packed, library["run"])


def empty_packed(emitted: Emitted) -> list[tvm.runtime.Tensor]:
    """Arrays for packed weights, filled with bytes that are NaN, or wrong, where packing leaves them."""
    names = {**DTYPES, "int32": np.int32, "int8": np.int8}
    arrays = [np.full(shape, 0, names[dtype]) for shape, dtype in emitted.packed]
    for array in arrays:
        array.view(np.uint8)[...] = 0xFF
    return [tvm.runtime.tensor(array) for array in arrays]


def rows(op: LinearOp, B: int, L: int) -> np.ndarray:
    x = np.random.default_rng(B * 1000 + L).standard_normal((B, L, op.in_features), np.float32)
    return x.astype(DTYPES[op.dtype])


def side_by_side(widths: tuple[int, ...], in_features: int, **fields) -> LinearOp:
    """Linears side by side: of PyTorch's and of the transposed layout, with and without bias."""
    transposed, biased = tuple(i == 1 for i in range(len(widths))), tuple(i % 2 == 0 for i in range(len(widths)))
    return LinearOp(("B", "L"), in_features, widths, biased, transposed, **fields)


def error_of_rows(L: int | str, count: int, in_features: int) -> float:
    """The root of the mean squared error of so many rows, by that of y."""
    linear = random_linear(LinearOp((1, L), in_features, (200,), (False,), (False,)), machine("avx512"))
    x = rows(linear.op, 1, count)
    expected = linear.expected(x)
    return float(np.sqrt(np.square(linear(x) - expected).mean() / np.square(expected).mean()))


@pytest.mark.thorough
@pytest.mark.parametrize("in_features", [*(pytest.param(n, marks=pytest.mark.thorough) for n in (197, 256)), 1100])
def test_few_rows_are_summed_in_as_many_chains_as_a_library_does(in_features, monkeypatch):
    """The budget is twice PyTorch's error, whose sums of few rows drift less than those of four or six chains."""
    few, of_free_rows, many = (error_of_rows(*rows_of, in_features) for rows_of in ((5, 5), ("L", 5), ("L", 17)))
    assert few == of_free_rows < 0.8 * many
    monkeypatch.setattr(microkernel, "FEW_ROWS", 0)
    assert error_of_rows(5, 5, in_features) > 1.25 * few


@pytest.mark.thorough_but("192x33-bfloat16-int8-dots512", "5x7-float16-scalar")
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(("dtype", "int8"), KINDS, ids=[f"{dtype}{'-int8' * int8}" for dtype, int8 in KINDS])
@pytest.mark.parametrize(("widths", "in_features"), SHAPES, ids=["5x7", "192x33", "216x197"])
def test_linears_side_by_side(name, widths, in_features, dtype, int8):
    """Every tail of rows, of features and of a step; `packed` and y begin as NaN."""
    linear = random_linear(side_by_side(widths, in_features, dtype=dtype, int8_weights=int8), machine(name))
    for B, L in [(1, 1), (1, 2), (1, 7), (3, 7), (1, 197)]:
        linear.check(rows(linear.op, B, L))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [pytest.param("avx2", marks=pytest.mark.thorough), pytest.param("avx512", marks=pytest.mark.thorough), "dots512"],
)
@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("bfloat16", "float16"))]
)
def test_many_parts_blocks_and_groups(name, dtype):
    """Small blocks, groups and parts, and rows that fill no tile, at lengths that are fixed."""
    profile = machine(name)
    for L in (1, 3, 53, 64):
        op = LinearOp((1, L), 197, (70,), (True,), (False,), dtype=dtype)
        config = KERNEL.default_config(op, profile) | {"block": 3, "group": 2, "depth": 32}
        emitted = KERNEL.emit(op, profile, config)
        library = compiled(emitted, profile)
        rng = np.random.default_rng(L)
        weight, bias = (rng.standard_normal(s, np.float32).astype(DTYPES[dtype]) for s in ((70, 197), (70,)))
        packed = empty_packed(emitted)
        library["pack"](tvm.runtime.tensor(weight), tvm.runtime.tensor(bias), *packed)
        Linear(op, [weight], [bias], packed, library["run"]).check(rows(op, 1, L))


@pytest.mark.thorough_but("5x7-True-avx512")
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("widths", "in_features"), SHAPES, ids=["5x7", "192x33", "216x197"])
def test_an_epilogue_comes_once_to_each_element(name, widths, in_features, int8):
    """Also to the rows that two tiles compute, and to the columns of a panel that is not full."""
    profile = machine(name)
    op = side_by_side(widths, in_features, int8_weights=int8)
    steps = ("mul", (0, 0.5)), ("erf", (3,)), ("mul", (4, 1)), ("sigmoid", (2,)), ("sub", (5, 6)), ("add", (7, 0))
    with_one = replace(op, epilogue=Epilogue(2, tuple(EpilogueStep(*step) for step in steps)))
    config = KERNEL.default_config(op, profile) | {"block": 3, "group": 2}
    plain = random_linear(op, profile, config)
    run = compiled(KERNEL.emit(with_one, profile, config), profile)["run"]
    for B, L in [(1, 1), (1, 2), (1, 7), (3, 7), (1, 53)]:
        x = rows(op, B, L)
        y = plain(x)
        factor, gate = (np.random.default_rng(seed).standard_normal(y.shape, np.float32) for seed in (1, 2))
        result = np.full_like(y, np.nan)
        result = call(run, x, *(packed.numpy() for packed in plain.packed), factor, gate, result)
        y = torch.from_numpy(y.astype(np.float64))
        expected = torch.erf(y / 2) * torch.from_numpy(factor) - torch.sigmoid(torch.from_numpy(gate)) + y
        assert np.abs(result - expected.numpy()).max() <= 4 * np.finfo(np.float32).eps * float(expected.abs().max())


def test_the_padding_of_rows_is_left_alone():
    linear = random_linear(LinearOp(("B", "L"), 33, (70,), (True,), (False,), padding=3), machine("avx512"))
    x = rows(linear.op, 1, 7)
    output = tvm.runtime.tensor(np.full((1, 7, 73), 5, np.float32))
    linear.run(tvm.runtime.tensor(x), *linear.packed, output)
    y, expected = output.numpy(), linear.expected(x)
    assert (y[..., 70:] == 5).all()
    assert np.abs(y[..., :70] - expected).max() <= RTOL * np.abs(expected).max()


@pytest.mark.parametrize("name", [pytest.param("avx512", marks=pytest.mark.thorough), "dots512"])
def test_int8_rows_that_are_zero_tiny_infinite_or_nan(name):
    linear = random_linear(LinearOp(("B", "L"), 70, (40,), (True,), (False,), int8_weights=True), machine(name))
    x = rows(linear.op, 1, 9)
    clean = linear(x)
    x[0, 1], x[0, 3], x[0, 5, 69], x[0, 7, 3] = 0, 1e-40, np.inf, np.nan
    y = linear(x)
    np.testing.assert_array_equal(y[0, ::2], clean[0, ::2])  # a row's scale is its own
    np.testing.assert_array_equal(y[0, 1], linear.biases[0])
    np.testing.assert_allclose(y[0, 3], linear.biases[0], atol=1e-30)
    assert not np.isfinite(y[0, 5]).any()
    assert np.isnan(y[0, 7]).all()


def test_an_int8_feature_of_zeros_is_its_bias_and_one_with_nan_is_nan():
    profile = machine("avx512")
    op = LinearOp(("B", "L"), 7, (3,), (True,), (False,), int8_weights=True)
    emitted = KERNEL.emit(op, profile, KERNEL.default_config(op, profile))
    library, packed = compiled(emitted, profile), empty_packed(emitted)
    weight, bias = np.ones((3, 7), np.float32), np.arange(3, dtype=np.float32)
    weight[1] = 0
    library["pack"](tvm.runtime.tensor(weight), tvm.runtime.tensor(bias), *packed)
    linear, x = Linear(op, [weight], [bias], packed, library["run"]), np.ones((1, 2, 7), np.float32)
    np.testing.assert_allclose(linear(x), [[[7, 1, 9]] * 2], rtol=1e-6)
    weight[1, 3] = np.nan
    library["pack"](tvm.runtime.tensor(weight), tvm.runtime.tensor(bias), *packed)
    assert np.isnan(linear(x)).tolist() == [[[False, True, False]] * 2]


@pytest.mark.thorough_but("avx2-float32-False-vfmadd")
@pytest.mark.parametrize(
    ("name", "dtype", "int8", "instruction"),
    [("avx2", "float32", False, "vfmadd"), ("avx2", "bfloat16", False, "vfmadd"),
     ("avx512", "float32", False, "vfmadd"), ("avx512", "bfloat16", False, "vfmadd"),
     ("avx512", "float16", False, "vfmadd"),
     ("dots512", "bfloat16", False, "vdpbf16ps"), ("dots512", "bfloat16", True, "vpdpbusd"),
     ("dots256", "float32", True, "vpdpbusd")],
)  # fmt: skip
def test_the_inner_loops_stay_in_registers_and_call_nothing(name, dtype, int8, instruction):
    bits, registers, mcpu, features = MACHINES[name]
    profile = vector_machine(bits, registers, READ_FOR.get(name, mcpu), features)
    op = LinearOp(("B", "L"), 768, (768,), (True,), (False,), dtype=dtype, int8_weights=int8)
    code = assembly(KERNEL.emit(op, profile, KERNEL.default_config(op, profile)), profile)
    loops = inner_loops(code, instruction)
    assert loops
    for body in loops:
        assert not stack_stores(body), "\n".join(body)
        assert not [line for line in body if "call" in line]


def test_what_it_refuses():
    long = LinearOp((1, 1), MOST_INT8_TERMS + 1, (8,), (False,), (False,), int8_weights=True)
    assert str(MOST_INT8_TERMS) in KERNEL.why_not(long, load_profile("x86-64-v4"))


def test_defaults_answer_every_knob_on_every_cpu():
    for target in ("x86-64-v3", "x86-64-v4", "znver4", "neoverse-v2", "cortex-a53"):
        profile = load_profile(target)
        for dtype in DTYPES:
            op = side_by_side((768, 768, 768), 768, dtype=dtype)
            config, space = KERNEL.default_config(op, profile), KERNEL.search_space(op, profile)
            assert config.keys() == space.keys() and min(config.values()) > 0
            assert config["rows"] * config["columns"] < profile.hardware.vector_registers
            assert KERNEL.why_not(op, profile) is None
            if KERNEL.layout(op, profile, 1).unit.rows == 1:  # columns that one vector holds come in panels of one
                narrow = side_by_side((min(profile.vector_lanes("float32"), 4),), 768, dtype=dtype)
                assert KERNEL.default_config(narrow, profile)["columns"] == 1
