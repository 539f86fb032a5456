"""The kernels of each family, in the order in which they are asked about operations of their type: the first that
`why_not` answers None takes the operation."""

from __future__ import annotations

from typing import Any

from mhsa_compile.hardware.profile import TargetProfile
from mhsa_compile.kernels.cpu.attention.kernel import CpuAttentionKernel
from mhsa_compile.kernels.cpu.cache_concat import CpuKvConcatKernel
from mhsa_compile.kernels.cpu.cache_scatter import CpuKvScatterKernel
from mhsa_compile.kernels.cpu.decode.kernel import CpuDecodeKernel
from mhsa_compile.kernels.cpu.linear.blocks import CpuBlockLinearKernel
from mhsa_compile.kernels.cpu.linear.bytes_on_tiles import CpuTileInt8LinearKernel, CpuTileQuantisedLinearKernel
from mhsa_compile.kernels.cpu.linear.float32_on_tiles import CpuFloat16TileLinearKernel, CpuFloat32TileLinearKernel
from mhsa_compile.kernels.cpu.linear.kernel import CpuLinearKernel
from mhsa_compile.kernels.cpu.linear.quantised import CpuQuantisedLinearKernel
from mhsa_compile.kernels.cpu.linear.rounded_on_tiles import CpuRoundedTileLinearKernel
from mhsa_compile.kernels.cpu.linear.tiles import CpuTileLinearKernel
from mhsa_compile.kernels.cpu.products.kernel import CpuProductKernel
from mhsa_compile.kernels.cpu.products.on_tiles import CpuTileProductKernel
from mhsa_compile.kernels.cpu.products.skinny import CpuSkinnyProductKernel
from mhsa_compile.kernels.cpu.quantise import CpuQuantiseKernel
from mhsa_compile.kernels.cpu.quantise_rows import CpuQuantiseRowsKernel
from mhsa_compile.kernels.cpu.recurrence import CpuRecurrenceKernel
from mhsa_compile.kernels.cpu.rope import CpuRotaryKernel
from mhsa_compile.kernels.cpu.softmax import CpuSoftmaxKernel
from mhsa_compile.kernels.cpu.softmax_outputs.probs_kernel import CpuAttentionProbsKernel
from mhsa_compile.kernels.cpu.softmax_outputs.stats_kernel import CpuSoftmaxStatsKernel
from mhsa_compile.kernels.cpu.tile_attention.kernel import CpuTileAttentionKernel
from mhsa_compile.kernels.cuda import cache, rope
from mhsa_compile.kernels.cuda.attention import kernel as attention
from mhsa_compile.kernels.cuda.attention_hopper import kernel as hopper
from mhsa_compile.kernels.cuda.decode import kernel as decode
from mhsa_compile.kernels.cuda.linear import hopper_kernel
from mhsa_compile.kernels.cuda.linear import kernel as linear
from mhsa_compile.kernels.cuda.softmax_outputs import kernel as softmax_outputs
from mhsa_compile.kernels.interface import ops
from mhsa_compile.kernels.interface.kernel import Kernel

AnyKernel = (
    Kernel[ops.LinearOp]
    | Kernel[ops.QuantisedLinearOp]
    | Kernel[ops.BlockLinearOp]
    | Kernel[ops.QuantiseOp]
    | Kernel[ops.ProductOp]
    | Kernel[ops.SoftmaxOp]
    | Kernel[ops.RecurrenceOp]
    | Kernel[ops.AttentionOp]
    | Kernel[ops.SoftmaxStatsOp]
    | Kernel[ops.AttentionProbsOp]
    | Kernel[ops.RotaryOp]
    | Kernel[ops.QuantiseRowsOp]
    | Kernel[ops.KvScatterOp]
    | Kernel[ops.KvConcatOp]
)
"""Spelt out, not `Kernel[Any]`, so that a type checker compares each kernel's methods with its `op_type`."""

KERNELS: dict[str, tuple[AnyKernel, ...]] = {
    "cpu": (
        CpuTileLinearKernel(),
        CpuFloat32TileLinearKernel(),
        CpuRoundedTileLinearKernel(),
        CpuFloat16TileLinearKernel(),
        CpuTileInt8LinearKernel(),
        CpuLinearKernel(),
        CpuTileQuantisedLinearKernel(),
        CpuQuantisedLinearKernel(),
        CpuBlockLinearKernel(),
        CpuQuantiseKernel(),
        CpuSkinnyProductKernel(),
        CpuTileProductKernel(),
        CpuProductKernel(),
        CpuSoftmaxKernel(),
        CpuRecurrenceKernel(),
        CpuDecodeKernel(),
        CpuTileAttentionKernel(),
        CpuAttentionKernel(),
        CpuSoftmaxStatsKernel(),
        CpuAttentionProbsKernel(),
        CpuRotaryKernel(),
        CpuQuantiseRowsKernel(),
        CpuKvScatterKernel(),
        CpuKvConcatKernel(),
    ),
    "cuda": (
        hopper_kernel.HopperLinearKernel(),
        linear.MmaLinearKernel(),
        linear.Float32LinearKernel(),
        decode.CudaDecodeKernel(),
        hopper.HopperAttentionKernel(),
        attention.MmaAttentionKernel(),
        attention.Fp32AttentionKernel(),
        softmax_outputs.CudaSoftmaxStatsKernel(),
        softmax_outputs.CudaAttentionProbsKernel(),
        rope.CudaRotaryKernel(),
        cache.CudaKvScatterKernel(),
        cache.CudaKvConcatKernel(),
    ),
}


def kernels_of(op: ops.Op, profile: TargetProfile) -> tuple[Kernel[Any], ...]:
    """The kernels of the target's family that are made for operations of this type, in their order."""
    return tuple(kernel for kernel in KERNELS.get(profile.family, ()) if type(op) is kernel.op_type)
