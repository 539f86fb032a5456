"""Arithmetic of a function of TVM's, written so that TVM keeps what it means: it leaves alone what it cannot look into.

**Floats.** TVM simplifies floats as if they were numbers on paper: x - x is 0 also for NaN and infinity, (x + k) - k is
x also where x + k was rounded, not (x < k) is k <= x also where x is NaN. LLVM knows better, and does what is exact. So
every operand of such an operation stands behind a reinterpretation, the second one behind two, so that no two look
alike.

TVM computes bfloat16 in float32, and rounds what is stored; it has no reinterpretation of bfloat16. So that is written
out here.

**Quotients and remainders of indices.** TVM's FlattenBuffer (its iter maps) makes x[-j % 8] of x[(7 - j) % 8], and the
like of quotients, and of constants between two divisions: a reversed copy of repeated rows was off by one. So a
dividend with a constant, or that counts down, stands behind a reinterpretation as what it is, which is no instruction.
"""

from __future__ import annotations

from mhsa_compile.compiler.fallback.function_nodes import (
    Nodes,
    dtype_of,
    hidden,
    hidden_flag,
    made,
    prim_type,
    put,
    reductions,
)

_ARITHMETIC = tuple(
    f"prim.{name}" for name in ("Add", "Sub", "Mul", "Div", "Mod", "FloorDiv", "FloorMod", "Min", "Max")
)
_COMPARISONS = tuple(f"prim.{name}" for name in ("EQ", "NE", "LT", "LE", "GT", "GE"))
_LOGIC = tuple(f"prim.{name}" for name in ("And", "Or", "Not"))
_FLOATS = ("bfloat16", "float16", "float32", "float64")
_DIVISIONS = ("prim.FloorDiv", "prim.FloorMod")


def hide_operands(nodes: Nodes) -> None:
    """Hides the operands of operations on floats, and comparisons of floats where logic reads them, in place."""
    of_reductions = reductions(nodes)
    for i in range(len(nodes)):
        kind, data = nodes[i]["type"], nodes[i].get("data", {})
        if kind in _LOGIC:
            for side in {"a", "b"} & set(data):
                if _is_flag_of_floats(nodes, data[side]):
                    data[side] = hidden_flag(nodes, data[side])
        elif kind in _ARITHMETIC + _COMPARISONS and dtype_of(nodes, data["a"]) in _FLOATS and i not in of_reductions:
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
    wide = prim_type(nodes, "float32")
    data |= {side: put(nodes, made(nodes, "prim.Cast", ty=wide, value=data[side])) for side in ("a", "b")}
    if nodes[i]["type"] in _ARITHMETIC:
        operation = put(nodes, {"type": nodes[i]["type"], "data": data | {"ty": wide}})
        nodes[i] = made(nodes, "prim.Cast", ty=data["ty"], value=operation)


def hide_dividends(nodes: Nodes) -> None:
    """Hides the dividends that TVM would get wrong, in place."""
    graph = _FunctionGraph(nodes)
    divisions = [i for i, node in enumerate(nodes) if node["type"] in _DIVISIONS and graph.is_whole(i)]
    for i in filter(graph.is_in_danger, divisions):
        graph.hide_dividend(i)


class _FunctionGraph:
    """The nodes of a function, and which of them move with its loops."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._moving: dict[int, bool] = {}
        for node in nodes:
            name = {"tirx.For": "loop_var", "tirx.IterVar": "var"}.get(node["type"])
            if name is not None:
                self._moving[node["data"][name]] = True

    def is_whole(self, i: int) -> bool:
        """Whether a node is a whole number."""
        return dtype_of(self._nodes, i) in ("int32", "int64")

    def is_in_danger(self, i: int) -> bool:
        """Whether the dividend of a division moves with loops, and has a constant, or a part that moves down."""
        dividend = self._nodes[i]["data"]["a"]
        return self._moves(dividend) and not self._counts_up(dividend, 1)

    def hide_dividend(self, i: int) -> None:
        """Puts the dividend of a division behind a reinterpretation."""
        data = self._nodes[i]["data"]
        data["a"] = hidden(self._nodes, data["a"])

    def _counts_up(self, i: int, factor: int) -> bool:
        """Whether a sum is of parts alone that move, and move up."""
        node = self._nodes[i]
        if node["type"] in ("prim.Add", "prim.Sub"):
            other = factor if node["type"] == "prim.Add" else -factor
            return self._counts_up(node["data"]["a"], factor) and self._counts_up(node["data"]["b"], other)
        if node["type"] == "prim.Mul":
            for one, number in (("a", "b"), ("b", "a")):
                if (step := self._number(node["data"][number])) is not None:
                    return self._counts_up(node["data"][one], factor * step)
        if self._number(i) == 0:
            return True
        return factor > 0 and self._moves(i)

    def _moves(self, i: int) -> bool:
        if i not in self._moving:
            node = self._nodes[i]
            data = node["data"] if node["type"].startswith("prim.") else {}
            self._moving[i] = any(self._moves(data[side]) for side in ("a", "b", "value") if side in data)
        return self._moving[i]

    def _number(self, i: int) -> int | None:
        node = self._nodes[i]
        return int(self._nodes[node["data"]["value"]]["data"]) if node["type"] == "ir.IntImm" else None
