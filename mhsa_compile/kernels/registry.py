"""The kernels of each family, in the order in which they are asked: the first that applies takes the operation."""

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

KERNELS: dict[str, tuple[Kernel, ...]] = {
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
