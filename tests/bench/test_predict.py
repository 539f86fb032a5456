"""What kernels become on ARM, and how fast LLVM's models say their inner loops are: nothing runs."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from functools import cache

import pytest
from support.attention_ops import attention_of
from typer.testing import CliRunner

from mhsa_bench.static import llvm_mca
from mhsa_bench.static.assembly_loops import Loop, inner_loops
from mhsa_bench.static.predict import assembly, predict
from mhsa_compile.cli.app import app
from mhsa_compile.errors import InstallationError, TargetError
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.cpu.attention.kernel import CpuAttentionKernel
from mhsa_compile.kernels.cpu.linear.kernel import CpuLinearKernel
from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout, LinearOp


def linear(dtype: str = "float32", int8: bool = False) -> LinearOp:
    return LinearOp(("B", "L"), 768, (768,) * 3, (True,) * 3, (False,) * 3, dtype, int8)


def attention(dtype: str = "float32") -> AttentionOp:
    L, H, E = 144, 8, 64
    width = 3 * H * E
    q, k, v = (HeadLayout(0, "rows", width, offset * H * E) for offset in range(3))
    return attention_of(1, L, L, H, H, E, E, 0.125, q, k, v, HeadLayout(0, "rows", H * E), dtype)


KERNELS = {
    "linear": (CpuLinearKernel(), linear()),
    "linear bf16": (CpuLinearKernel(), linear("bfloat16")),
    "linear int8": (CpuLinearKernel(), linear(int8=True)),
    "attention": (CpuAttentionKernel(), attention()),
    "attention bf16": (CpuAttentionKernel(), attention("bfloat16")),
}
MULTIPLIED_BY = {  # (kernel, target): the instruction that its inner loops are made of
    **{(name, t): "fmla" for name in ("linear", "attention") for t in ("neoverse-n1", "neoverse-v1")},
    **{("linear int8", target): "sdot" for target in ("neoverse-n1", "cortex-a76")},
    **{("linear int8", target): "smmla" for target in ("neoverse-v1", "neoverse-v2")},
    **{("linear bf16", target): "bfmmla" for target in ("neoverse-v1", "neoverse-v2")},
    ("attention bf16", "neoverse-v1"): "bfmmla",
    ("linear", "cortex-a76"): "fmla",
    ("linear", "neoverse-v2"): "fmla",
    ("attention", "cortex-a76"): "fmla",
    ("attention", "neoverse-v2"): "fmla",
}
LEAST = {"linear": 0.90, "attention": 0.85}


@cache
def loops_of(name: str, target: str) -> list[Loop]:
    (kernel, op), profile = KERNELS[name], load_profile(target)
    return inner_loops(assembly(kernel.emit(op, profile, kernel.default_config(op, profile)), profile))


def require_analyzer(target: str) -> llvm_mca.Analyzer:
    """The analyzer for a target; the test is skipped where there is none, and fails where there has to be one."""
    try:
        return llvm_mca.find(load_profile(target))
    except InstallationError as error:
        if os.environ.get("MHSA_REQUIRE_SYSTEM") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.mark.thorough_but(
    "attention bf16-neoverse-v1", "linear bf16-neoverse-v2", "linear int8-cortex-a76", "linear int8-neoverse-v2"
)
@pytest.mark.parametrize(("name", "target"), MULTIPLIED_BY, ids=str)
def test_inner_loops_are_made_of_the_best_instruction_and_spill_nothing(name, target):
    loops = loops_of(name, target)
    assert {loop.instruction for loop in loops} == {MULTIPLIED_BY[name, target]}
    assert not ["\n".join(loop.lines) for loop in loops if loop.spills], "accesses to the stack"
    assert not [line for loop in loops for line in loop.lines if line.startswith("bl")]


@pytest.mark.thorough_but("linear int8-cortex-a76")
@pytest.mark.parametrize(("name", "target"), MULTIPLIED_BY, ids=str)
def test_inner_loops_fill_the_slots_for_multiplications(name, target):
    """LLVM's model says so of loops of whole tiles, without what they have for tails."""
    analyzer = require_analyzer(target)
    loops = loops_of(name, target)
    most = max(loop.sums for loop in loops)
    for loop in loops:
        if 2 * loop.sums > most:
            share = len(loop.multiplies) / analyzer.cycles(loop.lines) / analyzer.peak(loop)
            assert share >= LEAST[name.split()[0]], "\n".join(loop.lines)


def test_two_operations_with_one_kernel_are_one_row():
    require_analyzer("neoverse-v1")
    found = predict({"q": linear(), "k": linear(), "eight": linear(int8=True)}, load_profile("neoverse-v1"))
    assert [kernel.ops for kernel in found.kernels] == [("q", "k"), ("eight",)]
    assert found.model == "V1" and found.kernels[0].share == found.kernels[0].main[0].share
    assert [loop.tail for loop in found.kernels[0].loops] == [False, True]


@pytest.mark.thorough
def test_the_command(capfd):
    require_analyzer("cortex-a76")
    done = CliRunner().invoke(app, ["bench", "--predict", "--target", "cortex-a76", "--workload", "tiny", "--json"])
    assert done.exit_code == 0, done.output
    prediction = json.loads(done.stdout)["predictions"]["tiny"]
    assert prediction["model"] == "N1", "LLVM would take Cortex-A57 for it"
    assert {kernel["kind"] for kernel in prediction["kernels"]} == {"linear", "attention"}
    assert all(0.8 < loop["share"] <= 1.001 for k in prediction["kernels"] for loop in k["loops"] if not loop["tail"])


def test_a_target_needs_a_prediction():
    done = CliRunner().invoke(app, ["bench", "--target", "cortex-a76"])
    assert done.exit_code == 2 and "--predict" in done.output


def test_without_an_analyzer_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    done = CliRunner().invoke(app, ["bench", "--predict", "--target", "neoverse-n1"])
    assert done.exit_code == 2 and "apt-get install llvm-19" in done.output


def test_a_cpu_that_the_analyzer_does_not_know():
    analyzer = require_analyzer("neoverse-n1")
    with pytest.raises(TargetError, match="newer llvm-mca"):
        replace(analyzer, cpu="neoverse-v999").cycles(("nop",))


ARM = """\
.LBB0_1:
	ldp	q0, q1, [x1], #32
	ldr	s2, [x2], #4                    // 4 bytes
	ld1r	{ v3.4s }, [x3]
	ld1	{ v4.d }[1], [x4]
	str	q9, [sp, #16]
	fmla	v10.4s, v0.4s, v2.s[0]
	fmla	v11.4s, v1.4s, v2.s[0]
	fmla	v12.4s, v0.4s, v3.4s
	fmla	v13.4s, v1.4s, v3.4s
	fmla	v14.4s, v0.4s, v4.4s
	fmla	v15.4s, v1.4s, v4.4s
	fmla	v15.4s, v1.4s, v4.4s
	b.ne	.LBB0_1
"""
X86 = """\
.LBB0_1:
	vmovups	(%rax), %zmm0
	vbroadcastss	(%rbx), %zmm1
	vmovups	%zmm9, (%rcx)
{}	vfmadd231ps	8(%rdx){{1to16}}, %zmm0, %zmm8
	jne	.LBB0_1
""".format("".join(f"	vfmadd231ps	%zmm1, %zmm0, %zmm{i}\n" for i in range(2, 8)))


@pytest.mark.parametrize(
    ("text", "instruction", "sums", "loaded", "spills"),
    [(ARM, "fmla", 6, 32 + 4 + 4 + 8, 1), (X86, "vfmadd231ps", 7, 64 + 4 + 4, 0)],
    ids=["aarch64", "x86-64"],
)
def test_what_is_read_from_a_loop(text, instruction, sums, loaded, spills):
    (loop,) = inner_loops(text)
    assert (loop.instruction, len(loop.multiplies), loop.sums) == (instruction, 7, sums)
    assert (loop.loaded_bytes, loop.spills) == (loaded, spills)


def test_a_loop_around_another_and_exponentials_are_no_products():
    around = ARM.replace("	b.ne	.LBB0_1\n", "	b.ne	.LBB0_1\n	b	.LBB0_0\n")
    assert len(inner_loops(".LBB0_0:\n" + around)) == 1
    assert not inner_loops(ARM.replace("	str	q9, [sp, #16]", "	shl	v9.4s, v9.4s, #23"))


def test_a_sum_of_zeros_is_no_product():
    """Values times zero are not a number where one of them is not: no factor is loaded but the values."""
    zeros = "	movi	v3.2d, #0\n"
    sums = "".join(f"	fmla	v{10 + i}.4s, v3.4s, v{i % 2}.4s\n" for i in range(8))
    assert not inner_loops(f".LBB0_1:\n	ldp	q0, q1, [x1], #32\n{zeros}{sums}	b.ne	.LBB0_1\n")
    assert inner_loops(f".LBB0_1:\n	ldp	q0, q1, [x1], #32\n	ldr	q3, [x2]\n{sums}	b.ne	.LBB0_1\n")
