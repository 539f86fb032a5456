"""TVM's compiler, loaded when something is first compiled.

Where its library cannot be loaded (no room in memory for its 200 MB, a library that it needs is missing), TVM goes on
with its runtime alone and says nothing: what compiles then fails somewhere, at the first function that is not there.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from mhsa_compile.errors import InstallationError
from mhsa_compile.hardware import environment
from mhsa_compile.runtime import tvm_runtime

_LIBRARY = "lib/libtvm_compiler.so"
_REINSTALL = (
    "Start anew with more memory (`ulimit -v` limits a process's), or reinstall: "
    "pip install --force-reinstall --no-deps apache-tvm"
)


def load() -> None:
    """Loads TVM's runtime and its compiler. Raises InstallationError, with what the system's loader says."""
    tvm_runtime.start()
    with tvm_runtime.without_torch():  # the compiler takes a second to load, and would load PyTorch
        import tvm.base

        if tvm.base._RUNTIME_ONLY:
            raise _refusal(Path(tvm.__file__).parent / _LIBRARY)
        import tvm.relax


def _refusal(library: Path) -> InstallationError:
    """Why this process has the runtime alone."""
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return InstallationError("apache-tvm", "its compiler, which can be loaded", str(error), _REINSTALL)
    got = f"the runtime alone, which was imported with {environment.RUNTIME_ALONE}=1 or when memory was short"
    return InstallationError("apache-tvm", "its compiler", got, "Start the process anew.")
