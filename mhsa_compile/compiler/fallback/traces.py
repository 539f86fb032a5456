"""PrimFuncs of TVM's own operators as things with tuned records: their key, and a schedule's trace applied to them.

A trace is the list of steps by which TVM's MetaSchedule transformed a function; it names blocks. Names come from the
model, so blocks are counted instead, and a LayerNorm of one model is that of another.
"""

from __future__ import annotations

import json
import keyword
import re
from hashlib import sha256
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import Trace

KIND = "tvm"
"""The word in records, for the operation and for the kernel."""

_BLOCK = re.compile(r'T\.sblock\("(\w*)"\)')
_NAME = re.compile(r'"[^"]*"|(?<![\w.])[A-Za-z_]\w*')
_KEPT = {*keyword.kwlist, "T", "I", "main", "range"}


def canonical(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with its blocks called b0, b1, ... in their order, whatever they were."""
    names: dict[str, str] = {"root": "root"}
    text = _BLOCK.sub(lambda block: f'T.sblock("{names.setdefault(block[1], f"b{len(names) - 1}")}")', _plain(function))
    return tvm.script.from_source(text)


def key_of(function: tirx.PrimFunc) -> dict[str, Any]:
    """The key of a record: the digest of what it computes, whatever its variables are called, and the shapes it has."""
    names: dict[str, str] = {}

    def renamed(name: re.Match[str]) -> str:
        is_fixed = name[0][0] == '"' or name[0] in _KEPT
        return name[0] if is_fixed else names.setdefault(name[0], f"n{len(names)}")

    text = _NAME.sub(renamed, _plain(canonical(function)))
    return {"function": sha256(text.encode()).hexdigest()[:16], "shapes": [_shape(p) for p in buffers(function)]}


def buffers(function: tirx.PrimFunc) -> list[Any]:
    """The buffers that a function is called with, the output last."""
    return [parameter for parameter in function.params if isinstance(parameter, tirx.Buffer)]


def is_static(function: tirx.PrimFunc) -> bool:
    return all(isinstance(dim, tirx.IntImm) for buffer in buffers(function) for dim in buffer.shape)


def apply(function: tirx.PrimFunc, trace: str) -> tirx.PrimFunc | str:
    """The function scheduled by a record's trace, or why it cannot be."""
    schedule = s_tir.Schedule(canonical(function))
    try:
        Trace.apply_json_to_schedule(json.loads(trace), schedule)
    except Exception as error:  # a record is someone's text: whatever TVM trips over is a reason
        lines = [line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
        return f"its trace does not fit: {lines[-1].strip()[:200]}"
    return finish(schedule)


def finish(schedule: Any) -> tirx.PrimFunc:
    """The scheduled function, its buffers as small as they can be: `build` leaves that pass out."""
    return COMPACT(schedule.mod)["main"]


COMPACT = tvm.transform.Sequential(
    [
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.CompactBufferAllocation(),
    ]
)
"""The passes that give what is computed for a part of the output buffers of that part's size."""


def _plain(function: tirx.PrimFunc) -> str:
    """The text of a function, without what it is called and how it may be fused."""
    for attribute in ("global_symbol", "op_pattern"):
        if attribute in (function.attrs or {}):
            function = function.without_attr(attribute)
    return str(function.script())


def _shape(buffer: Any) -> list[int | str]:
    return [int(dim) if isinstance(dim, tirx.IntImm) else "any" for dim in buffer.shape]
