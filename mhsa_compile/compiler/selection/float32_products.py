"""Which products of float32 an operation gets: what was asked for, if the kernel that computes it makes them, else
IEEE's, which are more exact, and the reason why."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from mhsa_compile.hardware.profile import TargetProfile, shipped_relatives
from mhsa_compile.kernels.interface.kernel import Kernel, TermProducts, products_of
from mhsa_compile.kernels.interface.ops import AttentionOp, BlockLinearOp, LinearOp, Op, ProductOp, QuantisedLinearOp
from mhsa_compile.kernels.registry import kernels_of
from mhsa_compile.spec.float32_products import Float32Products, Float32Request


@dataclass(frozen=True)
class Resolution:
    """An operation with the word that it gets, and why it is not what was asked for; "" where it is."""

    op: Op
    reason: str = ""


def resolve(op: Op, request: Float32Request, profile: TargetProfile) -> Resolution:
    """What an operation gets of what was asked for: the one place that decides."""
    if request == "ieee" or not multiplies_float32(op):
        return Resolution(op)
    offered = offers_products(op, profile)
    if request == "auto":
        if "bf16x6" not in offered:
            return Resolution(op)
        if "bf16x6" in exact_products(op, profile):
            return Resolution(replace(op, float32_products="bf16x6"))
        return Resolution(op, "bf16x6 is not known to stay inside float32's error budget, in its time, here")
    if request in offered:
        return Resolution(replace(op, float32_products=request))
    return Resolution(op, _why_not(op, request, profile))


def resolutions(ops: Mapping[str, Op], request: Float32Request, profile: TargetProfile) -> dict[str, Resolution]:
    """How each of a model's operations multiplies float32, by their names."""
    decide = functools.cache(functools.partial(resolve, request=request, profile=profile))
    return {name: decide(op) for name, op in ops.items()}


def resolved_ops(ops: Mapping[str, Op], request: Float32Request, profile: TargetProfile) -> dict[str, Op]:
    """Operations by their names, each with the word that it gets."""
    return {name: resolution.op for name, resolution in resolutions(ops, request, profile).items()}


def multiplies_float32(op: Op) -> TypeGuard[LinearOp | AttentionOp | ProductOp]:
    """Whether an operation has products of float32 that can be made in several ways: not those of whole numbers."""
    if not isinstance(op, LinearOp | AttentionOp | ProductOp) or op.dtype != "float32":
        return False
    if isinstance(op, LinearOp):
        whole = op.int8_weights or isinstance(op, QuantisedLinearOp) or (isinstance(op, BlockLinearOp) and op.rounds_x)
        return not whole
    return True


def offers_products(op: Op, profile: TargetProfile) -> tuple[Float32Products, ...]:
    """The words other than "ieee" with which an operation is computed on a target."""
    return tuple(word for word in _kernels(op, profile) if word != "ieee")


def exact_products(op: Op, profile: TargetProfile) -> tuple[Float32Products, ...]:
    """Those of `offers_products` that are known to stay inside float32's error budget, and to take no longer."""
    kernels = _kernels(op, profile)
    by_terms = ((word, kernel) for word, kernel in kernels.items() if isinstance(kernel, TermProducts))
    return tuple(word for word, kernel in by_terms if word in kernel.exact_products(op, profile))


def _kernels(op: Op, profile: TargetProfile) -> dict[Float32Products, Kernel[Any]]:
    """The first kernel of the family for each word with which one takes an operation: of those up to the first that
    takes it with "ieee", which is not passed over for a word."""
    first: dict[Float32Products, Kernel[Any]] = {}
    if not multiplies_float32(op):
        return first
    for kernel in kernels_of(op, profile):
        for word in products_of(kernel, op, profile):
            if kernel.why_not(replace(op, float32_products=word), profile) is None:
                first.setdefault(word, kernel)
        if "ieee" in first:
            break
    return first


def _why_not(op: Op, request: Float32Products, target: TargetProfile) -> str:
    others = [other.name for other in shipped_relatives(target) if request in offers_products(op, other)]
    if not others:
        return f"no kernel makes {request} products of such an operation on any target"
    return f"no matrix unit on target {target.name} makes {request} products; compile for {' or '.join(others)}"
