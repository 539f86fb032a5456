"""The kernels of each family, in the order in which they are asked about operations of their type: the first that
applies takes the operation."""

from __future__ import annotations

from mhsa_compile.kernels.base import Kernel
from mhsa_compile.kernels.cpu.attention import AttentionKernel
from mhsa_compile.kernels.cpu.decode import DecodeKernel
from mhsa_compile.kernels.cpu.linear import LinearKernel
from mhsa_compile.kernels.cpu.present import PresentKernel
from mhsa_compile.kernels.cpu.rope import RotaryKernel
from mhsa_compile.kernels.cpu.scatter import ScatterKernel
from mhsa_compile.kernels.cpu.statistics import StatisticsKernel
from mhsa_compile.kernels.cpu.weights import WeightsKernel
from mhsa_compile.kernels.cuda import (
    attention,
    attention_float32,
    decode,
    hopper,
    linear,
    linear_hopper,
    present,
    rope,
    scatter,
    statistics,
    weights,
)
from mhsa_compile.kernels.operations import (
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
        linear_hopper.HopperLinearKernel(),
        linear.LinearKernel(),
        linear.Float32LinearKernel(),
        decode.DecodeKernel(),
        hopper.HopperAttentionKernel(),
        attention.AttentionKernel(),
        attention_float32.AttentionFloat32Kernel(),
        statistics.StatisticsKernel(),
        weights.WeightsKernel(),
        rope.RotaryKernel(),
        scatter.ScatterKernel(),
        present.PresentKernel(),
    ),
}
