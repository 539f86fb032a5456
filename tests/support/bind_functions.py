"""A compiled module that has functions to pack weights and nothing else."""

from __future__ import annotations

from typing import Any


class Machine(dict[str, Any]):
    """Functions by name, each its own name: those that take the weights of these places."""

    def __init__(self, **takes: list[int]) -> None:
        super().__init__({name: name for name in takes})
        self["get_function_arity"] = lambda name: len(takes[name])
        self["get_function_param_name"] = lambda name, i: f"weight_{takes[name][i]}"
        self.implements_function = takes.__contains__
