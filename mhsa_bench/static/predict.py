"""How fast the inner loops of a target's kernels would be, predicted without the hardware.

For each loop: the share of the slots for multiplications that it fills, by LLVM's model of the CPU (`mca`). A
prediction, not a measurement: data is taken to lie in the first-level cache, and only the loops are looked at, not what
lies around them (the exponentials of attention, for one).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import tvm

from mhsa_bench.static import llvm_mca
from mhsa_bench.static.assembly_loops import Loop, inner_loops
from mhsa_bench.static.llvm_mca import Analyzer
from mhsa_compile.compiler.codegen.build import pass_context
from mhsa_compile.compiler.kernel_code import code_of
from mhsa_compile.compiler.selection.select_kernel import kernels_for, select_kernel
from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.interface.kernel import Emitted
from mhsa_compile.kernels.interface.ops import AttentionOp, LinearOp, Op
from mhsa_compile.records import record_files
from mhsa_compile.records.record import RecordSet


@dataclass(frozen=True)
class LoopReport:
    """Loops of one kernel that are alike.

    instruction  that multiplies; `multiplies` of them an iteration, into `sums` registers
    tail         whether it is for rows or queries that fill no whole tile: half as many sums or fewer
    cycles       of an iteration, and `share` of the slots of that instruction that are used; the slowest of them
    bytes        loaded for each multiplication
    spills       accesses to the stack in an iteration
    """

    instruction: str
    multiplies: int
    sums: int
    loops: int
    tail: bool
    cycles: float
    share: float
    bytes: float
    spills: int


@dataclass(frozen=True)
class KernelReport:
    """A kernel, under the names of the operations that it computes."""

    ops: tuple[str, ...]
    kind: str
    kernel: str
    config: dict[str, int]
    loops: tuple[LoopReport, ...]

    @property
    def main(self) -> tuple[LoopReport, ...]:
        """What nearly all of the time goes to."""
        return tuple(loop for loop in self.loops if not loop.tail)

    @property
    def share(self) -> float:
        """The part of the slots for multiplications that is filled, in the slowest of the main loops."""
        return min((loop.share for loop in self.main), default=0.0)


@dataclass(frozen=True)
class Prediction:
    """`model` is what LLVM's model of the CPU calls itself, which may be that of a relative."""

    analyzer: str
    model: str
    kernels: tuple[KernelReport, ...]


def predict(ops: Mapping[str, Op], profile: CpuProfile) -> Prediction:
    """Predicts the kernels of the projections and attentions among `ops`. Raises InstallationError and TargetError."""
    analyzer = llvm_mca.find(profile)
    shelf = RecordSet(record_files.gather(profile.records())[0], profile)
    kernels: list[KernelReport] = []
    for name, op in ops.items():
        willing, _ = kernels_for(op, profile)
        if not isinstance(op, LinearOp | AttentionOp) or not willing:
            continue
        choice = select_kernel(op, profile, willing, shelf)
        loops = _loops(code_of(op, choice.kernel, choice.config, profile), profile, analyzer)
        report = KernelReport((name,), op.kind, choice.kernel.name, choice.config, loops)
        alike = next((other for other in kernels if replace(other, ops=report.ops) == report), None)
        if alike is not None:
            kernels[kernels.index(alike)] = replace(alike, ops=(*alike.ops, name))
        else:
            kernels.append(report)
    return Prediction(f"llvm-mca {analyzer.version}", analyzer.model(), tuple(kernels))


def assembly(emitted: Emitted, profile: CpuProfile) -> str:
    """What LLVM makes of a kernel."""
    module = tvm.IRModule({"run": emitted.run.with_attr("global_symbol", "run")})
    with pass_context():
        text: str = tvm.compile(module, target=tvm.target.Target(profile.tvm_config())).mod.inspect_source("asm")
    return text


def _loops(emitted: Emitted, profile: CpuProfile, analyzer: Analyzer) -> tuple[LoopReport, ...]:
    """A report for each kind of loop: alike are those with as many multiplications, of one kind, sums,
    bytes and spills."""
    groups: dict[tuple[Any, ...], list[Loop]] = {}
    for loop in inner_loops(assembly(emitted, profile)):
        kind = loop.instruction, len(loop.multiplies), loop.sums, loop.loaded_bytes, loop.spills
        groups.setdefault(kind, []).append(loop)
    most = max((sums for _, _, sums, _, _ in groups), default=0)
    reports = []
    for (instruction, count, sums, size, spills), loops in groups.items():
        cycles = max(analyzer.cycles(loop.lines) for loop in loops)
        share = count / cycles / analyzer.peak(loops[0])
        tail = 2 * sums <= most
        reports.append(LoopReport(instruction, count, sums, len(loops), tail, cycles, share, size / count, spills))
    return tuple(sorted(reports, key=lambda report: (report.tail, -report.sums)))
