"""Linears of bytes and the bytes of an array, alone: whole numbers in NumPy, and ONNX Runtime's bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tvm
from onnx import TensorProto, helper
from support import this_cpu
from support.byte_ops import of_bytes, whole_numbers
from support.kernel_runs import assembly, compiled, inner_loops, stack_stores, vector_machine

from mhsa_compile.hardware.profile import TargetProfile, load_profile
from mhsa_compile.kernels.cpu.linear.quantised import MOST_TERMS, CpuQuantisedLinearKernel
from mhsa_compile.kernels.cpu.quantise import CpuQuantiseKernel
from mhsa_compile.kernels.interface.epilogue import Epilogue, EpilogueStep
from mhsa_compile.kernels.interface.ops import QuantisedLinearOp, QuantiseOp

LINEAR, QUANTISE = CpuQuantisedLinearKernel(), CpuQuantiseKernel()
Array = np.ndarray[Any, Any]
BYTES = ("int8", "uint8")
MACHINES = {
    "dots512": (512, 32, "x86-64-v4", ("avx512_vnni",)),
    "dots256": (256, 16, "x86-64-v3", ("avx_vnni",)),
    "pairs512": (512, 32, "x86-64-v4", ("avx512bw",)),
    "pairs256": (256, 16, "x86-64-v3", ("avx2",)),
}


def machine(name: str) -> TargetProfile:
    bits, registers, mcpu, features = MACHINES[name]
    profile = vector_machine(bits, registers, this_cpu.level(mcpu), features)
    this_cpu.require(profile.tvm_config())
    return profile


class Linear:
    """One operation, compiled, with its weights packed."""

    def __init__(self, op: QuantisedLinearOp, profile: TargetProfile, zeros: list[Array], seed: int = 0) -> None:
        rng, self.op, self.zeros = np.random.default_rng(seed), op, zeros
        self.weights = [whole_numbers(rng, d, n, op.in_features) for d, n in zip(op.stored, op.widths, strict=True)]
        self.scales = [rng.uniform(0.01, 0.05, n).astype(np.float32) for n in op.widths]
        self.biases = [rng.standard_normal(n).astype(np.float32) * b for n, b in zip(op.widths, op.biased, strict=True)]
        emitted = LINEAR.emit(op, profile, LINEAR.default_config(op, profile))
        library = compiled(emitted, profile)
        stored = [np.ascontiguousarray(w.T) if t else w for w, t in zip(self.weights, op.transposed, strict=True)]
        biases = [bias for bias, there in zip(self.biases, op.biased, strict=True) if there]
        names = {"int32": np.int32, "float32": np.float32}
        arrays = [np.full(shape, -1, names[dtype]) for shape, dtype in emitted.packed]
        self.packed = [tvm.runtime.tensor(array) for array in arrays]
        library["pack"](*map(tvm.runtime.tensor, [*stored, *zeros, *self.scales, *biases]), *self.packed)
        self.run = library["run"]

    def __call__(self, x: Array, zero: int, scale: float) -> Array:
        y = np.full((*x.shape[:-1], self.op.out_features), np.nan, np.float32)
        numbers = np.array(zero, x.dtype), np.array(scale, np.float32)
        result = tvm.runtime.tensor(y)
        self.run(*map(tvm.runtime.tensor, (x, *numbers)), *self.packed, result)
        return result.numpy()

    def sums(self, x: Array, zero: int) -> Array:
        rows = x.astype(np.int64) - zero
        parts = zip(self.weights, self.zeros, strict=True)
        return np.concatenate([rows @ (w.astype(np.int64) - z.astype(np.int64)[:, None]).T for w, z in parts], axis=-1)

    def check(self, x: Array, zero: int, scale: float) -> None:
        """The sums exactly, the rest within three roundings of float32."""
        sums = self.sums(x, zero)
        scaled = sums * (np.float64(np.float32(scale)) * np.concatenate(self.scales))
        expected = scaled + np.concatenate(self.biases)
        allowed = 2.0**-24 * (3 * np.abs(scaled) + np.abs(expected))
        assert (np.abs(self(x, zero, scale) - expected) <= allowed).all()


CASES = [
    (7, (1,), "uint8", ("int8",)),
    (33, (7, 33), "uint8", ("uint8", "int8")),
    (200, (33, 1, 50), "uint8", ("int8", "uint8", "uint8")),
    (64, (64,), "uint8", ("int8",)),
    (64, (33,), "int8", ("int8",)),
    (33, (40,), "int8", ("uint8",)),
]


@pytest.mark.thorough_but(
    "(33, (40,), 'int8', ('uint8',))-pairs256",
    "(33, (7, 33), 'uint8', ('uint8', 'int8'))-dots256",
    "(33, (7, 33), 'uint8', ('uint8', 'int8'))-dots512",
    "(64, (33,), 'int8', ('int8',))-dots512",
    "(7, (1,), 'uint8', ('int8',))-pairs256",
)
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_whole_numbers(case: Any, name: str) -> None:
    """Zeros of each feature, odd ones among them; one row, few and many."""
    profile, rng = machine(name), np.random.default_rng(1)
    linear = Linear(of_bytes(*case), profile, [whole_numbers(rng, d, n) for d, n in zip(case[3], case[1], strict=True)])
    for B, L in ((1, 1), (1, 3), (2, 197)):
        x = whole_numbers(rng, case[2], B, L, case[0])
        for zero in (0, 127) if case[2] == "int8" else (0, 128, 255):
            linear.check(x, zero, 0.031)


@pytest.mark.thorough_but("int8-0")
@pytest.mark.parametrize(("stored", "centre"), [("int8", 0), ("uint8", 128)])
def test_zeros_that_need_no_sums_of_rows(stored: str, centre: int) -> None:
    rng = np.random.default_rng(2)
    linear = Linear(
        of_bytes(100, (48,), "uint8", (stored,), centred=True), machine("dots512"), [np.full(48, centre, stored)]
    )
    for rows in (1, 3, 50):
        linear.check(whole_numbers(rng, "uint8", 1, rows, 100), 131, 0.5)


def test_exact_sums_of_extremes() -> None:
    """Numbers of one sign, whose sums of pairs and fours pass 16 bits and whose sum of all comes near to 31."""
    terms = MOST_TERMS // 1000 * 1000
    linear = Linear(of_bytes(terms, (17,), "uint8", ("int8",)), machine("dots512"), [np.full(17, 127, np.int8)])
    linear.weights[0][...] = -128
    emitted = LINEAR.emit(linear.op, machine("dots512"), LINEAR.default_config(linear.op, machine("dots512")))
    given = [linear.weights[0].T.copy(), *linear.zeros, *linear.scales, *linear.biases]
    compiled(emitted, machine("dots512"))["pack"](*map(tvm.runtime.tensor, given), *linear.packed)
    for zero in (0, 255):
        x = np.full((1, 3, terms), 255 - zero, np.uint8)
        assert np.abs(linear.sums(x, zero)).min() == terms * 255 * 255
        linear.check(x, zero, 1.0)


def test_an_epilogue_behind_it() -> None:
    rng = np.random.default_rng(3)
    steps = Epilogue(1, (EpilogueStep("max", (0, 0.0)), EpilogueStep("add", (2, 1))))
    plain = of_bytes(40, (20,), "uint8", ("int8",), centred=True)
    zeros = [np.zeros(20, np.int8)]
    linear, bare = (
        Linear(replace(plain, epilogue=steps), machine("dots512"), zeros),
        Linear(plain, machine("dots512"), zeros),
    )
    x, residual = whole_numbers(rng, "uint8", 1, 5, 40), rng.standard_normal((1, 5, 20)).astype(np.float32)
    y = tvm.runtime.tensor(np.zeros((1, 5, 20), np.float32))
    numbers = np.array(3, np.uint8), np.array(0.25, np.float32)
    linear.run(*map(tvm.runtime.tensor, (x, *numbers)), *linear.packed, tvm.runtime.tensor(residual), y)
    np.testing.assert_array_equal(y.numpy(), np.maximum(bare(x, 3, 0.25), 0) + residual)


def test_which_machines_take_it() -> None:
    plain = of_bytes(64, (8,), "uint8", ("int8",))
    assert "asimddp" in str(LINEAR.why_not(plain, load_profile("cortex-a72")))  # type: ignore[arg-type]
    for target in ("x86-64-v3", "x86-64-v4", "znver5", "neoverse-n1", "neoverse-v1"):
        assert LINEAR.why_not(plain, load_profile(target)) is None  # type: ignore[arg-type]
    assert "terms" in str(LINEAR.why_not(replace(plain, in_features=MOST_TERMS + 1), load_profile("znver5")))  # type: ignore[arg-type]


@pytest.mark.parametrize(("target", "instruction"), [("neoverse-n1", "sdot"), ("neoverse-v1", "smmla")])
def test_code_for_arm(target: str, instruction: str) -> None:
    profile = load_profile(target)
    for x, stored in product(BYTES, BYTES):
        emitted = LINEAR.emit(
            plain := of_bytes(50, (40,), x, (stored,)), profile, LINEAR.default_config(plain, profile)
        )  # type: ignore[arg-type]
        code = assembly(emitted, profile)  # type: ignore[arg-type]
        assert code.count(instruction) > 6 and "bl\tmhsa" not in code


@pytest.mark.thorough_but("256-16-x86-64-v3-avx2-vpmaddwd")
@pytest.mark.parametrize(
    ("bits", "registers", "mcpu", "feature", "instruction"),
    [
        (512, 32, "znver4", "avx512_vnni", "vpdpbusd"),
        (512, 32, "x86-64-v4", "avx512bw", "vpmaddwd"),
        (256, 16, "x86-64-v3", "avx2", "vpmaddwd"),
    ],
)
def test_no_sum_leaves_its_register(bits: int, registers: int, mcpu: str, feature: str, instruction: str) -> None:
    plain = replace(of_bytes(768, (768,), "uint8", ("int8",)), biased=(True,))
    profile = vector_machine(bits, registers, mcpu, (feature,))
    code = assembly(LINEAR.emit(plain, profile, LINEAR.default_config(plain, profile)), profile)
    loops = inner_loops(code, instruction)
    assert loops
    assert not any(stack_stores(loop) for loop in loops)


# ---- The bytes of an array


def runtime_bytes() -> Any:
    value, node = (
        helper.make_tensor_value_info,
        helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "scale", "zero"]),
    )
    outputs = [("y", TensorProto.UINT8, ["n"]), ("scale", TensorProto.FLOAT, []), ("zero", TensorProto.UINT8, [])]
    graph = helper.make_graph([node], "g", [value("x", TensorProto.FLOAT, ["n"])], [value(*o) for o in outputs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x})


RNG = np.random.default_rng(4)
STEPS = np.float32(0.125) * (np.arange(511, dtype=np.float32) / 2 - 100)
ARRAYS = {
    "one": np.array([-2.5], "f4"),
    "none": np.zeros(0, "f4"),
    "numbers": RNG.standard_normal(10_007).astype("f4"),
    "many": RNG.standard_normal(70_001).astype("f4") * 30,
    "halves": STEPS[(STEPS >= -100 * 0.125) & (STEPS <= 155 * 0.125)],
    "positive": RNG.uniform(1, 2, 300).astype("f4"),
    "negative": -RNG.uniform(1, 2, 300).astype("f4"),
    "zeros": np.zeros(100, "f4"),
    "minus zeros": np.full(100, -0.0, "f4"),
    "denormals": np.array([1e-39, -1e-39, 2e-40, 0], "f4"),
    "least": np.full(40, 1e-45, "f4"),
    "overflow": np.array([3e38, -3e38, 1], "f4"),
    "infinity": np.array([1, np.inf, -2, 3], "f4"),
    "minus infinity": np.array([1, -np.inf, -2, 3], "f4"),
    "infinities": np.array([1, -np.inf, np.inf, 3], "f4"),
    "nan": np.array([1, -1, 2, 0.5, np.nan, 0.25], "f4"),
    "many nan": np.where(RNG.random(5000) < 0.1, np.nan, RNG.standard_normal(5000)).astype("f4"),
    "all nan": np.full(100, np.nan, "f4"),
}


@pytest.fixture(scope="module")
def quantisers() -> list[Any]:
    profiles = [vector_machine(512, 32, this_cpu.level("x86-64-v4")), vector_machine(128, 32)]
    return [compiled(QUANTISE.emit(QuantiseOp(("n",)), p, {}), p)["run"] for p in profiles]


@pytest.mark.thorough_only("one")
@pytest.mark.parametrize("name", ARRAYS)
def test_bytes_of_onnx_runtime(name: str, quantisers: list[Any]) -> None:
    x = ARRAYS[name]
    expected = runtime_bytes()(x)
    if name == "many nan":  # whose neighbours in ONNX Runtime's vectors it hides from the range
        some = x[~np.isnan(x)]
        expected[1:] = runtime_bytes()(some)[1:]
        expected[0] = np.zeros_like(expected[0])
        expected[0][~np.isnan(x)] = runtime_bytes()(some)[0]
    for run in quantisers:
        results = [tvm.runtime.tensor(np.full_like(array, 77)) for array in expected]
        run(tvm.runtime.tensor(x), *results)
        for mine, other in zip(results, expected, strict=True):
            np.testing.assert_array_equal(mine.numpy(), other)
