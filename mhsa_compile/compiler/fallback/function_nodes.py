"""A PrimFunc as TVM writes it out: a list of nodes, in which each stands once, whoever reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tvm
from tvm_ffi.serialization import from_json_graph_str

Node = dict[str, Any]
Nodes = list[Node]
"""Nodes name each other by their places."""


def rewritten(function: Any, *changes: Callable[[Nodes], None]) -> Any:
    """The PrimFunc whose nodes were changed in place. TVM's `load_json` would look first for what older versions wrote,
    which takes six times as long."""
    graph = json.loads(tvm.ir.save_json(function))
    for change in changes:
        change(graph["nodes"])
    return from_json_graph_str(json.dumps(graph))


def at_any_address(nodes: Nodes) -> None:
    """Aligns every buffer to one element; that is part of a buffer's type, which stands wherever the buffer does.

    TVM takes an array to begin with a cache line, and LLVM makes loads of that, which fault elsewhere. NumPy's large
    arrays begin 16 bytes behind one: a call would have to copy each of them first. Loads of any address cost nothing
    more.
    """
    for node in nodes:
        if node["type"] == "tirx.BufferType":
            dtype = tvm.DataType(nodes[node["data"]["dtype"]]["data"]["dtype"])
            node["data"]["data_alignment"] = (dtype.bits * dtype.lanes + 7) // 8


def without_scopes(nodes: Nodes) -> None:
    """Gives another name to what TVM writes around the loops of its scatters, and what its generator of code then warns
    of, on stderr."""
    for node in nodes:
        if node["type"] == "ffi.String" and node["data"] == "pragma_scope":
            node["data"] = "scope"


_CARRIERS = {"float16": "int16", "float32": "int32", "float64": "int64", "int32": "float32", "int64": "float64"}


def hidden(nodes: Nodes, i: int) -> int:
    """The place of a new node: the value of node i, of one of `_CARRIERS`, as TVM's passes do not look into it.

    It is reinterpreted as another kind of as many bits, and back, which is no instruction. As what it is, a pass for
    floats of 8 bits would take that away.
    """
    return _reinterpret(nodes, _reinterpret(nodes, i, _CARRIERS[dtype_of(nodes, i)]), dtype_of(nodes, i))


def hidden_flag(nodes: Nodes, i: int) -> int:
    """The place of a new node: the bool of node i, as `hidden` does it."""
    number = put(nodes, made(nodes, "prim.Cast", ty=prim_type(nodes, "int32"), value=i))
    sides = {"a": hidden(nodes, number), "b": int32_zero(nodes)}
    return put(nodes, made(nodes, "prim.NE", ty=nodes[i]["data"]["ty"], **sides))


def _reinterpret(nodes: Nodes, i: int, dtype: str) -> int:
    return put(nodes, made_call(nodes, "tirx.reinterpret", [i], prim_type(nodes, dtype)))


def prim_type(nodes: Nodes, dtype: str) -> int:
    return put(nodes, made(nodes, "ir.PrimType", dtype=dtype))


def int32_zero(nodes: Nodes) -> int:
    value = put(nodes, {"type": "int", "data": 0})
    return put(nodes, made(nodes, "ir.IntImm", ty=prim_type(nodes, "int32"), value=value))


def made_call(nodes: Nodes, operator: str, arguments: list[int], kind: int) -> Node:
    """A call of an operator of TVM's whose result is of the type at `kind`."""
    op = put(nodes, {"type": "ir.Op", "data": operator})
    args, types = (put(nodes, {"type": "ffi.Array", "data": part}) for part in (arguments, []))
    attrs = put(nodes, {"type": "None"})
    return made(nodes, "ir.Call", ty=kind, op=op, args=args, attrs=attrs, ty_args=types)


def made(nodes: Nodes, kind: str, **data: int | str) -> Node:
    """A node that comes from no place of a source."""
    return {"type": kind, "data": {"span": put(nodes, {"type": "None"}), **data}}


def put(nodes: Nodes, node: Node) -> int:
    """The place of a new node."""
    nodes.append(node)
    return len(nodes) - 1


def dtype_of(nodes: Nodes, i: int) -> str:
    """The dtype of a value, of one lane; "" of anything else."""
    kind = nodes[nodes[i]["data"]["ty"]]["data"]
    return str(kind.get("dtype", "")) if isinstance(kind, dict) else ""


def reductions(nodes: Nodes) -> set[int]:
    """The operations by which reductions join one more element, and the products of two elements that they join: TVM's
    passes know both by their form."""
    nodes_of_sums: set[int] = set()
    for node in nodes:
        if node["type"] == "tirx.BufferStore" and "b" in (data := nodes[node["data"]["value"]].get("data", ())):
            sides = [data[side] for side in ("a", "b")]
            if any(_source(nodes, side) == node["data"]["buffer"] for side in sides):
                nodes_of_sums |= {node["data"]["value"], *(side for side in sides if _is_product(nodes, side))}
    return nodes_of_sums


def _is_product(nodes: Nodes, i: int) -> bool:
    """Whether a value is a product of elements of two arrays."""
    if nodes[i]["type"] != "prim.Mul":
        return False
    sources = {_source(nodes, nodes[i]["data"][side]) for side in ("a", "b")}
    return len(sources) == 2 and None not in sources


def _source(nodes: Nodes, i: int) -> int | None:
    """The array that a value is an element of, as it is or cast."""
    while nodes[i]["type"] == "prim.Cast":
        i = nodes[i]["data"]["value"]
    return int(nodes[i]["data"]["source"]) if nodes[i]["type"] == "ir.TensorLoad" else None
