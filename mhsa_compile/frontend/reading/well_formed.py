"""Refuses graphs that are none, by the name of the node: values that nobody makes, operators, inputs and attributes
that ONNX does not have. ONNX's own checker finds these as well; it names few of them.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import defs

from mhsa_compile.errors import ModelError, did_you_mean
from mhsa_compile.frontend.onnx_graph import branches, node_error, title

_KINDS = {
    "FLOAT": "a number",
    "INT": "a whole number",
    "STRING": "a text",
    "FLOATS": "numbers",
    "INTS": "whole numbers",
    "STRINGS": "texts",
    "TENSOR": "a tensor",
    "TENSORS": "tensors",
    "GRAPH": "a graph",
    "SPARSE_TENSOR": "a sparse tensor",
    "TYPE_PROTO": "a type",
}
CORRECT = "Correct the file, or export it again."
_LEFT_OUT = frozenset(("Resize",))
"""Operators of which runtimes take inputs as absent that a schema of theirs asks for."""


def check_well_formed(model: onnx.ModelProto) -> None:
    """Raises ModelError for a model that imports no operators or gives nothing out, and for the first node of its graph
    that does not hold together."""
    opset = _opset(model)
    if not model.graph.output:
        raise ModelError("model", "an output at least", "a graph without any", CORRECT)
    if model.ir_version > onnx.IR_VERSION:
        expected = f"ir_version of at most {onnx.IR_VERSION}, which onnx {onnx.__version__} reads"
        hint = "Install a newer onnx, or export it with an older one."
        raise ModelError("model", expected, str(model.ir_version), hint)
    _check_inputs(model.graph)
    functions = {(function.domain, function.name) for function in model.functions}
    _check_graph(model.graph, frozenset(), opset, functions)


def _check_inputs(graph: onnx.GraphProto) -> None:
    names: set[str] = set()
    for value in graph.input:
        if value.name in names:
            raise ModelError(f"input {value.name!r}", "one input of that name", "two", CORRECT)
        names.add(value.name)
        if not value.type.tensor_type.HasField("shape"):
            hint = "Declare it, as onnx.helper.make_tensor_value_info(name, dtype, ['B', 'L', 64]) does."
            raise ModelError(f"input {value.name!r}", "a size or a symbol for each of its axes", "no shape", hint)


def _opset(model: onnx.ModelProto) -> int:
    """The version of ONNX's operators that a model imports; 0 where it neither does nor uses any."""
    opset = next((entry.version for entry in model.opset_import if entry.domain == ""), None)
    last, own = defs.onnx_opset_version(), any(node.domain == "" for node in model.graph.node)
    if opset is None and not own:
        return 0
    if opset is None or not 1 <= opset <= last:
        got = "none" if opset is None else str(opset)
        hint = "Say in opset_import which it is written for, or export it with another."
        raise ModelError("model", f"an opset of ONNX's operators from 1 to {last}", got, hint)
    return int(opset)


def _check_graph(
    graph: onnx.GraphProto, outside: Collection[str], opset: int, functions: Collection[tuple[str, str]]
) -> None:
    makers: dict[str, str] = {}
    names = {*outside, *(value.name for value in graph.input), *(tensor.name for tensor in graph.initializer)}
    names |= {tensor.values.name for tensor in graph.sparse_initializer}
    for node in graph.node:
        for name in node.input:
            if name and name not in names:
                raise node_error(node, *_unmade(graph, node, name), CORRECT)
        if node.domain == "" and (node.domain, node.op_type) not in functions:
            _check_node(node, opset)
        for branch in branches(node):
            _check_graph(branch, names, opset, functions)
        for name in filter(None, node.output):
            if name in makers:
                got = f"{name!r}, which {makers[name]} makes already"
                raise node_error(node, "outputs of names that no other node makes", got, CORRECT)
            makers[name] = title(node)
            names.add(name)
    for value in graph.output:
        if value.name not in names:
            got = "one that no node makes"
            raise ModelError(f"output {value.name!r}", "a value that a node of the graph makes", got, CORRECT)


def _unmade(graph: onnx.GraphProto, node: onnx.NodeProto, name: str) -> tuple[str, str]:
    """What was expected of an input that no earlier node makes, though nodes are in order, and what came."""
    if not any(name in other.output for other in graph.node):
        return "inputs that the graph has, or that a node makes", f"{name!r}, which nothing makes"
    expected = "inputs that do not depend on its own outputs"
    return expected, f"{name!r}, which is made from {' or '.join(map(repr, node.output))}: a circle"


def _check_node(node: onnx.NodeProto, opset: int) -> None:
    operator = node.op_type
    try:
        schema = defs.get_schema(operator, opset, "")
    except defs.SchemaError:
        raise _unknown(node, opset) from None
    if schema.deprecated:
        hint = f"Import an opset that has it, of those below {schema.since_version}."
        raise node_error(node, f"an operator of opset {opset}", f"{operator}, which it has no more", hint)
    for what, names, least, most in (
        ("inputs", node.input, schema.min_input, schema.max_input),
        ("outputs", node.output, schema.min_output, schema.max_output),
    ):
        if not least <= len(names) <= most:
            count = str(least) if least == most else f"{least} or more" if most > 1 << 20 else f"{least} to {most}"
            raise node_error(node, f"{count} {what}, as {operator} has", str(len(names)), CORRECT)
    for place, (name, parameter) in enumerate(zip(node.input, schema.inputs, strict=False)):
        required = parameter.option == defs.OpSchema.FormalParameterOption.Single
        if required and not name and operator not in _LEFT_OUT:
            raise node_error(node, f"input {place}, {parameter.name!r}", "none: its name is empty", CORRECT)
    _check_attributes(node, schema)


def _unknown(node: onnx.NodeProto, opset: int) -> ModelError:
    operator = node.op_type
    later = sorted(
        schema.since_version
        for schema in defs.get_all_schemas_with_history()
        if schema.domain == "" and schema.name == operator
    )
    if later:
        hint = f"Import opset {later[0]} or a later one, if the file means that operator."
        expected = f"an operator of opset {opset}, which the file imports"
        return node_error(node, expected, f"one of {later[0]}", hint)
    names = {schema.name for schema in defs.get_all_schemas() if schema.domain == ""}
    hint = did_you_mean(operator, names, "Put its meaning into the file as a model-local function.", cutoff=0.75)
    return node_error(node, "an operator of ONNX's", f"{operator!r}, which ONNX does not have", hint)


def _check_attributes(node: onnx.NodeProto, schema: defs.OpSchema) -> None:
    attrs = {attribute.name: attribute for attribute in node.attribute}
    for name, attribute in attrs.items():
        if name not in schema.attributes:
            if name.startswith("__"):  # ONNX leaves these to tools
                continue
            names = ", ".join(schema.attributes) or "none"
            expected = f"attributes of {schema.name} as of opset {schema.since_version}: {names}"
            raise node_error(node, expected, repr(name), "Leave it out, or import the opset that has it.")
        type_name = schema.attributes[name].type.name
        kind = onnx.AttributeProto.AttributeType.Name(attribute.type)
        if kind not in (type_name, "UNDEFINED"):
            expected = f"attribute {name!r} as {_KINDS.get(type_name, type_name)}"
            raise node_error(node, expected, _KINDS.get(kind, kind), CORRECT)
    for name, declaration in schema.attributes.items():
        if declaration.required and name not in attrs:
            raise node_error(node, f"attribute {name!r}, which {schema.name} needs", "none", CORRECT)
