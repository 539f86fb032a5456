"""Quotients and remainders of indices, written so that TVM keeps what they mean.

TVM's FlattenBuffer (its iter maps) makes x[-j % 8] of x[(7 - j) % 8], and the like of quotients, and of constants
between two divisions: a reversed copy of repeated rows was off by one. It leaves alone what it cannot look into. So a
dividend with a constant, or that counts down, stands behind a reinterpretation as what it is, which is no instruction.
"""

from __future__ import annotations

from mhsa_compile.compiler.fallback.function_nodes import Nodes, dtype_of, hidden

_DIVISIONS = ("prim.FloorDiv", "prim.FloorMod")


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
