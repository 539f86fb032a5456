"""The kernels of each family, in the order in which they are asked about operations of their type: the first that
applies takes the operation."""

from __future__ import annotations

from mhsa_compile.kernels.cpu.attention.kernel import AttentionKernel
from mhsa_compile.kernels.cpu.cache_concat import PresentKernel
from mhsa_compile.kernels.cpu.cache_scatter import ScatterKernel
from mhsa_compile.kernels.cpu.decode.kernel import DecodeKernel
from mhsa_compile.kernels.cpu.linear.kernel import LinearKernel
from mhsa_compile.kernels.cpu.rope import RotaryKernel
from mhsa_compile.kernels.cpu.softmax_outputs.probs_kernel import WeightsKernel
from mhsa_compile.kernels.cpu.softmax_outputs.stats_kernel import StatisticsKernel
from mhsa_compile.kernels.cuda import cache_concat, cache_scatter, rope
from mhsa_compile.kernels.cuda.attention import kernel as attention
from mhsa_compile.kernels.cuda.attention import kernel_fp32
from mhsa_compile.kernels.cuda.attention_hopper import kernel as hopper
from mhsa_compile.kernels.cuda.decode import kernel as decode
from mhsa_compile.kernels.cuda.linear import hopper_kernel
from mhsa_compile.kernels.cuda.linear import kernel as linear
from mhsa_compile.kernels.cuda.softmax_outputs import probs_kernel, stats_kernel
from mhsa_compile.kernels.interface.kernel import Kernel
from mhsa_compile.kernels.interface.ops import (
    AttentionOp,
    LinearOp,
    PresentOp,
    RotaryOp,
    ScatterOp,
    StatisticsOp,
    WeightsOp,
)

AnyKernel = (
    Kernel[LinearOp]
    | Kernel[AttentionOp]
    | Kernel[StatisticsOp]
    | Kernel[WeightsOp]
    | Kernel[RotaryOp]
    | Kernel[ScatterOp]
    | Kernel[PresentOp]
)
"""Spelt out, not `Kernel[Any]`, so that a type checker compares each kernel's methods with its `op_type`."""

KERNELS: dict[str, tuple[AnyKernel, ...]] = {
    "cpu": (
        LinearKernel(),
        DecodeKernel(),
        AttentionKernel(),
        StatisticsKernel(),
        WeightsKernel(),
        RotaryKernel(),
        ScatterKernel(),
        PresentKernel(),
    ),
    "cuda": (
        hopper_kernel.HopperLinearKernel(),
        linear.LinearKernel(),
        linear.Float32LinearKernel(),
        decode.DecodeKernel(),
        hopper.HopperAttentionKernel(),
        attention.AttentionKernel(),
        kernel_fp32.AttentionFloat32Kernel(),
        stats_kernel.StatisticsKernel(),
        probs_kernel.WeightsKernel(),
        rope.RotaryKernel(),
        cache_scatter.ScatterKernel(),
        cache_concat.PresentKernel(),
    ),
}
