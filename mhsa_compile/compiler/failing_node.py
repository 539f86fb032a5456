"""The node of a graph at which compiling fails, where what fails says nothing that a user could look up."""

from __future__ import annotations

import time
from collections.abc import Callable

import onnx

from mhsa_compile.compiler.codegen.runtime_functions import AbsentFunctions
from mhsa_compile.errors import MhsaError, ModelError
from mhsa_compile.frontend.onnx_graph import node_error

_SECONDS = 20.0  # that a search may take


def failing_node(model: onnx.ModelProto, compiles: Callable[[onnx.ModelProto], object]) -> onnx.NodeProto | None:
    """The last node of the shortest beginning of a graph at which `compiles` fails; None where time is up before, and
    where it fails of any graph.

    A beginning gives out all that nobody in it reads, so that a longer one fails wherever a shorter one does.
    """
    end = time.monotonic() + _SECONDS
    least, most = 0, len(model.graph.node) - 1
    while least < most:
        middle = (least + most) // 2
        if time.monotonic() > end:
            return None
        if _fails(_beginning(model, middle), compiles):
            most = middle
        else:
            least = middle + 1
    if not _fails(_beginning(model, most), compiles) or (
        most == 0 and model.graph.input and _fails(_without_work(model), compiles)
    ):
        return None
    return model.graph.node[most]


def refusal(node: onnx.NodeProto, cause: Exception) -> ModelError:
    """What a user reads of a node that has no code, or code that only TVM's compiler could run."""
    if isinstance(cause, AbsentFunctions):
        expected = "an operator whose code runs where TVM's compiler is not installed"
        got = f"one that calls {', '.join(cause.names)}, which TVM's runtime has not"
        hint = "Cut it off, and compute it before or after the call, or write what it does in other operators."
        return node_error(node, expected, got, hint)
    hint = "Write what it does in other operators, or with other dtypes; fix free sizes with dims."
    return node_error(node, "an operator of a form and dtype that has code on this target", "one without", hint)


def _beginning(model: onnx.ModelProto, last: int) -> onnx.ModelProto:
    """The graph up to a node, with everything that nobody reads any more as outputs."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    nodes = list(model.graph.node)[: last + 1]
    del result.graph.node[:], result.graph.output[:]
    result.graph.node.extend(nodes)
    inputs = {name for node in nodes for name in node.input}
    outputs = [name for node in nodes for name in node.output if name and (name not in inputs or node is nodes[-1])]
    result.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in outputs)
    return result


def _without_work(model: onnx.ModelProto) -> onnx.ModelProto:
    """A graph of the same inputs that hands on the first of them."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    (first, *_), output = model.graph.input, onnx.helper.make_empty_tensor_value_info("handed_on")
    del result.graph.node[:], result.graph.output[:]
    result.graph.node.append(onnx.helper.make_node("Identity", [first.name], [output.name]))
    result.graph.output.append(output)
    return result


def _fails(model: onnx.ModelProto, compiles: Callable[[onnx.ModelProto], object]) -> bool:
    """Whether a beginning fails as the whole did, not by one of our own refusals."""
    try:
        compiles(model)
    except MhsaError:
        return False
    except Exception:
        return True
    return False
