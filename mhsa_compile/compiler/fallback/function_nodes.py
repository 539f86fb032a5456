"""A PrimFunc as TVM writes it out: a list of nodes, in which each stands once, whoever reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tvm

Nodes = list[dict[str, Any]]
"""Nodes name each other by their places."""


def rewritten(function: Any, *changes: Callable[[Nodes], None]) -> Any:
    """The PrimFunc whose nodes were changed in place."""
    graph = json.loads(tvm.ir.save_json(function))
    for change in changes:
        change(graph["nodes"])
    return tvm.ir.load_json(json.dumps(graph))


def hidden(nodes: Nodes, i: int) -> int:
    """The place of a new node: the value of node i behind a reinterpretation as what it is, which is no instruction.

    TVM's passes do not look into it.
    """
    op = put(nodes, {"type": "ir.Op", "data": "tirx.reinterpret"})
    arguments, types = (put(nodes, {"type": "ffi.Array", "data": part}) for part in ([i], []))
    none = put(nodes, {"type": "None"})
    call = {"span": none, "ty": nodes[i]["data"]["ty"], "op": op, "args": arguments, "attrs": none, "ty_args": types}
    return put(nodes, {"type": "ir.Call", "data": call})


def put(nodes: Nodes, node: dict[str, Any]) -> int:
    """The place of a new node."""
    nodes.append(node)
    return len(nodes) - 1


def dtype_of(nodes: Nodes, i: int) -> str:
    """The dtype of a value, of one lane; "" of anything else."""
    kind = nodes[nodes[i]["data"]["ty"]]["data"]
    return str(kind.get("dtype", "")) if isinstance(kind, dict) else ""


def reductions(nodes: Nodes) -> list[int]:
    """The operations by which reductions join one more element: TVM's passes know these by their form."""
    blocks = [node["data"] for node in nodes if node["type"] == "s_tir.SBlock"]
    bodies = [nodes[block["body"]] for block in blocks if nodes[block["init"]]["type"] != "None"]
    return [body["data"]["value"] for body in bodies if body["type"] == "tirx.BufferStore"]
