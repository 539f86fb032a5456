"""The definitions, in standard operators, of nodes of our domain that a model gets; nodes that are alike share one."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import helper

from mhsa_compile.nn import mhsa_operator
from mhsa_compile.spec.attention_spec import DOMAIN

OPSET = 24
"""The first whose Attention defines the operator of ours that has more outputs, or sinks. All that 23 says, it says
alike, so a model is raised by its number, and keeps every shape that is known of it."""
_OVERLOADS = 10  # the first version of the file format in which functions of one name may differ


class Definitions:
    """Definitions for nodes of a model whose standard is `opset`; `had_ours`: it has nodes of our domain already."""

    def __init__(self, opset: int, *, had_ours: bool) -> None:
        self._opset, self._had_ours = max(opset, OPSET), had_ours
        self._overloads: dict[bytes, str] = {}  # a definition -> what sets it apart from others of its name
        self._functions: list[onnx.FunctionProto] = []

    def define(self, node: onnx.NodeProto, *, bool_mask: bool) -> None:
        """Makes a node one of our domain and gives it its definition. One with functions of scores has none."""
        node.domain = DOMAIN
        if any(attribute.name in mhsa_operator.FUNCTIONS for attribute in node.attribute):
            return
        function = mhsa_operator.attention_function(node, self._opset, bool_mask=bool_mask)
        text = function.SerializeToString(deterministic=True)
        if text not in self._overloads:
            alone = not self._overloads and not self._had_ours  # most tools know no overloads
            self._overloads[text] = function.overload = "" if alone else f"outputs_{len(self._overloads)}"
            self._functions.append(function)
        node.overload = self._overloads[text]

    def put_into(self, model: onnx.ModelProto) -> None:
        """Adds the definitions, and the versions that they need, to the model with the nodes."""
        if not self._functions:
            return
        model.functions.extend(self._functions)
        versions = model.opset_import
        for entry in versions:
            if entry.domain in ("", "ai.onnx"):
                entry.version = max(entry.version, self._opset)
        if all(entry.domain != DOMAIN for entry in versions):
            versions.append(helper.make_opsetid(DOMAIN, 1))
        least = helper.find_min_ir_version_for(versions, True)
        overloaded = _OVERLOADS if any(function.overload for function in self._functions) else 0
        model.ir_version = max(model.ir_version, least, overloaded)


def has_ours(nodes: Sequence[onnx.NodeProto]) -> bool:
    """Whether one of the nodes is of our domain."""
    return any(node.domain == DOMAIN for node in nodes)
