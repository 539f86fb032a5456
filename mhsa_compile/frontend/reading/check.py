"""Refuses what a file says and nobody here understands: `TABLE` is the whole of what is understood."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import onnx
from onnx import defs

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.onnx_graph import GraphView, all_nodes, attributes, branches, node_error, opset_of, reads
from mhsa_compile.frontend.reading import microsoft
from mhsa_compile.frontend.reading.microsoft import MICROSOFT
from mhsa_compile.frontend.reading.operands import check_dtypes, check_sizes
from mhsa_compile.frontend.reading.row import ANY, Row
from mhsa_compile.frontend.reading.standard import LAST, PREVIEW, PREVIEW_VERSION, PREVIEWED, STANDARD
from mhsa_compile.nn.row_operators import ROW_OPERATORS
from mhsa_compile.spec.attention_spec import DOMAIN

TABLE: dict[tuple[str, str], Row] = {
    **{("", operator): row for operator, row in STANDARD.items()},
    **{(microsoft.DOMAIN, operator): row for operator, row in MICROSOFT.items()},
}
"""(domain, operator) -> what is understood of it. A domain is part of a name: a vendor's "Softmax" is not ONNX's."""

OWN_OPERATORS = ("Attention", *ROW_OPERATORS)
_DOMAINS = ("", microsoft.DOMAIN, DOMAIN)
_VALUES = ("extrapolation_value", "mask_filter_value", "max", "min", "value", "value_float", "value_floats")
"""Attributes that are values of tensors, or bounds of them: those may be infinite."""
_VENDOR = (
    "Only its author knows what it computes: put its meaning into the file as a model-local function, or write it in "
    "ONNX's own operators."
)
_ONE_MACHINE = (
    "A session of ONNX Runtime wrote it in a layout for its own machine: save what a session makes with "
    "ORT_ENABLE_EXTENDED at most, or compile the file that it read."
)
_NEXT_STEPS = {
    "ai.onnx.ml": "ONNX's trees, scalers and encoders of tables have no code here: leave them to ONNX Runtime, and "
    "compile the part of the graph before or behind them.",
    "com.microsoft.nchwc": _ONE_MACHINE,
    "com.ms.internal.nhwc": _ONE_MACHINE,
}
"""By domain: what to do where it is known whose it is."""


def check_domains(model: onnx.ModelProto) -> None:
    """Refuses operators of domains that nobody here knows, unless the file says by a function what they compute.

    Raises ModelError.
    """
    functions = {(function.domain, function.name) for function in model.functions}
    for node in all_nodes(model.graph):
        is_supported = node.domain in _DOMAINS and (node.domain != DOMAIN or node.op_type in OWN_OPERATORS)
        is_supported |= node.domain == PREVIEW and node.op_type in PREVIEWED
        if not is_supported and (node.domain, node.op_type) not in functions:
            got, next_step = f"one of the domain {node.domain!r}", _NEXT_STEPS.get(node.domain, _VENDOR)
            raise node_error(node, "an operator of ONNX's or of com.microsoft", got, next_step)


def check_file(model: onnx.ModelProto) -> None:
    """Refuses what the operators of a file without functions say beyond their rows, as far as they are Microsoft's, and
    attributes that are no numbers.

    The standard's may be rewritten before TVM gets them: `check_graph` sees those that are left. Raises ModelError.
    """
    check_domains(model)
    graph = _Graph(model)
    for node in all_nodes(model.graph):
        _check_finite(node)
        if node.domain == microsoft.DOMAIN:
            if node.op_type not in MICROSOFT:
                expected = f"an operator of com.microsoft among {', '.join(MICROSOFT)}"
                raise node_error(node, expected, node.op_type)
            _check_row(graph, node, MICROSOFT[node.op_type], {})


def check_operands(model: onnx.ModelProto) -> None:
    """Refuses nodes of the standard's whose operands contradict each other, or their operator, by dtype or by size.

    Raises ModelError.
    """
    view = _EveryGraph(model)
    for node in all_nodes(model.graph):
        if node.domain == "":
            check_dtypes(view, node)
            check_sizes(view, node)


def check_graph(model: onnx.ModelProto) -> None:
    """Refuses what a graph, as TVM's importer is about to get it, says beyond the rows of `STANDARD`.

    Nodes of this library's own are left out. Raises ModelError.
    """
    check_domains(model)
    graph = _Graph(model)
    for node in all_nodes(model.graph):
        if node.domain == PREVIEW:
            expected = f"one that its definition of version {PREVIEW_VERSION} holds, with inputs of known types"
            raise node_error(node, expected, "another")
        if node.domain == microsoft.DOMAIN:  # in a graph that says it is one of ours, which no pass looks at
            if node.op_type not in microsoft.STAYING:
                raise node_error(node, "an operator of ONNX's", f"one of {node.domain}")
            _check_row(graph, node, MICROSOFT[node.op_type], {})
        if node.domain != DOMAIN and node.op_type in STANDARD:  # the importer says which operators it knows
            _check_standard(graph, node)


def unsupported_nodes(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Those of the standard's nodes of a model that have no row, or say more than it."""
    graph, result = _Graph(model), []
    for node in nodes:
        try:
            if node.domain == "" and node.op_type in STANDARD:
                _check_standard(graph, node)
                continue
        except ModelError:
            pass
        result.append(node)
    return result


def _check_standard(graph: _Graph, node: onnx.NodeProto) -> None:
    schema = defs.get_schema(node.op_type, opset_of(graph.model), "")
    if schema.since_version > LAST:
        hint, got = f"Export the model with opset {LAST}, or an older one.", f"that of opset {schema.since_version}"
        raise node_error(node, f"{node.op_type} as opset {LAST} has it", got, hint)
    values = (attribute.default_value for attribute in schema.attributes.values())
    defaults = attributes(onnx.NodeProto(attribute=[value for value in values if value.name]))
    _check_row(graph, node, STANDARD[node.op_type], defaults)


def _check_finite(node: onnx.NodeProto) -> None:
    """Refuses NaN and infinities where a node states a number to compute with: a scale, an epsilon."""
    for name, value in attributes(node).items():
        numbers = value if isinstance(value, list) else [value]
        if name not in _VALUES and any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            hint = "The file is damaged, or its exporter computed it wrongly: write it again."
            raise node_error(node, f"{name} as a finite number", f"{name}={value}", hint)


class _EveryGraph(GraphView):
    """A view that knows the values of the graphs in a graph's nodes, too, by names that are unique."""

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__(model)
        makers = Counter(iter(self.initializers))
        for node in all_nodes(model.graph):
            makers.update(filter(None, node.output))
            self._producers |= {name: node for name in node.output if name}
            for branch in branches(node):
                makers.update(tensor.name for tensor in branch.initializer)
                self.initializers |= {tensor.name: tensor for tensor in branch.initializer}
        for name in (name for name, count in makers.items() if count > 1):  # one in each of two branches
            for table in (self._types, self._producers, self.initializers):
                table.pop(name, None)


class _Graph:
    """A model, with what its conditions ask of it computed once, and only if one asks."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model

    @cached_property
    def view(self) -> GraphView:
        return _EveryGraph(self.model)

    @cached_property
    def read_names(self) -> set[str]:
        """The names of the values that somebody reads, or that the model gives out."""
        graph = self.model.graph
        return {value.name for value in graph.output} | {name for node in graph.node for name in reads(node)}


def _check_row(graph: _Graph, node: onnx.NodeProto, row: Row, defaults: Mapping[str, Any]) -> None:
    """Refuses what a node says beyond its row."""

    def refused(expected: str, got: str) -> ModelError:
        return node_error(node, expected, got, row.hint)

    for name, value in attributes(node).items():
        values = row.attributes.get(name, (defaults[name],) if name in defaults else ())
        if values != ANY and not any(bool(value == one) for one in values):
            expected = " or ".join(f"{name}={one!r}" for one in values) or f"no attribute {name!r}"
            raise refused(expected, f"{name}={value!r}")
    for place, name in enumerate(node.input):
        if name and (place >= row.inputs or place in row.unread):
            raise refused(f"no {row.unread.get(place, f'input {place}')}, which is not understood", repr(name))
    if any(name and name in graph.read_names for name in node.output[row.outputs :]):
        raise refused(f"readers of its first {row.outputs} outputs alone", "one of a later output")
    if row.condition is not None and (mismatch := row.condition(graph.view, node)) is not None:
        raise refused(*mismatch)
    if row.dtypes is not None:
        for name in filter(None, (*node.input, *node.output)):
            kind = graph.view.dtype(name)
            if kind is not None and kind not in row.dtypes:
                raise refused(f"values of {', '.join(sorted(row.dtypes))}", f"{name!r} of {kind}")
