"""Arithmetic of floats, written so that TVM keeps its roundings and its NaN.

TVM simplifies floats as if they were numbers on paper: x - x is 0 also for NaN and infinity, (x + k) - k is x also
where x + k was rounded, not (x < k) is k <= x also where x is NaN. LLVM knows better, and does what is exact. So every
operand of such an operation stands behind a reinterpretation, the second one behind two, so that no two look alike.

TVM computes bfloat16 in float32, and rounds what is stored; it has no reinterpretation of bfloat16. So that is written
out here.
"""

from __future__ import annotations

from mhsa_compile.compiler.fallback.function_nodes import Nodes, dtype_of, hidden, hidden_flag, put, reductions

_ARITHMETIC = tuple(
    f"prim.{name}" for name in ("Add", "Sub", "Mul", "Div", "Mod", "FloorDiv", "FloorMod", "Min", "Max")
)
_COMPARISONS = tuple(f"prim.{name}" for name in ("EQ", "NE", "LT", "LE", "GT", "GE"))
_LOGIC = tuple(f"prim.{name}" for name in ("And", "Or", "Not"))
_FLOATS = ("bfloat16", "float16", "float32", "float64")


def hide_operands(nodes: Nodes) -> None:
    """Hides the operands of operations on floats, and comparisons of floats where logic reads them, in place."""
    joined = reductions(nodes)
    for i in range(len(nodes)):
        kind, data = nodes[i]["type"], nodes[i].get("data", {})
        if kind in _LOGIC:
            for side in {"a", "b"} & set(data):
                if _is_flag_of_floats(nodes, data[side]):
                    data[side] = hidden_flag(nodes, data[side])
        elif kind in _ARITHMETIC + _COMPARISONS and dtype_of(nodes, data["a"]) in _FLOATS and i not in joined:
            if dtype_of(nodes, data["a"]) == "bfloat16":
                _widen(nodes, i)
                data = nodes[i]["data"] if kind in _COMPARISONS else nodes[nodes[i]["data"]["value"]]["data"]
            for side, times in (("a", 1), ("b", 2)):
                for _ in range(times if nodes[data[side]]["type"] != "ir.FloatImm" else 0):  # C++ has no place of one
                    data[side] = hidden(nodes, data[side])


def _is_flag_of_floats(nodes: Nodes, i: int) -> bool:
    """Whether a bool is a comparison of floats, or was stored, maybe by one."""
    kind, data = nodes[i]["type"], nodes[i].get("data", {})
    return kind == "ir.TensorLoad" or (kind in _COMPARISONS and dtype_of(nodes, data["a"]) in _FLOATS)


def _widen(nodes: Nodes, i: int) -> None:
    """An operation on bfloat16 as one on float32; where its result is a float, a cast of that."""
    data = nodes[i]["data"]
    wide = put(nodes, {"type": "ir.PrimType", "data": {"span": data["span"], "dtype": "float32"}})
    for side in ("a", "b"):
        cast = {"span": data["span"], "ty": wide, "value": data[side]}
        data[side] = put(nodes, {"type": "prim.Cast", "data": cast})
    if nodes[i]["type"] in _ARITHMETIC:
        operation = put(nodes, {"type": nodes[i]["type"], "data": data | {"ty": wide}})
        nodes[i] = {"type": "prim.Cast", "data": {"span": data["span"], "ty": data["ty"], "value": operation}}
