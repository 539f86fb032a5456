"""The code of a kernel. Nobody's model is to blame where a kernel that takes an operation has none for it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import tvm_ffi
from tvm import tirx

from mhsa_compile.compiler.codegen import build
from mhsa_compile.compiler.codegen.build import LoweredModule
from mhsa_compile.compiler.codegen.runtime_functions import AbsentFunctions
from mhsa_compile.errors import DefectError, MhsaError
from mhsa_compile.files.foreign_errors import defect, place_of_slip, refusal_of
from mhsa_compile.hardware.profile import TargetProfile
from mhsa_compile.kernels.interface.kernel import Emitted, Kernel
from mhsa_compile.kernels.interface.ops import Op, float32_products_of

_SECONDS = 10.0  # that a search may take


def code_of(
    op: Op, kernel: Kernel[Any], config: Mapping[str, int], profile: TargetProfile, *, is_recorded: bool = False
) -> Emitted:
    """What `kernel`, which takes this operation, emits for it. Raises DefectError."""
    try:
        return kernel.emit(op, profile, dict(config))
    except MhsaError:
        raise
    except Exception as error:  # the operation was checked, so whatever it is
        if (shortage := refusal_of(error)) is not None:
            raise shortage from error
        ways = ["records=[], for the default config"] if is_recorded else []
        ways += ['float32_products="ieee"'] if float32_products_of(op) != "ieee" else []
        way_out = f"Until it is mended, try {', or '.join([*ways, 'a target of fewer features, for other code'])}."
        expected = f"code of kernel {kernel.name} with {dict(config)}"
        raise defect(f"{op.kind} ({op.summary()})", expected, error, way_out) from error


def failing_kernel(scheduled: LoweredModule, profile: TargetProfile, cause: Exception) -> DefectError | None:
    """The error for the kernel whose code does not compile alone, where a whole module failed with `cause`; None where
    that of each does, where `cause` says enough, or time is up before."""
    says_enough = isinstance(cause, MhsaError | AbsentFunctions) or refusal_of(cause) is not None
    if says_enough or place_of_slip(cause) is not None:
        return None
    end, sound = time.monotonic() + _SECONDS, set[int]()
    functions = {variable.name_hint: function for variable, function in scheduled.module.functions.items()}
    for report in scheduled.reports:
        for name in (f"{report.op}_{report.name}", f"pack_{report.name}"):
            if time.monotonic() > end:
                return None
            function = functions.get(name)
            if report.source == "fallback" or function is None:
                continue
            alone = function.without_attr("global_symbol")
            if (form := tvm_ffi.structural_hash(alone)) in sound:  # layers of a model are alike
                continue
            if not _compiles(alone, profile):
                expected = f"machine code of kernel {report.kernel} with {report.config}"
                return defect(f"{report.op} ({report.note})", expected, cause)
            sound.add(form)
    return None


def _compiles(function: tirx.PrimFunc, profile: TargetProfile) -> bool:
    try:
        build.machine_code({"run": function}, profile)
    except MhsaError:
        return True
    except Exception:
        return False
    return True
