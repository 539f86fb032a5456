"""The definitions, in standard operators, of nodes of our domain that a model gets; nodes that are alike share one."""

from __future__ import annotations

import onnx
from onnx import helper

from mhsa_compile.frontend.onnx_graph import GraphView, add_import
from mhsa_compile.nn import mhsa_operator
from mhsa_compile.spec.attention_spec import DOMAIN

OPSET = 24
"""The first whose Attention defines the operator of ours that has more outputs, or inputs. All that 23 says, it says
alike, so a model is raised by its number, and keeps every shape that is known of it."""
_OVERLOADS = 10  # the first version of the file format in which functions of one name may differ


class Definitions:
    """Definitions for nodes that a model gets; `graph` is the model as it was."""

    def __init__(self, graph: GraphView) -> None:
        self._opset = max(graph.opset, OPSET)
        self._had_ours = any(node.domain == DOMAIN for node in graph.nodes)
        self._names = {function.overload for function in graph.model.functions if function.domain == DOMAIN}
        self._overloads: dict[bytes, str] = {}  # a definition -> what sets it apart from others of its name
        self._functions: list[onnx.FunctionProto] = []

    def define(self, node: onnx.NodeProto, *, bool_mask: bool) -> None:
        """Makes a node one of our domain and gives it its definition. One that standard operators cannot say has
        none."""
        node.domain = DOMAIN
        if not mhsa_operator.has_definition(node):
            return
        function = mhsa_operator.attention_function(node, self._opset, bool_mask=bool_mask)
        text = function.SerializeToString(deterministic=True)
        if text not in self._overloads:
            alone = not self._overloads and not self._had_ours  # most tools know no overloads
            self._overloads[text] = function.overload = "" if alone else self._free_overload()
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
        add_import(model, DOMAIN)
        least = helper.find_min_ir_version_for(versions, True)
        overloaded = _OVERLOADS if any(function.overload for function in self._functions) else 0
        model.ir_version = max(model.ir_version, least, overloaded)

    def _free_overload(self) -> str:
        count = len(self._overloads)
        while (name := f"outputs_{count}") in self._names:
            count += 1
        self._names.add(name)
        return name
