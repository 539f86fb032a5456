"""The units that multiply: what instructions compute and become, that several functions may use them, and which one a
machine has."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from support import this_cpu
from support.kernel_runs import vector_machine
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile, load_profile, profile_names
from mhsa_compile.kernels.common.buffers import argument
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.units.choice import NARROW, units
from mhsa_compile.kernels.cpu.units.dot_products import DotProducts

INSTRUCTIONS = {  # by the feature, as assembly
    ("avx512_bf16", 1): r"vdpbf16ps\s+.*%zmm",
    ("avx512_vnni", 1): r"vpdpbusd\s+.*%zmm",
    ("avx_vnni", 1): r"vpdpbusd\s+.*%ymm",
    ("avx512bw", 1): r"vpmaddwd\s+.*%zmm",
    ("avx2", 1): r"vpmaddwd\s+.*%ymm",
    ("bf16", 1): r"bfdot\s+v\d+\.4s, v\d+\.8h, v\d+\.",
    ("bf16", 2): r"bfmmla\s+v\d+\.4s, v\d+\.8h, v\d+\.8h",
    ("asimdfhm", 1): r"fmlal\s+v\d+\.4s, v\d+\.4h, v\d+\.4?h",
    ("asimddp", 1): r"sdot\s+v\d+\.4s, v\d+\.16b, v\d+\.",
    ("i8mm", 2): r"smmla\s+v\d+\.4s, v\d+\.16b, v\d+\.16b",
}
X86, ARM = "x86_64-linux-gnu", "aarch64-linux-gnu"
MACHINES = {  # by the feature: LLVM's triple, and a CPU without it
    "avx512_bf16": (X86, "x86-64-v4"),
    "avx512_vnni": (X86, "x86-64-v4"),
    "avx_vnni": (X86, "x86-64-v3"),
    "avx512bw": (X86, "x86-64-v3"),
    "avx2": (X86, "x86-64-v2"),
    "bf16": (ARM, "generic"),
    "asimdfhm": (ARM, "generic"),
    "asimddp": (ARM, "generic"),
    "i8mm": (ARM, "generic"),
}


def target(feature: str) -> dict[str, object]:
    triple, mcpu = MACHINES[feature]
    return {"kind": "llvm", "mtriple": triple, "mcpu": mcpu, "mattr": [*this_cpu.attributes((feature,))]}


def runs_here(feature: str) -> pytest.MarkDecorator:
    why = this_cpu.lacking(target(feature))
    return pytest.mark.skipif(why is not None, reason=why or "")


def name_of(instruction: DotProducts) -> str:
    return f"{instruction.dtype}-{instruction.rows}x{instruction.lanes}-{instruction.feature}"


def accumulating(instruction: DotProducts, name: str) -> object:
    """total (rows * lanes,) += the products of every row of a (n, rows) and b (n, lanes)."""
    n = tirx.Var("n", "int64")
    rows, lanes = instruction.rows, instruction.lanes
    with IRBuilder() as ib, T.prim_func():
        T.func_name(name)
        a, b = (argument(x, [n, T.int64(size)], instruction.word) for x, size in (("a", rows), ("b", lanes)))
        total = argument("total", [T.int64(rows * lanes)], instruction.sums)
        with instruction.imported(), T.serial(n) as i:
            at = [i, T.int64(0)]
            sums = vectors.load(total, [T.int64(0)], rows * lanes)
            sums = instruction.accumulate(sums, vectors.load(a, at, rows), vectors.load(b, at, lanes))
            vectors.store(total, [T.int64(0)], sums, rows * lanes)
    return ib.get().with_attr("global_symbol", name)


def library(instruction: DotProducts, *names: str):
    module = tvm.IRModule({name: accumulating(instruction, name) for name in names})
    return tvm.compile(module, target=tvm.target.Target(target(instruction.feature)))


def factors(instruction: DotProducts, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(a (33, rows, group), b (33, lanes, group)); small integers are exact in bfloat16, and their sums in float32."""
    shapes = [(33, size, instruction.group) for size in (instruction.rows, instruction.lanes)]
    if instruction.dtype != "int8":
        dtype = np.dtype(instruction.dtype)
        return tuple(rng.integers(-200, 200, shape).astype(dtype) for shape in shapes)
    first = np.uint8 if instruction.unsigned else np.int8
    limits = np.iinfo(first)
    a = rng.integers(limits.min, limits.max + 1, shapes[0]).astype(first)
    return a, rng.integers(-128, 128, shapes[1]).astype(np.int8)


@pytest.mark.parametrize("instruction", [pytest.param(d, id=name_of(d), marks=runs_here(d.feature)) for d in NARROW])
def test_two_functions_of_a_module_compute_it(instruction):
    """Both import the same text; what they are given is odd in every product."""
    built = library(instruction, "one", "two")
    rng = np.random.default_rng(3)
    for name in ("one", "two"):
        a, b = factors(instruction, rng)
        expected = np.einsum("nrg,nlg->rl", a.astype(np.float64), b.astype(np.float64)) + 5
        total = tvm.runtime.tensor(np.full(expected.size, 5, instruction.sums))
        words = [np.ascontiguousarray(x).view(instruction.word)[..., 0] for x in (a, b)]
        built[name](*map(tvm.runtime.tensor, words), total)
        pairs = [total.numpy()] if instruction.rows == 1 else np.moveaxis(total.numpy().reshape(-1, 2, 2), 1, 0)
        np.testing.assert_array_equal(np.reshape(pairs, expected.shape), expected)


@pytest.mark.thorough_only("int8-1x4-asimddp", "int8-2x4-i8mm")
@pytest.mark.parametrize("instruction", NARROW, ids=name_of)
def test_it_becomes_the_instruction_and_no_call(instruction):
    assembly = library(instruction, "run").mod.inspect_source("asm")
    assert re.search(INSTRUCTIONS[instruction.feature, instruction.rows], assembly)
    assert instruction.function not in re.sub(r"\.asciz.*", "", assembly)


def test_the_choice_asks_for_features_and_width():
    def first(target: str, dtype: str) -> tuple[str, int, int]:
        unit = units(load_profile(target), dtype)[0]
        return unit.feature, unit.rows, unit.lanes

    assert first("znver4", "bfloat16") == ("avx512_bf16", 1, 16)
    assert first("sapphirerapids", "int8") == ("avx512_vnni", 1, 16)
    assert first("x86-64-v4", "int16") == ("avx512bw", 1, 16)
    assert first("x86-64-v3", "int16") == ("avx2", 1, 8)
    assert first("neoverse-n1", "int8") == ("asimddp", 1, 4)
    assert first("neoverse-v1", "int8") == ("i8mm", 2, 4)
    assert first("neoverse-v2", "bfloat16") == ("bf16", 2, 4)
    assert first("neoverse-v1", "float16") == ("asimdfhm", 1, 4)
    for target, dtype in [("x86-64-v4", "bfloat16"), ("znver4", "float16"), ("neoverse-n1", "float16")]:
        assert first(target, dtype) == ("", 1, load_profile(target).vector_lanes("float32"))
    narrow = vector_machine(256, 16, features=("avx512_bf16", "avx512_vnni", "avx_vnni"))
    assert [unit.lanes for unit in units(narrow, "int8")] == [8, 8]
    assert [unit.dtype for unit in units(narrow, "bfloat16")] == ["float32"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "int16"])
@pytest.mark.parametrize("target", profile_names())
def test_the_last_unit_is_one_that_every_machine_has(target, dtype):
    """And the widest comes before a narrower of its kind."""
    if isinstance(profile := load_profile(target), CpuProfile):
        *narrow, last = units(profile, dtype)
        assert last.dtype == "float32" and not last.feature and last.group == 1
        assert all(unit.dtype == dtype and unit.group * unit.rows >= 1 for unit in narrow)
        work = [unit.rows * unit.lanes for unit in narrow]
        assert work == sorted(work, reverse=True)
