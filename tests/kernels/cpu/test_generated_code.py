"""What the kernels become: the assembly of their inner loops, for AVX2 and AVX-512, compiled on any machine."""

from __future__ import annotations

import re

import pytest
from support.attention_ops import attention_of, changed
from support.kernel_runs import assembly, inner_loops, stack_stores, vector_machine

from mhsa_compile.kernels.cpu.attention.kernel import CpuAttentionKernel
from mhsa_compile.kernels.cpu.decode.kernel import CpuDecodeKernel
from mhsa_compile.kernels.cpu.linear.kernel import CpuLinearKernel
from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout, LinearOp
from mhsa_compile.kernels.scores.call_mask import CallMask

MACHINES = {"x86-64-v3": (256, 16), "x86-64-v4": (512, 32)}


def attention(q_length, kv_length="S", ratio=1, mask=None) -> AttentionOp:
    H, E = 8, 128
    G = H // ratio
    return attention_of(
        batch="B", q_length=q_length, kv_length=kv_length, num_heads=H, num_kv_heads=G, head_dim=E, v_head_dim=E,
        scale=0.3, band=None, mask=mask, query=HeadLayout(0, "heads", H * E), key=HeadLayout(1, "heads", G * E),
        value=HeadLayout(2, "heads", G * E), output=HeadLayout(0, "heads", H * E),
    )  # fmt: skip


KERNELS = {
    "linear": (CpuLinearKernel(), LinearOp(("B", "L"), 768, (768,), (True,), (False,))),
    "attention": (CpuAttentionKernel(), attention("L")),
    "attention, capped": (CpuAttentionKernel(), changed(attention(64), softcap=50.0)),
    # One path of decode at a time. With both (S not known to be whole groups), LLVM spills a few sums of the masked
    # one, which then runs for the last block only.
    "decode, 1 row": (CpuDecodeKernel(), attention(1, 2048)),
    "decode, 4 rows": (CpuDecodeKernel(), attention(1, 2048, ratio=4)),
    "attention, clamped": (CpuAttentionKernel(), changed(attention(64), softclamp=50.0)),
    "decode, capped": (CpuDecodeKernel(), changed(attention(1, 2048), softcap=50.0)),
    "decode, masked": (CpuDecodeKernel(), attention(1, ratio=4, mask=CallMask("bool", ("B", 1, 1, "S")))),
}


@pytest.fixture(params=MACHINES, scope="module")
def machine(request):
    return vector_machine(*MACHINES[request.param], mcpu=request.param)


@pytest.fixture(params=KERNELS, scope="module")
def code(request, machine):
    kernel, op = KERNELS[request.param]
    return request.param, machine, assembly(kernel.emit(op, machine, kernel.default_config(op, machine)), machine)


def products(assembly_text: str) -> list[list[str]]:
    """The innermost loops that are matrix products: many multiply-adds, and none of the shifts of exp2."""
    return [loop for loop in inner_loops(assembly_text, "vfmadd") if not any("vpslld" in line for line in loop)]


@pytest.mark.thorough_but("decode, 1 row-x86-64-v4")
def test_nothing_calls_libm(code):
    """Neither what LLVM makes of a vector's exp, tanh or max (expf, fmaxf, ...) nor anything else of libm's."""
    _, _, text = code
    assert not re.findall(r"\b(?:call|jmp)\w*\s+\S*\b(?:exp|log|pow|tanh|fmax|fmin|fma|floor|round|rint)\w*", text)


@pytest.mark.thorough_only(
    "attention, capped-x86-64-v3",
    "attention, clamped-*",
    "attention-x86-64-v4",
    "decode, 1 row-x86-64-v3",
    "linear-x86-64-v3",
)
def test_inner_loops_keep_their_sums_in_registers(code):
    name, machine, text = code
    few = machine.hardware.vector_registers < 32
    if name in ("decode, 4 rows", "decode, masked") and not few:
        pytest.skip("LLVM spills up to five of the sixteen sums of p V, though registers are free: open")
    loops = products(text)
    assert loops
    for loop in loops:
        count = len([line for line in loop if "vfmadd" in line])
        # Decode's scores are unrolled into one loop with their maximum: with 16 registers that one is spilled.
        assert len(stack_stores(loop)) <= (count // 128 if name.startswith("decode") else 0), "\n".join(loop)
        assert not [line for line in loop if re.match(r"\s+call", line)], "\n".join(loop)
