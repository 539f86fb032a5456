"""Functions that compiled code calls by name, and that nobody has who only loads it: TVM's compiler brings many more,
some of them in Python.

The runtime that `mhsa bundle` builds for other machines has all that this one has but what no compiled module calls:
TVM's own caches of keys and values, sampling, RPC, JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import tvm_ffi

_NAME = re.compile(rb"[A-Za-z_][A-Za-z_0-9]*(?:\.[A-Za-z_0-9]+)+")


class AbsentFunctions(LookupError):
    """Compiled code calls functions that TVM's runtime has not; `names` are theirs."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"calls of {', '.join(names)}, which TVM's runtime has not")
        self.names = tuple(names)


def check_functions(library: Path, runtime: Sequence[Path]) -> None:
    """Raises AbsentFunctions for a library that calls a function of this process which the runtime's libraries lack."""
    words = {name.decode() for name in _NAME.findall(library.read_bytes())}
    functions = words & set(tvm_ffi.registry.list_global_func_names())
    if missing := sorted(name for name in functions if not any(name in _strings(path) for path in runtime)):
        raise AbsentFunctions(missing)


@cache
def _strings(library: Path) -> frozenset[str]:
    """The C strings of a library that are names: it registers a function under one, which has a zero on either side."""
    return frozenset(text.decode() for text in library.read_bytes().split(b"\0") if _NAME.fullmatch(text))
