"""What TVM's own code gets to be right on arrays that begin at any element, and silent.

TVM takes an array to begin with a cache line, and LLVM makes loads of that, which fault elsewhere. NumPy's large arrays
begin 16 bytes behind one: a call would have to copy each of them first. Loads of any address cost nothing more.
"""

from __future__ import annotations

import tvm

from mhsa_compile.compiler.fallback.function_nodes import Nodes

_BUFFER = "tirx.BufferType"
_SCOPE = "pragma_scope"
"""What TVM writes around the loops of its scatters, and what its generator of code then warns of, on stderr."""


def at_any_address(nodes: Nodes) -> None:
    """Aligns every buffer to one element. That is part of a buffer's type, which stands wherever the buffer does."""
    for node in nodes:
        if node["type"] == _BUFFER:
            dtype = tvm.DataType(nodes[node["data"]["dtype"]]["data"]["dtype"])
            node["data"]["data_alignment"] = (dtype.bits * dtype.lanes + 7) // 8


def without_scopes(nodes: Nodes) -> None:
    """Scopes go by another name, of which nobody warns."""
    for node in nodes:
        if node["type"] == "ffi.String" and node["data"] == _SCOPE:
            node["data"] = "scope"
