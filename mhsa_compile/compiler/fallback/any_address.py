"""TVM's own code for arrays that begin at any element.

TVM takes an array to begin with a cache line, and LLVM makes loads of that, which fault elsewhere. NumPy's large arrays
begin 16 bytes behind one: a call would have to copy each of them first. Loads of any address cost nothing more.
"""

from __future__ import annotations

import json
from typing import Any

import tvm

_BUFFER = "tirx.BufferType"
_SCOPE = "pragma_scope"
"""What TVM writes around the loops of its scatters, and what its generator of code then warns of, on stderr."""


def at_any_address(function: Any) -> Any:
    """A PrimFunc, with every buffer aligned to one element. That is part of a buffer's type, which stands wherever the
    buffer does: in TVM's own form of a function as text each stands once."""
    text = tvm.ir.save_json(function)
    graph = json.loads(text.replace(f'"{_SCOPE}"', '"scope"'))
    nodes = graph["nodes"]
    for node in nodes:
        if node["type"] == _BUFFER:
            dtype = tvm.DataType(nodes[node["data"]["dtype"]]["data"]["dtype"])
            node["data"]["data_alignment"] = (dtype.bits * dtype.lanes + 7) // 8
    return tvm.ir.load_json(json.dumps(graph))
