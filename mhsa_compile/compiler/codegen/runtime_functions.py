"""Functions that compiled code calls by name, and that nobody has who only loads it: TVM's compiler brings many more,
some of them in Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import tvm_ffi

_NAME = re.compile(rb"[A-Za-z_][A-Za-z_0-9]*(?:\.[A-Za-z_0-9]+)+")


def check_functions(library: Path, runtime: Sequence[Path]) -> None:
    """Raises LookupError for a library that calls a function of this process which the runtime's libraries lack."""
    mentioned = {name.decode() for name in _NAME.findall(library.read_bytes())}
    called = mentioned & set(tvm_ffi.registry.list_global_func_names())
    known = b"".join(path.read_bytes() for path in runtime) if called else b""
    missing = sorted(name for name in called if name.encode() not in known)
    if missing:
        raise LookupError(f"calls of {', '.join(missing)}, which TVM's runtime has not")
