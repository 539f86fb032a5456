"""A scheduled module -> one shared library, for this host or another.

Zig's C compiler links for every target from any host, needs no system tool chain, and gives the same bytes twice.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from mhsa_compile import zig
from mhsa_compile.profile import TargetProfile
from mhsa_compile.schedule import Scheduled

_FLOAT16 = Path(__file__).with_name("float16.c")


def build(scheduled: Scheduled, profile: TargetProfile, library: Path) -> None:
    """Writes the shared library. Raises BuildError with the linker's words."""
    target = tvm.target.Target(profile.tvm_config())
    with pass_context():
        executable = relax.build(scheduled.module, target, relax_pipeline=_pipeline())
    executable.export_library(str(library), fcompile=_linker(profile.link.triple))


def library(functions: Mapping[str, Any], profile: TargetProfile) -> bytes:
    """PrimFuncs by name as a shared library of their own, without a VM. Raises BuildError with the linker's words."""
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()})
    with pass_context(), tempfile.TemporaryDirectory(prefix="mhsa-") as folder:
        compiled = tvm.compile(module, target=tvm.target.Target(profile.tvm_config()))
        path = Path(folder, "functions.so")
        compiled.export_library(str(path), fcompile=_linker(profile.link.triple))
        return path.read_bytes()


def pass_context() -> Any:
    """Without two passes that take three quarters of the time and give our kernels nothing: their buffers are as large
    as they need to be, and LLVM finds common subexpressions itself."""
    return tvm.transform.PassContext(
        disabled_pass=["s_tir.CompactBufferAllocation"], config={"tirx.disable_cse_tir": True}
    )


def _pipeline() -> Any:
    """From call_tir to the VM's instructions, in order."""
    return tvm.transform.Sequential(
        [
            relax.transform.ToNonDataflow(),
            relax.transform.RemovePurityChecking(),
            relax.transform.CallTIRRewrite(),
            relax.transform.StaticPlanBlockMemory(),
            relax.transform.LowerAllocTensor(),
            relax.transform.KillAfterLastUse(),
            relax.transform.LowerRuntimeBuiltin(),
            relax.transform.ComputePrimValue(),
            relax.transform.VMShapeLower(),
            tvm.transform.module_pass(_order_shape_arithmetic, opt_level=0),
            relax.transform.AttachGlobalSymbol(),
        ]
    )


def _order_shape_arithmetic(module: Any, _: Any) -> Any:
    """Sorts the stores of the sizes that VMShapeLower computes: it writes them in the order of a hash of addresses, and
    two builds would differ. They are independent, since each is computed from the inputs' own dims."""
    for variable, function in module.functions_items():
        if variable.name_hint.startswith("shape_func") and isinstance(function.body, tvm.tirx.SeqStmt):
            stores = sorted(function.body.seq, key=str)
            module[variable] = function.with_body(tvm.tirx.SeqStmt(stores))
    return module


def _linker(triple: str) -> Any:
    """`fcompile` of export_library: links object files into a stripped shared library."""

    def link(output: str, objects: list[str], options: list[str] | None = None, **_: Any) -> None:
        added = [str(_FLOAT16)] if triple.startswith("riscv") else []
        words = ["-shared", "-fPIC", "-O1", "-s", "-o", output, *objects, *added, *(options or [])]
        zig.run("cc", triple, words, "a shared library")

    link.output_format = "so"  # type: ignore[attr-defined]
    return link
