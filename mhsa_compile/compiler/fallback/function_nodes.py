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
