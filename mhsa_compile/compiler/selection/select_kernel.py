"""Which kernel computes an operation, and with which config: a tuned record's where one fits, else the default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mhsa_compile.compiler.selection.op_key import key_of
from mhsa_compile.hardware.profile import TargetProfile
from mhsa_compile.kernels.interface.kernel import Kernel, products_of
from mhsa_compile.kernels.interface.ops import Op, float32_products_of
from mhsa_compile.kernels.registry import kernels_of
from mhsa_compile.records.record import Record, RecordSet, is_of_default


@dataclass(frozen=True)
class KernelChoice:
    """A kernel and its config. `record` is where they come from, None for the default; `tuning` says it in words."""

    kernel: Kernel[Any]
    config: dict[str, int]
    record: Record | None
    tuning: str


def kernels_for(op: Op, profile: TargetProfile) -> tuple[list[Kernel[Any]], list[str]]:
    """(the kernels that can compute an operation, the preferred one first; why others made for such cannot)."""
    willing, reasons = list[Kernel[Any]](), list[str]()
    for kernel in kernels_of(op, profile):
        word = float32_products_of(op)
        reason = None if word in products_of(kernel, op, profile) else f"it makes no products of float32 by {word}"
        reason = kernel.why_not(op, profile) if reason is None else reason
        if reason is None:
            willing.append(kernel)
        else:
            reasons.append(f"{kernel.name}: {reason}")
    return willing, reasons


def select_kernel(op: Op, profile: TargetProfile, willing: list[Kernel[Any]], shelf: RecordSet) -> KernelChoice:
    """The kernel of the best record that fits, else the first of those that can compute the operation."""
    key = key_of(op)
    default = willing[0].default_config(op, profile)
    if key is None:
        return KernelChoice(willing[0], default, None, "nothing to tune")
    kernels = {kernel.name: kernel for kernel in willing}

    def use(record: Record) -> Kernel[Any] | str:
        kernel = kernels.get(record.kernel)
        if kernel is None:
            return f"no kernel {record.kernel} takes it"
        return kernel.why_not_config(op, profile, record.config) or kernel

    match = shelf.best_match(op.kind, key, use)
    if isinstance(match, str):
        return KernelChoice(willing[0], default, None, match)
    record, kernel = match
    if is_of_default(record):  # of its own target: caches may give this one another
        return KernelChoice(willing[0], default, record, f"the default was the fastest there: {record.summary()}")
    return KernelChoice(kernel, dict(record.config), record, record.summary())
