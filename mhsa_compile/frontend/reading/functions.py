"""Model-local functions become the nodes that they stand for, wherever they are called, by onnx's own inliner.

Where the format leaves a meaning to the runtime, the file is refused: a function named as an operator that has a
meaning already, and one written for an opset in which an operator of it differs from the model's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence

import onnx
from onnx import defs, inliner

from mhsa_compile.errors import ModelError
from mhsa_compile.files.foreign_errors import first_line
from mhsa_compile.frontend.detach_weights import light, whole
from mhsa_compile.frontend.onnx_graph import branches, inner_nodes, is_standard, node_error, opset_of, replace, title
from mhsa_compile.frontend.reading.microsoft import DOMAIN as MICROSOFTS
from mhsa_compile.frontend.reading.microsoft import MICROSOFT
from mhsa_compile.nn.row_operators import ROW_OPERATORS
from mhsa_compile.spec.attention_spec import DOMAIN

_OWN = (DOMAIN, "Attention")
"""Ours stays one node, as its kernels know it; its definition tells other tools what it computes. So do those of rows
in eight bits."""

Functions = dict[tuple[str, str, str], onnx.FunctionProto]


def check_functions(model: onnx.ModelProto) -> None:
    """Refuses functions that are called, but of which nobody can tell what they mean. Raises ModelError."""
    functions = _functions(model)
    for key, node in _calls(model.graph.node, functions, {}).items():
        _check_name(functions[key], node)
        _check_opset(functions[key], node, model)


def inline(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without functions of its own, but the definitions of mhsa.Attention; itself if it has none. Inlined
    nodes are named for the call, too. Raises ModelError."""
    functions = _functions(model)
    if not functions:
        return model
    small, tensors = light(model)
    called = _calls(model.graph.node, functions, {})
    replace(small.functions, (_for_opset(functions[key], model) for key in called))
    try:
        result = inliner.inline_local_functions(small)
    except Exception as error:  # the inliner's own kinds, of C++
        hint = "Write out in the graph what they do."
        raise ModelError("functions of the model", "functions that can be inlined", first_line(error), hint) from error
    _name(result.graph.node, model.graph.node, functions)
    imported = {entry.domain for entry in result.opset_import}
    for entry in (entry for key in called for entry in functions[key].opset_import):
        if entry.domain not in imported:
            imported.add(entry.domain)
            result.opset_import.append(entry)
    replace(result.functions, (function for function in model.functions if _is_own(function)))
    return whole(result, tensors)


def _functions(model: onnx.ModelProto) -> Functions:
    """The functions that are to be inlined."""
    return {_key(function): function for function in model.functions if not _is_own(function)}


def _key(of: onnx.FunctionProto | onnx.NodeProto) -> tuple[str, str, str]:
    return of.domain, (of.name if isinstance(of, onnx.FunctionProto) else of.op_type), of.overload


def _is_own(function: onnx.FunctionProto) -> bool:
    """Whether a function is a definition of mhsa.Attention, all of which are standard attention with more around it, or
    of rows in eight bits."""
    if function.domain == DOMAIN and function.name in ROW_OPERATORS:
        return True
    return (function.domain, function.name) == _OWN and any(is_standard(node, "Attention") for node in function.node)


def _calls(
    nodes: Iterable[onnx.NodeProto], functions: Functions, callers: dict[tuple[str, str, str], onnx.NodeProto]
) -> dict[tuple[str, str, str], onnx.NodeProto]:
    """The functions that nodes call, and those that these call -> the first node that does; added to `callers`."""
    for node in (inner for outer in nodes for inner in (outer, *inner_nodes(outer))):
        if (key := _key(node)) in functions and key not in callers:
            callers[key] = node
            _calls(functions[key].node, functions, callers)
    return callers


def _check_name(function: onnx.FunctionProto, node: onnx.NodeProto) -> None:
    """Refuses a function whose calls may mean two things, or that gives an input back as it is."""
    domain, name = function.domain, function.name
    is_operator = name in MICROSOFT if domain == MICROSOFTS else domain == "" and defs.has(name)
    if is_operator:
        got = f"one named {name!r} in {'com.microsoft' if domain else 'the domain of ONNX'}"
        hint = "Some runtimes take the function, others the operator: rename it, or take it out of the file."
        raise _refused(node, "a function of a name that is no operator's", got, hint)
    for output in function.output:
        if output in function.input:
            hint = "Put an Identity between the two."
            raise _refused(node, "outputs that its nodes make", f"its input {output!r}", hint)


def _check_opset(function: onnx.FunctionProto, caller: onnx.NodeProto, model: onnx.ModelProto) -> None:
    """Refuses a function in which an operator differs from that of the opset that the model imports: the format allows
    another opset only where its operators are the same in both."""
    opsets = [opset_of(owner) for owner in (function, model)]
    for node in (inner for outer in function.node for inner in (outer, *inner_nodes(outer))):
        if node.domain == "" and _since(node.op_type, opsets[0]) != _since(node.op_type, opsets[1]):
            got = f"{node.op_type} of opset {opsets[0]}, which differs from that of {opsets[1]}"
            hint = "Write the function for the opset that the model imports."
            raise _refused(caller, "operators that mean the same in the model's opset", got, hint)


def _for_opset(function: onnx.FunctionProto, model: onnx.ModelProto) -> onnx.FunctionProto:
    """The function, said to be of the opsets that the model imports."""
    versions = {entry.domain: entry.version for entry in model.opset_import}
    result = copy.deepcopy(function)
    for entry in result.opset_import:
        entry.version = versions.get(entry.domain, entry.version)
    return result


def _since(operator: str, opset: int) -> int:
    try:
        return int(defs.get_schema(operator, opset, "").since_version)
    except defs.SchemaError:
        return 0


def _name(
    inlined_nodes: Sequence[onnx.NodeProto], nodes: Sequence[onnx.NodeProto], functions: Functions, call: str = ""
) -> None:
    """Puts the name of the call before the names of the nodes that stand in its place, which they do in order."""
    stood = iter(inlined_nodes)
    for node, prefix in _written_out(nodes, functions, call):
        here = next(stood, None)
        if here is None or here.op_type != node.op_type:
            return  # the inliner wrote something else between: no name is better than a wrong one
        if prefix:
            here.name = f"{prefix}/{node.name or node.op_type}"
        for theirs, ours in zip(branches(here), branches(node), strict=False):
            _name(theirs.node, ours.node, functions, prefix)


def _written_out(
    nodes: Sequence[onnx.NodeProto], functions: Functions, call: str
) -> Iterator[tuple[onnx.NodeProto, str]]:
    """The nodes that a graph's or a function's nodes stand for, in order, each with the names of its calls."""
    for node in nodes:
        if (function := functions.get(_key(node))) is None:
            yield node, call
        else:
            name = node.name or next(filter(None, node.output), node.op_type)
            yield from _written_out(function.node, functions, f"{call}/{name}" if call else name)


def _refused(node: onnx.NodeProto, expected: str, got: str, hint: str) -> ModelError:
    return node_error(f"{title(node)}, a function of the file", expected, got, hint)
