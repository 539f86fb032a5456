"""The dot-product instructions: what they compute, what they become, and that several functions may use them."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
import tvm
from kernel_runs import vector_machine
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_compile import host
from mhsa_compile.kernels.cpu import dot, vectors
from mhsa_compile.profile import load_profile

INSTRUCTIONS = {"bfloat16": r"vdpbf16ps\s+.*%zmm", "int8": r"vpdpbusd\s+.*%[yz]mm"}
MCPU = {"avx512_bf16": "znver4", "avx512_vnni": "znver4", "avx_vnni": "alderlake"}


def runs_here(feature: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(feature not in host.cpu_features(), reason=f"this CPU has no {feature}")


def accumulating(instruction: dot.Dot, name: str) -> object:
    """total (lanes,) += the products of every row of a and b (n, lanes)."""
    n = tirx.Var("n", "int64")
    with IRBuilder() as ib, T.prim_func():
        T.func_name(name)
        a, b = (vectors.argument(x, [n, T.int64(instruction.lanes)], "int32") for x in "ab")
        total = vectors.argument("total", [T.int64(instruction.lanes)], instruction.accumulator)
        with instruction.imported(), T.serial(n) as i:
            row, whole = [i, T.int64(0)], [T.int64(0)]
            lanes = instruction.lanes
            factors = (vectors.load(x, row, lanes) for x in (a, b))
            vectors.store(total, whole, instruction.accumulate(vectors.load(total, whole, lanes), *factors), lanes)
    return ib.get().with_attr("global_symbol", name)


def library(instruction: dot.Dot, *names: str):
    module = tvm.IRModule({name: accumulating(instruction, name) for name in names})
    target = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": MCPU[instruction.feature]}
    return tvm.compile(module, target=tvm.target.Target(target))


def factors(instruction: dot.Dot, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(a, b) (33, lanes, group); small integers are exact in bfloat16, and so are their sums in float32."""
    shape = (33, instruction.lanes, instruction.group)
    if instruction.dtype == "bfloat16":
        return tuple(rng.integers(-200, 200, shape).astype(ml_dtypes.bfloat16) for _ in range(2))
    return rng.integers(0, 256, shape).astype(np.uint8), rng.integers(-128, 128, shape).astype(np.int8)


@pytest.mark.parametrize(
    "instruction", [pytest.param(d, id=f"{d.dtype}-{d.lanes}", marks=runs_here(d.feature)) for d in dot.DOTS]
)
def test_two_functions_of_a_module_compute_it(instruction):
    """Both import the same text; what they are given is odd in every product."""
    built = library(instruction, "one", "two")
    rng = np.random.default_rng(3)
    for name in ("one", "two"):
        a, b = factors(instruction, rng)
        expected = (a.astype(np.float64) * b.astype(np.float64)).sum(axis=(0, 2)) + 5
        total = tvm.runtime.tensor(np.full(instruction.lanes, 5, instruction.accumulator))
        words = [np.ascontiguousarray(x).view(np.int32).reshape(33, instruction.lanes) for x in (a, b)]
        built[name](*map(tvm.runtime.tensor, words), total)
        np.testing.assert_array_equal(total.numpy(), expected)


@pytest.mark.parametrize("instruction", dot.DOTS, ids=lambda d: f"{d.dtype}-{d.lanes}")
def test_it_becomes_the_instruction_and_no_call(instruction):
    assembly = library(instruction, "run").mod.inspect_source("asm")
    assert re.search(INSTRUCTIONS[instruction.dtype], assembly)
    assert instruction.function not in re.sub(r"\.asciz.*", "", assembly)


def test_available_asks_for_features_and_width():
    assert dot.available(load_profile("znver4"), "bfloat16").lanes == 16
    assert dot.available(load_profile("sapphirerapids"), "int8").feature == "avx512_vnni"
    assert dot.available(load_profile("x86-64-v4"), "bfloat16") is None
    assert dot.available(load_profile("neoverse-n1"), "int8") is None
    assert dot.available(load_profile("znver4"), "float16") is None
    narrow = vector_machine(256, 16, features=("avx512_bf16", "avx512_vnni", "avx_vnni"))
    assert dot.available(narrow, "bfloat16") is None
    assert dot.available(narrow, "int8").lanes == 8
