"""Sums, differences and products of whole numbers that a call brings wrap, as NumPy's do.

TVM takes whole numbers of 32 and 64 bits for indices, which never overflow: (x + k) > x is true, and 2 x / 2 is x. LLVM
is told so, too, and of unsigned ones as well. Indices stay as they are; of numbers that were loaded, the arithmetic is
where neither looks into it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from mhsa_compile.compiler.fallback.function_nodes import (
    Nodes,
    dtype_of,
    hidden,
    int32_zero,
    made,
    made_call,
    prim_type,
    put,
    reductions,
)

_NAMES = {"prim.Add": "add", "prim.Sub": "sub", "prim.Mul": "mul"}
_BITS = {"int32": 32, "int64": 64, "uint32": 32, "uint64": 64}
_LLVM = "\n".join(
    f"define i{bits} @mhsa_{name}_{bits}(i{bits} %a, i{bits} %b) alwaysinline nounwind memory(none) {{\n"
    f"  %c = {name} i{bits} %a, %b\n  ret i{bits} %c\n}}"
    for name in _NAMES.values()
    for bits in sorted(set(_BITS.values()))
)
"""Each operation without a promise that it does not overflow, of which TVM has no way to ask for."""


def wrap_in_llvm(nodes: Nodes) -> None:
    """For a CPU, in place: calls of functions of LLVM's, which become part of their callers."""
    if _rewrite(nodes, _make_call, _BITS):
        _import(nodes, _LLVM)


def wrap_without_sign(nodes: Nodes) -> None:
    """For a GPU, in place: C++ knows what unsigned numbers are beyond their bounds."""
    _rewrite(nodes, _unsigned, ("int32", "int64"))


def _rewrite(nodes: Nodes, rewrite: Callable[[Nodes, int], None], kinds: Collection[str]) -> bool:
    """Rewrites the operations on numbers of these dtypes; whether there is one."""
    of_reductions, loaded = reductions(nodes), _loaded(nodes)
    stored = {i for node in nodes if node["type"] == "tirx.BufferStore" for i in _parts(nodes, node["data"]["value"])}
    operations = [i for i in sorted(stored & loaded - of_reductions) if nodes[i]["type"] in _NAMES]
    operations = [i for i in operations if dtype_of(nodes, i) in kinds]
    for i in operations:
        rewrite(nodes, i)
    return bool(operations)


def _loaded(nodes: Nodes) -> set[int]:
    """The values that depend on numbers in memory; what a node is computed from stands before it."""
    loaded: set[int] = set()
    for i, node in enumerate(nodes):
        if node["type"] == "ir.TensorLoad" or any(operand in loaded for operand in _operands(nodes, i)):
            loaded.add(i)
    return loaded


def _parts(nodes: Nodes, i: int) -> Iterator[int]:
    """A value and those that it is computed from, but for what says where it is loaded from."""
    waiting = [i]
    while waiting:
        yield (place := waiting.pop())
        waiting += _operands(nodes, place)


def _operands(nodes: Nodes, i: int) -> list[int]:
    data: Any = nodes[i].get("data")
    if nodes[i]["type"] == "ffi.Array":
        return list(data)
    if nodes[i]["type"].endswith(("Imm", "TensorLoad")) or not isinstance(data, dict):
        return []
    return [
        data[name] for name in ("a", "b", "value", "condition", "true_value", "false_value", "args") if name in data
    ]


def _make_call(nodes: Nodes, i: int) -> None:
    data = nodes[i]["data"]
    name = f"mhsa_{_NAMES[nodes[i]['type']]}_{_BITS[dtype_of(nodes, i)]}"
    arguments = [_string(nodes, name), data["a"], data["b"]]
    nodes[i] = made_call(nodes, "tirx.call_pure_extern", arguments, data["ty"])


def _unsigned(nodes: Nodes, i: int) -> None:
    data = nodes[i]["data"]
    wide = prim_type(nodes, f"u{dtype_of(nodes, i)}")
    sides = {}
    for side in ("a", "b"):  # hidden, as TVM has no unsigned number of a constant below 0
        sides[side] = put(nodes, made(nodes, "prim.Cast", ty=wide, value=hidden(nodes, data[side])))
    operation = put(nodes, {"type": nodes[i]["type"], "data": data | sides | {"ty": wide}})
    nodes[i] = made(nodes, "prim.Cast", ty=data["ty"], value=operation)


def _string(nodes: Nodes, text: str) -> int:
    kind = put(nodes, made(nodes, "ir.StringType"))
    value = put(nodes, {"type": "ffi.String", "data": text})
    return put(nodes, made(nodes, "ir.StringImm", ty=kind, value=value))


def _import(nodes: Nodes, text: str) -> None:
    """Puts what says that LLVM reads `text` around the body of the function."""
    function = next(node["data"] for node in nodes if node["type"] == "tirx.PrimFunc")
    outer = nodes[function["body"]]
    holder = nodes[outer["data"]["block"]]["data"] if outer["type"] == "s_tir.SBlockRealize" else function
    key, value = put(nodes, {"type": "ffi.String", "data": "pragma_import_llvm"}), _string(nodes, text)
    attribute = {"node": int32_zero(nodes), "attr_key": key, "value": value, "body": holder["body"]}
    holder["body"] = put(nodes, made(nodes, "tirx.AttrStmt", **attribute))
